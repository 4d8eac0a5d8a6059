"""Which dialect a tokenizer speaks: found by trying conversations out, never by the model's name."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from agentrl.chat.codec import ChatCodec
from agentrl.chat.probes import NEXT_QUESTION, PROBES, ProbeOutcome, try_out
from agentrl.chat.readers import HermesReader, ResponseTemplateReader
from agentrl.chat.tags import TAGS, Tagged
from agentrl.chat.template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "dialect"
"""The key of ``tokenizer_config.json`` that names a dialect of tags. It stays with a model when it is saved."""

FALLBACK = "codec: nothing else fits"
NO_CALLS = (
    "the chat template writes no tool calls; they are written and read as Hermes tags, <tool_call>{...}</tool_call>"
)
NO_REASONING = "the chat template writes no reasoning; it is written and read as <think> tags in the content"
UNREAD = (
    "nothing here reads the tool calls that the chat template writes (renderers does not know it, and the tokenizer "
    "has no response_template that does); they are written and read as Hermes tags, which is not the model's own way"
)
REWRITES = "the chat template rewrites earlier turns; they stay as they were sampled"
NO_RENDERERS = "the package renderers is not installed, so its model families were not tried; pip install renderers"


def find_dialect(tokenizer: "PreTrainedTokenizerBase") -> ChatCodec:
    """The codec of the tags that the tokenizer names, or of the first dialect that fits: Hermes tags, if all that the
    chat template writes comes back from them; a family of ``renderers`` that writes what the template writes; the
    tokenizer's ``response_template``; and Hermes tags again, with remarks that say what does not fit.

    Raises ValueError if the tokenizer has no chat template, or one that refuses a user's question and its answer.
    """
    if chosen := tokenizer.init_kwargs.get(KEY):
        return _tagged(tokenizer, chosen)
    template = Template(tokenizer)
    hermes = ChatCodec(template, "hermes", HermesReader(template))
    outcomes = _outcomes(hermes)
    if template.writes_calls and all(one.text and one.read for one in outcomes.values()):
        return _with_remarks(hermes, [])
    remarks = []
    try:
        if family := _family(tokenizer):
            return family
    except ImportError:
        remarks.append(NO_RENDERERS)
    if getattr(tokenizer, "response_template", None):
        source = "response_template: the tokenizer carries it"
        own = ChatCodec(template, "response_template", ResponseTemplateReader(template), source=source)
        if _reads_calls(_outcomes(own)):
            return _with_remarks(own, remarks)
    if template.writes_calls and not _reads_calls(outcomes):
        plain = Template(tokenizer, hermes=True)
        hermes = ChatCodec(plain, "hermes", HermesReader(plain), source=f"{FALLBACK}, {UNREAD}")
        remarks.append(UNREAD)
    elif not template.writes_calls:
        hermes.source = f"{FALLBACK}, {NO_CALLS}"
        remarks.append(NO_CALLS)
    return _with_remarks(hermes, remarks)


def _family(tokenizer: "PreTrainedTokenizerBase") -> ChatCodec | None:
    from agentrl.chat.families import find

    family = find(Template(tokenizer, native=True))
    if family is None:
        return None
    options = "".join(f", {name}={value}" for name, value in family.options.items())
    package = f"renderers {version('renderers')}"
    codec = ChatCodec(
        Template(tokenizer, family.stop_ids),
        f"{family.name} ({package}{options})",
        family,
        family,
        source=f"{package}: it writes what the chat template writes",
    )
    return _with_remarks(codec, [])


def _tagged(tokenizer: "PreTrainedTokenizerBase", name: str) -> ChatCodec:
    if name not in TAGS:
        raise ValueError(f"the tokenizer names the dialect {name!r}; allowed are {', '.join(TAGS)}, or none")
    tagged = Tagged(Template(tokenizer), TAGS[name])
    return ChatCodec(tagged, name, tagged, source=f"codec: the tokenizer's {KEY} names it")


def _outcomes(codec: ChatCodec) -> dict[str, ProbeOutcome]:
    tried = {name: try_out(codec, probe) for name, probe in PROBES.items()}
    return {name: outcome for name, outcome in tried.items() if outcome is not None}


def _reads_calls(outcomes: dict[str, ProbeOutcome]) -> bool:
    return any(outcomes[name].read for name in ("call", "parallel", "values") if name in outcomes)


def _with_remarks(codec: ChatCodec, remarks: list[str]) -> ChatCodec:
    outcomes = _outcomes(codec)
    if "plain" not in outcomes or outcomes["plain"].refused:
        reason = outcomes["plain"].refused if "plain" in outcomes else "it refuses a user's question with an answer"
        raise ValueError(f"the tokenizer's chat template cannot be used: {reason}")
    if not outcomes["plain"].read:
        raise ValueError(
            f"nothing here reads what the tokenizer's chat template writes (tried: renderers, {codec.dialect}); give "
            "the tokenizer a response_template, or another chat template"
        )
    if not codec.template.writes_reasoning:
        remarks.append(NO_REASONING)
    reasons = {
        one.refused: [name for name in outcomes if outcomes[name].refused == one.refused] for one in outcomes.values()
    }
    remarks += [f"cannot be written: {', '.join(names)}: {reason}" for reason, names in reasons.items() if reason]
    written = {name: one for name, one in outcomes.items() if not one.refused}
    other = [name for name, one in written.items() if not one.text]
    if other == [NEXT_QUESTION]:
        remarks.append(REWRITES)
    elif other:
        remarks.append(
            f"turns that follow the generation prompt differ from the chat template's finished ones: {', '.join(other)}"
        )
    if unread := [name for name, one in written.items() if not one.read]:
        remarks.append(f"turns do not read back as they were written: {', '.join(unread)}")
    codec.remarks = remarks
    return codec

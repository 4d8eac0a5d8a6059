"""Which dialect a tokenizer speaks: found by trying conversations out, never by the model's name."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

from agentrl.chat.codec import TURNS, ChatCodec
from agentrl.chat.forms import ANSWERS_TOLD, ID_FORMS, TOOLS_TOLD
from agentrl.chat.probes import ACTS, CALL, NEXT_QUESTION, PROBES, ProbeOutcome, try_out
from agentrl.chat.readers import HermesReader, ResponseTemplateReader
from agentrl.chat.tags import TAGS, Tagged
from agentrl.chat.template import Template
from agentrl.schemas.installation import install_hint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "dialect"
"""The key of ``tokenizer_config.json`` that names a dialect. It stays with a model when it is saved."""

HERMES = "hermes"
FALLBACK = "codec: nothing else fits"
NO_CALLS = (
    "the chat template writes no tool calls; they are written and read as Hermes tags, <tool_call>{...}</tool_call>"
)
NO_REASONING = "the chat template writes no reasoning; it is written and read as <think> tags in the content"
NO_TOOLS = f"the chat template does not show the tools to the policy; {TOOLS_TOLD}, in the Hermes form"
NO_ANSWERS = f"the chat template drops or refuses tools' answers; {ANSWERS_TOLD}, in <tool_response> tags"
UNREAD = "nothing here reads the tool calls that the chat template writes"
INSTEAD = (
    f"set `model: {{dialect: {HERMES}}}` to have tools, calls and answers in the Hermes form, which the model may not "
    "know"
)
REWRITES = "the chat template rewrites earlier turns; they stay as they were sampled"
NO_RENDERERS = "the package renderers is not installed, so its model families were not tried"


class Trial(NamedTuple):
    """A dialect, and what became of each probe in it."""

    codec: ChatCodec
    outcomes: dict[str, ProbeOutcome]

    @property
    def fits(self) -> bool:
        """Whether all that the template does not refuse is written as it does, and reads back."""
        return all(outcome.text and outcome.read for outcome in self.outcomes.values() if not outcome.by_template)

    @property
    def unread(self) -> int:
        """How many probes with tools do not read back."""
        return sum(not self.outcomes[name].read for name in (*ACTS, "parallel", "reasoned call"))

    def table(self) -> list[dict[str, str]]:
        """For each probe its name, what was tried, what the template wrote, what came back or why not, and the verdict:
        ok, differs, or refused. There is none for dialects of tags, which act by one tool of their own."""
        return [
            {
                "probe": name,
                "tried": PROBES[name].what,
                "wrote": outcome.wrote,
                "back": outcome.refused or outcome.back,
                "verdict": outcome.verdict,
            }
            for name, outcome in self.outcomes.items()
        ]


def find_dialect(tokenizer: "PreTrainedTokenizerBase") -> ChatCodec:
    """The codec of the dialect that the tokenizer names, or the first that reads back all that the chat template
    writes, or else most of it: Hermes tags; a family of ``renderers`` that writes what the template writes; the
    tokenizer's ``response_template``; calls in the form that is learned from the template. What the template does not
    do is done in the Hermes form, and remarks say so; ``cannot`` says what does not come back, and is refused.

    Raises ValueError if the tokenizer has no chat template, or one that refuses a user's question and its answer.
    """
    return prove(tokenizer).codec


def prove(tokenizer: "PreTrainedTokenizerBase") -> Trial:
    """As :func:`find_dialect`, with what became of each probe."""
    chosen = tokenizer.init_kwargs.get(KEY)
    if chosen and chosen != HERMES:
        codec = _tagged(tokenizer, chosen)
        return Trial(codec, {})
    remarks: list[str] = []
    trials: list[Trial] = []
    template = Template(tokenizer)
    for codec in _candidates(template, remarks):
        trials.append(Trial(codec, {name: try_out(codec, probe) for name, probe in PROBES.items()}))
        if template.writes_calls and trials[-1].fits:
            break
    best = min(trials, key=lambda trial: (trial.unread, trial.codec.dialect == HERMES))
    if chosen and (best.codec.dialect != HERMES or "tools" in _cannot(best.outcomes)):
        plain = Template(tokenizer, hermes=True)
        codec = ChatCodec(plain, HERMES, HermesReader(plain), source=f"codec: the tokenizer's {KEY} names it")
        best = Trial(codec, {name: try_out(codec, probe) for name, probe in PROBES.items()})
    return _settled(best, remarks)


def _candidates(template: Template, remarks: list[str]) -> Iterator[ChatCodec]:
    """Dialects to try, the best first."""
    tokenizer = template.tokenizer
    hermes = ChatCodec(template, HERMES, HermesReader(template))
    if template.writes_calls:
        yield hermes
    try:
        family = _family(template)
    except ImportError:
        remarks.append(f"{NO_RENDERERS}; {install_hint('dialects')}")
        family = None
    if family:
        yield family
    if getattr(tokenizer, "response_template", None):
        source = "response_template: the tokenizer carries it"
        yield ChatCodec(template, "response_template", ResponseTemplateReader(template), source=source)
    if not template.writes_calls:
        hermes.source = f"{FALLBACK}, {NO_CALLS}"
        yield hermes
        return
    yield from _learned(family.template if family else template, family)


def _learned(template: "Template | Tagged", family: ChatCodec | None) -> Iterator[ChatCodec]:
    """A dialect whose reader learns the form of calls from the template, if it can be learned."""
    from agentrl.chat.learned import LearnedReader

    assert isinstance(template, Template)
    try:
        reader = LearnedReader(template)
    except ValueError:
        return
    source = "learned: calls are read in the form that the chat template writes"
    name = f"{family.dialect}, calls learned" if family else "learned"
    yield ChatCodec(template, name, reader, family.bridge if family else None, source)


def _family(template: Template) -> ChatCodec | None:
    from agentrl.chat.families import find

    family = find(Template(template.tokenizer, native=True))
    if family is None:
        return None
    options = "".join(f", {name}={value}" for name, value in family.options.items())
    package = f"renderers {version('renderers')}"
    own = Template(template.tokenizer, family.stop_ids)
    return ChatCodec(
        own,
        f"{family.name} ({package}{options})",
        family,
        None if own.tells_answers else family,
        source=f"{package}: it writes what the chat template writes",
    )


def _tagged(tokenizer: "PreTrainedTokenizerBase", name: str) -> ChatCodec:
    if name not in TAGS:
        raise ValueError(f"the tokenizer names the dialect {name!r}; allowed are {', '.join([*TAGS, HERMES])}, or none")
    tagged = Tagged(Template(tokenizer), TAGS[name])
    return ChatCodec(tagged, name, tagged, source=f"codec: the tokenizer's {KEY} names it")


def _settled(trial: Trial, remarks: list[str]) -> Trial:
    """The trial with its remarks and what it cannot do. Raises ValueError if a plain answer does not come back."""
    codec, outcomes = trial
    if reason := outcomes["plain"].refused:
        raise ValueError(f"the tokenizer's chat template cannot be used: {reason}")
    if not outcomes["plain"].read:
        raise ValueError(
            f"nothing here reads what the tokenizer's chat template writes (tried: renderers, {codec.dialect}); give "
            "the tokenizer a response_template, or another chat template"
        )
    template = codec.template
    assert isinstance(template, Template)
    remedies = [(template.tells_tools, TOOLS_TOLD, NO_TOOLS), (template.tells_answers, ANSWERS_TOLD, NO_ANSWERS)]
    if ways := [remedy for tells, remedy, _ in remedies if tells]:
        codec.dialect = f"{codec.dialect} ({'; '.join(ways)})"
    remarks += [] if template.writes_calls else [NO_CALLS]
    remarks += [remark for tells, _, remark in remedies if tells]
    remarks += [] if template.writes_reasoning else [NO_REASONING]
    if ids := ID_FORMS[template.id_form]:
        remarks.append(ids)
    codec.cannot = _cannot(outcomes)
    if template.calls_refused and codec.source.startswith(FALLBACK):
        codec.cannot["tools"] = f"{template.calls_refused}; {INSTEAD}"
    remarks += [f"{what} is refused: {reason}" for what, reason in codec.cannot.items()]
    codec.remarks = [*remarks, *_differences(outcomes, codec.cannot)]
    of_tools = [
        text for text in remarks if text in (NO_CALLS, NO_TOOLS, NO_ANSWERS, ids) or text.startswith("tools is ref")
    ]
    codec.matters_with = {"tools": of_tools, "reasoning": [text for text in remarks if text == NO_REASONING]}
    return trial


def _cannot(outcomes: dict[str, ProbeOutcome]) -> dict[str, str]:
    """What the dialect cannot write, each with its reason."""
    failing = {name: outcome for name, outcome in outcomes.items() if not outcome.read}
    cannot = {}
    if acts := [name for name in ACTS if name in failing]:
        first = failing[acts[0]]
        what = UNREAD if CALL in acts and not first.refused else f"tried: {', '.join(acts)}"
        cannot["tools"] = f"{what}: {first.refused or f'back came {first.back!r}'}; {INSTEAD}"
    for name in TURNS:
        if name in failing and not failing[name].refused and not ("tools" in cannot and name != "reasoning"):
            cannot[name] = f"back came {failing[name].back!r}"
    return cannot


def _differences(outcomes: dict[str, ProbeOutcome], cannot: dict[str, str]) -> list[str]:
    """Remarks on what is not as the template writes it."""
    remarks: list[str] = []
    tried = {
        name: outcome for name, outcome in outcomes.items() if not ("tools" in cannot and PROBES[name].tools != "[]")
    }
    reasons = dict.fromkeys(outcome.refused for outcome in tried.values() if outcome.refused)
    for reason in reasons:
        names = ", ".join(name for name in tried if tried[name].refused == reason)
        remarks.append(f"cannot be written: {names}: {reason}")
    written = {name: outcome for name, outcome in tried.items() if not outcome.refused}
    other = [name for name, outcome in written.items() if not outcome.text]
    if other == [NEXT_QUESTION]:
        remarks.append(REWRITES)
    elif other:
        remarks.append(
            f"turns that follow the generation prompt differ from the chat template's finished ones: {', '.join(other)}"
        )
    if unread := [name for name, outcome in written.items() if not outcome.read and name not in cannot]:
        remarks.append(f"turns do not read back as they were written: {', '.join(unread)}")
    return remarks

"""Model families that the ``renderers`` package knows: how they end a turn, go on after it, and are read."""

import json
from functools import cache
from typing import Any, get_args

from agentrl.chat.hermes import Parsed
from agentrl.chat.probes import NEXT_QUESTION, PROBES, Probe
from agentrl.chat.readers import as_text, broken
from agentrl.chat.template import Template, native
from agentrl.schemas.trajectory import Message, Role, ToolCall

NEEDS = {"gpt-oss": "<|channel|>"}
"""Tokens without which a family is not tried: its renderer would look for its vocabulary on the internet."""


class ModelFamily:
    """One family's renderer for the tokenizer of ``template``. ``name`` is the family's in ``renderers``; ``options``
    are the chat template's own switches that it was found with.

    Raises ValueError if the tokenizer lacks tokens of this family.
    """

    def __init__(self, template: Template, name: str, options: dict[str, bool]) -> None:
        from renderers import config_from_name, create_renderer

        tokenizer, self.control = template.tokenizer, template.control
        if NEEDS.get(name, "") not in {"", *tokenizer.get_added_vocab()}:
            raise ValueError(f"the tokenizer has no {NEEDS[name]}")
        self.name = name
        self.options = options
        self.tokenizer = tokenizer
        try:
            # "all": earlier turns stay as they were sampled, even if the template would rewrite them
            config = type(config_from_name(name))(thinking_retention="all", **options)
            self.renderer = create_renderer(tokenizer, config)
        except Exception as error:  # renderers assert, and raise what their vocabularies raise
            raise ValueError(f"renderers cannot speak {name} with this tokenizer: {error}") from error
        self.stop_ids: list[int] = self.renderer.get_stop_token_ids()

    def render(self, messages: list[Message], generate: bool, tools: str) -> str:
        """The text of a conversation, to compare with the chat template's. Raises ValueError if it is refused."""
        try:
            ids = self.renderer.render_ids(
                [native(message) for message in messages], tools=_tools(tools), add_generation_prompt=generate
            )
        except Exception as error:
            raise ValueError(f"renderers refuse this conversation: {error}") from error
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def between(self, prompt: list[int], turn: list[int], messages: list[Message], tools: str) -> list[int]:
        """See :class:`agentrl.chat.codec.Bridge`."""
        neutralised = [self.control.heard(message) for message in messages]
        bridged = self.renderer.bridge_to_next_turn(
            prompt, turn, [native(message) for message in neutralised], tools=_tools(tools)
        )
        if bridged is None:
            raise ValueError(
                f"the dialect {self.name} cannot go on after {self.tokenizer.decode(turn[-20:])!r} without changing it:"
                " the turn ended inside its reasoning, or a message has a role that this family does not know"
            )
        new = bridged.token_ids[len(prompt) + len(turn) :]
        if neutralised != messages:  # renderers encode what text spells as control tokens
            return self.control.encode(str(self.tokenizer.decode(new, skip_special_tokens=False)))
        return new

    def read(self, turn: list[int], prompt: list[int], tools: str) -> Parsed:
        """See :class:`agentrl.chat.codec.Reader`."""
        text = str(self.tokenizer.decode(turn[:-1] if turn and turn[-1] in self.stop_ids else turn))
        parsed = self.renderer.parse_response(turn, tools=_tools(tools), prompt_ids=prompt or None)
        reasoning = (parsed.reasoning_content or "").strip() or None
        if parsed.reasoning_complete is False and turn and turn[-1] in self.stop_ids:
            return broken(text, "the turn ended inside its reasoning", reasoning)
        calls = []
        for number, call in enumerate(parsed.tool_calls):
            if call.status != "ok" or not call.name:
                return broken(text, f"tool call {number}: {call.status}", reasoning)
            if not isinstance(call.name, str):  # parsers of JSON hand on whatever stands there
                return broken(text, f"tool call {number}: its name is no string", reasoning)
            try:
                arguments = as_text(call.arguments if call.arguments is not None else {})
            except ValueError as error:
                return broken(text, f"tool call {number}: {error}", reasoning)
            calls.append(ToolCall(id=call.id or f"call_{number}", name=call.name, arguments=arguments))
        message = Message(role=Role.ASSISTANT, content=parsed.content.strip(), reasoning=reasoning, tool_calls=calls)
        return Parsed(message)


@cache
def candidates() -> list[tuple[str, dict[str, bool]]]:
    """Names and options of all families that can be tried; without options come those that models ship with."""
    from renderers import RendererConfig

    [union, _] = get_args(RendererConfig)
    names_and_switches: list[tuple[str, dict[str, bool]]] = []
    for config in get_args(union):
        name = config.model_fields["name"].default
        if name in ("auto", "custom", "default"):
            continue
        names_and_switches.append((name, {}))
        if "enable_thinking" in config.template_field_names():
            names_and_switches += [(name, {"enable_thinking": value}) for value in (True, False)]
    return names_and_switches


def find(template: Template) -> ModelFamily | None:
    """The first family that writes every probe as the tokenizer's own chat template does; None if none does.

    Raises ImportError if ``renderers`` is not installed.
    """
    for name, options in candidates():
        try:
            family = ModelFamily(template, name, options)
        except ValueError:
            continue
        if all(_agree(template, family, probe) for probe in PROBES.values()):
            return family
    return None


def _agree(template: Template, family: ModelFamily, probe: Probe) -> bool:
    """Whether opening and whole conversation are the same text. What the template refuses does not count; a later
    question is left out, since a family keeps earlier turns as they were sampled."""
    wholes = [probe.messages] if probe is not PROBES[NEXT_QUESTION] else []
    for messages, generate in [(probe.opening, True), *((whole, False) for whole in wholes)]:
        try:
            wanted = template.encode(template.render(messages, generate, probe.tools))
        except ValueError:
            continue
        try:
            if family.render(messages, generate, probe.tools) != template.tokenizer.decode(wanted):
                return False
        except ValueError:
            return False
    return True


def _tools(tools: str) -> Any:
    return json.loads(tools) or None

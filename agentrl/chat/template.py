"""A tokenizer's own chat template: messages as the text that it writes, whole or turn by turn."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl.chat.control import ControlTokens
from agentrl.chat.hermes import format_assistant
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Message, Role, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "Zx9Qk7"
"""Text that no template changes. What a template writes after it, it writes after what a policy said."""

_FIXED_DATE = (
    "{%- macro strftime_now(form) -%}"
    "{{- {'%Y-%m-%d': '2024-07-26', '%d %b %Y': '26 Jul 2024'}.get(form, '26 July 2024') -}}"
    "{%- endmacro -%}"
)
"""Put before a template that asks for the date, so that a conversation has the same tokens every day. The date is the
default of Llama's templates."""

REMEMBERED = 4096
"""Rollouts of one task often see the same answers of tools, so so many texts between turns are kept."""

THOUGHT = "<think>"
"""With this, some generation prompts begin the policy's reasoning."""

_STEM = Message(role=Role.USER, content=".")


class TemplateError(ValueError):
    """A conversation that the chat template refuses, with its reason."""


class Template:
    """What a chat template writes, and which parts of a message it knows.

    ``writes_calls`` and ``writes_reasoning`` are found by trying. A template that drops tool calls or reasoning gets
    them as text, in the Hermes form, unless ``native`` is set; with ``hermes`` it gets all calls so.

    ``stop_ids`` and their texts ``ends`` are the tokens that may end an assistant's turn: ``known`` ones, those that
    the template writes, and the tokenizer's own. ``end`` comes after an answer and ``call_end`` after a call; "" if
    the template writes none. ``tail`` and ``call_tail`` are all that it writes after a last turn.

    Raises ValueError if the tokenizer has no chat template, no end-of-turn token, or one that refuses a user message.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        known: Sequence[int] = (),
        native: bool = False,
        hermes: bool = False,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat_template; save one with it, or use a chat model")
        self.tokenizer = tokenizer
        self.native = native
        self.text_arguments = self.writes_calls = False
        self.writes_reasoning = False
        self._known: dict[Any, str] = {}
        self.source = str(tokenizer.get_chat_template())
        if "strftime_now" in self.source:
            self.source = _FIXED_DATE + self.source
        self.control = ControlTokens(tokenizer, self.source)
        self.prompt = self.render([_STEM], generate=True)
        self.writes_reasoning = self._writes_reasoning()
        self.writes_calls = not hermes and self._writes_calls()
        self._learn_ends(known)

    def _learn_ends(self, known: Sequence[int]) -> None:
        """How turns end. A template that ends its last answer with a token ends its last call with one too."""
        answer = Message(role=Role.TOOL, content=".", name="f", tool_call_id="call_0")
        between = self._after_mark([_STEM, _said([]), _STEM])
        self.stop_ids = self._stops(known, between)
        self._name_ends()
        last = self._after_mark([_STEM, _said([])])
        closes = self._first_end(last)
        earlier = self._first_end(between)
        if not known and closes != earlier and closes and earlier:
            raise ValueError(
                f"the chat template ends a last answer with {closes} and an earlier one with {earlier}, and renderers "
                "knows no such family with this tokenizer, so nobody can say where a sampled turn ends"
            )
        self.end = self.call_end = closes or earlier
        self.tail = self.call_tail = _from(last, closes)
        if not self.writes_calls:
            return
        last = self._after_mark([_STEM, _said([answer])])
        if closes and (added := self._added(last)):
            self.stop_ids = tuple(dict.fromkeys([*self.stop_ids, added[-1]]))
            self._name_ends()
        closes = self._first_end(last)
        self.call_end = closes or self._first_end(self._after_mark([_STEM, _said([answer]), answer]))
        self.call_tail = _from(last, closes) if closes else ""  # what follows the mark then still belongs to the call

    def render(self, messages: list[Message], generate: bool = False, tools: str = "[]") -> str:
        """The text of a conversation; with ``generate`` up to where the assistant begins to speak. Control tokens that
        users and tools spell are divided, see :mod:`agentrl.chat.control`.

        Raises TemplateError if the template refuses it.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [self._native(message) for message in messages],
                tools=json.loads(tools) or None,
                add_generation_prompt=generate,
                tokenize=False,
                chat_template=self.source,
            )
        except Exception as error:  # templates raise what they like
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TemplateError(f"the chat template refuses this conversation: {reason}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of what this template writes."""
        return self.control.encode(text)

    def turn(self, message: Message, answers: Sequence[Message] = (), before: Sequence[Message] = ()) -> str:
        """The text of an assistant's turn after the generation prompt, without its end, as the template writes it if
        the tools' ``answers`` follow. ``before`` is what came between it and the turn before, if there was one.

        Raises TemplateError if the template writes the beginning of a finished turn differently from the generation
        prompt, so that no policy could have sampled this turn.
        """
        if answers:
            rest = self._between(list(answers))
            after = _from(rest, self._first_end(rest))
            text = self.render([_STEM, message, *answers], generate=True)
            if not text.endswith(after):
                raise TemplateError("the chat template writes a part of this turn after the tools' answers")
            text = text.removesuffix(after)
        else:
            text = self.render([_STEM, message]).removesuffix(self.call_tail if message.tool_calls else self.tail)
        if text.startswith(self.prompt.rstrip()):
            return text.removeprefix(self.prompt.rstrip()).removeprefix(self.prompt[len(self.prompt.rstrip()) :])
        header = self.prompt.rstrip().removesuffix(THOUGHT)
        if header != self.prompt.rstrip() and text.startswith(header) and not self.writes_reasoning:
            said = text.removeprefix(header)
            if message.reasoning:
                said = said.removeprefix("\n")  # it came after the end of the thought, which the template drops
            begun = not before or self.after_turn(list(before)).rstrip().endswith(THOUGHT)
            if not begun and not message.reasoning:
                return said
            return f"{'' if begun else THOUGHT}{message.reasoning or ''}\n</think>\n\n{said}"
        raise TemplateError(
            f"the generation prompt ends in {self.prompt[-20:]!r}, and the chat template does not begin this finished "
            "turn with it: turns like this can be sampled, but not written"
        )

    def closing(self, message: Message) -> list[int]:
        """The token that ends a written turn."""
        end = self.call_end if message.tool_calls else self.end
        return [self.stop_ids[self.ends.index(end)] if end else self.stop_ids[0]]

    def ended(self, turn: Sequence[int]) -> bool:
        """Whether a turn that stopped is over."""
        return turn[-1] in self.stop_ids

    def after_turn(self, messages: list[Message]) -> str:
        """The text between the end of an assistant's turn and the beginning of its next one, with ``messages`` in
        between. It is taken from after a mark, so it does not matter if the template rewrites what came before."""
        rest = self._between(messages)
        end = self._first_end(rest)
        return rest.partition(end)[2] if end else rest

    def _between(self, messages: list[Message]) -> str:
        """The text between an assistant's last words and the beginning of its next turn."""
        key = tuple((message.role, message.name, message.tool_call_id, message.content) for message in messages)
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            said = _said(messages) if self.writes_calls else _said([])
            self._known[key] = self.render([_STEM, said, *messages], generate=True).partition(MARK)[2]
        return self._known[key]

    def _native(self, message: Message) -> dict[str, Any]:
        """A message as chat templates expect it."""
        if message.tool_calls and not self.writes_calls and not self.native:
            return {"role": message.role.value, "content": format_assistant(message)}
        if message.role is not Role.ASSISTANT:
            return native(self.control.heard(message))
        out = native(message, self.text_arguments)
        if message.reasoning and not (self.writes_reasoning or self.native):
            del out["reasoning_content"]
            out["content"] = f"{THOUGHT}{message.reasoning}</think>\n{message.content}"
        return out

    def _writes_reasoning(self) -> bool:
        self.writes_reasoning = True
        return self._shows(Message(role=Role.ASSISTANT, content=".", reasoning=MARK))

    def _writes_calls(self) -> bool:
        """Whether the template writes calls; ``text_arguments`` is then true if it wants arguments as text."""
        self.writes_calls = True
        call = _said([Message(role=Role.TOOL)])
        for self.text_arguments in (False, True):
            if self._shows(call, unlike="{'q'"):
                return True
        self.text_arguments = False
        return False

    def _shows(self, message: Message, unlike: str | None = None) -> bool:
        try:
            text = self.render([_STEM, message])
        except TemplateError:
            return False
        return MARK in text and (unlike is None or unlike not in text)

    def _after_mark(self, messages: list[Message]) -> str:
        """What the template writes after the mark, if it does not refuse the conversation."""
        try:
            return self.render(messages, generate=messages[-1].role is not Role.ASSISTANT).partition(MARK)[2]
        except TemplateError:
            return ""

    def _stops(self, known: Sequence[int], between: str) -> tuple[int, ...]:
        """Ids of tokens that may end a turn, given what the template writes between an answer and a question."""
        own = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        written = [] if set(self.encode(between)) & {*own, *known} else self._added(between)
        stops = tuple(dict.fromkeys([*known, *written[:1], *own]))
        if not stops:
            raise ValueError("the tokenizer has no eos_token; set the token that ends an assistant turn")
        return stops

    def _added(self, text: str) -> list[int]:
        """Ids of special and other added tokens in a text."""
        return [one for one in self.encode(text) if one in self.tokenizer.added_tokens_decoder]

    def _name_ends(self) -> None:
        self.ends = tuple(str(self.tokenizer.convert_ids_to_tokens(one)) for one in self.stop_ids)

    def _first_end(self, text: str) -> str:
        found = [(text.index(end), end) for end in self.ends if end in text]
        return min(found)[1] if found else ""


def native(message: Message, text_arguments: bool = False) -> dict[str, Any]:
    """A message as chat templates and renderers expect it; arguments that are no JSON stay text."""
    out: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if text_arguments else _object(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.name:
        out["name"] = message.name
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    return out


def _said(answers: list[Message]) -> Message:
    """An assistant's turn that ``answers`` can follow: with the calls that they answer, if they are tools' answers. Its
    last words are the mark."""
    tools = [message for message in answers if message.role is Role.TOOL]
    if not tools:
        return Message(role=Role.ASSISTANT, content=MARK)
    names = [(message.tool_call_id or f"call_{number}", message.name or "f") for number, message in enumerate(tools)]
    arguments = [json.dumps({"q": "."})] * (len(names) - 1) + [json.dumps({"q": MARK})]
    calls = [ToolCall(id=one, name=name, arguments=text) for (one, name), text in zip(names, arguments, strict=True)]
    return Message(role=Role.ASSISTANT, tool_calls=calls)


def _from(text: str, end: str) -> str:
    """The text from the end of a turn on; all of it if no end is known, as nobody says it then."""
    return text[text.index(end) :]


def _object(arguments: str) -> Any:
    try:
        return loads(arguments)
    except ValueError:
        return arguments

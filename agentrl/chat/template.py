"""A tokenizer's own chat template: messages as the text that it writes, whole or turn by turn."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl.chat.control import ControlTokens
from agentrl.chat.forms import HERMES_CALL, ID_FORMS, IdForm, any_id, as_user_turns, own_call, with_tools
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

_TAG = re.compile(r"<[^<>]+>|\[[A-Z]+\]")

_STEM = Message(role=Role.USER, content=".")
_NAME, _KEY = "fn8Xq2", "key5Vw"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "A text."}},
            "required": [_KEY],
        },
    },
}
_EXAMPLE = ToolCall(id="call_0", name="function_name", arguments=json.dumps({"argument_name": "value"}))


class TemplateError(ValueError):
    """A conversation that the chat template refuses, with its reason."""


class Template:
    """What a chat template writes, and which parts of a message it knows.

    ``writes_calls`` and ``writes_reasoning`` are found by trying. A template that drops tool calls or reasoning gets
    them as text, in the Hermes form, unless ``native`` is set; with ``hermes`` it gets all calls so. ``tells_tools``
    and ``tells_answers`` are true if it does not show tools or their answers, and we do: see
    :mod:`agentrl.chat.forms`. ``id_form`` gives calls the ids that it takes; ``calls_refused`` says why it takes none.

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
        self.writes_reasoning = self.tells_tools = self.tells_answers = False
        self.id_form: IdForm = any_id
        self.call_form = HERMES_CALL
        self.calls_refused = ""
        self._known: dict[Any, str] = {}
        self.source = str(tokenizer.get_chat_template())
        if "strftime_now" in self.source:
            self.source = _FIXED_DATE + self.source
        self.control = ControlTokens(tokenizer, self.source)
        self.prompt = self.render([_STEM], generate=True)
        self.thought = self._prefilled()
        self.writes_reasoning = self._writes_reasoning()
        self.writes_calls = not hermes and self._writes_calls()
        self.tells_answers = not native and (hermes or not self._writes_answers())
        self._learn_ends(known)
        self.takes_system = self._shows(Message(role=Role.SYSTEM, content=MARK))
        if not native and not self._shows_tools():
            self.tells_tools = True
            self.call_form = own_call(self._example()) if self.writes_calls else HERMES_CALL

    def _learn_ends(self, known: Sequence[int]) -> None:
        """How turns end. A template that ends its last answer with a token ends its last call with one too."""
        answer = _answer(0, ".")
        between = self._after_mark([_STEM, _said([]), _STEM])
        self.stop_ids = self._stops(known, between)
        self._name_ends()
        last = self._after_mark([_STEM, _said([])])
        closes = self._first_end(last)
        earlier = self._first_end(between)
        if not known and closes != earlier and closes and earlier:
            raise ValueError(
                f"the chat template ends a last answer with {closes} and an earlier one with {earlier}, and renderers "
                "knows no such family with this tokenizer, so the end of a sampled turn is unknown"
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
        spoken = [self._native(message) for message in messages]
        given = json.loads(tools) or None
        if self.tells_answers:
            spoken = as_user_turns(spoken)
        if given and self.tells_tools:
            spoken, given = with_tools(spoken, given, self.call_form, self.takes_system), None
        try:
            text = self.tokenizer.apply_chat_template(
                spoken,
                tools=given,
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
            written = text.removeprefix(header)
            if message.reasoning:
                written = written.removeprefix("\n")  # it came after the end of the thought, which the template drops
            begun = not before or self.after_turn(list(before)).rstrip().endswith(THOUGHT)
            if not begun and not message.reasoning:
                return written
            return f"{'' if begun else THOUGHT}{message.reasoning or ''}\n</think>\n\n{written}"
        header = self.prompt.removesuffix(self.thought)
        if self.thought and text.startswith(header) and not message.reasoning:
            written = text.removeprefix(header)
            if written.startswith("</") or len(_TAG.findall(self.thought)) > 1:
                return written  # the thought is closed by this turn, or by the prompt
            if self.thought.strip() == THOUGHT:
                return f"\n</think>\n\n{written}"
        raise TemplateError(
            f"the generation prompt ends in {self.prompt[-20:]!r}, and the chat template does not begin this finished "
            "turn with it: turns like this can be sampled, but not written"
        )

    def _prefilled(self) -> str:
        """What of the generation prompt is a thought, begun or closed, that a finished turn does not begin with."""
        try:
            text = self.render([_STEM, _said([])])
        except TemplateError:
            return ""
        pairs = enumerate(zip(text, self.prompt, strict=False))
        same = next((index for index, (here, there) in pairs if here != there), min(len(text), len(self.prompt)))
        if ">" not in self.prompt[max(self.prompt.rfind("<", 0, same), 0) : same]:  # in the midst of a tag
            same = self.prompt.rfind("<", 0, same)
        rest = self.prompt[same:]
        return rest if "think" in rest.lower() or "thought" in rest else ""

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
            calling = _said(messages) if self.writes_calls else _said([])
            self._known[key] = self.render([_STEM, calling, *messages], generate=True).partition(MARK)[2]
        return self._known[key]

    def _native(self, message: Message) -> dict[str, Any]:
        """A message as chat templates expect it."""
        if message.tool_calls and not self.writes_calls and not self.native:
            return {"role": message.role.value, "content": format_assistant(message)}
        if message.role is not Role.ASSISTANT:
            as_native = native(self.control.heard(message))
            if message.tool_call_id:
                as_native["tool_call_id"] = self.id_form(as_native["tool_call_id"], message.name or "f")
            return as_native
        out = native(message, self.text_arguments)
        for call in out.get("tool_calls", ()):
            call["id"] = self.id_form(call["id"], call["function"]["name"])
        if message.reasoning and not (self.writes_reasoning or self.native):
            del out["reasoning_content"]
            out["content"] = f"{THOUGHT}{message.reasoning}</think>\n{message.content}"
        return out

    def _writes_reasoning(self) -> bool:
        self.writes_reasoning = True
        return self._shows(Message(role=Role.ASSISTANT, content=".", reasoning=MARK))

    def _writes_calls(self) -> bool:
        """Whether the template writes calls, with their names; ``text_arguments`` is then true if it wants arguments as
        text, and ``id_form`` is that of the ids that it takes."""
        self.writes_calls = True
        call = _said([Message(role=Role.TOOL, name=_NAME)])
        for self.id_form in ID_FORMS:
            for self.text_arguments in (False, True):
                if self._shows(call, _NAME, unlike="{'q'"):
                    return True
        self.text_arguments, self.id_form = False, any_id
        try:
            self.render([_STEM, call])
        except TemplateError as error:
            self.calls_refused = str(error)
        return False

    def _writes_answers(self) -> bool:
        """Whether the template writes what tools answer, one or two of them. If it refuses two calls in a turn, one
        answer is enough."""
        names = {1: ["Rn4a"], 2: ["Rn4a", "Rn5b"]}
        for count, contents in names.items():
            answers = [_answer(number, content) for number, content in enumerate(contents)]
            calling = _said(answers if self.writes_calls else [])
            try:
                text = self.render([_STEM, calling, *answers], generate=True).partition(MARK)[2]
            except TemplateError:
                return count > 1 and self._refuses([_STEM, calling])
            places = [text.find(content) for content in contents]
            if -1 in places or places != sorted(places):
                return False
        return True

    def _refuses(self, messages: list[Message]) -> bool:
        try:
            self.render(messages)
        except TemplateError:
            return True
        return False

    def _shows_tools(self) -> bool:
        """Whether the template shows a tool with its argument, and so that calls in the form that is read are meant."""
        try:
            text = self.render([_STEM], generate=True, tools=json.dumps([_TOOL]))
        except TemplateError:
            return False
        return _NAME in text and _KEY in text and (self.writes_calls or "<tool_call>" in text)

    def _example(self) -> str:
        """A call as the template writes it."""
        message = Message(role=Role.ASSISTANT, tool_calls=[_EXAMPLE])
        try:
            text = self.turn(message)
        except TemplateError:
            text = self.render([_STEM, message]).removeprefix(self.prompt)
        return text.rpartition("</think>")[2].strip()

    def _shows(self, message: Message, *parts: str, unlike: str | None = None) -> bool:
        conversation = [message, _STEM] if message.role is Role.SYSTEM else [_STEM, message]
        try:
            text = self.render(conversation)
        except TemplateError:
            return False
        return all(part in text for part in (MARK, *parts)) and (unlike is None or unlike not in text)

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
        return [token for token in self.encode(text) if token in self.tokenizer.added_tokens_decoder]

    def _name_ends(self) -> None:
        self.ends = tuple(str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.stop_ids)

    def _first_end(self, text: str) -> str:
        ends_at = [(text.index(end), end) for end in self.ends if end in text]
        return min(ends_at)[1] if ends_at else ""


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
    calls = [ToolCall(id=i, name=name, arguments=text) for (i, name), text in zip(names, arguments, strict=True)]
    return Message(role=Role.ASSISTANT, tool_calls=calls)


def _answer(number: int, content: str) -> Message:
    return Message(role=Role.TOOL, content=content, name="f", tool_call_id=f"call_{number}")


def _from(text: str, end: str) -> str:
    """The text from the end of a turn on; all of it if no end is known, as nobody says it then."""
    return text[text.index(end) :]


def _object(arguments: str) -> Any:
    try:
        return loads(arguments)
    except ValueError:
        return arguments

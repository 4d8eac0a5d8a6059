"""Between messages and tokens. A conversation is encoded turn by turn and never as a whole, so that training sees
exactly the tokens that were sampled: the opening is encoded once, an assistant turn keeps its sampled tokens, and an
observation is what the model family's template writes between two assistant turns.
"""

import json
from collections.abc import Callable, Sequence
from itertools import groupby, takewhile
from typing import Protocol

from agentrl.chat.forms import numbered
from agentrl.chat.hermes import Parsed, with_thoughts
from agentrl.chat.tags import Tagged
from agentrl.chat.template import REMEMBERED, Template
from agentrl.schemas.json_text import is_json, unstorable
from agentrl.schemas.trajectory import Message, Role, Trajectory

TURNS: dict[str, Callable[[Message], bool]] = {
    "tools": lambda message: bool(message.tool_calls),
    "reasoning": lambda message: bool(message.reasoning),
    "reasoned call": lambda message: bool(message.reasoning and message.tool_calls),
    "call with text": lambda message: bool(message.content and message.tool_calls),
    "parallel": lambda message: len(message.tool_calls) > 1,
}
"""Kinds of turns that a dialect may have no way with."""


class Reader(Protocol):
    """Reads the turns that a model family's policies sample."""

    def read(self, turn: list[int], prompt: list[int], tools: str) -> Parsed:
        """The message of one turn, with or without its end. ``prompt`` are the tokens before it, or none."""
        ...


class Bridge(Protocol):
    """What a model family writes between two turns."""

    def between(self, prompt: list[int], turn: list[int], messages: list[Message], tools: str) -> list[int]:
        """Token ids from the end of ``turn`` to the beginning of the next one, with ``messages`` in between.

        Raises ValueError if the family has no way to go on from this turn.
        """
        ...


class ChatCodec:
    """Encodes and decodes conversations of one tokenizer in one dialect.

    ``dialect`` names it, ``source`` says who reads its turns and why, and ``remarks`` say what of it a user should
    know. Those of ``matters_with`` (``tools`` or ``reasoning`` -> remarks) matter to conversations with that alone, and
    ``tell`` is called with each of them at the first. ``cannot`` gives for ``tools`` and for kinds of turns the reason
    why they are refused: what was tried did not come back. ``stop_ids`` are the tokens that end a turn, the most usual
    one first.
    """

    def __init__(
        self,
        template: Template | Tagged,
        dialect: str,
        reader: Reader,
        bridge: Bridge | None = None,
        source: str = "codec: the chat template writes what it reads",
    ) -> None:
        self.template = template
        self.dialect = dialect
        self.source = source
        self.reader = reader
        self.bridge = bridge
        self.remarks: list[str] = []
        self.matters_with: dict[str, list[str]] = {}
        self.tell: Callable[[str], None] | None = None
        self.cannot: dict[str, str] = {}
        self.stop_ids = list(template.stop_ids)
        self._known: dict[str, list[int]] = {}

    def opening(self, messages: list[Message], tools: str = "[]") -> list[int]:
        """Token ids of the opening messages, up to the beginning of the assistant's turn.

        Raises ValueError if there are tools, and the dialect cannot write them.
        """
        if json.loads(tools):
            self.refuse("tools")
            self._meets("tools")
        return self.template.encode(self.template.render(messages, generate=True, tools=tools))

    def _meets(self, what: str) -> None:
        """Tell what matters from now on."""
        remarks = self.matters_with.pop(what, ()) if self.tell else ()
        for remark in remarks:
            assert self.tell
            self.tell(remark)

    def refuse(self, what: str) -> None:
        """Raise ValueError if this is one of what the dialect cannot do."""
        if what in self.cannot:
            raise ValueError(f"the dialect {self.dialect} cannot write {what}: {self.cannot[what]}")

    def count(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.template.encode(text))

    def shows_tools(self) -> bool:
        """Whether the policy is shown the tools in the opening."""
        stem = [Message(role=Role.USER, content=".")]
        schema = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": "x", "description": "x", "parameters": schema}}
        return self.template.render(stem, tools=json.dumps([tool])) != self.template.render(stem)

    def assistant(self, message: Message, answers: Sequence[Message] = (), before: Sequence[Message] = ()) -> list[int]:
        """Token ids of an assistant turn that was written, not sampled; ends with an end-of-turn token. ``answers`` are
        the tools' answers to it, and ``before`` is what came between it and the turn before: some templates write a
        turn in the middle of tool calls differently. Raises ValueError if the dialect cannot write such a turn."""
        for what, is_one in TURNS.items():
            if is_one(message):
                self.refuse(what)
                self._meets(what)
        return [*self.template.encode(self.template.turn(message, answers, before)), *self.template.closing(message)]

    def ended(self, turn: Sequence[int]) -> bool:
        """Whether a turn that stopped at one of ``stop_ids`` is over. If it is not, the policy goes on with it: a
        closing tag is several tokens, and its last one may stand elsewhere."""
        return self.template.ended(turn)

    def observations(
        self, messages: list[Message], prompt: Sequence[int] = (), turn: Sequence[int] = (), tools: str = "[]"
    ) -> list[int]:
        """Token ids between the end-of-turn token of one assistant turn and the beginning of the next.

        ``turn`` is the turn before, and ``prompt`` are the tokens before that; families that close a turn in several
        ways need them. Rollouts of one task often see the same observations, so encodings are remembered.
        """
        if self.bridge and turn:
            return self.bridge.between(list(prompt), list(turn), messages, tools)
        key = "\0".join(
            f"{message.role}\0{message.name}\0{message.tool_call_id}\0{message.content}" for message in messages
        )
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = self.template.encode(self.template.after_turn(messages))
        return list(self._known[key])

    def parse(self, ids: Sequence[int], prompt: Sequence[int] = (), tools: str = "[]") -> Parsed:
        """Parse the token ids of one sampled turn, with or without its end-of-turn token. ``prompt`` are the tokens
        before it: some families begin the turn in the prompt. A call that no row can hold counts as unreadable."""
        parsed = self.reader.read(list(ids), list(prompt), tools)
        for number, call in enumerate(parsed.message.tool_calls):
            if unstorable(call.name) or not is_json(call.arguments):
                text = str(self.template.tokenizer.decode([token for token in ids if token not in self.stop_ids]))
                problem = f"tool call {number}: its name or its arguments are not JSON that every parser accepts"
                return Parsed(Message(role=Role.ASSISTANT, content=text), problem)
        if not (parsed.message.reasoning or self.template.writes_reasoning):
            parsed = Parsed(with_thoughts(parsed.message), parsed.error)
        if parsed.message.reasoning:
            self._meets("reasoning")
        return parsed


def spanned(messages: Sequence[Message], start: int, end: int) -> list[Message]:
    """Messages that were encoded together: the first has the span of all, the others an empty one at its end."""
    return [
        message.model_copy(update={"token_start": end if number else start, "token_end": end})
        for number, message in enumerate(messages)
    ]


def is_plain_text(messages: Sequence[Message]) -> bool:
    """Whether a row is no conversation: all that it holds is one text that nobody was asked for."""
    return len(messages) == 1 and messages[0].role is Role.ASSISTANT and not messages[0].tool_calls


def encode(codec: ChatCodec, messages: Sequence[Message], tools: str) -> tuple[list[int], list[bool], list[Message]]:
    """The tokens of a written conversation, which of them are the assistant's, and the messages with their spans. An
    episode that failed at its beginning has no messages, and so no tokens. An assistant message alone, without calls,
    is plain text: its tokens and an end, nothing of a template, all of them to be trained on.

    Raises ValueError if no assistant message follows the opening, two follow each other, or the dialect cannot write
    the conversation.
    """
    if is_plain_text(messages):
        ids = [*codec.template.encode(messages[0].content), codec.stop_ids[0]]
        return ids, [True] * len(ids), spanned(messages, 0, len(ids))
    ids = []
    mask: list[bool] = []
    spanned_messages: list[Message] = []
    turn: tuple[int, int] | None = None
    spoken = numbered(messages, codec.template.id_form)
    blocks = [list(group) for _, group in groupby(spoken, key=lambda message: message.role is Role.ASSISTANT)]
    for before, block, following in zip([[], *blocks], blocks, [*blocks[1:], []], strict=False):
        is_action = block[0].role is Role.ASSISTANT
        if is_action:
            if not ids or len(block) > 1:
                raise ValueError("an assistant message must follow a user or tool message")
            answers = list(takewhile(lambda message: message.role is Role.TOOL, following))
            new = codec.assistant(block[0], answers, before if turn else ())
            turn = (len(ids), len(ids) + len(new))
        elif turn:
            start, end = turn
            new = codec.observations(block, ids[:start], ids[start:end], tools)
        else:
            new = codec.opening(block, tools)
        spanned_messages += spanned(
            messages[len(spanned_messages) : len(spanned_messages) + len(block)], len(ids), len(ids) + len(new)
        )
        ids += new
        mask += [is_action] * len(new)
    return ids, mask, spanned_messages


def tokenize(trajectory: Trajectory, codec: ChatCodec, tokenizer: str) -> Trajectory:
    """A trajectory that was written, not sampled, with its tokens; one that has tokens is returned as it is.

    ``tokenizer`` is the tokenizer's fingerprint. Log-probabilities are NaN: a scripted or imported policy has none.
    Raises ValueError, with the trajectory's id, if it cannot be encoded.
    """
    if trajectory.input_ids:
        return trajectory
    try:
        ids, mask, messages = encode(codec, trajectory.messages, trajectory.tools)
    except ValueError as error:
        raise ValueError(f"{trajectory.trajectory_id}: {error}") from error
    return trajectory.model_copy(
        update={
            "messages": messages,
            "tokenizer": tokenizer,
            "input_ids": ids,
            "action_mask": mask,
            "logprobs": [float("nan")] * len(ids),
            "n_tokens": len(ids),
            "n_action_tokens": sum(mask),
        }
    )

"""Conversations as a tree of sampled turns. A request is matched with the turns that it repeats, which stand for their
sampled tokens; what it adds is heard.

Messages are compared by role, stripped text, and the names and arguments of calls. Reasoning, ids of calls, the order
of fields and the form of numbers do not count, since clients drop or rewrite them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Any

from agentrl.chat.codec import ChatCodec
from agentrl.engines.base import Session, Turn
from agentrl.recorder.repeated import made_of
from agentrl.schemas.json_text import loads, writer
from agentrl.schemas.trajectory import Message, Role, ToolCall


def canonical(message: Message) -> str:
    """What counts of a message."""
    calls = [
        (call.name, _sorted(text) if len(text := call.arguments) > _SHORT else _sorted_again(text))
        for call in message.tool_calls
    ]
    return _plain([message.role.value, message.content.strip(), calls])


def _sorted(arguments: str) -> str:
    try:
        return _in_order(_numbers_alike(loads(arguments)))
    except ValueError:
        return arguments


_sorted_again = lru_cache(maxsize=4096)(_sorted)
_SHORT = 1000  # characters of arguments that are kept: a request repeats all calls before it


def _numbers_alike(value: Any) -> Any:
    """A value of JSON whose numbers are floats, as JavaScript's are: 20000.0 comes back as 20000, and an integer beyond
    2^53 rounded. One beyond all floats stays as it is."""
    if isinstance(value, dict):
        return {key: _numbers_alike(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers_alike(inner) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) + 0.0  # which makes 0.0 of -0.0
        except OverflowError:
            return value
    return value


_plain, _in_order = writer(ensure_ascii=False), writer(sort_keys=True)


@lru_cache(maxsize=64)
def beginning(tools: str) -> bytes:
    """The digest of a conversation without messages, in which ``tools`` are on offer. Its requests repeat them."""
    return hashlib.blake2b(_in_order(loads(tools)).encode(), digest_size=16).digest()


def digests(messages: Sequence[Message], before: bytes) -> list[bytes]:
    """The digest of the conversation up to each message, that message included."""
    chain = []
    for message in messages:
        before = made_of(message).reached(before, _digest)
        chain.append(before)
    return chain


def _digest(before: bytes, message: Message) -> bytes:
    return hashlib.blake2b(before + canonical(message).encode(), digest_size=16).digest()


@dataclass(eq=False)
class SampledTurn:
    """A turn that the engine sampled, after ``heard``, which are ``heard_ids`` in tokens. ``turn`` has spans relative
    to its own beginning. ``call_ids`` are those that the client was told, one for each call of ``message``.

    ``agent`` and ``kind`` are what the client said of the request; see :class:`agentrl.recorder.wire.Caller`.
    ``constrained`` says that it was kept to a JSON schema, so that its tokens are heard and not trained on.
    ``delivered`` says that a client has received it. ``seconds`` is the time from its request until it was sampled.
    ``session`` is the engine's, as long as it ends with this turn.
    """

    number: int
    parent: "SampledTurn | None"
    heard: list[Message]
    heard_ids: list[int]
    turn: Turn
    message: Message
    call_ids: list[str]
    digest: bytes
    tools: str
    sampling: str
    instructed: bool = False
    agent: str = ""
    kind: str = ""
    constrained: bool = False
    delivered: bool = False
    seconds: float | None = None
    children: "list[SampledTurn]" = field(default_factory=list)
    session: Session | None = None

    @property
    def path(self) -> "list[SampledTurn]":
        """All turns from the first one to this."""
        turns, turn = [], self
        while True:
            turns.append(turn)
            if turn.parent is None:
                return turns[::-1]
            turn = turn.parent

    @property
    def ids(self) -> list[int]:
        """All tokens up to the end of this turn."""
        ids: list[int] = []
        for turn in self.path:
            ids += turn.heard_ids
            ids += turn.turn.ids
        return ids

    @property
    def beginning(self) -> str:
        """A digest of what was heard before the first turn, and of the tools."""
        first = self.path[0]
        return digests(first.heard, beginning(first.tools))[-1].hex()

    def messages(self, instructions: bool = True) -> list[Message]:
        """The conversation up to this turn, with or without the instructions of the first request."""
        messages = [message for turn in self.path for message in (*turn.heard, turn.message)]
        return messages[1:] if self.path[0].instructed and not instructions else messages


@dataclass
class Tree:
    """The turns of one episode, in the order in which they were sampled. A turn without parent begins a segment."""

    turns: list[SampledTurn] = field(default_factory=list)
    by_digest: dict[bytes, list[SampledTurn]] = field(default_factory=dict)

    def add(self, turn: SampledTurn) -> None:
        self.turns.append(turn)
        self.by_digest.setdefault(turn.digest, []).append(turn)
        if turn.parent is not None:
            turn.parent.children.append(turn)


def match(
    messages: Sequence[Message],
    reached: Sequence[bytes],
    by_digest: dict[bytes, list[SampledTurn]],
    named: SampledTurn | None = None,
) -> tuple[SampledTurn | None, int]:
    """The last sampled turn that a request repeats, and the number of messages up to its end. ``reached`` are the
    digests of the request. Of turns that said the same, the one that the request has ``named`` is taken, then one with
    the request's call ids, then one that the client has received, then one that nothing follows yet."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role is not Role.ASSISTANT or not (candidates := by_digest.get(reached[index])):
            continue
        if len(candidates) == 1:
            return candidates[0], index + 1
        given = {call.id for message in messages[: index + 1] for call in message.tool_calls}

        def rank(turn: SampledTurn, given: set[str] = given) -> tuple[bool, int, bool, bool, int]:
            known_calls = sum(call in given for turn in turn.path for call in turn.call_ids)
            return turn is named, known_calls, turn.delivered, not turn.children, turn.number

        return max(candidates, key=rank), index + 1
    return None, 0


def with_own_ids(messages: Sequence[Message], before: SampledTurn | None) -> list[Message]:
    """New messages with the ids that the policy itself gave its calls, and answers of tools with the tool's name, as in
    a rollout of our own."""
    written: dict[str | None, ToolCall] = {}
    renamed = []
    for message in messages:
        written.update((call.id, call) for call in message.tool_calls)
        if message.role is Role.TOOL:
            call = written.get(message.tool_call_id) or _sampled(message.tool_call_id, before)
            changed = {"tool_call_id": call.id, "name": message.name or call.name} if call else {}
            message = message.model_copy(update=changed)
        renamed.append(message)
    return renamed


def _sampled(call_id: str | None, turn: SampledTurn | None) -> ToolCall | None:
    """The call that a client knows by this id, in a turn or before it. Most answers are to the last turn."""
    while turn is not None:
        for told, call in zip(reversed(turn.call_ids), reversed(turn.message.tool_calls), strict=True):
            if told == call_id:
                return call
        turn = turn.parent
    return None


def heard_ids(codec: ChatCodec, before: SampledTurn | None, messages: Sequence[Message], tools: str) -> list[int]:
    """Tokens of ``messages`` after a sampled turn, up to the beginning of the next one. Turns of the assistant among
    them were not sampled here and are written as the dialect writes them.

    Raises ValueError if the dialect cannot go on from that turn.
    """
    if before is None:
        return codec.opening(list(messages), tools)
    turn = list(before.turn.ids)
    prompt = before.ids[: -len(turn) or None] if codec.bridge else []  # nothing else looks that far back
    ids: list[int] = []
    if not turn or not (turn[-1] in codec.stop_ids and codec.ended(turn)):  # a limit ended it, or a stop string
        ids = codec.template.closing(before.message)
        turn = turn + ids
    earlier: list[Message] = []
    blocks = [list(group) for _, group in groupby(messages, key=lambda message: message.role is Role.ASSISTANT)]
    for block, following in zip(blocks, [*blocks[1:], []], strict=True):
        if block[0].role is not Role.ASSISTANT:
            earlier, new = block, codec.observations(block, prompt, turn, tools)
            prompt = prompt + turn + new if codec.bridge else []
        elif len(block) > 1 or not earlier:
            raise ValueError("two turns of the assistant follow each other")
        else:
            answers = list(takewhile(lambda message: message.role is Role.TOOL, following))
            new = turn = codec.assistant(block[0], answers, earlier)
        ids = ids + new
    return ids


def received(turns: Sequence[SampledTurn]) -> set[SampledTurn]:
    """The turns that a client has received, and those before them."""
    kept: set[SampledTurn] = set()
    for turn in turns:
        if turn.delivered:
            kept.update(turn.path)
    return kept

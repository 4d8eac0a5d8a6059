"""What requests repeat, which is most of each: a message, once it was read, is the same object in every later request,
and what was made of it is looked up by that object."""

import hashlib
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from pydantic import WrapValidator

from agentrl.recorder.body import RepeatedTools, bytes_of_value
from agentrl.schemas.trajectory import Message

Value = TypeVar("Value")
Source = TypeVar("Source")

_MOST = 16 * 2**20  # bytes, as they came, that are kept of a field, and as many again
_ENTRY = 500  # bytes that a short message takes beside its text
_BEGINNINGS = 256  # of conversations, for one message: an agent that says "ok" says it after anything


class LastUsed(Generic[Value]):
    """Values by keys. It keeps what was used among the last ``most`` bytes, and as many again."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._young: dict[Hashable, tuple[Value, int]] = {}
        self._old: dict[Hashable, tuple[Value, int]] = {}

    def get(self, key: Hashable) -> Value | None:
        entry = self._young.get(key)
        if entry is None:
            entry = self._old.get(key)
            if entry is None:
                return None
            self.put(key, *entry)
        return entry[0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        self.size += size
        if self.size > self.most:
            self._old, self._young, self.size = self._young, {}, size
        self._young[key] = value, size


def read_once() -> WrapValidator:
    """Of a field that later requests repeat: an equal value of JSON is validated once, and is the same object after
    that. Nobody may change it."""
    kept: LastUsed[Any] = LastUsed(_MOST)

    def read(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            key = value if isinstance(value, RepeatedTools) else bytes_of_value(value)
        except ValueError:  # it is no value of JSON, but an object that was read before
            return validate(value)
        value_read = kept.get(key)
        if value_read is None:
            value_read = validate(value)
            kept.put(key, value_read, _ENTRY + (len(key) if isinstance(key, bytes) else key.size))
        return value_read

    return WrapValidator(read)


def once_of(make: Callable[[Source], Value], size: Callable[[Value], int]) -> Callable[[Source], Value]:
    """What ``make`` makes of an object, which is looked up when this very object comes again. Nobody may change either.
    ``size`` is about as many bytes as both take."""
    kept: LastUsed[tuple[Source, Value]] = LastUsed(_MOST)

    def made(source: Source) -> Value:
        entry = kept.get(id(source))
        if entry is None:
            entry = source, make(source)  # as long as the source is kept, no other object has its id
            kept.put(id(source), entry, size(entry[1]))
        return entry[1]

    return made


class MessageNotes:
    """What was made of ``message``: ``exact`` is a digest of all that it says, and ``after`` has the digest of the
    conversation up to it, by the digest of what comes before it."""

    __slots__ = ("after", "exact", "message")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.after: dict[bytes, bytes] = {}
        calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
        spoken = (message.role.value, message.content, message.reasoning, message.tool_call_id, message.name)
        self.exact = hashlib.blake2b(bytes_of_value([spoken, message.error, calls]), digest_size=16).digest()

    def reached(self, before: bytes, digest: Callable[[bytes, Message], bytes]) -> bytes:
        """The digest of a conversation up to this message, which ``digest`` makes."""
        reached = self.after.get(before)
        if reached is None:
            if len(self.after) >= _BEGINNINGS:
                self.after.clear()
            reached = self.after[before] = digest(before, self.message)
        return reached


made_of = once_of(MessageNotes, lambda notes: _ENTRY + len(notes.message.content))

"""Regular records, from bytes to columns without a dict per record and per message.

Most records of a file have one shape. A format may declare it as a typed record, and how that becomes messages. Lines
are parsed into such records some at a time, and their values go into columns together. Whatever is not exactly of
that shape, or needs a note, a guess or a refusal, is read by the format's reader, as all records of other formats are:
so no rule but that of the shape is here, and a file gives the same with and without it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, groupby, islice, pairwise
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
from pydantic_core import from_json

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.blocks import BLOCK_ROWS, BLOCK_SIZE, CALL_FIELDS, RowBlock, columns_of
from agentrl.datastore.formats.messages import ROLES, answer, json_text, tools_text
from agentrl.datastore.formats.rows import ANSWERED, UNKNOWN, task_id
from agentrl.datastore.formats.source import BROKEN, Line, Row, Source
from agentrl.schemas.json_text import MAX_DEPTH, depth

Raw = msgspec.Raw
NULL = Raw(b"null")


class Typed(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A part of a regular record. Fields that it does not have make the record irregular."""


class TypedFunction(Typed):
    name: str
    arguments: str | dict[str, Any] | None = None


class TypedCall(Typed):
    function: TypedFunction
    id: str | None = None
    type: str | None = None


class TypedMessage(Typed):
    """A message as chat has it."""

    role: str
    content: str | None = None
    tool_calls: list[TypedCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = msgspec.field(default=None, name="reasoning_content")


class MadeMessage(msgspec.Struct, gc=False):
    """A message of another format, with calls as columns have them."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    error: bool | None = None


_OF_CHAT, _OF_OTHERS = ("tool_call_id", "name", "reasoning"), ("tool_call_id", "name", "error")
"""Fields that not all messages have."""
_LONGEST = 1000
"""Longer names of models are cut by the readers."""


class RegularRow(msgspec.Struct, gc=False):
    """A row: its messages, and other fields that its record gives. ``content`` tells its task from others; without it
    the messages before the first assistant message do."""

    messages: Sequence[TypedMessage] | Sequence[MadeMessage]
    fields: dict[str, Any]
    content: str | None = None


class IrregularError(ValueError):
    """The reader of the format has to read a record."""


Shape = TypeVar("Shape", bound=Typed)
Reader = Callable[[Source], Iterator[Row]]
_MISSHAPEN = (msgspec.MsgspecError, ValueError, RecursionError)


class Regular(Generic[Shape]):
    """What most records of a format look like, and the row that one gives, of messages of chat or of others."""

    def __init__(
        self, source: str, shape: type[Shape], row_of: Callable[[Shape], RegularRow], *, chat: bool = False
    ) -> None:
        self.source, self.row_of, self.chat = source, row_of, chat
        self.decode = msgspec.json.Decoder(shape).decode

    def rows(self, source: Source, read: Reader) -> Iterator[Row | RowBlock]:
        """The rows of a file of JSON Lines, in order: regular ones as blocks, all others by the format's reader. After
        a block of lines without a regular one that reads what is left."""
        lines = source.lines()
        for block in _gathered(lines):
            records = self._decoded(block, source.limit)
            start = 0
            for regular, run in groupby(records, lambda record: record is not None):
                own = [*run]
                part = block[start : (start := start + len(own))]
                yield from self._blocks(part, own, source, read) if regular else _irregular(part, source, read)
            if block and records.count(None) == len(block):
                yield from _irregular(lines, source, read)

    def _decoded(self, lines: list[Line], limit: int) -> list[Shape | None]:
        """The record of each line; None for one that is not regular."""
        try:
            if max([size for _, _, size in lines], default=0) <= limit:
                return [self.decode(content) for _, content, _ in lines]
        except _MISSHAPEN:
            pass
        return [None] if len(lines) == 1 else [record for line in lines for record in self._decoded([line], limit)]

    def _blocks(self, lines: list[Line], records: list[Any], source: Source, read: Reader) -> Iterator[Row | RowBlock]:
        """Rows of records. Those that turn out to be irregular are found by halves."""
        try:
            block = taken(self.source, [*map(self.row_of, records)], [number for number, _, _ in lines], self.chat)
        except BROKEN:
            half = len(lines) // 2
            if not half:
                yield from _irregular(lines, source, read)
            for part in (slice(half), slice(half, None)) if half else ():
                yield from self._blocks(lines[part], records[part], source, read)
            return
        source.number = block.numbers[-1]
        source.read_to += sum([len(content) for _, content, _ in lines])
        yield block


def _irregular(lines: Iterable[Line], source: Source, read: Reader) -> Iterator[Row]:
    source.given = source.parsed(lines)
    return read(source)


def _gathered(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """Lines, some at a time. What was read before an error comes before it."""
    block, size = list[Line](), 0
    try:
        for line in lines:
            block.append(line)
            size += len(line[1])
            if len(block) == BLOCK_ROWS or size >= BLOCK_SIZE:
                yield block
                block, size = [], 0
    except StoreError:
        yield block
        raise
    yield block


def taken(source: str, rows: Sequence[RegularRow], numbers: list[int], chat: bool) -> RowBlock:
    """Rows taken apart. Raises what a reader may raise if one of them is not regular."""
    messages: list[Any] = [*chain.from_iterable([row.messages for row in rows])]
    ends = [*accumulate([len(row.messages) for row in rows])]
    roles, contents = [ROLES[message.role] for message in messages], [message.content or "" for message in messages]
    made: list[Any] = [message.tool_calls or () for message in messages]
    calls, flat = [*map(len, made)], [*chain.from_iterable(made)]
    call_fields = _calls(flat) if chat else [[call[name] for call in flat] for name in CALL_FIELDS]
    fields: dict[str, list[Any]] = {"role": roles, "content": contents}
    for name in _OF_CHAT if chat else _OF_OTHERS:
        values = [*map(attrgetter(name), messages)]
        if values.count(None) < len(values):
            fields[name] = values
    if chat and "tool" in roles:
        _answer(fields, calls, call_fields, ends)
    bounds = [*pairwise([0, *ends])]
    given = [row.fields for row in rows]
    spoken = [*chain.from_iterable(zip(roles, contents, strict=True))]
    told = [
        "\0".join(spoken[2 * start : 2 * roles.index("assistant", start, end)]) if content is None else content
        for content, (start, end) in zip([row.content for row in rows], bounds, strict=True)
    ]
    row_fields: dict[str, list[Any]] = {
        "source": [source] * len(rows),
        "env": [source] * len(rows),
        "prompt": [contents[roles.index("user", *bound)] for bound in bounds],
        "task_id": [task_id(source, None, content) for content in told],
        "termination": [ANSWERED if roles[end - 1] == "assistant" and not calls[end - 1] else UNKNOWN for end in ends],
    }
    if "reasoning" in fields:
        fields["reasoning"] = [text or None for text in fields["reasoning"]]
    if "error" in fields:
        row_fields["n_tool_errors"] = [fields["error"][start:end].count(True) for start, end in bounds]
    if not all(row_fields["prompt"]):
        raise IrregularError
    return RowBlock(
        [end - start for start, end in bounds],
        fields,
        calls,
        call_fields,
        row_fields | columns_of(given, set().union(*given)),
        numbers,
    )


def _calls(calls: Sequence[TypedCall]) -> list[list[str]]:
    functions = [call.function for call in calls]
    arguments = [arguments_text(function.arguments) for function in functions]
    return [[call.id or "" for call in calls], [function.name for function in functions], arguments]


def arguments_text(value: Any) -> str:
    text = json_text({} if value is None else value)
    if len(text) > MAX_DEPTH and type(value) is dict and depth(text):  # deeper than the reader may take
        raise IrregularError
    return text


def _answer(
    fields: dict[str, list[Any]], calls: Sequence[int], call_fields: Sequence[list[str]], ends: Sequence[int]
) -> None:
    """Give tool messages the ids and names of the calls that they answer."""
    nothing = [None] * len(calls)
    roles, ids, names = (fields.get(name, nothing[:]) for name in ("role", "tool_call_id", "name"))
    if all(ids[at] and names[at] for at, role in enumerate(roles) if role == "tool"):
        return
    made = zip(*call_fields[:2], strict=True)
    unanswered: list[dict[str, Any]] = []
    begins = {0, *ends}
    for at, count in enumerate(calls):
        if at in begins:
            unanswered = []
        if count:
            unanswered = [{"id": identity, "name": name} for identity, name in islice(made, count)]
        elif roles[at] == "tool":
            message = {"tool_call_id": ids[at], "name": names[at]}
            answer(message, unanswered)
            ids[at], names[at] = message["tool_call_id"], message["name"]
    fields |= {"tool_call_id": ids, "name": names}


@lru_cache(maxsize=128)
def _tools(text: bytes, anthropic: bool) -> str:
    tools = from_json(text)
    if depth(text.decode()) > MAX_DEPTH or (not anthropic and any("input_schema" in tool for tool in tools or ())):
        raise IrregularError
    return tools_text(tools)


def tools_of(raw: msgspec.Raw, anthropic: bool = False) -> str:
    """Tool schemas as JSON text. With those of Anthropic a record is regular in its format alone."""
    return _tools(bytes(raw), anthropic)


def acting(model: str | None) -> dict[str, Any]:
    """Fields of the model that acted."""
    if model is None:
        return {}
    if not 0 < len(model) <= _LONGEST:
        raise IrregularError
    return {"policy": model, "model": model}

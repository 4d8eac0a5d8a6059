"""Rows from dicts of readers: checked Arrow columns, some rows at a time, without an object per row or message.

The rows of a block become a table of Arrow's own making. If a row does not fit its columns or breaks a rule of the
buffer, it goes through the model: it says which record is at fault, and reads what may be read generously (``"1"`` as a
number).
"""

import gc
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datastore.errors import StoreError
from datastore.formats.source import BROKEN, Row, Source, excerpt
from datastore.ingest import as_table
from datastore.validation import LENIENT_SCHEMA, validate
from schemas.trajectory import Message, RewardComponent, Role, Span, ToolCall, Trajectory

BATCH_ROWS = 4096
BATCH_SIZE = 2**23
"""Characters of source that a batch is read from, at about which it ends."""
BLOCK_ROWS = 64
BLOCK_SIZE = 2**18
"""Rows are taken over after so many of them, or so many characters of source: they stay in the processor's cache, and
what they were read into is used again."""

_MISFITS = (pa.ArrowException, OverflowError, *BROKEN)
_REQUIRED = frozenset(name for name, info in Trajectory.model_fields.items() if info.is_required())
_DEFAULTS = {
    name: info.get_default(call_default_factory=True, validated_data={})
    for name, info in Trajectory.model_fields.items()
    if name not in _REQUIRED
}
_DEFAULTS |= dict.fromkeys(["created_at", "n_steps", "n_tool_calls", "n_tokens", "n_action_tokens"])
"""Of a row that lacks a field. None: a whole batch gets the time, and what is counted."""
_MESSAGES = LENIENT_SCHEMA.field("messages").type
_FIELDS = {field.name: field for field in _MESSAGES.value_type}
_CALLS = _FIELDS["tool_calls"].type
_PLACES = ("token_start", "token_end")
_KNOWN = Message.model_fields.keys()
_ROW_FIELDS = Trajectory.model_fields.keys()
_CALL_FIELDS = ToolCall.model_fields.keys()
_COMPONENT_FIELDS = RewardComponent.model_fields.keys()
_SPAN_FIELDS = Span.model_fields.keys()


Block: TypeAlias = dict[str, pa.Array]
"""Columns of some rows by name: those that any of the rows has."""


@dataclass(frozen=True)
class RowBatch:
    """Rows in ``LENIENT_SCHEMA``; the source of each, and what was kept of its record."""

    table: pa.Table
    sources: list[Source]
    kept: list[Any]


class _Waiting(NamedTuple):
    """A row that is not yet taken over, the number of its record in its source, and the record."""

    row: Row
    source: Source
    number: int
    record: Any


def batches(rows: Iterable[tuple[Source, Row]], keep: Callable[[Any], Any] = lambda _: None) -> Iterator[RowBatch]:
    """Tables of a bounded number of rows, each given with the source that has just read it. ``keep`` says what to
    keep of a record beside its row. A row that does not fit is refused with its place."""
    was_on = gc.isenabled()
    part = _Batch(keep)
    try:
        gc.disable()  # it would look at every value of a batch again and again, and find no circle
        for source, row in rows:
            part.add(row, source)
            if part.full:
                batch, part = part.finished(), _Batch(keep)
                if was_on:
                    gc.enable()
                yield batch
                gc.disable()
        if part.count:
            yield part.finished()
    except StoreError:
        part.finished()  # if a record before is at fault too, that one is named
        raise
    finally:
        if was_on:
            gc.enable()


class _Batch:
    """Rows on their way into a table. They are taken over some at a time: one by one is much slower."""

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        self.count = 0
        self._keep = keep
        self._size = self._waiting_size = 0
        """How much was read for the rows."""
        self._waiting: list[_Waiting] = []
        self._blocks: list[Block] = []
        self._places: list[tuple[Source, int]] = []
        self._kept: list[Any] = []

    @property
    def full(self) -> bool:
        return self.count >= BATCH_ROWS or self._size >= BATCH_SIZE

    def add(self, row: Row, source: Source) -> None:
        """Add a row that ``source`` has just read."""
        self._waiting.append(_Waiting(row, source, source.number, source.record))
        self.count += 1
        self._waiting_size += source.took()
        if len(self._waiting) == BLOCK_ROWS or self._waiting_size >= BLOCK_SIZE:
            self._take_over()

    def finished(self) -> RowBatch:
        """The rows as a table, without those that do not fit."""
        self._take_over()
        table = _joined(self._blocks, len(self._places))
        if at_fault := {problem.row for problem in validate(table)}:
            table = self._without(table, at_fault)
        return RowBatch(table, [source for source, _ in self._places], self._kept)

    def _take_over(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._size += self._waiting_size
        self._waiting_size = 0
        if not waiting:
            return
        try:
            self._take(waiting, _block([one.row for one in waiting]))
        except _MISFITS:
            for one in waiting:
                try:
                    self._take([one], _block([one.row]))
                except _MISFITS:
                    if (table := _judged(one.row, one.source, one.number, one.record)) is not None:
                        self._take([one], {name: table[name].combine_chunks() for name in table.column_names})

    def _take(self, waiting: Sequence[_Waiting], block: Block) -> None:
        self._blocks.append(block)
        self._places += [(one.source, one.number) for one in waiting]
        self._kept += [self._keep(one.record) for one in waiting]

    def _without(self, table: pa.Table, at_fault: set[int]) -> pa.Table:
        """The table without the rows at fault, except for those that the model can read."""
        tables, left = [LENIENT_SCHEMA.empty_table()], []
        for number, (source, record) in enumerate(self._places):
            here = table.slice(number, 1)
            one: pa.Table | None = here
            if number in at_fault:
                row = _given(here.to_pylist()[0])
                known = {
                    name: value for name, value in row.items() if name != "created_at" and value != _DEFAULTS.get(name)
                }
                one = _judged(row, source, record, known)
            if one is not None:
                tables.append(one)
                left.append(number)
        self._places, self._kept = [self._places[one] for one in left], [self._kept[one] for one in left]
        return pa.concat_tables(tables)


def _judged(row: Row, source: Source, number: int, record: Any) -> pa.Table | None:
    """A row as the model reads it. One that it cannot read is refused with its place."""
    try:
        return as_table([Trajectory.model_validate(_counted(row))])
    except _MISFITS as error:
        source.notes.refuse(source.place_of(number), error, excerpt(record))
        return None


def _given(row: Row) -> Row:
    """A row of a table without what is null, except for an outcome that is."""
    messages = [{key: value for key, value in one.items() if value is not None} for one in row["messages"]]
    return {name: value for name, value in row.items() if value is not None or name in ("reward", "success")} | {
        "messages": messages
    }


def _counted(row: Row) -> Row:
    """A row with its counts, and log-probs that are None as NaN, for the model."""
    mask = row.get("action_mask") or ()
    messages = row["messages"]
    counts = {
        "n_steps": sum(one["role"] == Role.ASSISTANT for one in messages),
        "n_tool_calls": sum(len(one.get("tool_calls") or ()) for one in messages),
        "n_tokens": len(mask),
        "n_action_tokens": sum(map(bool, mask)),
    }
    if logprobs := row.get("logprobs"):
        row = row | {"logprobs": [math.nan if one is None else one for one in logprobs]}
    return counts | row


def _block(rows: Sequence[Row]) -> Block:
    """Columns of rows. Raises what Arrow or Python raises if a value does not fit its column."""
    names = frozenset().union(*rows)
    if not _REQUIRED <= names <= _ROW_FIELDS:
        raise ValueError("lacks a field, or has one that is not known")
    block = {name: _column(name, [row.get(name, _DEFAULTS.get(name)) for row in rows]) for name in names - {"messages"}}
    return block | {"messages": _messages([row["messages"] for row in rows])}


def _joined(blocks: Sequence[Block], count: int) -> pa.Table:
    """Blocks as a table in ``LENIENT_SCHEMA``, with the defaults of what rows lack, the time, and what is counted."""
    if not blocks:
        return LENIENT_SCHEMA.empty_table()
    names = frozenset().union(*blocks)
    columns = {
        name: pa.concat_arrays([one[name] if name in one else _absent(name, len(one["messages"])) for one in blocks])
        if name in names
        else _absent(name, count)
        for name in LENIENT_SCHEMA.names
    }
    found = _counts(columns["messages"], columns["action_mask"])
    found["created_at"] = pa.scalar(datetime.now(UTC), LENIENT_SCHEMA.field("created_at").type)
    for name, values in found.items():
        if columns[name].null_count:
            columns[name] = pc.coalesce(columns[name], values)
    return pa.Table.from_arrays(list(columns.values()), schema=LENIENT_SCHEMA)


def _counts(messages: pa.Array, mask: pa.Array) -> dict[str, pa.Array]:
    """What follows from the messages and the mask of each row."""
    spoken = pc.equal(messages.values.field("role"), Role.ASSISTANT.value).fill_null(False)
    places, tokens = messages.offsets.to_numpy(), mask.offsets.to_numpy()
    counts = {
        "n_steps": np.diff(_running(spoken)[places]),
        "n_tool_calls": np.diff(messages.values.field("tool_calls").offsets.to_numpy()[places]),
        "n_tokens": np.diff(tokens),
        "n_action_tokens": np.diff(_running(mask.values)[tokens]),
    }
    return {name: pa.array(values, pa.int32()) for name, values in counts.items()}


@lru_cache(maxsize=512)
def _absent(name: str, count: int) -> pa.Array:
    """A column of which no row has a value. Batches are mostly of one size, and share it."""
    return pa.repeat(pa.scalar(_DEFAULTS[name], LENIENT_SCHEMA.field(name).type), count)


def _messages(talks: Sequence[Sequence[dict[str, Any]]]) -> pa.Array:
    """The column of messages."""
    messages = list(chain.from_iterable(talks))
    names: frozenset[str] = frozenset().union(*messages)
    if not names <= _KNOWN:
        raise ValueError("has a field of a message that is not known")
    if "tool_calls" in names:
        calls = [call for one in messages for call in one.get("tool_calls") or ()]
        if any(len(call) != len(_CALL_FIELDS) for call in calls):
            raise ValueError("has a call with other fields than a call has")
    lists = pa.array(talks, _list_of(names))
    structs = lists.values
    if structs.null_count:
        raise TypeError("a message is an object")
    columns = []
    for name, field in _FIELDS.items():
        if name in _PLACES and name in names:
            columns.append(_exact([one.get(name) for one in messages], field.type))
        elif name in names:
            found = structs.field(name)
            columns.append(_filled(found) if name == "tool_calls" else found)
        elif name == "tool_calls":
            columns.append(_filled(pa.nulls(len(messages), field.type)))
        else:
            columns.append(pa.nulls(len(messages), field.type))
    structs = pa.StructArray.from_arrays(columns, fields=list(_FIELDS.values()))
    return pa.ListArray.from_arrays(lists.offsets, structs, type=_MESSAGES)


@lru_cache(maxsize=64)
def _list_of(names: frozenset[str]) -> pa.DataType:
    """Lists of messages with these fields. Arrow would cut a place of 1.5 to 1: places are read on their own."""
    return pa.list_(pa.struct([field for name, field in _FIELDS.items() if name in names and name not in _PLACES]))


def _filled(lists: pa.Array) -> pa.Array:
    """Lists of calls, empty ones instead of nulls."""
    return pa.ListArray.from_arrays(lists.offsets, lists.values, type=lists.type)


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """The table with other values in a column."""
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    return table.set_column(index, field, pa.array(values, field.type))


def _column(name: str, values: list[Any]) -> pa.Array:
    kind = LENIENT_SCHEMA.field(name).type
    match name:
        case "input_ids":
            ids = array("i")
            for one in values:
                ids.fromlist(one)
            flat = pa.Array.from_buffers(pa.int32(), len(ids), [None, pa.py_buffer(ids)])
            return pa.ListArray.from_arrays(_offsets(map(len, values)), flat, type=kind)
        case "action_mask":
            flags = np.frombuffer(b"".join(map(bytes, values)), np.uint8)
            if len(flags) and flags.max() > 1:
                raise ValueError("a mask is true or false")
            return pa.ListArray.from_arrays(_offsets(map(len, values)), pa.array(flags.view(bool)), type=kind)
        case "logprobs":
            flat = pa.array(list(chain.from_iterable(values)), pa.float32()).fill_null(math.nan)
            return pa.ListArray.from_arrays(_offsets(map(len, values)), flat, type=kind)
        case "tags" if not all(isinstance(one, list) for one in values):
            raise TypeError("tags are a list")
        case "reward_components" if any(one.keys() - _COMPONENT_FIELDS for each in values for one in each):
            raise ValueError(f"a reward component has {', '.join(_COMPONENT_FIELDS)}")
        case "spans" if any(one.keys() != _SPAN_FIELDS for each in values for one in each):
            raise ValueError(f"a span has {', '.join(_SPAN_FIELDS)}")
        case "spans" if any(type(number) is not int for each in values for one in each for number in one.values()):
            raise TypeError("a span is of integers")
    return _exact(values, kind)


def _exact(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Values as an array. Raises if one of them is of another kind: Arrow alone would cut 1.5 to 1."""
    if pa.types.is_integer(kind):
        return pa.array(values).cast(kind)
    return pa.array(values, kind)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array(np.fromiter(accumulate(lengths, initial=0), np.int32))


def _running(flags: pa.Array) -> np.ndarray:
    """How many flags are true before each position, and at the end."""
    return np.concatenate([[0], np.cumsum(flags.to_numpy(zero_copy_only=False))])

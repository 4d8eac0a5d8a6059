"""Rows of readers as tables, built column by column: no object is made per message, and no dict is kept.

A row is a dict with fields of a trajectory; fields that it lacks have their default, and counts are counted here. If
a batch of rows does not fit the columns, or breaks a rule of the buffer, its rows go through the model one by one: it
says which record is at fault, and reads what may be read generously (``"1"`` as a number).
"""

import gc
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.blocks import (
    ABSENT,
    BLOCK_ROWS,
    BLOCK_SIZE,
    CALL_FIELDS,
    DEFAULTS,
    PLAIN_FIELDS,
    ROW_FIELDS,
    RowBlock,
    block_of,
)
from agentrl.datastore.formats.notes import excerpt
from agentrl.datastore.formats.rows import ROW_DEFAULTS
from agentrl.datastore.formats.source import BROKEN, Row, Source
from agentrl.datastore.table.ingest import as_table
from agentrl.datastore.table.validation import LENIENT_SCHEMA, validate
from agentrl.schemas.trajectory import RewardComponent, Role, Span, Trajectory

BATCH_ROWS = 4096
BATCH_SIZE = 2**23
"""Characters of source that a batch is read from, at about which it ends."""
_MISFITS = (pa.ArrowException, OverflowError, *BROKEN)
_MESSAGE = LENIENT_SCHEMA.field("messages").type
_CALL = _MESSAGE.value_type.field("tool_calls").type
_FIELDS = ["role", "content", *PLAIN_FIELDS]
_COMPONENT_FIELDS = RewardComponent.model_fields.keys()
_SPAN_FIELDS = Span.model_fields.keys()


RowOrigin: TypeAlias = tuple[Source, int, Any]
"""Where a row comes from: its source, the number of the record in it, and what is kept of the record."""


Keep: TypeAlias = Callable[[Any], Any]
"""What to keep of a record beside its row. If its attribute ``of_each`` is false, it keeps nothing of a record without
annotations."""


def of_each(keep: Keep | None) -> bool:
    """Whether something may be kept of any record."""
    return keep is not None and getattr(keep, "of_each", True)


@dataclass(frozen=True)
class RowBatch:
    """Rows in ``LENIENT_SCHEMA``; the source of each, and what was kept of its record."""

    table: pa.Table
    sources: list[Source]
    kept: list[Any]


def batches(rows: Iterable[tuple[Source, Row | RowBlock]], keep: Keep | None = None) -> Iterator[RowBatch]:
    """Tables of a bounded number of rows, each given with the source that has just read it. ``keep`` says what to
    keep of a record beside its row. A row that does not fit is refused with its place."""
    was_on = gc.isenabled()
    part = _Columns()
    try:
        gc.disable()  # it would look at every value of a batch again and again, and find no circle
        for source, row in rows:
            if isinstance(row, RowBlock):
                part.add_block(row, source)
            else:
                kept = keep(source.record) if keep else None
                part.add(row, (source, source.number, kept), source.took())
            if part.count >= BATCH_ROWS or part.size >= BATCH_SIZE:
                batch, part = part.batch(), _Columns()
                if was_on:
                    gc.enable()
                yield batch
                gc.disable()
        if part.count:
            yield part.batch()
    except StoreError:
        part.batch()  # if a record before is at fault too, that one is named
        raise
    finally:
        if was_on:
            gc.enable()


class _Columns:
    """Values of some rows, of their messages and of their calls, field by field. Rows are taken over some at a time:
    one by one is much slower, and all at once leaves the processor's cache."""

    def __init__(self) -> None:
        self.size = 0
        """How much was read for the rows."""
        self.origins: list[RowOrigin] = []
        self.row_fields: dict[str, list[Any]] = {}
        """Values of all fields but messages that a row has had so far."""
        self.lengths: list[int] = []
        self.fields: dict[str, list[Any]] = {name: [] for name in _FIELDS}
        """Values of the messages; an empty list if no message has any so far."""
        self.calls: list[int] = []
        """How many calls each message has."""
        self.call_fields: tuple[list[str], list[str], list[str]] = ([], [], [])
        self._waiting: list[tuple[Row, RowOrigin, Any]] = []
        self._waiting_size = 0

    @property
    def count(self) -> int:
        return len(self.origins) + len(self._waiting)

    def add_block(self, block: RowBlock, source: Source) -> None:
        """Add rows that were taken apart already."""
        self.take_over()
        self.size += source.took()
        self._take(block, [(source, number, None) for number in block.numbers])

    def add(self, row: Row, origin: RowOrigin, size: int) -> None:
        """Add a row that was read from ``size`` bytes or characters."""
        self._waiting.append((row, origin, origin[0].record))
        self.size += size
        self._waiting_size += size
        if len(self._waiting) == BLOCK_ROWS or self._waiting_size >= BLOCK_SIZE:
            self.take_over()

    def take_over(self) -> None:
        """Take over the rows that wait. One that does not fit is refused."""
        waiting, self._waiting, self._waiting_size = self._waiting, [], 0
        try:
            self._take(block_of([row for row, _, _ in waiting]), [origin for _, origin, _ in waiting])
        except _MISFITS:
            for row, origin, record in waiting:
                try:
                    self._take(block_of([row]), [origin])
                except _MISFITS as error:
                    source, number, _ = origin
                    source.notes.refuse(source.place_of(number), _reason(row) or error, excerpt(record))

    def _take(self, block: RowBlock, origins: Sequence[RowOrigin]) -> None:
        """Take over the values of rows."""
        for name, values in block.fields.items():
            self.fields[name] += [None] * (len(self.calls) - len(self.fields[name]))
            self.fields[name] += values
        self.calls += block.calls
        for whole, part in zip(self.call_fields, block.call_fields, strict=False):
            whole += part
        self.lengths += block.lengths
        for name, values in block.row_fields.items():
            column, default = self.row_fields.setdefault(name, []), DEFAULTS.get(name, ABSENT)
            column += [default] * (len(self.origins) - len(column))
            column += values
        self.origins += origins

    def batch(self) -> RowBatch:
        """The rows as a table, without those that do not fit."""
        self.take_over()
        for values in self.fields.values():
            if values:
                values += [None] * (len(self.calls) - len(values))
        for name, values in self.row_fields.items():
            values += [DEFAULTS.get(name, ABSENT)] * (len(self.origins) - len(values))
        try:
            table = self._table()
            if not validate(table):
                return _row_batch(table, self.origins)
        except _MISFITS:
            pass
        tables: list[pa.Table] = []
        kept: list[RowOrigin] = []
        for row, origin in zip(self._whole(), self.origins, strict=True):
            try:
                tables.append(as_table([Trajectory.model_validate(_counted(row))]))
                kept.append(origin)
            except _MISFITS as error:
                source, number, _ = origin
                source.notes.refuse(source.place_of(number), error, excerpt(row))
        return _row_batch(pa.concat_tables([LENIENT_SCHEMA.empty_table(), *tables]), kept)

    def _whole(self) -> Iterator[Row]:
        """The rows with their messages, as they were added, but for what is a default anyway."""
        calls = (dict(zip(CALL_FIELDS, values, strict=True)) for values in zip(*self.call_fields, strict=True))
        start = 0
        for number, length in enumerate(self.lengths):
            messages: list[dict[str, Any]] = []
            for at in range(start, start + length):
                message = {name: self.fields[name][at] for name in ("role", "content")}
                message |= {name: self.fields[name][at] for name in PLAIN_FIELDS if self.fields[name]}
                message = {
                    name: value for name, value in message.items() if value is not None or name not in PLAIN_FIELDS
                }
                messages.append(message | {"tool_calls": [next(calls) for _ in range(self.calls[at])]})
            start += length
            row = {name: self.row_fields[name][number] for name in ROW_FIELDS if name in self.row_fields}
            row = {name: value for name, value in row.items() if value is not DEFAULTS.get(name, ABSENT)}
            yield row | {"messages": messages}

    def _table(self) -> pa.Table:
        """Rows in ``LENIENT_SCHEMA``. Raises what Arrow or Python raises if a value does not fit its column."""
        columns, count = self._messages(), len(self.origins)
        for field in LENIENT_SCHEMA:
            name = field.name
            if name in self.row_fields:
                columns[name] = _column(name, self.row_fields[name], field.type)
            elif name == "created_at":
                columns[name] = pa.repeat(pa.scalar(datetime.now(UTC), field.type), count)
            elif name not in columns and name not in ("n_tokens", "n_action_tokens"):
                columns[name] = _defaults(name, count)
        counts = {"n_tokens": pc.list_value_length(columns["action_mask"])}
        counts["n_action_tokens"] = _trues(columns["action_mask"]).cast(pa.int32())
        columns = counts | columns
        return pa.Table.from_arrays([columns[name] for name in LENIENT_SCHEMA.names], schema=LENIENT_SCHEMA)

    def _messages(self) -> dict[str, pa.Array]:
        """The column of messages, and counts of steps and calls per row."""
        types = {field.name: field.type for field in _MESSAGE.value_type}
        texts = [pa.array(values, pa.string()) for values in self.call_fields]
        calls = pa.StructArray.from_arrays(texts, fields=list(_CALL.value_type))
        columns = {"tool_calls": pa.ListArray.from_arrays(_offsets(self.calls), calls, type=_CALL)}
        for name, values in self.fields.items():
            kind = types[name]
            columns[name] = _exact(values, kind) if values else pa.nulls(len(self.calls), kind)
        structs = pa.StructArray.from_arrays([columns[name] for name in types], fields=list(_MESSAGE.value_type))
        offsets = _offsets(self.lengths)
        bounds = offsets.to_numpy()
        spoken = pc.equal(columns["role"], Role.ASSISTANT.value).fill_null(False)
        steps = _running(spoken)[bounds]
        return {
            "messages": pa.ListArray.from_arrays(offsets, structs, type=_MESSAGE),
            "n_steps": pa.array(np.diff(steps), pa.int32()),
            "n_tool_calls": pa.array(np.diff(columns["tool_calls"].offsets.to_numpy()[bounds]), pa.int32()),
        }


def _row_batch(table: pa.Table, origins: list[RowOrigin]) -> RowBatch:
    return RowBatch(table, [source for source, _, _ in origins], [kept for _, _, kept in origins])


def _reason(row: Row) -> Exception | None:
    """What the model says about a row that does not fit."""
    try:
        Trajectory.model_validate(_counted(row))
    except _MISFITS as error:
        return error
    return None


@lru_cache(maxsize=256)
def _defaults(name: str, count: int) -> pa.Array:
    """A column of defaults. Batches are mostly of one size, and share it."""
    return pa.repeat(pa.scalar(DEFAULTS[name], LENIENT_SCHEMA.field(name).type), count)


def _counted(row: Row) -> Row:
    """A row with its counts, and log-probs that are None as NaN, for the model."""
    mask = row.get("action_mask") or ()
    messages = row["messages"]
    counts = {
        "n_steps": sum(message["role"] == Role.ASSISTANT for message in messages),
        "n_tool_calls": sum(len(message.get("tool_calls") or ()) for message in messages),
        "n_tokens": len(mask),
        "n_action_tokens": sum(map(bool, mask)),
    }
    if logprobs := row.get("logprobs"):
        row = row | {"logprobs": [math.nan if logprob is None else logprob for logprob in logprobs]}
    return ROW_DEFAULTS | counts | row


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """The table with other values in a column."""
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    return table.set_column(index, field, pa.array(values, field.type))


def _column(name: str, values: list[Any], kind: pa.DataType) -> pa.Array:
    match name:
        case "input_ids":
            ids = array("i")
            for row_ids in values:
                ids.fromlist(row_ids)
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
        case "tags" if not all(isinstance(tags, list) for tags in values):
            raise TypeError("tags are a list")
        case "reward_components" if any(component.keys() - _COMPONENT_FIELDS for each in values for component in each):
            raise ValueError(f"a reward component has {', '.join(_COMPONENT_FIELDS)}")
        case "spans" if any(span.keys() != _SPAN_FIELDS for each in values for span in each):
            raise ValueError(f"a span has {', '.join(_SPAN_FIELDS)}")
        case "spans" if any(type(number) is not int for each in values for span in each for number in span.values()):
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


def _trues(lists: pa.Array) -> pa.Array:
    """How many values of each list are true."""
    return pa.array(np.diff(_running(lists.flatten())[lists.offsets.to_numpy()]))

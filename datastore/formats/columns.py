"""Rows of readers as tables, built column by column: no object is made per message, and no dict is kept.

A row is a dict with fields of a trajectory; fields that it lacks have their default, and counts are counted here. If
a batch of rows does not fit the columns, or breaks a rule of the buffer, its rows go through the model one by one: it
says which record is at fault, and reads what may be read generously (``"1"`` as a number).
"""

import gc
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datastore.formats.source import BROKEN, Row, Source, excerpt
from datastore.ingest import as_table
from datastore.validation import LENIENT_SCHEMA, validate
from schemas.trajectory import Message, RewardComponent, Role, Span, ToolCall, Trajectory

BATCH_ROWS = 1024
BATCH_SIZE = 2**23
"""Characters of source that a batch is read from, at about which it ends."""

_MISFITS = (pa.ArrowException, OverflowError, *BROKEN)
_REQUIRED = frozenset(name for name, info in Trajectory.model_fields.items() if info.is_required())
_DEFAULTS = {
    name: info.get_default(call_default_factory=True, validated_data={})
    for name, info in Trajectory.model_fields.items()
    if name not in _REQUIRED and name != "created_at"
}
_MESSAGE = LENIENT_SCHEMA.field("messages").type
_CALL = _MESSAGE.value_type.field("tool_calls").type
_PLAIN_FIELDS = [name for name in Message.model_fields if name not in ("role", "content", "tool_calls")]
_KNOWN = Message.model_fields.keys()
_CALL_FIELDS = ToolCall.model_fields.keys()
_COMPONENT_FIELDS = RewardComponent.model_fields.keys()
_SPAN_FIELDS = Span.model_fields.keys()


class RowOrigin(NamedTuple):
    """Where a row comes from: the number of the record in its source, and what is kept of the record."""

    source: Source
    number: int
    kept: Any


@dataclass(frozen=True)
class RowBatch:
    """Rows in ``LENIENT_SCHEMA``, and where each comes from."""

    table: pa.Table
    origins: list[RowOrigin]


def batches(rows: Iterable[tuple[Source, Row]], keep: Callable[[Any], Any] = lambda _: None) -> Iterator[RowBatch]:
    """Tables of a bounded number of rows, each given with the source that has just read it. ``keep`` says what to
    keep of a record beside its row. A row that does not fit is refused with its place."""
    was_on = gc.isenabled()
    gc.disable()  # it would look at every value of a batch again and again, and find no circle
    try:
        part, size = _Columns(), 0
        for source, row in rows:
            try:
                part.add(row, RowOrigin(source, source.number, keep(source.record)))
            except _MISFITS as error:
                source.notes.refuse(source.place, error, excerpt(source.record))
            size += source.took()
            if len(part.rows) >= BATCH_ROWS or size >= BATCH_SIZE:
                yield part.batch()
                part, size = _Columns(), 0
        if part.rows:
            yield part.batch()
    finally:
        if was_on:
            gc.enable()


class _Columns:
    """Values of some rows: scalars row by row, messages field by field, calls field by field."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.origins: list[RowOrigin] = []
        self.lengths: list[int] = []
        self.roles: list[str] = []
        self.contents: list[str] = []
        self.fields: dict[str, list[Any]] = {name: [] for name in _PLAIN_FIELDS}
        self.calls: list[int] = []
        """How many calls each message has."""
        self.call_fields: tuple[list[str], list[str], list[str]] = ([], [], [])

    def add(self, row: Row, origin: RowOrigin) -> None:
        """Take over a row. Raises what tells why it does not fit, and takes nothing of it then."""
        messages = row["messages"]
        names = set().union(*messages)
        calls: list[dict[str, Any]] = []
        if "tool_calls" in names:
            lengths = [len(one.get("tool_calls") or ()) for one in messages]
            calls = [call for one in messages for call in one.get("tool_calls") or ()]
        else:
            lengths = [0] * len(messages)
        if not (names <= _KNOWN and row.keys() <= Trajectory.model_fields.keys()) or any(map(_odd, calls)):
            Trajectory.model_validate(_counted(row))  # says what is wrong
        self.roles += [one["role"] for one in messages]
        self.contents += [one.get("content", "") for one in messages]
        for name in _PLAIN_FIELDS:
            values = self.fields[name]
            if name in names:
                values += [None] * (len(self.calls) - len(values))
                values += [one.get(name) for one in messages]
        self.calls += lengths
        for call in calls:
            for values, name in zip(self.call_fields, _CALL_FIELDS, strict=True):
                values.append(call[name])
        del row["messages"]
        self.lengths.append(len(messages))
        self.rows.append(row)
        self.origins.append(origin)

    def batch(self) -> RowBatch:
        """The rows as a table, without those that do not fit."""
        for values in self.fields.values():
            if values:
                values += [None] * (len(self.calls) - len(values))
        try:
            table = self._table()
            if not validate(table):
                return RowBatch(table, self.origins)
        except _MISFITS:
            pass
        tables: list[pa.Table] = []
        kept: list[RowOrigin] = []
        for row, origin in zip(self._whole(), self.origins, strict=True):
            try:
                tables.append(as_table([Trajectory.model_validate(_counted(row))]))
                kept.append(origin)
            except _MISFITS as error:
                origin.source.notes.refuse(origin.source.place_of(origin.number), error, excerpt(row))
        return RowBatch(pa.concat_tables([LENIENT_SCHEMA.empty_table(), *tables]), kept)

    def _whole(self) -> Iterator[Row]:
        """The rows with their messages, as they were added."""
        calls = (dict(zip(_CALL_FIELDS, one, strict=True)) for one in zip(*self.call_fields, strict=True))
        place = 0
        for row, length in zip(self.rows, self.lengths, strict=True):
            messages: list[dict[str, Any]] = []
            for at in range(place, place + length):
                one: dict[str, Any] = {"role": self.roles[at], "content": self.contents[at]}
                one["tool_calls"] = [next(calls) for _ in range(self.calls[at])]
                one |= {name: values[at] for name, values in self.fields.items() if values}
                messages.append(one)
            place += length
            yield row | {"messages": messages}

    def _table(self) -> pa.Table:
        """Rows in ``LENIENT_SCHEMA``. Raises what Arrow or Python raises if a value does not fit its column."""
        names = set().union(*self.rows)
        columns = self._messages()
        for field in LENIENT_SCHEMA:
            name = field.name
            if name in columns and name not in names:
                continue
            if name in names:
                values = [row.get(name, _DEFAULTS.get(name)) for row in self.rows]
                columns[name] = _column(name, values, field.type)
            elif name not in ("n_tokens", "n_action_tokens"):
                value = datetime.now(UTC) if name == "created_at" else _DEFAULTS[name]
                columns[name] = pa.repeat(pa.scalar(value, field.type), len(self.rows))
        counts = {"n_tokens": pc.list_value_length(columns["action_mask"])}
        counts["n_action_tokens"] = _trues(columns["action_mask"]).cast(pa.int32())
        columns = counts | columns
        return pa.Table.from_arrays([columns[name] for name in LENIENT_SCHEMA.names], schema=LENIENT_SCHEMA)

    def _messages(self) -> dict[str, pa.Array]:
        """The column of messages, and counts of steps and calls per row."""
        types = {field.name: field.type for field in _MESSAGE.value_type}
        texts = [pa.array(values, pa.string()) for values in self.call_fields]
        calls = pa.StructArray.from_arrays(texts, fields=list(_CALL.value_type))
        columns = {
            "role": pa.array(self.roles, pa.string()),
            "content": pa.array(self.contents, pa.string()),
            "tool_calls": pa.ListArray.from_arrays(_offsets(self.calls), calls, type=_CALL),
        }
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


def _odd(call: dict[str, Any]) -> bool:
    return call.keys() != _CALL_FIELDS


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


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """The table with other values in a column."""
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    return table.set_column(index, field, pa.array(values, field.type))


def _column(name: str, values: list[Any], kind: pa.DataType) -> pa.Array:
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


def _trues(lists: pa.Array) -> pa.Array:
    """How many values of each list are true."""
    return pa.array(np.diff(_running(lists.flatten())[lists.offsets.to_numpy()]))

"""Rows of readers as tables, built column by column: no object is made per message.

A row is a dict with fields of a trajectory; fields that it lacks have their default, and counts are counted here. If
a batch of rows does not fit the columns, or breaks a rule of the buffer, its rows go through the model one by one: it
says which record is at fault, and reads what may be read generously (``"1"`` as a number).
"""

import math
from array import array
from collections.abc import Iterable, Iterator
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
from schemas.trajectory import RewardComponent, Role, Trajectory

BATCH_ROWS = 512
BATCH_SIZE = 2**23
"""Characters of source that a batch is read from, at about which it ends."""

_MISFITS = (pa.ArrowException, OverflowError, *BROKEN)
_REQUIRED = frozenset(name for name, info in Trajectory.model_fields.items() if info.is_required())
_DEFAULTS = {
    name: info.get_default(call_default_factory=True, validated_data={})
    for name, info in Trajectory.model_fields.items()
    if name not in _REQUIRED and name != "created_at"
}
_COMPONENT = RewardComponent.model_fields.keys()
_COUNTED = ("n_steps", "n_tokens", "n_action_tokens", "n_tool_calls")


class Origin(NamedTuple):
    """Where a row comes from: the number of the record in its source, and the record."""

    source: Source
    number: int
    record: Any


@dataclass(frozen=True)
class Batch:
    """Rows in ``LENIENT_SCHEMA``, and where each comes from."""

    table: pa.Table
    origins: list[Origin]


def batches(rows: Iterable[tuple[Source, Row]]) -> Iterator[Batch]:
    """Tables of a bounded number of rows, each given with the source that has just read it. A row that does not fit
    is refused with its place."""
    part: list[Row] = []
    origins: list[Origin] = []
    size = 0
    for source, row in rows:
        part.append(row)
        origins.append(Origin(source, source.number, source.record))
        size += source.took()
        if len(part) >= BATCH_ROWS or size >= BATCH_SIZE:
            yield _batch(part, origins)
            part, origins, size = [], [], 0
    if part:
        yield _batch(part, origins)


def _batch(rows: list[Row], origins: list[Origin]) -> Batch:
    try:
        table = table_of(rows)
        if not validate(table):
            return Batch(table, origins)
    except _MISFITS:
        pass
    tables: list[pa.Table] = []
    kept: list[Origin] = []
    for row, origin in zip(rows, origins, strict=True):
        try:
            tables.append(as_table([Trajectory.model_validate(_counted(row))]))
            kept.append(origin)
        except _MISFITS as error:
            origin.source.notes.refuse(origin.source.place_of(origin.number), error, excerpt(origin.record))
    return Batch(pa.concat_tables([LENIENT_SCHEMA.empty_table(), *tables]), kept)


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


def table_of(rows: list[Row]) -> pa.Table:
    """Rows in ``LENIENT_SCHEMA``. Raises what Arrow or Python raises if a value does not fit its column, and
    ValueError for a field that no column takes."""
    names = set().union(*rows)
    if unknown := names - Trajectory.model_fields.keys():
        raise ValueError(f"unknown fields {sorted(unknown)}")
    messages, counts = _messages([row["messages"] for row in rows])
    columns = {"messages": messages}
    for field in LENIENT_SCHEMA:
        name, default = field.name, _DEFAULTS.get(field.name)
        if name == "messages":
            continue
        if name not in names:
            if name in _REQUIRED:
                raise ValueError(f"no row has the field {name}")
            value = datetime.now(UTC) if name == "created_at" else default
            columns[name] = pa.repeat(pa.scalar(value, field.type), len(rows))
        else:
            columns[name] = _column(name, [row.get(name, default) for row in rows], field.type)
    lengths = pc.list_value_length(columns["action_mask"])
    counts |= {"n_tokens": lengths, "n_action_tokens": _trues(columns["action_mask"])}
    for name in _COUNTED:
        if name not in names:
            columns[name] = counts[name].cast(pa.int32())
    return pa.Table.from_arrays([columns[name] for name in LENIENT_SCHEMA.names], schema=LENIENT_SCHEMA)


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
                ids.extend(one) if not isinstance(one, list) else ids.fromlist(one)
            return _lists(values, pa.Array.from_buffers(pa.int32(), len(ids), [None, pa.py_buffer(ids)]), kind)
        case "action_mask":
            flags = np.frombuffer(b"".join(map(bytes, values)), np.uint8)
            if len(flags) and flags.max() > 1:
                raise ValueError("a mask is true or false")
            return _lists(values, pa.array(flags.view(bool)), kind)
        case "logprobs":
            flat = pa.array(list(chain.from_iterable(values)), pa.float32())
            return _lists(values, flat.fill_null(math.nan), kind)
        case "tags" if not all(isinstance(one, list | tuple) for one in values):
            raise TypeError("tags are a list")
        case "reward_components" if any(one.keys() - _COMPONENT for each in values for one in each):
            raise ValueError(f"a reward component has {', '.join(_COMPONENT)}")
    return _exact(values, kind)


def _exact(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Values as an array. Raises if one of them is of another kind: Arrow alone would cut 1.5 to 1."""
    if pa.types.is_integer(kind):
        return pa.array(values).cast(kind)
    return pa.array(values, kind)


def _lists(values: list[Any], flat: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(_offsets(values), flat, type=kind)


def _offsets(values: Iterable[Any]) -> pa.Array:
    return pa.array(accumulate(map(len, values), initial=0), pa.int32())


def _messages(lists: list[list[dict[str, Any]]]) -> tuple[pa.Array, dict[str, pa.Array]]:
    """The column of messages, and counts of steps and calls per row."""
    kind = LENIENT_SCHEMA.field("messages").type
    flat = list(chain.from_iterable(lists))
    names = set().union(*flat)
    fields = {field.name: field.type for field in kind.value_type}
    if unknown := names - fields.keys():
        raise ValueError(f"unknown fields of messages {sorted(unknown)}")
    columns = {name: _field(name, flat, name in names, one) for name, one in fields.items()}
    structs = pa.StructArray.from_arrays(list(columns.values()), fields=list(kind.value_type))
    column = _lists(lists, structs, kind)
    bounds = column.offsets.to_numpy()
    spoken = pc.equal(columns["role"], Role.ASSISTANT.value).fill_null(False).to_numpy(zero_copy_only=False)
    steps = np.concatenate([[0], np.cumsum(spoken)])
    calls = columns["tool_calls"].offsets.to_numpy()[bounds]
    return column, {"n_steps": pa.array(np.diff(steps[bounds])), "n_tool_calls": pa.array(np.diff(calls))}


def _field(name: str, flat: list[dict[str, Any]], given: bool, kind: pa.DataType) -> pa.Array:
    """One field of all messages."""
    if name == "role":
        return pa.array([one["role"] for one in flat], kind)
    if name == "tool_calls":
        lists = [one.get("tool_calls") or () for one in flat] if given else [()] * len(flat)
        calls = list(chain.from_iterable(lists))
        if odd := [one for one in calls if len(one) != 3]:
            raise ValueError(f"a call has an id, a name and arguments, not {sorted(odd[0])}")
        parts = [pa.array([one[field.name] for one in calls], field.type) for field in kind.value_type]
        return _lists(lists, pa.StructArray.from_arrays(parts, fields=list(kind.value_type)), kind)
    if not given:
        return pa.repeat("", len(flat)) if name == "content" else pa.nulls(len(flat), kind)
    default = "" if name == "content" else None
    return _exact([one.get(name, default) for one in flat], kind)


def _trues(lists: pa.Array) -> pa.Array:
    """How many values of each list are true."""
    running = np.concatenate([[0], np.cumsum(lists.flatten().to_numpy(zero_copy_only=False))])
    return pa.array(np.diff(running[lists.offsets.to_numpy()]))

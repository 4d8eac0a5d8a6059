"""The contract of a trajectory, checked on whole columns before anything is written.

Each check gives one boolean per row, so a million rows take seconds. The checks work on Arrow data from any writer.
Rows that pydantic has built may still fail them, since models can be changed after they were validated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.errors import StoreError
from agentrl.schemas.arrow import json_columns
from agentrl.schemas.hints import did_you_mean
from agentrl.schemas.json_text import is_json
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Role, Termination, Trajectory

Mask = np.ndarray
"""One boolean per row."""

Owner = Callable[[np.ndarray], np.ndarray]
"""From positions in a flat column to the numbers of the rows that they belong to. Called only for broken rows."""


@dataclass(frozen=True)
class BadField:
    """``row``: number of the row in the append, from 0."""

    row: int
    trajectory_id: str
    field: str
    reason: str


def _nullable(arrow_type: pa.DataType) -> pa.DataType:
    if pa.types.is_list(arrow_type):
        return pa.list_(pa.field("element", _nullable(arrow_type.value_type)))
    if pa.types.is_struct(arrow_type):
        return pa.struct([pa.field(field.name, _nullable(field.type)) for field in arrow_type])
    return arrow_type


LENIENT_SCHEMA = pa.schema([pa.field(field.name, _nullable(field.type)) for field in TRAJECTORY_SCHEMA])
"""The buffer's columns and types, nulls allowed everywhere: what rows have before they are checked."""


def conform(table: pa.Table) -> pa.Table:
    """The table with the buffer's columns, in :data:`LENIENT_SCHEMA`. Raises on other columns and wrong types."""
    names = TRAJECTORY_SCHEMA.names
    if missing := [name for name in names if name not in table.schema.names]:
        raise StoreError(f"the table lacks the column {', '.join(missing)}; a trajectory has them all")
    if unknown := [name for name in table.schema.names if name not in names]:
        hint = did_you_mean(unknown[0], names) or "; drop it before the append"
        raise StoreError(f"a trajectory has no column {unknown[0]!r}{hint}")
    if len(set(table.schema.names)) != len(table.schema.names):
        raise StoreError("the table has a column twice; a trajectory has each once")
    columns = []
    for field in LENIENT_SCHEMA:
        column = table[field.name]
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise StoreError(f"column {field.name!r} is {column.type}, not {field.type}: {error}") from None
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=LENIENT_SCHEMA)


def strict(table: pa.Table) -> pa.Table:
    """A checked table in the buffer's own schema; no data is copied. (Arrow's cast lets nulls through: check first.)"""
    return table.cast(TRAJECTORY_SCHEMA)


def validate(table: pa.Table, seen: set[str] | None = None, first_row: int = 0) -> list[BadField]:
    """Every broken rule of every row of a table in :data:`LENIENT_SCHEMA`.

    ``seen`` collects the ids of the append, so that a doubled one is found across batches. ``first_row`` is the number
    of the table's first row in the append.
    """
    rows = _Rows(table)
    problems = []
    for field, reason, broken in _checks(rows):
        for index in np.flatnonzero(broken).tolist():
            name = table["trajectory_id"][index].as_py() or "no id"
            problems.append(BadField(first_row + index, name, field, reason))
    if seen is not None:
        for row, name in enumerate(table["trajectory_id"].to_pylist()):
            if name in seen:
                problems.append(BadField(first_row + row, name, "trajectory_id", "is in this append already"))
            elif name is not None:
                seen.add(name)
    return sorted(problems, key=lambda problem: problem.row)


class _Rows:
    """Columns of the table as flat arrays, and which row each flat value belongs to."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()
        self.count = table.num_rows
        self.ids_length = self.lengths("input_ids")
        self.messages = self.column("messages").flatten()
        self.message_owner = _owner(self.column("messages"))

    @cached_property
    def mask(self) -> np.ndarray:
        return _numpy(self.column("action_mask").flatten(), False)

    @cached_property
    def running(self) -> np.ndarray:
        """Action tokens before each position of the flat mask."""
        running = np.zeros(len(self.mask) + 1, dtype=np.int32)
        np.cumsum(self.mask, out=running[1:])
        return running

    def column(self, name: str) -> pa.Array:
        column = self.table[name]
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)

    def lengths(self, name: str) -> np.ndarray:
        return pc.fill_null(pc.list_value_length(self.column(name)), 0).to_numpy(zero_copy_only=False).astype(np.int64)

    def rows_of(self, owner: Owner, broken: np.ndarray) -> Mask:
        """Rows that own at least one broken flat value."""
        mask = np.zeros(self.count, dtype=bool)
        if broken.any():
            mask[owner(np.flatnonzero(broken))] = True
        return mask


def _same(positions: np.ndarray) -> np.ndarray:
    return positions


def _owner(lists: pa.Array, above: Owner = _same) -> Owner:
    """The owner of the flattened values of a list column whose own values belong to ``above``."""

    def find(positions: np.ndarray) -> np.ndarray:
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        return above(np.searchsorted(np.cumsum(lengths), positions, side="right"))

    return find


def _numpy(array: pa.Array, fill: object) -> np.ndarray:
    filled = pc.fill_null(array, fill) if array.null_count else array
    return filled.to_numpy(zero_copy_only=False)


def _checks(rows: _Rows) -> Iterator[tuple[str, str, Mask]]:
    """(field, reason, broken rows) of every rule."""
    yield from _nulls(rows)
    yield from _values(rows)
    yield from _json(rows)
    if len(rows.column("input_ids").flatten()):
        yield from _tokens(rows)
    yield from _spans(rows)
    yield from _weights(rows)


def _nulls(rows: _Rows) -> Iterator[tuple[str, str, Mask]]:
    """Nulls, at any depth, in columns that must not be null."""
    for field in TRAJECTORY_SCHEMA:
        yield from _nulls_in(rows, field.name, rows.column(field.name), field, _same)


def _nulls_in(
    rows: _Rows, path: str, array: pa.Array, field: pa.Field, owner: Owner
) -> Iterator[tuple[str, str, Mask]]:
    if not field.nullable and array.null_count:
        yield path, "is null", rows.rows_of(owner, array.is_null().to_numpy(zero_copy_only=False))
    if pa.types.is_list(field.type) and _has_required(field.type):
        yield from _nulls_in(rows, path, array.flatten(), field.type.value_field, _owner(array, owner))
    elif pa.types.is_struct(field.type):
        alive, above = array, owner
        if array.null_count:  # the fields of an absent struct are absent too, and no fault
            kept = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
            alive, above = array.take(pa.array(kept)), lambda positions: owner(kept[positions])
        for child, values in zip(field.type, alive.flatten(), strict=True):
            yield from _nulls_in(rows, f"{path}.{child.name}", values, child, above)


def _has_required(arrow_type: pa.DataType) -> bool:
    return not arrow_type.value_field.nullable


def _values(rows: _Rows) -> Iterator[tuple[str, str, Mask]]:
    """Names that must not be empty, enums, and numbers that must be finite."""
    for name in ("trajectory_id", "task_id", "env"):
        yield name, "is empty", _numpy(pc.equal(rows.column(name), ""), False)
    allowed = [value.value for value in Termination]
    unknown = pc.invert(pc.is_in(rows.column("termination"), pa.array(allowed)))
    yield "termination", f"is not one of {', '.join(allowed)}", _numpy(unknown, True)
    yield "reward", "is not a finite number", ~np.isfinite(_numpy(rows.column("reward"), 0.0))
    yield from _seconds(rows)
    components = rows.column("reward_components")
    if len(parts := components.flatten()):
        owner = _owner(components)
        for name in ("value", "weight"):
            infinite = ~np.isfinite(_numpy(pc.struct_field(parts, name), 0.0))
            yield f"reward_components.{name}", "is not a finite number", rows.rows_of(owner, infinite)
    if len(rows.messages):
        roles = [role.value for role in Role]
        unknown = pc.invert(pc.is_in(pc.struct_field(rows.messages, "role"), pa.array(roles)))
        yield (
            "messages.role",
            f"is not one of {', '.join(roles)}",
            rows.rows_of(rows.message_owner, _numpy(unknown, True)),
        )
        infinite = ~np.isfinite(_numpy(pc.struct_field(rows.messages, "reward"), 0.0))
        yield "messages.reward", "is not a finite number", rows.rows_of(rows.message_owner, infinite)


def _seconds(rows: _Rows) -> Iterator[tuple[str, str, Mask]]:
    seconds = rows.column("message_seconds")
    if not len(known := seconds.flatten()):
        return
    wrong = _numpy(pc.fill_null(pc.invert(pc.and_(pc.is_finite(known), pc.greater_equal(known, 0))), False), False)
    yield "message_seconds", "is negative or not finite", rows.rows_of(_owner(seconds), wrong)


def _json(rows: _Rows) -> Iterator[tuple[str, str, Mask]]:
    for name in json_columns(Trajectory):
        yield name, "is not JSON", _not_json(rows.column(name))
    calls = pc.struct_field(rows.messages, "tool_calls")
    if len(flat := calls.flatten()):
        owner = _owner(calls, rows.message_owner)
        broken = _not_json(pc.struct_field(flat, "arguments"))
        yield "messages.tool_calls.arguments", "is not JSON", rows.rows_of(owner, broken)


def _not_json(texts: pa.Array) -> Mask:
    """Each distinct text is parsed once: most rows share their tools and sampling."""
    encoded = pc.dictionary_encode(texts)
    bad = np.array([not is_json(text) for text in encoded.dictionary.to_pylist()] or [False])
    return bad[_numpy(encoded.indices, 0)] & texts.is_valid().to_numpy(zero_copy_only=False)


def _tokens(rows: _Rows) -> Iterator[tuple[str, str, Mask]]:
    """Token columns are aligned, and log-probs are numbers for sampled tokens and NaN for others."""
    mask_length, logprob_length = rows.lengths("action_mask"), rows.lengths("logprobs")
    uneven = mask_length != rows.ids_length
    yield "action_mask", "is not as long as input_ids", uneven
    ragged = logprob_length != rows.ids_length
    yield "logprobs", "is not as long as input_ids (write NaN if a log-prob is not known)", ragged
    ids = rows.column("input_ids")
    yield "input_ids", "has a negative id", rows.rows_of(_owner(ids), _numpy(ids.flatten(), 0) < 0)
    logprobs = _numpy(rows.column("logprobs").flatten(), np.nan)
    logprob_owner = _owner(rows.column("logprobs"))
    yield "logprobs", "is infinite", rows.rows_of(logprob_owner, np.isinf(logprobs))
    yield "logprobs", "is positive", rows.rows_of(logprob_owner, logprobs > 0.01)
    if not (uneven.any() or ragged.any()):
        stray = rows.rows_of(logprob_owner, ~rows.mask & ~np.isnan(logprobs))
        yield "logprobs", "is not NaN where action_mask is false", stray
    tokens = rows.ids_length > 0
    counted = _numpy(rows.column("n_tokens"), 0) != rows.ids_length
    yield "n_tokens", "is not the length of input_ids", counted & tokens
    ends = np.cumsum(mask_length)
    actions = rows.running[ends] - rows.running[ends - mask_length]
    counted = _numpy(rows.column("n_action_tokens"), 0) != actions
    yield "n_action_tokens", "is not the number of true values in action_mask", counted & tokens & ~uneven


def _any(owner: np.ndarray, broken: np.ndarray, count: int) -> Mask:
    return np.bincount(owner[broken], minlength=count) > 0


def _spans(rows: _Rows) -> Iterator[tuple[str, str, Mask]]:
    """Message spans lie in the tokens, in order, and hold all action tokens in assistant messages."""
    if not len(rows.messages):
        return
    start_column, end_column = (pc.struct_field(rows.messages, f"token_{side}") for side in ("start", "end"))
    has_start, has_end = (column.is_valid().to_numpy(zero_copy_only=False) for column in (start_column, end_column))
    uneven = rows.rows_of(rows.message_owner, has_start != has_end)
    yield "messages.token_end", "is set without token_start, or not with it", uneven
    spanned = has_start & has_end
    start, end = _numpy(start_column, 0)[spanned].astype(np.int64), _numpy(end_column, 0)[spanned].astype(np.int64)
    owner = rows.message_owner(np.flatnonzero(spanned))
    outside = _any(owner, (start < 0) | (end < start) | (end > rows.ids_length[owner]), rows.count)
    yield "messages.token_end", "span is empty backwards or outside input_ids", outside
    disordered = np.zeros(len(start), dtype=bool)
    disordered[1:] = (owner[1:] == owner[:-1]) & (start[1:] < end[:-1])
    yield "messages.token_start", "span overlaps or precedes the one before", _any(owner, disordered, rows.count)
    mask_length = rows.lengths("action_mask")
    usable = ~outside & (mask_length == rows.ids_length)
    spoken = _numpy(pc.equal(pc.struct_field(rows.messages, "role"), Role.ASSISTANT.value), False)[spanned]
    keep = spoken & usable[owner]
    offsets = np.concatenate([[0], np.cumsum(mask_length)])
    running = rows.running
    base = offsets[owner[keep]]
    inside = np.bincount(
        owner[keep], weights=running[base + end[keep]] - running[base + start[keep]], minlength=rows.count
    )
    total = running[offsets[1:]] - running[offsets[:-1]]
    has_spans = np.bincount(owner, minlength=rows.count) > 0  # imported rows may have tokens and no spans
    stray = usable & has_spans & (inside != total)
    yield "action_mask", "is true outside the assistant messages", stray


def _weights(rows: _Rows) -> Iterator[tuple[str, str, Mask]]:
    """What names the origin of tokens: the spans of versions of the weights, and the prefix of a fork."""
    mask_length = rows.lengths("action_mask")
    usable = mask_length == rows.ids_length
    running, offsets = rows.running, np.concatenate([[0], np.cumsum(mask_length)])
    fork = _numpy(rows.column("fork_at"), 0).astype(np.int64)
    yield "fork_at", "is negative or beyond input_ids", (fork < 0) | (fork > rows.ids_length)
    orphan = rows.column("parent_id").is_null().to_numpy(zero_copy_only=False)
    yield "fork_at", "is set without parent_id", (fork > 0) & orphan
    prefix = offsets[:-1] + np.clip(fork, 0, mask_length)
    yield "action_mask", "is true before fork_at", usable & (running[prefix] > running[offsets[:-1]])
    column = rows.column("spans")
    if not len(spans := column.flatten()):
        return
    owner = _owner(column)(np.arange(len(spans)))
    version, start, end = (
        _numpy(pc.struct_field(spans, name), 0).astype(np.int64) for name in ("version", "start", "end")
    )
    yield "spans.version", "is negative", _any(owner, version < 0, rows.count)
    outside = _any(owner, (start < 0) | (end <= start) | (end > rows.ids_length[owner]), rows.count)
    yield "spans", "is empty, backwards or outside input_ids", outside
    disordered = np.zeros(len(spans), dtype=bool)
    disordered[1:] = (owner[1:] == owner[:-1]) & (start[1:] < end[:-1])
    yield "spans", "overlaps or precedes the one before", _any(owner, disordered, rows.count)
    keep = (usable & ~outside)[owner]
    base = offsets[owner[keep]]
    inside = np.bincount(
        owner[keep], weights=running[base + end[keep]] - running[base + start[keep]], minlength=rows.count
    )
    total = running[offsets[1:]] - running[offsets[:-1]]
    has_spans = np.bincount(owner, minlength=rows.count) > 0
    yield "spans", "leaves out an action token", usable & ~outside & has_spans & (inside != total)

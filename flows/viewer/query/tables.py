"""Rows of the buffer as a table: filtered, sorted, a page at a time. Everything is over scalar columns, which the
buffer keeps in memory, so that a key press is answered at once."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
from polars.exceptions import PanicException, PolarsError

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import NoBufferError, StoreError
from agentrl.datastore.read.matches import Find
from agentrl.datastore.read.scalars import SCHEMA
from agentrl.datastore.search.words import parsed
from agentrl.datastore.table.writer import SCALARS
from agentrl.flows.viewer.query import filters
from agentrl.flows.viewer.wire import RefusedError
from agentrl.pipelines.file.problems import did_you_mean

COLUMNS = pl.Schema({name: SCHEMA[name] for name in SCALARS})
"""The scalar columns: what filters, sorts and pages are over."""

READ_AT_ONCE = 20_000
"""Rows that a filter for words reads into the full-text index before it is answered; more are left to the command."""
FILTER_S = 5.0
"""Seconds after which a filter is given up."""
ROWS_AT_ONCE = 2**13
TEXT = 300
"""Characters of a text in a table; the row itself has all."""
VERSIONS, MASKS, ORDERS = 3, 16, 4
"""How many are kept of each: versions of the table, and filters and orders of one version."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """The values that were asked for last. Who asks for one that is being made waits for it, or for its failure."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._lock = threading.Lock()
        self._making: dict[Key, Future[Value]] = {}

    def get_or(self, key: Key, make: Callable[[], Value]) -> Value:
        with self._lock:
            if key in self:
                self.move_to_end(key)
                return self[key]
            others = self._making.get(key)
            own = self._making.setdefault(key, Future())
        if others:
            return others.result()
        try:
            made = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            own.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self[key] = made
            while len(self) > self._limit:
                self.popitem(last=False)
        own.set_result(made)
        return made


class Snapshot:
    """The rows of one version of the buffer, each by its number in an order that stays."""

    def __init__(self, version: int, rows: pl.LazyFrame, find: Find) -> None:
        self.version = version
        self.find = find
        self._rows = rows
        self._reading = threading.Lock()
        self._ids: pl.Series | None = None
        self._masks: Recent[str, np.ndarray] = Recent(MASKS)
        self._orders: Recent[tuple[str, bool], np.ndarray] = Recent(ORDERS)
        self.kept: Recent[str, object] = Recent(64)
        """What others have computed over all rows."""

    def columns(self, names: Sequence[str]) -> pl.DataFrame:
        """Whole columns. Those that are not in memory yet are read by one thread, and the others wait for it. A scan
        promises no order, and has another one if an older version was read in between; here it is always that of the
        first time."""
        wanted = list(dict.fromkeys(names))
        with self._reading:
            rows = self._rows.select(list(dict.fromkeys([*wanted, "trajectory_id"]))).collect()
            if self._ids is None:
                self._ids = rows["trajectory_id"]
        if not rows["trajectory_id"].equals(self._ids):
            rows = self._ids.to_frame().join(rows, on="trajectory_id", how="left", maintain_order="left")
        return rows.select(wanted)

    @property
    def total(self) -> int:
        return self.columns(["segment"]).height

    def matching(self, text: str) -> np.ndarray | None:
        """Whether each row is in the filter, [rows]; None if the filter is empty. Raises RefusedError if it is wrong,
        or takes too long."""
        text = text.strip()
        return self._masks.get_or(text, lambda: self._matching(text)) if text else None

    def words(self, text: str) -> list[str]:
        """The words and phrases that rows in a filter hold because it asks for them. Raises RefusedError if the filter
        is wrong."""
        asked = filters.with_words(text, COLUMNS)[2] if text.strip() else {}
        return list(dict.fromkeys(word for question in asked.values() for word in parsed(question).wanted))

    def _matching(self, text: str) -> np.ndarray:
        chosen, names, asked = filters.with_words(text, COLUMNS)
        rows = self.columns(names or ["segment"])
        if asked:
            ids = self.columns(["trajectory_id"])["trajectory_id"]
            rows = rows.with_columns(ids.is_in(self.find(words).implode()).alias(name) for name, words in asked.items())
        until = time.monotonic() + FILTER_S
        parts = [np.zeros(0, dtype=bool)]
        for start in range(0, rows.height, ROWS_AT_ONCE):
            part = rows.slice(start, ROWS_AT_ONCE)
            try:
                is_match = part.select(chosen.alias("found"))["found"].cast(pl.Boolean).fill_null(False)
            except (PolarsError, PanicException) as error:
                raise filters.bad(f"the filter fails on the data: {filters.first_line(error)}") from None
            parts.append(
                np.broadcast_to(is_match.to_numpy(), part.height)
            )  # an expression without columns is one value
            if time.monotonic() > until:
                raise RefusedError(
                    f"the filter took more than {FILTER_S:g} s and was given up", field="filter", status=408
                )
        return np.concatenate(parts)

    def _order(self, sort: str, desc: bool) -> np.ndarray:
        """Numbers of all rows, sorted; what is unknown comes last, and equals are in the order of their ids, which
        unlike that of the table stays from version to version."""
        by_id = self.kept.get_or(
            "by id", lambda: self.columns(["trajectory_id"])["trajectory_id"].arg_sort().to_numpy()
        )
        assert isinstance(by_id, np.ndarray)
        order = pl.arg_sort_by(sort, descending=desc, nulls_last=True, maintain_order=True)
        ordered: np.ndarray = by_id[self.columns([sort])[by_id].select(order).to_series().to_numpy()]
        return ordered

    def chosen(self, text: str, sort: str, desc: bool, among: np.ndarray | None = None) -> np.ndarray:
        """Numbers of the rows in the filter, and ``among`` those of a mask, sorted."""
        mask = both(self.matching(text), among)
        order = self._orders.get_or((sort, desc), lambda: self._order(sort, desc))
        return order if mask is None else order[mask[order]]

    def page(
        self,
        text: str,
        sort: str,
        desc: bool,
        offset: int,
        limit: int,
        names: Sequence[str],
        among: np.ndarray | None = None,
    ) -> tuple[pa.Table, int]:
        """A page of these columns of the rows in the filter as Arrow, and how many rows are in the filter."""
        chosen = self.chosen(text, sort, desc, among)
        return page_of(self.columns(names)[chosen[offset : offset + limit]]), len(chosen)


class Tables:
    """Snapshots of a buffer."""

    def __init__(self, buffer: TrajectoryBuffer) -> None:
        self.buffer = buffer
        self._snapshots: Recent[int, Snapshot] = Recent(VERSIONS)

    def newest(self) -> int:
        """Raises NoBufferError if nothing was ever appended."""
        version = self.buffer.version
        if version is None:
            raise NoBufferError(self.buffer.uri)
        return version

    def at(self, at: str | None) -> Snapshot:
        """The rows at a version or a time; None is the newest. Raises RefusedError if ``at`` is neither."""
        version = self.version(at)
        return self._snapshots.get_or(
            version, lambda: Snapshot(version, self.buffer.scan(version), lambda text: self._found(text, version))
        )

    def _found(self, text: str, version: int) -> pl.Series:
        """The ids of the rows in which words stand. Raises RefusedError if the index lacks so many rows that nobody
        would wait for it, or cannot be read."""
        index = self.buffer.text
        try:
            lacking = index.lacking(version)
            if lacking <= READ_AT_ONCE:
                return index.ids(text, version)
        except StoreError as error:
            raise filters.bad(str(error)) from None
        raise RefusedError(
            f"the full-text index lacks {lacking:,} rows, which take a while to read",
            field="filter",
            following=f"agentrl buffer index --text --store {self.buffer.store}",
            status=409,
        )

    def version(self, at: str | None) -> int:
        if not at:
            return self.newest()
        if at.isascii() and at.isdigit():
            version = int(at) if len(at) < 16 else 10**16
            if version > (newest := self.newest()):
                raise RefusedError(
                    f"the buffer has no version {at[:80]}: the newest is {newest}",
                    field="at",
                    following="leave `at` out, or see `agentrl buffer history`",
                    status=404,
                )
            return version
        try:
            when = datetime.fromisoformat(at).astimezone()
        except (ValueError, OverflowError):
            raise RefusedError(
                f"{at[:80]!r} is neither a version nor a time", field="at", allowed=["12", "2026-01-31T12:00"]
            ) from None
        try:
            return int(self.buffer.table(when).version())
        except StoreError as error:
            raise RefusedError(str(error), field="at", status=404) from None


def both(first: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    """What is in two masks; None holds everything."""
    if first is None or other is None:
        return other if first is None else first
    joined: np.ndarray = first & other
    return joined


def column_of(name: str, field: str) -> str:
    """A scalar column that ``field`` of a query names. Raises RefusedError if there is none of this name."""
    if name in COLUMNS:
        return name
    hint = did_you_mean(name, COLUMNS.names())
    raise RefusedError(f"there is no column {name[:80]!r}{hint}", field=field, allowed=COLUMNS.names())


def page_of(rows: pl.DataFrame) -> pa.Table:
    """Rows as a table shows them: texts are cut."""
    texts = [name for name, kind in rows.schema.items() if kind == pl.String]
    return plain(rows.with_columns(pl.col(texts).str.slice(0, TEXT)))


def plain(rows: pl.DataFrame) -> pa.Table:
    """Arrow with the types that every reader knows: utf8, numbers, bool, timestamp[ms]."""
    table = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
    kinds = {
        field.name: pa.string()
        if pa.types.is_large_string(field.type)
        else pa.timestamp("ms", field.type.tz)
        if pa.types.is_timestamp(field.type)
        else field.type
        for field in table.schema
    }
    return pa.Table.from_arrays(
        [column.cast(kinds[name], safe=False) for name, column in zip(kinds, table.columns, strict=True)],
        schema=pa.schema(list(kinds.items())),
    )


def stream(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue())

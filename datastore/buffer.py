"""The trajectory buffer: one append-only Delta Lake table of all trajectories that stages made or that were imported.

Files are compressed Parquet with small row groups, so that one trajectory is read without reading its neighbours.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.artifacts.tasks import find, keep
from agentrl.datastore.artifacts.tokenizers import TextOf, text_of
from agentrl.datastore.errors import NoBufferError, StoreError, UnknownTrajectoryError, VersionGoneError
from agentrl.datastore.read.lookup import Ids, Lookup, id_array, known_columns, near_ids
from agentrl.datastore.storage.delta_paths import FOLDER, data_files, scan_table
from agentrl.datastore.storage.object_store import storage_of
from agentrl.datastore.table import delta_log as log
from agentrl.datastore.table.append import AppendResult, append, is_appended, transaction
from agentrl.datastore.table.delta_table import BufferTable, schema_version
from agentrl.datastore.table.ids import KnownIds
from agentrl.datastore.table.ingest import BATCH_ROWS, OnError, Rows
from agentrl.datastore.table.row_digests import CONTENT, STORED_SCHEMA, combined, contents
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, TRAJECTORY_VERSION, Trajectory

if TYPE_CHECKING:
    import polars as pl
    from deltalake import DeltaTable

    from agentrl.datastore.annotations.table import AnnotationTable
    from agentrl.datastore.read.batches import BufferBatches
    from agentrl.datastore.read.scalars import ScalarColumns
    from agentrl.datastore.search.experience import Demonstration
    from agentrl.datastore.search.fulltext import FullText
    from agentrl.datastore.search.index import SearchIndex

Answer = TypeVar("Answer")
DIGEST_ROWS = 2**20


def open_buffers() -> list["TrajectoryBuffer"]:
    """The buffers of this process, as long as they are in use."""
    return list(_open)


_open: WeakSet["TrajectoryBuffer"] = WeakSet()


class TrajectoryBuffer:
    """The buffer of one store, a local folder or ``s3://bucket/prefix``. Only ``append`` and upkeep ever write."""

    def __init__(self, store: str | Path) -> None:
        self.storage = storage_of(store)
        self.store = self.storage.uri
        self._table = BufferTable(self.storage)
        self.uri = self._table.uri
        self._indexes: dict[str, SearchIndex] = {}
        self._known = KnownIds(self._table)
        self._lookup = Lookup(self.storage, FOLDER)
        self._scalars: ScalarColumns | None = None
        _open.add(self)

    def __reduce__(self) -> tuple[type["TrajectoryBuffer"], tuple[str]]:
        return TrajectoryBuffer, (self.store,)  # only the place is sent to other processes, not what was read from it

    def text_of(self, tokenizer: str) -> TextOf | None:
        """What gives the bytes of tokens, and where each begins in them, if the store keeps a tokenizer of this
        fingerprint."""
        return text_of(self.storage, tokenizer)

    # table

    def table(self, version: int | datetime | None = None) -> "DeltaTable":
        """The Delta table at a version or a time. Raises if there is none, or if it is newer than we can read."""
        return self._table.open(version)

    @property
    def committed(self) -> BufferTable:
        """The table, for commits; upkeep writes through it."""
        return self._table

    @property
    def version(self) -> int | None:
        """Number of the newest commit; None if nothing was ever appended."""
        try:
            with self._table.following() as table:
                return table.version()
        except NoBufferError:
            return None

    def has(self, fingerprint: str, shard: int = 0) -> bool:
        """Whether this shard of this stage run was appended."""
        try:
            with self._table.following() as table:
                return is_appended(table.transaction_version(transaction(fingerprint, shard)))
        except NoBufferError:
            return False

    def append(
        self,
        trajectories: Rows,
        *,
        stage: str,
        fingerprint: str,
        shard: int = 0,
        run_id: str = "",
        pipeline: str | None = None,
        on_error: OnError = "raise",
    ) -> AppendResult:
        """Append rows in one commit; if ``pipeline``, ``stage``, ``fingerprint`` or ``run_id`` of a row is empty, it is
        filled in.

        An iterator is streamed, so that memory does not grow with the number of rows. If (fingerprint, shard) is in
        the buffer, nothing is read or written. Raises InvalidRowsError with row, field and reason of what breaks the
        contract; ``on_error="quarantine"`` sets such rows aside in ``quarantine/`` and appends the rest. On any error
        the table stays as it was.
        """
        lineage = {"pipeline": pipeline or "", "stage": stage, "fingerprint": fingerprint, "run_id": run_id}
        return append(self._table, self._known, self.storage, trajectories, lineage, shard, on_error)

    def keep_tasks(self, tasks: pa.Table) -> None:
        """Store tasks beside the buffer, by content, so that their rows can be scored again."""
        keep(self.storage, tasks)

    def tasks(self, ids: Collection[str]) -> pa.Table:
        """The tasks of these ids that were ever stored here."""
        return find(self.storage, ids)

    def quarantined(self) -> "pl.DataFrame":
        """Rows that appends have set aside: the columns of a trajectory, ``row`` in its append, and ``problems``."""
        import polars as pl

        keys = sorted(key for key in self.storage.keys("quarantine") if key.endswith(".parquet"))
        frames = [pl.read_parquet(self.storage.read(key) or b"") for key in keys]
        empty = pl.DataFrame(schema={"trajectory_id": pl.String, "row": pl.Int64, "problems": pl.List(pl.String)})
        return pl.concat(frames) if frames else empty

    def unreadable(self) -> list[dict[str, str]]:
        """Records of files that imports have set aside: ``place``, ``key`` at fault, ``reason`` and an ``excerpt``."""
        keys = sorted(key for key in self.storage.keys("quarantine") if key.endswith("-records.jsonl"))
        return [json.loads(line) for key in keys for line in (self.storage.read(key) or b"").splitlines()]

    @cached_property
    def annotations(self) -> "AnnotationTable":
        """What people and judges say of rows."""
        from agentrl.datastore.annotations.table import AnnotationTable

        return AnnotationTable(self.storage)

    # reading

    def scan(self, version: int | datetime | None = None) -> "pl.LazyFrame":
        """All rows, lazily and in no promised order; only the columns that are asked for are read. Whole scalar columns
        stay in memory, up to half a gigabyte, for the next query."""

        from agentrl.datastore.read.scalars import ScalarColumns, scan
        from agentrl.datastore.table import older_schemas as older

        with self._table.following() if version is None else nullcontext(self.table(version)) as table:
            files, number, known = data_files(self.storage, FOLDER, table), table.version(), schema_version(table)
        if known < TRAJECTORY_VERSION:
            return older.scan(scan_table(self.storage, FOLDER, self.table(number)))
        if self._scalars is None:
            self._scalars = ScalarColumns(self.storage, self._table.options)
        return scan(files, lambda: scan_table(self.storage, FOLDER, self.table(number)), self._scalars)

    def sql(
        self,
        query: str,
        version: int | datetime | None = None,
        *,
        unsafe: bool = False,
        scores: pa.Table | None = None,
        annotations: int | None = None,
    ) -> "pl.DataFrame":
        """Answer a query over the views ``trajectories``, ``steps``, ``tool_calls`` and ``annotations`` (of a version
        of their table, None: the newest), in Polars' SQL dialect, with ``matches(messages, 'words')`` for rows in which
        words stand. ``unsafe`` allows table functions, which read files; see :mod:`agentrl.datastore.read.sql`.
        ``scores`` of one scorer take the place of the rows' rewards."""
        from agentrl.datastore.read import sql, views
        from agentrl.datastore.read.scores import rescored

        def ask() -> "pl.DataFrame":
            rows = rescored(self.scan(version), scores)
            tables = views.views(rows, query, lambda: self.annotations.frame(annotations))
            return sql.collect(tables, query, unsafe=unsafe, find=lambda text: self.text.ids(text, version))

        return self.current(version, ask)

    def newest(self, ask: Callable[[int], Answer]) -> Answer:
        """What ``ask`` returns for the number of the newest version. If a compaction and a vacuum remove its files
        before they are read, ``ask`` is called again, with the version that is the newest then."""
        from polars.exceptions import PolarsError

        while True:
            version = self.table().version()
            try:
                return ask(version)
            except (OSError, PolarsError, StoreError):
                if self.version == version:
                    raise

    def current(self, version: int | datetime | None, ask: Callable[[], Answer]) -> Answer:
        """What ``ask`` returns, which reads this version (None: the newest). If a compaction and a vacuum remove files
        between finding the newest version and reading it, ``ask`` is called again. Raises VersionGoneError if files of
        an older version are gone."""
        from polars.exceptions import PolarsError

        while True:
            before = self._table.known
            try:
                return ask()
            except (OSError, PolarsError, StoreError):
                if version is not None and self._is_gone(version):
                    raise VersionGoneError(self.table(version).version(), self.version) from None
                if version is not None or self.version == before:
                    raise

    def _is_gone(self, version: int | datetime) -> bool:
        """Whether this version is not the newest, and files of it are not there."""
        table = self.table(version)
        if table.version() == self.version:
            return False
        there = {key.rpartition("/")[2] for key in self.storage.keys(FOLDER)}
        return not {unquote(path) for path in pa.table(table.get_add_actions())["path"].to_pylist()} <= there

    def diff(self, old: int | datetime, new: int | datetime | None = None) -> "pl.DataFrame":
        """The difference between two versions, by stage run: rows ``added`` and ``removed``, by id."""
        from agentrl.datastore.read.totals import changes

        return changes(self, old, new)

    def batches(self, ids: Ids, batch_rows: int, **options: Any) -> "BufferBatches":
        """Training batches of a selection, in a seeded order that can be resumed; for options see
        :class:`agentrl.datastore.read.batches.BufferBatches`."""
        from agentrl.datastore.read.batches import BufferBatches

        return BufferBatches(self, ids, batch_rows, **options)

    @cached_property
    def text(self) -> "FullText":
        """The full-text index over messages, calls and answers of tools."""
        from agentrl.datastore.search.fulltext import FullText

        return FullText(self)

    def search(
        self, text: str, k: int = 5, *, embedder: str | None = None, method: str = "hybrid", **options: Any
    ) -> "pl.DataFrame":
        """The ``k`` rows whose prompts are nearest to a text; see :meth:`SearchIndex.search` for the options, among
        them ``where``, which filters before anything is ranked. Builds the index, or brings it up to date. If no
        ``embedder`` is named, it is MiniLM if that is installed, else the buffer's own words. ``method="text"`` finds
        words in whole conversations instead, see :meth:`FullText.search`."""
        if method == "text":
            return self.text.search(text, k, **options)
        options["method"] = method
        return self._index(embedder).search(text, k, **options)

    def experience(self, prompt: str, *, embedder: str | None = None, **options: Any) -> "list[Demonstration]":
        """Successful runs of tasks like this one, as demonstrations; see :func:`experience` for the options."""
        from agentrl.datastore.search.experience import experience

        return experience(self._index(embedder), prompt, **options)

    def _index(self, embedder: str | None) -> "SearchIndex":
        from agentrl.datastore.search.index import SearchIndex

        index = SearchIndex(self, embedder)
        return self._indexes.setdefault(index.name, index)

    def stats(self, version: int | datetime | None = None) -> dict[str, Any]:
        """Totals, and under ``stages`` one row per stage of a pipeline: rows, tasks, tokens, rows without ``success``
        (unscored), and over the others success rate and mean reward."""
        from agentrl.datastore.read.totals import totals

        return self.current(version, lambda: totals(self, version))

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Commits, newest first: version, time, operation, rows, and the stage run that made them."""
        self.table()  # raises if there is none, and mends a torn log
        commits = log.newest(self.storage, limit) if limit else log.read(self.storage)
        return [
            {
                "version": commit.version,
                "time": commit.time,
                "operation": commit.info.get("operation"),
                "rows": int(commit.info["rows"]) if "rows" in commit.info else None,
                **{name: commit.info.get(name) for name in ("pipeline", "stage", "fingerprint", "shard", "run_id")},
            }
            for commit in reversed(commits)
        ]

    def ids(self, fingerprint: str) -> list[str]:
        """Ids of the rows of one stage run, sorted."""
        import polars as pl

        def ask() -> pl.DataFrame:
            return self.scan().filter(pl.col("fingerprint") == fingerprint).select("trajectory_id").collect()

        try:
            return self.current(None, ask)["trajectory_id"].sort().to_list()
        except NoBufferError:
            return []

    def read(self, ids: Ids, columns: Sequence[str] | None = None, version: int | None = None) -> pa.Table:
        """These rows, in the order asked, with these columns (default: all), as they were at a version (default: the
        newest). For many rows give the ids as an Arrow array."""
        return self._read(id_array(ids), known_columns(columns), version)

    def _read(self, ids: pa.Array, wanted: list[str], version: int | None = None) -> pa.Table:
        schema = _columns(wanted)
        if not len(ids):
            return schema.empty_table()
        read = list(dict.fromkeys(["trajectory_id", *wanted]))

        def ask() -> pa.Table:
            with self._table.following() as table:
                files = self._lookup.files(table if version is None else self.table(version))
            return self._lookup.read(files, ids, read, _columns(read), newest=version is None)

        rows = self.current(version, ask)
        order = pc.index_in(ids, value_set=rows["trajectory_id"].combine_chunks())
        if order.null_count:
            missing = pc.unique(ids.filter(order.is_null())).to_pylist()
            raise UnknownTrajectoryError(missing, near_ids(self.scan(), missing[0]))
        places = order.to_numpy()
        seen = np.zeros(rows.num_rows, dtype=bool)
        seen[places] = True
        if not seen.all():
            raise StoreError("several rows share one trajectory_id; `agentrl buffer check` lists them")
        rows = rows.select(wanted)
        if len(places) != rows.num_rows or (places != np.arange(len(places))).any():
            if rows.nbytes < 2**30:  # Arrow takes from one chunk much faster than from many
                rows = rows.combine_chunks()
            rows = rows.take(order)
        return rows if rows.schema.equals(schema) else rows.cast(schema)

    def attempts(self, task_id: str, columns: Sequence[str] | None = None, version: int | None = None) -> pa.Table:
        """All rows that attempt a task, sorted by id; empty if there are none. The rest as for :meth:`read`."""
        wanted = known_columns(columns)
        read = list(dict.fromkeys(["trajectory_id", "task_id", *wanted]))

        def ask() -> pa.Table:
            with self._table.following() as table:
                files = self._lookup.files(table if version is None else self.table(version))
            return self._lookup.of_task(files, task_id, read, _columns(read), newest=version is None)

        return self.current(version, ask).sort_by("trajectory_id").select(wanted)

    def get_many(self, ids: Ids) -> list[Trajectory]:
        """These trajectories, in the order asked."""
        return [Trajectory.model_validate(row) for row in self.read(ids).to_pylist()]

    def get(self, trajectory_id: str) -> Trajectory:
        """One trajectory. Raises ``UnknownTrajectoryError`` (a KeyError) with the nearest ids that exist."""
        return self.get_many([trajectory_id])[0]

    def digest(self, ids: Ids) -> str:
        """Content digest of these rows, in this order, whatever files hold them, and whenever and by which run they
        were made: an id counts without the fingerprint in it, so that equal rows of two attempts have equal digests."""
        return combined(self.digests(ids))

    def digests(self, ids: Ids) -> Iterator[pa.ChunkedArray]:
        """The content digest of each of these rows, 16 bytes, in this order, a bounded number of rows at a time."""
        with self._table.following() as table:
            stored = schema_version(table) == TRAJECTORY_VERSION
        names, size = id_array(ids), DIGEST_ROWS if stored else 2 * BATCH_ROWS
        for part in (names.slice(start, size) for start in range(0, len(names), size)):
            rows = self._read(part, [CONTENT] if stored else TRAJECTORY_SCHEMA.names)
            yield rows[CONTENT] if stored else contents(rows)


def _columns(names: Sequence[str]) -> pa.Schema:
    return pa.schema([STORED_SCHEMA.field(name) for name in names], metadata=TRAJECTORY_SCHEMA.metadata)

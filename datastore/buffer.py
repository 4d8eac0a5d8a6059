"""The trajectory buffer: one append-only Delta Lake table of everything that was ever rolled out or imported.

Files are ZSTD Parquet with small row groups, so that one trajectory is read without reading its neighbours.
An append is one commit. The commit carries (fingerprint, shard) as Delta's application transaction: a stage that
is killed and resumed neither loses nor doubles a row.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from datastore.digest import TableHasher
from datastore.errors import (
    CorruptError,
    NewerSchemaError,
    NoBufferError,
    OlderSchemaError,
    StoreError,
    UnknownTrajectoryError,
)
from datastore.ingest import BATCH_ROWS, Ingest, OnError, Rows
from datastore.lease import hold
from datastore.lookup import Lookup
from datastore.places import place, storage_options
from datastore.writer import FOLDER, SCALARS, FileWriter
from schemas.trajectory import TRAJECTORY_SCHEMA, TRAJECTORY_VERSION, Trajectory

if TYPE_CHECKING:
    import polars as pl
    from deltalake import DeltaTable

    from datastore.batches import Batches
    from datastore.retrieval.experience import Demonstration
    from datastore.retrieval.index import SearchIndex

VERSION_PROPERTY = "agentrl.schema_version"
FILL = ("stage", "fingerprint", "run_id")
VOLATILE = ("created_at", "run_id")
"""Columns that differ between two runs of the same stage, and so are left out of digests."""

PROPERTIES = {
    VERSION_PROPERTY: str(TRAJECTORY_VERSION),
    "delta.dataSkippingStatsColumns": ",".join(SCALARS),
    # artifacts point at old versions for ever; `vacuum` decides by them what may go
    "delta.logRetentionDuration": "interval 36500 days",
    "delta.deletedFileRetentionDuration": "interval 36500 days",
}


@dataclass(frozen=True)
class AppendResult:
    """``version`` of the table after the append; ``skipped``: this (fingerprint, shard) was there already."""

    version: int
    rows: int
    skipped: bool
    quarantined: int = 0


class TrajectoryBuffer:
    """The buffer of one store, a local folder or ``s3://bucket/prefix``. Only ``append`` and upkeep ever write."""

    def __init__(self, store: str | Path) -> None:
        self.place = place(store)
        self.store = self.place.uri
        self.uri = f"{self.store.rstrip('/')}/{FOLDER}"
        self._options = storage_options(self.store)
        self._indexes: dict[str, SearchIndex] = {}
        self._lookup = Lookup(self.place, FOLDER)

    # table

    def table(self, version: int | datetime | None = None) -> "DeltaTable":
        """The Delta table at a version or a time. Raises where there is none, or a newer one than we can read."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            table = DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError:
            raise NoBufferError(self.uri) from None
        except DeltaError as error:
            raise CorruptError(f"the log of the buffer at {self.uri}", str(error)) from None
        found = schema_version(table)
        if found > TRAJECTORY_VERSION:
            raise NewerSchemaError(self.uri, found, TRAJECTORY_VERSION)
        if version is not None:
            try:
                table.load_as_version(version)
            except (DeltaError, ValueError) as error:
                raise StoreError(
                    f"the buffer at {self.uri} has no version {version!s}: {error}; `agentrl buffer history` lists them"
                ) from None
        return table

    @property
    def version(self) -> int | None:
        """Number of the newest commit; None where nothing was ever appended."""
        try:
            return self.table().version()
        except NoBufferError:
            return None

    def has(self, fingerprint: str, shard: int = 0) -> bool:
        """Whether this shard of this stage run was appended."""
        try:
            return is_appended(self.table().transaction_version(_transaction(fingerprint, shard)))
        except NoBufferError:
            return False

    def _create(self) -> None:
        """Create the empty table, once: a second creation would conflict with appends that are under way."""
        from deltalake import DeltaTable

        with hold(self.place, "locks/create-trajectories.lock"):
            if self.version is not None:
                return
            DeltaTable.create(
                self.uri,
                TRAJECTORY_SCHEMA,
                description="agentrl trajectory buffer",
                configuration=PROPERTIES,
                storage_options=self._options,
                raise_if_key_not_exists=False,
            )

    def writable(self) -> "DeltaTable":
        """The table to write to, created where there is none. Raises where its schema is not exactly ours."""
        try:
            table = self.table()
        except NoBufferError:
            self._create()
            table = self.table()
        if (found := schema_version(table)) < TRAJECTORY_VERSION:
            raise OlderSchemaError(self.uri, found, TRAJECTORY_VERSION)
        return table

    # writing

    def append(
        self,
        trajectories: Rows,
        *,
        stage: str,
        fingerprint: str,
        shard: int = 0,
        run_id: str = "",
        on_error: OnError = "raise",
    ) -> AppendResult:
        """Append rows in one commit; empty ``stage``, ``fingerprint`` and ``run_id`` of the rows are filled in.

        An iterator is streamed, so that memory does not grow with the number of rows. If (fingerprint, shard) is in
        the buffer, nothing is read or written. Raises InvalidRowsError with row, field and reason of what breaks the
        contract; ``on_error="quarantine"`` sets such rows aside in ``quarantine/`` and appends the rest. On any error
        the table stays as it was.
        """
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError, DeltaError

        name = _transaction(fingerprint, shard)
        table = self.writable()
        before = table.transaction_version(name)
        if is_appended(before):
            return AppendResult(table.version(), 0, skipped=True)
        fill = dict(zip(FILL, (stage, fingerprint, run_id), strict=True))
        rows = Ingest(trajectories, fill, on_error, self.place, f"{stage}-{fingerprint[:8]}-{shard}")
        lineage = {"stage": stage, "fingerprint": fingerprint, "shard": str(shard), "run_id": run_id}
        writer = FileWriter(self.place)
        try:
            table.create_write_transaction(
                writer.write(rows.batches()),  # type: ignore[arg-type]
                mode="append",
                schema=table.schema(),
                commit_properties=CommitProperties(
                    custom_metadata=lineage | {"rows": str(rows.rows)},
                    max_commit_retries=1000,
                    app_transactions=[Transaction(name, 0 if before is None else before + 1)],
                ),
            )
        except CommitFailedError:
            writer.discard()
            table = self.table()
            if not is_appended(table.transaction_version(name)):
                raise
            return AppendResult(table.version(), 0, skipped=True)  # the same shard, from another process, was faster
        except StoreError:
            writer.discard()
            raise
        except (DeltaError, OSError) as error:
            writer.discard()
            raise StoreError(f"append to {self.uri} failed, the table is as it was: {error}") from error
        except BaseException:
            writer.discard()
            raise
        table.update_incremental()
        return AppendResult(table.version(), rows.rows, skipped=False, quarantined=rows.quarantined)

    def quarantined(self) -> "pl.DataFrame":
        """Rows that appends have set aside: the columns of a trajectory, ``row`` in its append, and ``problems``."""
        import polars as pl

        keys = sorted(self.place.keys("quarantine"))
        frames = [pl.read_parquet(self.place.read(key) or b"") for key in keys]
        empty = pl.DataFrame(schema={"trajectory_id": pl.String, "row": pl.Int64, "problems": pl.List(pl.String)})
        return pl.concat(frames) if frames else empty

    # reading

    def scan(self, version: int | datetime | None = None) -> "pl.LazyFrame":
        """All rows, lazily; only the columns that are asked for are read."""
        import polars as pl

        return pl.scan_delta(self.table(version))

    def sql(self, query: str, version: int | datetime | None = None) -> "pl.DataFrame":
        """Answer a query over the views ``trajectories``, ``steps`` and ``tool_calls``, in Polars' SQL dialect."""
        from polars.exceptions import PolarsError

        from datastore.views import context

        rows = self.scan(version)
        try:
            return context(rows).execute(query, eager=True)
        except PolarsError as error:
            columns = ", ".join(rows.collect_schema().names())
            hint = f"\ncolumns of trajectories: {columns}" if "column" in str(error).lower() else ""
            raise StoreError(f"query failed: {error}{hint}") from None

    def diff(self, old: int | datetime, new: int | datetime | None = None) -> "pl.DataFrame":
        """What lies between two versions, by stage run: rows ``added`` and ``removed``, by id."""
        import polars as pl

        keys = ["stage", "fingerprint"]
        before, after = (self.scan(v).select("trajectory_id", *keys).collect() for v in (old, new))
        added = after.join(before, on="trajectory_id", how="anti").group_by(keys).agg(pl.len().alias("added"))
        removed = before.join(after, on="trajectory_id", how="anti").group_by(keys).agg(pl.len().alias("removed"))
        both = added.join(removed, on=keys, how="full", coalesce=True)
        return both.with_columns(pl.col("added", "removed").fill_null(0).cast(pl.Int64)).sort(keys)

    def batches(self, ids: Sequence[str], batch_rows: int, **options: Any) -> "Batches":
        """Training batches of a selection, in a seeded order that can be resumed; see :class:`Batches` for options."""
        from datastore.batches import Batches

        return Batches(self, ids, batch_rows, **options)

    def search(self, text: str, k: int = 5, *, embedder: str = "embedded", **options: Any) -> "pl.DataFrame":
        """The ``k`` rows whose prompts are nearest to a text; see :meth:`SearchIndex.search` for the options, among
        them ``where``, which filters before anything is ranked. Builds the index, or brings it up to date."""
        return self._index(embedder).search(text, k, **options)

    def experience(self, prompt: str, *, embedder: str = "embedded", **options: Any) -> "list[Demonstration]":
        """Successful runs of tasks like this one, as demonstrations; see :func:`experience` for the options."""
        from datastore.retrieval.experience import experience

        return experience(self._index(embedder), prompt, **options)

    def _index(self, embedder: str) -> "SearchIndex":
        from datastore.retrieval.index import SearchIndex

        if embedder not in self._indexes:
            self._indexes[embedder] = SearchIndex(self, embedder)
        return self._indexes[embedder]

    def stats(self, version: int | datetime | None = None) -> dict[str, Any]:
        """Totals, and under ``stages`` one row per stage: rows, tasks, success rate, mean reward, tokens."""
        import polars as pl

        table = self.table(version)
        by_stage = (
            pl.scan_delta(table)
            .group_by("stage", "env")
            .agg(
                pl.len().alias("rows"),
                pl.col("task_id").n_unique().alias("tasks"),
                pl.col("success").mean(),
                pl.col("reward").mean(),
                pl.col("n_steps").mean().alias("steps"),
                pl.col("n_tokens").sum().cast(pl.Int64).alias("tokens"),
                pl.col("created_at").max().alias("newest"),
            )
            .sort("newest")
            .collect()
        )
        files = pl.DataFrame(pa.table(table.get_add_actions(flatten=True)))
        return {
            "stages": by_stage.to_dicts(),
            "rows": int(by_stage["rows"].sum()),
            "tokens": int(by_stage["tokens"].sum()),
            "files": files.height,
            "bytes": int(files["size_bytes"].sum()),
            "version": table.version(),
        }

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Commits, newest first: version, time, operation, rows, and the stage run that made them."""
        commits = []
        for commit in self.table().history(limit):
            commits.append(
                {
                    "version": commit["version"],
                    "time": datetime.fromtimestamp(commit["timestamp"] / 1000, UTC),
                    "operation": commit["operation"],
                    "rows": int(commit["rows"]) if "rows" in commit else None,
                    **{name: commit.get(name) for name in ("stage", "fingerprint", "shard", "run_id")},
                }
            )
        return commits

    def ids(self, fingerprint: str) -> list[str]:
        """Ids of the rows of one stage run, sorted."""
        import polars as pl

        try:
            rows = self.scan()
        except NoBufferError:
            return []
        found = rows.filter(pl.col("fingerprint") == fingerprint).select("trajectory_id")
        return found.collect()["trajectory_id"].sort().to_list()

    def read(self, ids: Sequence[str], columns: Sequence[str] | None = None) -> pa.Table:
        """These rows, in the order asked, with these columns (default: all)."""
        wanted = list(columns) if columns is not None else list(TRAJECTORY_SCHEMA.names)
        if unknown := [name for name in wanted if name not in TRAJECTORY_SCHEMA.names]:
            near = difflib.get_close_matches(unknown[0], TRAJECTORY_SCHEMA.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StoreError(f"a trajectory has no column {unknown[0]!r}{hint}")
        schema = _columns(wanted)
        if not ids:
            return schema.empty_table()
        read = list(dict.fromkeys(["trajectory_id", *wanted]))
        found = self._lookup.read(self.table(), ids, read, _columns(read))
        place_of = {name: index for index, name in enumerate(found["trajectory_id"].to_pylist())}
        if len(place_of) != found.num_rows or any(name not in place_of for name in ids):
            self._refuse(ids, set(place_of), doubled=len(place_of) != found.num_rows)
        order = np.array([place_of[name] for name in ids], dtype=np.int64)
        found = found.select(wanted)
        if len(order) != found.num_rows or (order != np.arange(len(order))).any():
            if found.nbytes < 2**30:  # Arrow takes from one chunk much faster than from many
                found = found.combine_chunks()
            found = found.take(pa.array(order))
        return found.cast(schema)

    def _refuse(self, ids: Sequence[str], found: set[str], doubled: bool) -> None:
        missing = [name for name in ids if name not in found]
        if missing:
            raise UnknownTrajectoryError(missing, self._near(missing[0]))
        if doubled:
            raise StoreError("several rows share one trajectory_id; `agentrl buffer check` lists them")

    def _near(self, name: str) -> list[str]:
        """Existing ids like this one. Candidates share its longest prefix that exists, so this stays fast."""
        import polars as pl

        rows = self.scan().select("trajectory_id")
        for length in (len(name), *(len(name) * part // 4 for part in (3, 2, 1)), 0):
            near = rows.filter(pl.col("trajectory_id").str.starts_with(name[:length])).head(5000).collect()
            if near.height:
                return difflib.get_close_matches(name, near["trajectory_id"].to_list(), 3, 0.5)
        return []

    def get_many(self, ids: Sequence[str]) -> list[Trajectory]:
        """These trajectories, in the order asked."""
        return [Trajectory.model_validate(row) for row in self.read(ids).to_pylist()]

    def get(self, trajectory_id: str) -> Trajectory:
        """One trajectory. Raises ``UnknownTrajectoryError`` (a KeyError) with the nearest ids that exist."""
        return self.get_many([trajectory_id])[0]

    def digest(self, ids: Sequence[str]) -> str:
        """Content digest of these rows, in this order, whatever the files they lie in, when and by which run."""
        columns = [name for name in TRAJECTORY_SCHEMA.names if name not in VOLATILE]
        hasher = TableHasher()
        hasher.update(self.read([], columns))
        for start in range(0, len(ids), 2 * BATCH_ROWS):
            hasher.update(self.read(ids[start : start + 2 * BATCH_ROWS], columns))
        return hasher.hexdigest()


def schema_version(table: "DeltaTable") -> int:
    """The version of our schema that a table was written with."""
    return int(table.metadata().configuration.get(VERSION_PROPERTY) or 1)


def _columns(names: Sequence[str]) -> pa.Schema:
    return pa.schema([TRAJECTORY_SCHEMA.field(name) for name in names], metadata=TRAJECTORY_SCHEMA.metadata)


def is_appended(transaction: int | None) -> bool:
    """Whether a shard's rows are in the table: appending it gives its transaction an even number, dropping it
    (after a loss of files) the next odd one."""
    return transaction is not None and transaction % 2 == 0


def _transaction(fingerprint: str, shard: int) -> str:
    if not fingerprint:
        raise StoreError("fingerprint is empty; it makes the append idempotent, give one that names this content")
    return f"{fingerprint}/{shard}"

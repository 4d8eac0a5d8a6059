"""Forgetting: the rows of one import leave the table, and no other row does; what it set aside goes too. Old versions
stay readable until ``vacuum``, and the same files can be imported again."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.datastore.table.ids import ids_of
from agentrl.datastore.table.maintenance import alone, live_files, read_parts
from agentrl.datastore.table.row_digests import STORED_SCHEMA
from agentrl.datastore.table.writer import FileWriter
from agentrl.datastore.upkeep.compaction import replace

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

IMPORT_RUN = "import-"
"""Prefix of the ``run_id`` of imported rows; the first half of the import's fingerprint follows."""
SHORTEST = 6


@dataclass(frozen=True)
class Forgotten:
    """``fingerprint`` is that of the import, or of the file."""

    fingerprint: str
    rows: int
    version: int


def forget(buffer: "TrajectoryBuffer", fingerprint: str, *, dry_run: bool = False) -> Forgotten:
    """Remove the rows of an import, or of one of its files, from the table; the beginning of the fingerprint is enough.

    Raises StoreError if it stands for no import or for several, and if an artifact reads one of the rows.
    """
    with alone(buffer):
        name, ids, rows = _rows(buffer, fingerprint)
        _refuse_read(buffer, ids)
        if dry_run:
            return Forgotten(name, len(ids), buffer.table().version())
        version = _drop(buffer, ids, {"upkeep": "forget", "forgotten": name, "rows": str(len(ids))})
        _forget_set_aside(buffer, rows)
        return Forgotten(name, len(ids), version)


def remove(buffer: "TrajectoryBuffer", ids: set[str]) -> tuple[int, int]:
    """Remove rows from the table that later rows hold in full. Gives how many are gone, and how many stay since an
    artifact reads them or an annotation is of them."""
    with alone(buffer):
        named = pl.col("trajectory_id").is_in(sorted(ids))
        there = set(buffer.scan().filter(named).select("trajectory_id").collect()["trajectory_id"])
        read = there & set(buffer.annotations.rows()["trajectory_id"].to_pylist())
        read.update(*(there & names for _, names in _read_rows(buffer)))
        if gone := there - read:
            _drop(buffer, gone, {"upkeep": "forget", "forgotten": "earlier states of sessions", "rows": str(len(gone))})
        return len(gone), len(read)


def _drop(buffer: "TrajectoryBuffer", ids: set[str], operation: dict[str, str]) -> int:
    """Commit the table without these rows. Gives the version."""
    gone, adds = [], []
    live = live_files(buffer.table())
    with FileWriter(buffer.storage, data_change=False) as files:
        for file in live:
            if ids.isdisjoint(ids_of(buffer.storage, file)):
                continue
            gone.append(file)
            kept = [part for part in _kept(buffer, file, ids) if part.num_rows]
            if kept:
                adds.append(files.write_one(kept))
        return replace(buffer, files, adds, gone, "DELETE", operation)


def _rows(buffer: "TrajectoryBuffer", text: str) -> tuple[str, set[str], pl.DataFrame]:
    """What a fingerprint stands for, the ids of its rows, and where they came from."""
    if len(text) < SHORTEST:
        raise StoreError(f"fingerprint {text!r} is too short; give at least {SHORTEST} characters of it")
    imported = buffer.scan().select("trajectory_id", "fingerprint", "run_id", "stage", "source_file")
    rows = imported.filter(pl.col("run_id").str.starts_with(IMPORT_RUN)).collect()
    for column, wanted in (("run_id", IMPORT_RUN + text[:16]), ("fingerprint", text)):
        matches = rows.filter(pl.col(column).str.starts_with(wanted))
        names = sorted(set(matches[column]))
        if len(names) > 1:
            raise StoreError(f"{text!r} stands for {len(names)} imports: {', '.join(names[:5])}; give more of it")
        if names:
            origin = ["stage", "run_id", "fingerprint", "source_file"]
            return names[0].removeprefix(IMPORT_RUN), set(matches["trajectory_id"]), matches.select(origin).unique()
    raise StoreError(f"no import has the fingerprint {text!r}; `agentrl buffer import` prints it, and so does history")


def _refuse_read(buffer: "TrajectoryBuffer", ids: set[str]) -> None:
    """Raise if an artifact of the catalog names one of the rows."""
    readers = [reader for reader, names in _read_rows(buffer) if not ids.isdisjoint(names)]
    if readers:
        raise StoreError(
            f"{len(readers)} artifacts read rows of this import: {', '.join(sorted(set(readers))[:5])}; remove them "
            "first (`agentrl gc` takes what no tag and no run keeps)"
        )


def _read_rows(buffer: "TrajectoryBuffer") -> Iterator[tuple[str, set[str]]]:
    """The artifacts of the catalog that name rows, each with the ids."""
    catalog = Catalog(buffer.store)
    for manifest in catalog.all():
        for output in manifest.outputs.values():
            if output.kind == "trajectories":
                named = pq.read_table(catalog.local(manifest, output.path), columns=["trajectory_id"])
                name = f"{manifest.ingredients.stage}/{manifest.fingerprint[:8]}"
                yield name, set(named["trajectory_id"].to_pylist())


def _forget_set_aside(buffer: "TrajectoryBuffer", gone: pl.DataFrame) -> None:
    """Remove what these files of an import have set aside, and all that the import has if none of its rows is left."""
    left = set(buffer.scan().select(pl.col("run_id").unique()).collect()["run_id"])
    for stage, run_id in gone.select("stage", "run_id").unique().iter_rows():
        name = f"quarantine/{stage}-{run_id.removeprefix(IMPORT_RUN)[:8]}"
        records, rows = f"{name}-records.jsonl", f"{name}-0.parquet"
        if run_id not in left:
            buffer.storage.delete(records)
            buffer.storage.delete(rows)
            continue
        files = [file for file in gone["source_file"].unique() if file]
        if kept := buffer.storage.read(records):
            lines = [line for line in kept.splitlines(keepends=True) if not _is_of(json.loads(line)["place"], files)]
            buffer.storage.write(records, b"".join(lines))
        if kept := buffer.storage.read(rows):
            table = pq.read_table(pa.BufferReader(kept))
            stays = [fingerprint not in set(gone["fingerprint"]) for fingerprint in table["fingerprint"].to_pylist()]
            sink = pa.BufferOutputStream()
            pq.write_table(table.filter(pa.array(stays, pa.bool_())), sink, compression="zstd")
            buffer.storage.write(rows, sink.getvalue().to_pybytes())


def _is_of(location: str, files: list[str]) -> bool:
    """Whether the place of a record is in one of the files: ``file``, ``file:line`` or ``file[number]``."""
    return any(location.startswith(file) and location[len(file) : len(file) + 1] in ("", ":", "[") for file in files)


def _kept(buffer: "TrajectoryBuffer", file: str, ids: set[str]) -> Iterator[pa.Table]:
    for part in read_parts(buffer, file):
        rows = part.cast(STORED_SCHEMA)
        stays = [row_id not in ids for row_id in rows["trajectory_id"].to_pylist()]
        yield rows.filter(pa.array(stays))

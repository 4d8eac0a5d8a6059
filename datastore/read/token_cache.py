"""Copies of the token columns on this machine, uncompressed and mapped into memory, for tables that are read at random.

To read one row, Parquet decodes its row group. A copy is an Arrow file of one data file's token columns, of which only
the rows that are asked for are touched. Data files never change, so neither does a copy; what has none is read from
Parquet. Copies take about two and a half times as much disk as the table, so only :func:`warm` makes them.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.storage.ownership import mark

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

COLUMNS = ("trajectory_id", "input_ids", "action_mask", "logprobs")


class Copies:
    """The copies that this machine has of one table: in the store's folder, or for S3 in the cache folder."""

    def __init__(self, storage: LocalStorage | S3Storage) -> None:
        self.folder = storage.working_folder() / "tokens"
        self._working = storage.working_folder()

    def read(self, name: str, ids: pa.Array, columns: Collection[str]) -> pa.Table | None:
        """Rows of the data file ``name`` with these ids. None if there is no copy, or it lacks a column."""
        if not set(columns) <= set(COLUMNS):
            return None
        try:
            table = pa.ipc.open_file(pa.memory_map(str(self.path(name)))).read_all()
        except (FileNotFoundError, pa.ArrowInvalid):
            return None
        asked = pc.is_in(table["trajectory_id"], value_set=ids)
        return table.select(list(columns)).take(pc.indices_nonzero(asked))

    def make(self, name: str, rows: pa.Table) -> None:
        """Write the copy of a data file. It gets its name when it is whole and on the disk."""
        temporary = self.folder / f".{name}.{mark(self._working)}.tmp"
        try:
            with temporary.open("wb") as file:
                with pa.ipc.new_file(file, rows.schema) as writer:
                    writer.write_table(rows.combine_chunks())  # rows are taken much faster from one batch
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path(name))
        finally:
            temporary.unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.arrow"


def warm(buffer: "TrajectoryBuffer") -> dict[str, int]:
    """Make the copies of all data files of the newest version, and remove those of other files. Gives the number of
    files, how many were copied and removed, and the bytes that the copies take."""
    from agentrl.datastore.table.ids import open_file
    from agentrl.datastore.table.maintenance import live_files

    copies = Copies(buffer.storage)
    copies.folder.mkdir(parents=True, exist_ok=True)
    names = list(live_files(buffer.table()))
    wanted = {copies.path(name) for name in names}
    old = [path for path in copies.folder.glob("*.arrow") if path not in wanted]
    for path in old:
        path.unlink(missing_ok=True)
    missing = [name for name in names if not copies.path(name).exists()]
    for name in missing:
        with open_file(buffer.storage, name) as file:
            copies.make(name, file.read(list(COLUMNS)))
    size = sum(path.stat().st_size for path in wanted)
    return {"files": len(names), "copied": len(missing), "removed": len(old), "bytes": size}

"""Which ids the table holds. Every append asks, so that no id is in it twice.

Delta's statistics say which files may hold an id. For most appends that is none, since ids begin with their stage run.
If a file may hold one, its ids are read once per process and kept as hashes of 8 bytes, up to :data:`LIMIT_IDS`.
"""

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.errors import CorruptError
from agentrl.datastore.storage.delta_paths import FOLDER
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.table.delta_log import read
from agentrl.datastore.table.delta_table import BufferTable

if TYPE_CHECKING:
    from deltalake import DeltaTable

LIMIT_IDS = 2**24
_LAST = chr(0x10FFFF)


def hashes(ids: Iterable[str]) -> np.ndarray:
    """One 64-bit hash per id, in their order. The same within one version of Polars, so never stored."""
    import polars as pl

    return pl.Series(ids, dtype=pl.String).hash(0).to_numpy()


def open_file(storage: LocalStorage | S3Storage, name: str) -> pq.ParquetFile:
    """A data file of the table."""
    source: Any = (
        storage.root / FOLDER / name if isinstance(storage, LocalStorage) else storage.open(f"{FOLDER}/{name}")
    )
    return pq.ParquetFile(source)


def ids_of(storage: LocalStorage | S3Storage, name: str) -> list[str]:
    """The ids in a data file, in its order."""
    with open_file(storage, name) as file:
        return file.read(["trajectory_id"])["trajectory_id"].to_pylist()


class KnownIds:
    """The ids of one table as it grows. Threads may share it."""

    def __init__(self, to: BufferTable) -> None:
        self._to = to
        self._storage = to.storage
        self._bounds: dict[str, tuple[str, str]] = {}
        self._version = -1
        self._table: str | None = None
        self._hashes: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.RLock()

    def follow(self, table: "DeltaTable") -> frozenset[str]:
        """Read what the table's version added. Returns the names of the files that it holds."""
        with self._lock:
            table_id = str(table.metadata().id)
            if table_id != self._table or table.version() < self._version:
                self._bounds, self._table = bounds(table), table_id
            elif table.version() - self._version > 100:  # one call costs less than many commits
                self._bounds = bounds(table)
            else:
                for commit in read(self._storage, self._version + 1, table.version()):
                    for name in commit.removes:
                        self._bounds.pop(name, None)
                    for name, add in commit.adds.items():
                        self._bounds[name] = _parsed_bounds(add)
            self._version = table.version()
            return frozenset(self._bounds)

    def clashes(self, ids: Collection[str], files: Collection[str] | None = None) -> dict[str, str]:
        """Those of the ids that are in the table (or in these of its files) already, each with the file's name."""
        wanted = sorted(ids)
        with self._lock:
            asked = list(self._bounds if files is None else files)
            suspects = [name for name in asked if name in self._bounds and _hit(wanted, *self._bounds[name])]
            if not suspects:
                return {}
            files_of_ids: dict[str, str] = {}
            hashes_asked = hashes(wanted)
            for name in suspects:
                if np.isin(hashes_asked, self._of(name)).any():
                    files_of_ids |= dict.fromkeys(set(wanted).intersection(ids_of(self._storage, name)), name)
            return files_of_ids

    def clashes_now(self, ids: Collection[str]) -> dict[str, str]:
        """The same, when a file that cannot be read may have left the table since."""
        try:
            return self.clashes(ids)
        except CorruptError:
            before = self._version
            with self._to.following() as table:
                self.follow(table)
            if self._version == before:
                raise
            return self.clashes_now(ids)

    def _of(self, name: str) -> np.ndarray:
        if name not in self._hashes:
            try:
                self._hashes[name] = hashes(ids_of(self._storage, name))
            except (pa.ArrowException, OSError) as error:
                raise CorruptError(f"data file {name}", str(error)) from error
            while len(self._hashes) > 1 and sum(map(len, self._hashes.values())) > LIMIT_IDS:
                self._hashes.popitem(last=False)
        self._hashes.move_to_end(name)
        return self._hashes[name]


def bounds(table: "DeltaTable") -> dict[str, tuple[str, str]]:
    """The least and the greatest id of each live file, open if the log does not say."""
    from urllib.parse import unquote

    actions = pa.table(table.get_add_actions(flatten=True))
    names = [unquote(path) for path in actions["path"].to_pylist()]
    sides = [
        actions[f"{side}.trajectory_id"].to_pylist() if f"{side}.trajectory_id" in actions.schema.names else [None]
        for side in ("min", "max")
    ]
    least, most = (side if len(side) == len(names) else [None] * len(names) for side in sides)
    return {name: (low or "", high or _LAST) for name, low, high in zip(names, least, most, strict=True)}


def _parsed_bounds(add: dict[str, Any]) -> tuple[str, str]:
    import json

    stats = json.loads(add.get("stats") or "{}")
    least, most = (stats.get(side, {}).get("trajectory_id") for side in ("minValues", "maxValues"))
    return least or "", most or _LAST


def _hit(wanted: list[str], least: str, most: str) -> bool:
    """Whether a sorted list has a value within bounds; an upper bound that was cut short counts as open."""
    position = bisect_left(wanted, least)
    return position < len(wanted) and (wanted[position] <= most or wanted[position].startswith(most))

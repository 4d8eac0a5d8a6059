"""Removing rows that are in the table more than once, which earlier versions allowed: two compactions at once, or two
appends of one id. Of equal rows one is kept, of different rows with one id the first."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from agentrl.datastore.table import delta_log as log
from agentrl.datastore.table.ids import hashes, ids_of
from agentrl.datastore.table.ingest import Quarantine
from agentrl.datastore.table.maintenance import live_files, read_parts
from agentrl.datastore.table.row_digests import CONTENT, STORED_SCHEMA
from agentrl.datastore.table.validation import BadField
from agentrl.datastore.table.writer import FileWriter
from agentrl.datastore.upkeep.checks import doubled_ids
from agentrl.datastore.upkeep.compaction import replace

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer


def keep_once(buffer: "TrajectoryBuffer") -> tuple[int, int]:
    """Remove rows whose id an earlier row has. Returns how many were equal to the row that stays, except for their time
    and run, and how many differed; those go to quarantine."""
    table = buffer.table()
    live = live_files(table)
    age = {name: commit.version for commit in log.read(buffer.storage) for name in commit.adds}
    names = sorted(live, key=lambda name: (age.get(name, 0), name))
    ids = {name: hashes(ids_of(buffer.storage, name)) for name in names}
    twice = doubled_ids(ids)
    if not len(twice):
        return 0, 0
    with FileWriter(buffer.storage, data_change=False) as files:
        sieve = _Sieve(buffer, twice, Quarantine(buffer.storage, f"doubled-{table.version()}"))
        adds, gone = [], []
        try:
            for name in names:
                if not np.isin(ids[name], twice).any():
                    continue
                kept = [part for part in sieve.parts(name) if part.num_rows]
                if sum(part.num_rows for part in kept) == live[name][0]:
                    continue
                gone.append(name)
                if kept:
                    adds.append(files.write_one(kept))
            sieve.quarantine.publish()
        finally:
            sieve.quarantine.discard()
        operation = {"upkeep": "keep once", "once": str(sieve.equal), "set_aside": str(sieve.different)}
        replace(buffer, files, adds, gone, "DELETE", operation)
    return sieve.equal, sieve.different


class _Sieve:
    """Keeps a row if no earlier row had its id."""

    def __init__(self, buffer: "TrajectoryBuffer", twice: np.ndarray, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self.equal = self.different = 0
        self._buffer = buffer
        self._twice = twice
        self._first: dict[str, bytes] = {}

    def parts(self, name: str) -> Iterator[pa.Table]:
        for part in read_parts(self._buffer, name):
            rows = part.cast(STORED_SCHEMA)
            ids = rows["trajectory_id"].to_pylist()
            suspects = np.flatnonzero(np.isin(hashes(ids), self._twice))
            stays = np.ones(len(ids), dtype=bool)
            problems = []
            content = rows[CONTENT].take(pa.array(suspects)).to_pylist()
            for row, digest in zip(suspects.tolist(), content, strict=True):
                if ids[row] not in self._first:
                    self._first[ids[row]] = digest
                    continue
                stays[row] = False
                if self._first[ids[row]] == digest:
                    self.equal += 1
                else:
                    self.different += 1
                    reason = "is the id of another row, appended before"
                    problems.append(BadField(row, ids[row], "trajectory_id", reason))
            if problems:
                twice = rows.take(pa.array([problem.row for problem in problems])).drop_columns([CONTENT])
                self.quarantine.add(twice, problems)
            yield rows.filter(pa.array(stays))

"""Repair: rows of damaged files are restored from the files they were merged from, and of rows that
are there twice, one is kept. Rows are given up only with ``drop``; they are then counted and recorded."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from agentrl.datastore.errors import OlderSchemaError, StoreError
from agentrl.datastore.table import delta_log as log
from agentrl.datastore.table.delta_table import schema_version
from agentrl.datastore.table.ids import hashes, ids_of
from agentrl.datastore.table.maintenance import alone, live_files, read_parts
from agentrl.datastore.table.older_schemas import upgrade
from agentrl.datastore.table.row_digests import STORED_SCHEMA, with_content
from agentrl.datastore.table.writer import Action, FileWriter
from agentrl.datastore.upkeep.compaction import replace
from agentrl.datastore.upkeep.doubles import keep_once
from agentrl.schemas.trajectory import TRAJECTORY_VERSION

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer


@dataclass
class Repaired:
    """What was done. ``damaged``: files that stay in the table although they cannot be read, since that would be a
    loss. ``lost``: rows that were given up; those of ``shards`` (fingerprint/number) can be appended again."""

    restored: int = 0
    once: int = 0
    set_aside: int = 0
    damaged: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    lost: int = 0
    shards: list[str] = field(default_factory=list)


def repair(buffer: "TrajectoryBuffer", drop: bool = False) -> Repaired:
    """Restore what can be restored. Of equal rows with one id, one is kept. Of different rows with one id, the first
    stays and the others go to ``quarantine/``.

    ``drop`` then removes files that cannot be restored. If such a file is still as its append wrote it, its whole shard
    is removed, and its stage may append the shard again.
    """
    table = buffer.table()
    if (stored := schema_version(table)) < TRAJECTORY_VERSION:
        raise OlderSchemaError(buffer.uri, stored, TRAJECTORY_VERSION)
    done = Repaired()
    with alone(buffer):
        damaged = [name for name in live_files(buffer.table()) if not _readable(buffer, name)]
        if damaged:
            commits = log.read(buffer.storage)
            for names in _groups(damaged, commits):
                if not _restore(buffer, names, commits, drop, done):
                    done.damaged += names
        if done.damaged and drop:
            _drop(buffer, set(done.damaged), log.read(buffer.storage), done)
        if not done.damaged:
            done.once, done.set_aside = keep_once(buffer)
    return done


def _readable(buffer: "TrajectoryBuffer", name: str) -> bool:
    try:
        for _ in read_parts(buffer, name):
            pass
    except (pa.ArrowException, OSError, StoreError):
        return False
    return True


# restoring


def _groups(damaged: list[str], commits: list[log.Commit]) -> list[list[str]]:
    """Damaged files by the commit that added them, since files of one commit were made from the same files."""
    groups = [[name for name in damaged if name in commit.adds] for commit in reversed(commits)]
    placed: set[str] = set()
    for group in groups:
        group[:] = [name for name in group if name not in placed]
        placed.update(group)
    return [group for group in groups if group]


def _restore(
    buffer: "TrajectoryBuffer", names: list[str], commits: list[log.Commit], drop: bool, done: Repaired
) -> bool:
    """Replace damaged files by rows of old ones. Returns whether the damaged files are out of the table. Without
    ``drop`` they stay unless all of their rows are found."""
    sources = [name for name in _ancestors(set(names), commits) if _readable(buffer, name)]
    if not sources:
        return False
    live = live_files(buffer.table())
    expected = sum(live[name][0] for name in names)
    present = [hashes(ids_of(buffer.storage, name)) for name in live if _has_ids(buffer, name)]
    with FileWriter(buffer.storage, data_change=False) as files:
        counted = _Missing(buffer, np.concatenate([np.zeros(0, np.uint64), *present]))
        adds = files.write(counted.batches(sources))
        short = max(0, expected - counted.rows)
        if not counted.rows or (short and not drop):
            return False
        info = {"upkeep": "drop" if short else "restore", "files": json.dumps(names), "rows": str(counted.rows)}
        if short:
            info["lost"] = json.dumps({"": short})
        replace(buffer, files, adds, names, "RESTORE", info)
    done.restored += counted.rows
    done.lost += short
    if short:
        done.dropped += names
    return True


def _has_ids(buffer: "TrajectoryBuffer", name: str) -> bool:
    try:
        ids_of(buffer.storage, name)
    except (pa.ArrowException, OSError):
        return False
    return True


def _ancestors(names: set[str], commits: list[log.Commit]) -> list[str]:
    """Files whose rows went into these, by compactions and migrations, the newest first."""
    wanted, removed = set(names), []
    for commit in reversed(commits):
        if commit.info.get("upkeep") not in (None, "drop") and wanted & set(commit.adds):
            removed += sorted(commit.removes)
            wanted |= commit.removes
    return list(dict.fromkeys(removed))


class _Missing:
    """Rows of old files whose ids are in no readable live file, each once."""

    def __init__(self, buffer: "TrajectoryBuffer", present: np.ndarray) -> None:
        self._buffer = buffer
        self._present = present
        self.rows = 0

    def batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        for name in names:
            ids_of_batches: list[np.ndarray] = []
            for part in read_parts(self._buffer, name):
                ids = hashes(part["trajectory_id"].to_pylist())
                new = ~np.isin(ids, self._present)
                if new.any():
                    rows = part.filter(pa.array(new))
                    current = rows.schema.names == STORED_SCHEMA.names
                    rows = rows.cast(STORED_SCHEMA) if current else with_content(upgrade(rows))
                    self.rows += rows.num_rows
                    yield from rows.to_batches()
                    ids_of_batches.append(ids[new])
            self._present = np.concatenate([self._present, *ids_of_batches])


# dropping


def _drop(buffer: "TrajectoryBuffer", gone: set[str], commits: list[log.Commit], done: Repaired) -> None:
    table = buffer.table()
    live = live_files(table)
    lost: dict[str, int] = {}
    transactions: list[Action] = []
    whole: set[str] = set()
    for commit in commits:
        for shard in commit.transactions:
            if "upkeep" not in commit.info and set(commit.adds) & gone and set(commit.adds) <= set(live):
                whole |= set(commit.adds)
                lost[shard] = sum(live[name][0] for name in commit.adds)
                number = (table.transaction_version(shard) or 0) + 1
                transactions.append({"txn": {"appId": shard, "version": number}})
    if rest := sum(live[name][0] for name in gone - whole):
        lost[""] = rest
    names = sorted(gone | whole)
    operation = {"upkeep": "drop", "files": json.dumps(names), "lost": json.dumps(lost)}
    replace(buffer, None, transactions, names, "DELETE", operation)
    done.damaged = []
    done.dropped += names
    done.lost += sum(lost.values())
    done.shards += sorted(filter(None, lost))

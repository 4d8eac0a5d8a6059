"""Compaction: small files are merged, no row changes, and old versions stay readable until ``vacuum``.

A file is small if it has few bytes and few rows. Each group of small files becomes one file in a commit of its own, so
every round leaves fewer files, and a kill costs the work on one file. It ends when no two small files can be merged.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from agentrl.datastore.errors import StoreError, UnfinishedError
from agentrl.datastore.table.checkpoints import overdue_checkpoint
from agentrl.datastore.table.commit import commit
from agentrl.datastore.table.delta_table import schema_version
from agentrl.datastore.table.ids import bounds
from agentrl.datastore.table.maintenance import alone, live_files, read_parts
from agentrl.datastore.table.row_digests import STORED_SCHEMA
from agentrl.datastore.table.writer import FILE_BYTES, FILE_ROWS, Action, FileWriter, removal
from agentrl.schemas.trajectory import TRAJECTORY_VERSION

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from agentrl.datastore.buffer import TrajectoryBuffer

GOAL_BYTES = 512 * 2**20
"""A group is complete with so many stored bytes, or :data:`FILE_ROWS`; a file with less than half of both is small.
Each file costs a kilobyte of log and its share of opening the table, so a terabyte should be some thousand files. Rows
limit files of small rows, whose footers would grow to tens of megabytes, which a scan parses as a whole."""


class SourcesGoneError(StoreError):
    """Another commit removed files from the table that this one was to replace."""


def compact(buffer: "TrajectoryBuffer") -> dict[str, int]:
    """Merge small files, until no two are left. Gives the number of files before and after, and the version.

    Appends may go on meanwhile. Their files are left to the next compaction, so that this one ends. A
    second compaction waits for the first one, and finds nothing left to do. Raises UnfinishedError if files were merged
    and an overdue checkpoint of the log cannot be written.
    """
    before = len(live_files(buffer.table()))
    with alone(buffer):
        buffer.committed.ensure()
        own_files = set(live_files(buffer.table()))
        while groups := _groups(buffer.table(), own_files):
            try:
                own_files.add(_merge(buffer, groups[0]))
            except SourcesGoneError:
                continue  # by an upkeep that ran in spite of the lock; start again with the files that are left
        table = buffer.table()
        after, version = len(live_files(table)), table.version()
        if why := overdue_checkpoint(buffer.committed):
            raise UnfinishedError(
                f"{before} files are {after} now, in version {version}, but a checkpoint of the log could not be "
                f"written, so that the table opens more slowly: {why}; mend that and compact again"
            )
        return {"files_before": before, "files_after": after, "version": version}


def _groups(table: "DeltaTable", among: set[str]) -> list[list[str]]:
    """Small ones of these files, by their least id, that are to become one file each."""
    files = live_files(table)
    least = {name: low for name, (low, _) in bounds(table).items()}
    small = [
        name
        for name, (rows, size) in files.items()
        if name in among and rows < FILE_ROWS // 2 and size < GOAL_BYTES // 2
    ]
    groups: list[list[str]] = []
    rows = size = 0
    for name in sorted(small, key=lambda name: (least[name], name)):
        if not groups or rows >= FILE_ROWS or size >= GOAL_BYTES:
            groups.append([])
            rows = size = 0
        groups[-1].append(name)
        rows, size = rows + files[name][0], size + files[name][1]
    return [group for group in groups if len(group) > 1]


def _merge(buffer: "TrajectoryBuffer", group: list[str]) -> str:
    """Give the name of the file that now stands for the group."""
    with FileWriter(buffer.storage, data_change=False) as files:
        add = files.write_one(_sorted(buffer, group))
        replace(buffer, files, [add], group, "OPTIMIZE", {"upkeep": "compact"})
        return files.names[0]


def replace(
    buffer: "TrajectoryBuffer",
    files: FileWriter | None,
    actions: Sequence[Action],
    gone: Sequence[str],
    operation: str,
    info: dict[str, str],
) -> int:
    """Commit ``actions`` and remove the files ``gone``, if each of them is live in the version that the commit
    follows."""

    def build(table: "DeltaTable") -> Sequence[Action]:
        live = live_files(table)
        if missing := [name for name in gone if name not in live]:
            raise SourcesGoneError(f"{missing[0]} left the table meanwhile; nothing was changed, so compact again")
        if schema_version(table) != TRAJECTORY_VERSION and not any("metaData" in action for action in actions):
            raise StoreError("the table's schema changed meanwhile; the table was left as it is, so compact again")
        return [*actions, *(removal(name, live[name][1]) for name in gone)]

    return commit(buffer.committed, files, build, operation, info)


def _sorted(buffer: "TrajectoryBuffer", names: list[str]) -> Iterator[pa.Table]:
    """Rows of some files, a bounded number of bytes at a time, each stretch sorted by id."""
    held: list[pa.Table] = []
    size = 0
    for name in names:
        for part in read_parts(buffer, name):
            held.append(part.cast(STORED_SCHEMA))
            size += part.nbytes
            if size >= FILE_BYTES:
                yield pa.concat_tables(held).sort_by("trajectory_id")
                held, size = [], 0
    if held:
        yield pa.concat_tables(held).sort_by("trajectory_id")

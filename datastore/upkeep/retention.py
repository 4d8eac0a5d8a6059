"""Vacuum: removing files that nobody can need any more.

The order of reading makes it safe beside writers: first the list of files, then the marks of writers, and the log last.
If a file is in the list and is still needed, its writer has a mark, or the log names the file.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.survey import survey
from agentrl.datastore.artifacts.unfinished import leftovers, remove
from agentrl.datastore.curation.kept import evidence_of_others
from agentrl.datastore.errors import StoreError
from agentrl.datastore.read.scalar_cache import ScalarCopies
from agentrl.datastore.storage.delta_paths import FOLDER
from agentrl.datastore.table import delta_log as log
from agentrl.datastore.table import routes
from agentrl.datastore.table.commit import commit
from agentrl.datastore.table.maintenance import alone
from agentrl.datastore.table.open_writers import FOLDER as MARKS
from agentrl.datastore.table.open_writers import Mark, clock, death, key_of, marks, writer_of

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

DEFAULT_RETENTION_HOURS = 168
MAX_RETENTION_HOURS = 24 * 36500
GRACE = timedelta(hours=1)
"""Least age of a file that is in no commit and does not carry a writer of ours in its name: another program may be
about to commit it."""


def vacuum(
    buffer: "TrajectoryBuffer", *, retention_hours: float = DEFAULT_RETENTION_HOURS, dry_run: bool = True
) -> list[str]:
    """Remove files that no kept version needs, and say which.

    Kept are: all files of the newest version, of each version that a manifest names as its ``buffer_version``, and of
    each version younger than the retention; all files of a living writer, however old. A file that no commit names and
    that nobody will commit (:func:`is_orphan`) goes if it is older than the retention. Leftovers of dead writers
    (temporary files, rows on their way to quarantine) are removed too, and of files that are gone this machine's copies
    of columns and evidence of curations. Returns the names without these; with ``dry_run`` nothing is removed.
    Routes that no run has trained on within the retention go too, by name.
    """
    if not retention_hours >= 0:
        raise StoreError(
            f"retention_hours {retention_hours} is negative; give 0 or more, where 0 keeps only what artifacts need"
        )
    retention = timedelta(hours=min(retention_hours, MAX_RETENTION_HOURS))
    buffer.table()  # raises if there is none, before a lock or a mark is written
    with alone(buffer), clock(buffer.storage) as now:
        stored = dict(stored_files(buffer))
        living, dead = writers(buffer, now)
        named = {artifact.buffer_version for artifact in survey(Catalog(buffer.store)).artifacts.values()}
        pinned = {version for version in named if version is not None}
        if dead and not dry_run:
            _declare_dead(buffer, dead)
        buffer.table()  # mends a torn log
        commits = log.read(buffer.storage)
        if commits[0].version > 0:
            raise StoreError(
                f"the log of {buffer.uri} begins with commit {commits[0].version}: the commits before it are gone, so "
                "which files old versions need is unknown; nothing was removed. Restore them from a backup"
            )
        lives = log.lives(commits)
        wanted = _wanted(commits, pinned, now - retention if retention else None)

        def dies(name: str, modified: datetime) -> bool:
            if name in lives:
                return not any(_held(stretch, wanted) for stretch in lives[name])
            return is_orphan(name, now - modified, living) and now - modified >= retention

        gone = {f"{FOLDER}/{name}": name for name, modified in sorted(stored.items()) if dies(name, modified)}
        spent, expired = _spent(buffer), list(routes.left_over(buffer.storage, now, retention))
        if not dry_run:
            for key in [*gone, *expired]:
                buffer.storage.delete(key)
            left = stored.keys() - set(gone.values())
            remove([*spent, *ScalarCopies(buffer.storage).of_others(left), *evidence_of_others(buffer.storage, left)])
        return [*gone.values(), *expired, *map(str, spent)]


def stored_files(buffer: "TrajectoryBuffer") -> Iterator[tuple[str, datetime]]:
    """Data files that lie in the table's folder, and when they were written."""
    for key, modified in buffer.storage.listing(FOLDER):
        name = key.removeprefix(f"{FOLDER}/")
        if not name.startswith("_delta_log/") and name.endswith(".parquet"):
            yield name, modified


def _spent(buffer: "TrajectoryBuffer") -> list[Path]:
    """Temporary files of dead writers on this machine: of the table, its log and marks, and of quarantine."""
    folders = (FOLDER, "_delta_log", MARKS)
    return [
        path
        for path in leftovers(buffer.storage, artifacts=())
        if path.parent.name in folders or path.name.startswith("quarantine-")
    ]


def is_orphan(name: str, age: timedelta, living: set[str]) -> bool:
    """Whether nobody will commit this file, which no commit names. ``living``: ids of the writers that live, read after
    the file was seen and before the log was."""
    writer = writer_of(name)
    return age > GRACE if writer is None else writer not in living


def writers(buffer: "TrajectoryBuffer", now: datetime) -> tuple[set[str], list[Mark]]:
    """Ids of the writers that live, and the marks of those that are dead."""
    marks_present = marks(buffer.storage)
    dead = [mark for mark in marks_present if not mark.alive(buffer.storage.working_folder(), now)]
    return {mark.writer for mark in marks_present} - {mark.writer for mark in dead}, dead


def _declare_dead(buffer: "TrajectoryBuffer", dead: list[Mark]) -> None:
    """Commit that these writers are dead. If one of them goes on after all, its commit is refused."""
    deaths = [{"txn": {"appId": death(mark.writer), "version": 0}} for mark in dead]
    commit(buffer.committed, None, lambda _: deaths, "WRITE", {"upkeep": f"declare {len(dead)} writers dead"})
    for mark in dead:
        buffer.storage.delete(key_of(mark.writer))


def _wanted(commits: list[log.Commit], pinned: set[int], limit: datetime | None) -> list[int]:
    """Versions to keep whole. One was the newest until the commit after it; a commit without a time counts as young."""
    wanted = {commits[-1].version, *pinned}
    if limit is not None:
        for commit, following in pairwise(commits):
            if following.time is None or following.time >= limit:
                wanted.add(commit.version)
    return sorted(wanted)


def _held(stretch: tuple[int, int | None], wanted: list[int]) -> bool:
    """Whether one of the sorted versions lies in the range."""
    from bisect import bisect_left

    first, end = stretch
    position = bisect_left(wanted, first)
    return position < len(wanted) and (end is None or wanted[position] < end)

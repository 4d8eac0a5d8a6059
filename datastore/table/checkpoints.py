"""Checkpoints of the log: each sums up all commits before it in one file, so that a table opens without reading them.

One is written when the log has grown enough since the last one, by bytes. All commits are kept, so checkpoints only
save time, and old ones are deleted. An older version is opened from the commits up to it.
"""

import json
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from agentrl.datastore.errors import LockTimeoutError, one_line
from agentrl.datastore.storage.lease import hold
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage, sync
from agentrl.datastore.table.delta_log import LOG, commit_key

if TYPE_CHECKING:
    from agentrl.datastore.table.delta_table import BufferTable

LEAST_BYTES = 2**20
"""Bytes of log that make a checkpoint due, however small the table is. A commit of one file has about 2 KB."""
SHARE = 8
"""The log must also have grown by this share (1/8) of the last checkpoint. So all that is ever written as checkpoints
is about nine times the log, and what is read as commits to open a table is little beside its checkpoint."""
BLOCK_BYTES = 4096
"""A commit counts as at least a block of a disk, since to open a file costs as much as to read one."""
HINT = f"{LOG}/_last_checkpoint"

_CHECKPOINT = re.compile(rf"{LOG}/(\d{{20}})\.checkpoint\..*parquet")
_LOCK = "locks/checkpoint-trajectories.lock"
_REQUESTS = 16  # at once, on S3


class Tail(NamedTuple):
    """The commits after a checkpoint, as far as they were counted."""

    checkpoint: int
    """Version of the checkpoint; -1 if there is none."""
    checkpoint_bytes: int
    last: int
    """The last commit that was counted."""
    size: int

    @property
    def due(self) -> bool:
        return self.size >= max(LEAST_BYTES, self.checkpoint_bytes // SHARE)


def committed(to: "BufferTable", version: int, size: int) -> None:
    """Say that this process committed ``version``, of ``size`` bytes. Writes a checkpoint if one is due. Without it
    everything works, but slower, so an error is only a warning, and the next try comes after as much log again."""
    try:
        if to.tail is not None and to.tail.last == version - 1:
            to.tail = _counted(to.tail, {version: size})
        else:
            to.tail = _until(to, to.tail or _since_hint(to.storage), version)
        if to.tail.due:
            _write_if_due(to, version)
    except Exception as error:
        if to.tail is not None:
            to.tail = to.tail._replace(size=0)
        warnings.warn(f"no checkpoint of the log of {to.uri} could be written: {one_line(error)}", stacklevel=3)


def overdue_checkpoint(to: "BufferTable") -> str:
    """Write a checkpoint, if that of an earlier commit could not be written, and delete old ones. Gives the reason if
    this one cannot be written either; empty if none is overdue any more."""
    try:
        _write_if_due(to, to.open().version())
        _delete_old(to.storage)
    except Exception as error:
        return one_line(error)
    return ""


def _write_if_due(to: "BufferTable", version: int) -> None:
    """Write a checkpoint, if none of another process made it needless. If another one is just being written, that is
    left to its process."""
    to.tail = _until(to, _since_hint(to.storage), version)
    if not to.tail.due:
        return
    try:
        with hold(to.storage, _LOCK, timeout=0):
            to.open().create_checkpoint()
            if isinstance(to.storage, LocalStorage):
                log = to.storage.root / LOG
                sync(to.storage.root / max(_checkpoints(to.storage)))
                sync(log)
                sync(to.storage.root / HINT)  # the hint after the file that it names
                sync(log)
            _delete_old(to.storage)
    except LockTimeoutError:
        return
    to.tail = _until(to, _since_hint(to.storage), version)


def _delete_old(storage: LocalStorage | S3Storage) -> None:
    """Delete all checkpoints but that which the hint names, the one before it, and later ones. The one before is for
    readers that read the hint just before it changed."""
    named = _since_hint(storage).checkpoint
    older = sorted(key for key in _checkpoints(storage) if _version(key) < named)
    kept = _version(older[-1]) if older else -1
    for key in older:
        if _version(key) < kept:
            storage.delete(key)


def _checkpoints(storage: LocalStorage | S3Storage) -> list[str]:
    return [key for key in storage.keys(LOG) if _CHECKPOINT.fullmatch(key)]


def _version(key: str) -> int:
    match = _CHECKPOINT.fullmatch(key)
    assert match is not None
    return int(match[1])


def _since_hint(storage: LocalStorage | S3Storage) -> Tail:
    """The checkpoint that readers begin with, and no commit after it counted yet."""
    try:
        hint = json.loads(storage.read(HINT) or b"")
        return Tail(int(hint["version"]), int(hint.get("sizeInBytes") or 0), int(hint["version"]), 0)
    except (ValueError, TypeError, KeyError):
        return Tail(-1, 0, -1, 0)


def _until(to: "BufferTable", tail: Tail, version: int) -> Tail:
    """The same with all commits up to ``version`` counted."""
    missing = range(tail.last + 1, version + 1)

    def size(number: int) -> int:
        return to.storage.size(commit_key(number)) or 0

    if isinstance(to.storage, LocalStorage) or len(missing) < 2:
        return _counted(tail, {number: size(number) for number in missing})
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return _counted(tail, dict(zip(missing, pool.map(size, missing), strict=True)))


def _counted(tail: Tail, sizes: dict[int, int]) -> Tail:
    grown = sum(max(size, BLOCK_BYTES) for size in sizes.values())
    return tail._replace(last=max(tail.last, *sizes, -1), size=tail.size + grown)

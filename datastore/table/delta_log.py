"""The Delta log of the buffer's table: reading its commits, and setting a torn commit aside.

The log is kept for ever, so it knows every file that was ever in the table and which commit took it out.
"""

import json
import re
import uuid
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from agentrl.datastore.errors import CorruptError
from agentrl.datastore.storage.delta_paths import FOLDER
from agentrl.datastore.storage.lease import hold
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

LOG = f"{FOLDER}/_delta_log"
ASIDE = "aside"
"""Folder of the store for torn files. Nothing in it is ever read as part of the table."""

_COMMIT = re.compile(rf"{LOG}/(\d{{20}})\.json")
_REQUESTS = 16  # at once, on S3


class TornError(ValueError):
    """A commit file is not whole."""


@dataclass(frozen=True)
class Commit:
    """What one commit did: ``adds`` has the add actions by file name, ``info`` what its writer said about it."""

    version: int
    adds: dict[str, dict[str, Any]]
    removes: frozenset[str]
    transactions: dict[str, int]
    info: dict[str, Any]

    @property
    def time(self) -> datetime | None:
        """By its writer's clock. None if the commit carries no valid time."""
        try:
            return datetime.fromtimestamp(self.info["timestamp"] / 1000, UTC)
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            return None


def commit_key(version: int) -> str:
    return f"{LOG}/{version:020d}.json"


def parse(version: int, data: bytes) -> Commit:
    """A commit from its file. Raises TornError if the file is empty, cut short or filled with something else."""
    try:
        actions = [json.loads(line) for line in data.splitlines()]
        info = next(action["commitInfo"] for action in actions if "commitInfo" in action)
        adds = {unquote(action["add"]["path"]): action["add"] for action in actions if "add" in action}
        removes = frozenset(unquote(action["remove"]["path"]) for action in actions if "remove" in action)
        transactions = {action["txn"]["appId"]: int(action["txn"]["version"]) for action in actions if "txn" in action}
    except (StopIteration, ValueError, TypeError, KeyError) as error:
        raise TornError(f"{len(data)} bytes, {str(error) or 'without commitInfo'}") from None
    if "shard" in info and not transactions:
        raise TornError("the end of the append is missing")
    return Commit(version, adds, removes, transactions, info)


def versions(storage: LocalStorage | S3Storage) -> list[int]:
    """Numbers of the commit files, in order."""
    matches = (_COMMIT.fullmatch(key) for key in storage.keys(LOG))
    return sorted(int(match[1]) for match in matches if match)


def read(storage: LocalStorage | S3Storage, first: int = 0, last: int | None = None) -> list[Commit]:
    """The commits ``first`` to ``last``, oldest first; each file is read once. Raises if one cannot be read."""
    wanted = [version for version in versions(storage) if version >= first and (last is None or version <= last)]
    return list(_read(storage, wanted))


def newest(storage: LocalStorage | S3Storage, limit: int) -> list[Commit]:
    """The newest commits, oldest of them first."""
    return list(_read(storage, versions(storage)[-limit:]))


def _read(storage: LocalStorage | S3Storage, wanted: list[int]) -> Iterable[Commit]:
    def one(version: int) -> Commit:
        try:
            return parse(version, storage.read(commit_key(version)) or b"")
        except TornError as error:
            raise CorruptError(f"commit {commit_key(version)}", str(error)) from None

    if isinstance(storage, LocalStorage) or len(wanted) < 2:
        return map(one, wanted)
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(one, wanted))


def lives(commits: Iterable[Commit]) -> dict[str, list[tuple[int, int | None]]]:
    """For each file the ranges of versions that hold it, as (first version, first later version without it, or
    None)."""
    stretches_of: dict[str, list[tuple[int, int | None]]] = {}
    for commit in commits:
        for name in commit.removes:
            if name in stretches_of and stretches_of[name][-1][1] is None:
                stretches_of[name][-1] = (stretches_of[name][-1][0], commit.version)
        for name in commit.adds:
            stretches = stretches_of.setdefault(name, [])
            if not stretches or stretches[-1][1] is not None:
                stretches.append((commit.version, None))
    return stretches_of


# torn files


def is_torn(storage: LocalStorage, version: int) -> bool:
    """Whether the file of this commit, which exists, is not whole."""
    try:
        parse(version, storage.read(commit_key(version)) or b"")
    except TornError:
        return True
    return False


def mend(storage: LocalStorage | S3Storage) -> list[str]:
    """Set aside a newest commit and checkpoints that a power loss left empty or torn, and say so. Gives their names.

    What is set aside was never acknowledged, because an append returns only after its commit and all earlier ones are
    on the disk. A torn commit that is not the newest stays, because later commits may depend on its rows.
    """
    with hold(storage, "locks/mend-trajectories.lock"):
        torn = _torn_checkpoints(storage)
        if (known := versions(storage)) and isinstance(storage, LocalStorage) and is_torn(storage, known[-1]):
            torn.append(commit_key(known[-1]))
        for key in torn:
            target = f"{ASIDE}/{key.rpartition('/')[2]}.{uuid.uuid4().hex[:8]}"
            storage.write(target, storage.read(key) or b"")
            storage.delete(key)
            warnings.warn(
                f"{storage.uri}/{key} is torn, as a power loss leaves it; it was moved to {target}, and the table "
                "goes on from what came before; run `agentrl buffer check` to see what was lost",
                stacklevel=3,
            )
    return torn


def _torn_checkpoints(storage: LocalStorage | S3Storage) -> list[str]:
    """Checkpoints only save time, since all commits are kept, so any of them may go."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    torn = []
    for key in storage.keys(LOG):
        if key.endswith(".checkpoint.parquet"):
            try:
                pq.read_table(BytesIO(storage.read(key) or b""))
            except (pa.ArrowException, OSError):
                torn.append(key)
    hint = f"{LOG}/_last_checkpoint"
    if (data := storage.read(hint)) is not None:
        try:
            names = f"{int(json.loads(data)['version']):020d}.checkpoint"
        except (ValueError, TypeError, KeyError):
            torn.append(hint)
        else:
            if any(names in key for key in torn) or not any(names in key for key in storage.keys(LOG)):
                torn.append(hint)
    return torn

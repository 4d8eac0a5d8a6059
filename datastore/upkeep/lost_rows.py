"""Rows that are lost for good. The log has a record of them, and `check` names them until somebody accepts the loss."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agentrl.datastore.table.append import is_appended
from agentrl.datastore.table.delta_log import ASIDE, Commit, read

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

FOLDER = "losses"
_TORN = re.compile(rf"{ASIDE}/(\d{{20}})\.json\..*")


@dataclass(frozen=True)
class Loss:
    """``rows`` is None if the number is not known; ``accepted``: somebody has confirmed that they know of it."""

    name: str
    what: str
    rows: int | None
    accepted: bool


def losses(buffer: "TrajectoryBuffer", commits: Sequence[Commit] | None = None) -> list[Loss]:
    """What was lost and not made again. A dropped shard that was appended again is no loss any more."""
    table = buffer.table()
    accepted = {key.rpartition("/")[2].removesuffix(".json") for key in buffer.storage.keys(FOLDER)}
    known = read(buffer.storage) if commits is None else commits
    rows_of = {name: _rows(add) for commit in known for name, add in commit.adds.items()}
    losses_seen = []
    for commit in known:
        if commit.info.get("upkeep") != "drop":
            continue
        by_shard = _by_shard(commit, rows_of)
        lost = {
            shard: rows
            for shard, rows in by_shard.items()
            if not shard or not is_appended(table.transaction_version(shard))
        }
        if lost:
            name = f"version-{commit.version}"
            when = f"{commit.time:%Y-%m-%d}" if commit.time else "once"
            shards = f", of the shards {', '.join(filter(None, lost))}" if any(lost) else ""
            what = f"{sum(lost.values())} rows dropped by version {commit.version} ({when}){shards}"
            losses_seen.append(Loss(name, what, sum(lost.values()), name in accepted))
    for key in sorted(buffer.storage.keys(ASIDE)):
        if match := _TORN.fullmatch(key):
            name = key.rpartition("/")[2]
            what = f"commit {int(match[1])}, found torn and set aside as {key}, with what it held"
            losses_seen.append(Loss(name, what, None, name in accepted))
    return losses_seen


def _by_shard(commit: Commit, rows_of: dict[str, int]) -> dict[str, int]:
    """Rows lost by shard; "" for those that belong to none that can be appended again."""
    if "lost" in commit.info:
        return {str(shard): int(rows) for shard, rows in json.loads(commit.info["lost"]).items()}
    rows = sum(rows_of.get(name, 0) for name in commit.removes)  # as earlier versions dropped
    return {next(iter(commit.transactions), ""): rows}


def _rows(add: dict[str, Any]) -> int:
    return int(json.loads(add.get("stats") or "{}").get("numRecords") or 0)


def accept_losses(buffer: "TrajectoryBuffer") -> list[Loss]:
    """Accept all losses. They stay on record and fail no later check. Returns those accepted now."""
    new = [loss for loss in losses(buffer) if not loss.accepted]
    for loss in new:
        body = {"what": loss.what, "rows": loss.rows, "accepted_at": datetime.now(UTC).isoformat()}
        buffer.storage.write(f"{FOLDER}/{loss.name}.json", json.dumps(body).encode())
    return new

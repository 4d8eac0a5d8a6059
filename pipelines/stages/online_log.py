"""The log of an online run: the buffer has its rollouts, and the stage's scratch folder what it trains on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.table.routes import RouteTable, routes_table, turns_of
from agentrl.pipelines.parts.row_files import read_rows, write_rows
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.checkpoints import BATCHES, DEV, number_of
from agentrl.rollouts.segments import episode_of
from agentrl.schemas.trajectory import Trajectory, row_fingerprint

if TYPE_CHECKING:
    from agentrl.online.recorded import Recorded


class OnlineLog:
    """See :class:`agentrl.online.recorded.Log`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.batches, self.kept = context.scratch / BATCHES, context.scratch / "under_way"
        for folder in (self.batches, self.kept):
            folder.mkdir(exist_ok=True)
        self._stored: dict[str, list[str]] = {}
        for name in context.row_ids():
            if number_of(name) < DEV:
                self._stored.setdefault(episode_of(name), []).append(name)
        for left in self.kept.glob("*.arrow"):
            if left.stem in self._stored:
                left.unlink()
        self._kept = {path.stem for path in self.kept.glob("*.arrow")}
        self._routes: dict[str, list[np.ndarray]] = {}  # of rows that are not appended yet

    def stored(self, names: Sequence[str]) -> dict[str, list[Trajectory]]:
        wanted = [name for name in names if name in self._stored]
        ids = [row_id for name in wanted for row_id in self._stored[name]]
        rows = dict(zip(ids, self.context.buffer.get_many(ids), strict=True)) if ids else {}
        by_name = {name: [rows[row_id] for row_id in self._stored[name]] for name in wanted}
        return {name: sorted(each, key=lambda row: row.segment) for name, each in by_name.items()}

    def under_way(self, names: Sequence[str]) -> dict[str, list[Trajectory]]:
        for name in names:
            if name in self._kept and (beside := self._path(name).with_suffix(".routes")).exists():
                self._routes |= turns_of(pq.read_table(beside))
        return {name: read_rows(self._path(name)) for name in names if name in self._kept}

    def keep(self, rows: Sequence[Trajectory]) -> None:
        path = self._path(rows[0].episode_id)
        if routes := self._routes_of(rows):
            pq.write_table(routes_table(routes), path.with_suffix(".routes"))
        write_rows(path, rows)

    def keep_routes(self, name: str, turns: list[np.ndarray]) -> None:
        """Keep the routes of a row until it is appended, unless it belongs to an evaluation."""
        if turns and number_of(name) < DEV:
            self._routes[name] = turns

    def _routes_of(self, rows: Sequence[Trajectory]) -> dict[str, list[np.ndarray]]:
        known = self._routes
        return {row.trajectory_id: known[row.trajectory_id] for row in rows if row.trajectory_id in known}

    def routes(self, ids: Sequence[str]) -> dict[str, bytes]:
        return self._table.read(ids)

    def expire(self, iteration: int, version: int) -> None:
        """Remove routes that nothing is trained on with any more: those of iterations before this one, and those of
        rows of policies older than ``version``."""
        from agentrl.online.recorded import drop_routes

        drop_routes(self.batches, iteration)
        self._table.expire(version)

    def forget_routes(self) -> None:
        """Remove all routes, since the run is over."""
        self._table.forget()

    @property
    def _table(self) -> RouteTable:
        fingerprint = row_fingerprint(self.context.fingerprint, self.context.made_again)
        return RouteTable(self.context.buffer.storage, fingerprint)

    def _path(self, name: str) -> Path:
        return self.kept / f"{name}.arrow"

    def append(self, rows: Sequence[Trajectory]) -> None:
        shard = min(number_of(row.trajectory_id) for row in rows)
        routes = self._routes_of(rows)
        self._table.append(shard, max(row.policy_version for row in rows), routes)  # first, since rows count as done
        self.context.append(rows, shard=shard)
        for name in routes:
            del self._routes[name]
        for path in {self._path(row.episode_id) for row in rows}:
            path.unlink(missing_ok=True)
            path.with_suffix(".routes").unlink(missing_ok=True)

    def recorded(self, iteration: int) -> "Recorded | None":
        from agentrl.online.recorded import Recorded, file_of

        path = file_of(self.batches, iteration)
        return Recorded.read(path) if path.exists() else None

    def record_tokens(self, iteration: int, seen: pa.Table) -> None:
        from agentrl.online.recorded import file_of, write_tokens

        write_tokens(file_of(self.batches, iteration), seen)

    def record(self, made: "Recorded") -> None:
        from agentrl.online.recorded import file_of

        made.write(file_of(self.batches, made.iteration))

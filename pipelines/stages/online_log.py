"""The log of an online run: the buffer has its rollouts, and the stage's scratch folder what it trains on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from agentrl.pipelines.parts.row_files import read_rows, write_rows
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.checkpoints import BATCHES, DEV, number_of
from agentrl.rollouts.segments import episode_of
from agentrl.schemas.trajectory import Trajectory

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

    def stored(self, names: Sequence[str]) -> dict[str, list[Trajectory]]:
        wanted = [name for name in names if name in self._stored]
        ids = [row_id for name in wanted for row_id in self._stored[name]]
        rows = dict(zip(ids, self.context.buffer.get_many(ids), strict=True)) if ids else {}
        by_name = {name: [rows[row_id] for row_id in self._stored[name]] for name in wanted}
        return {name: sorted(each, key=lambda row: row.segment) for name, each in by_name.items()}

    def under_way(self, names: Sequence[str]) -> dict[str, list[Trajectory]]:
        return {name: read_rows(self._path(name)) for name in names if name in self._kept}

    def keep(self, rows: Sequence[Trajectory]) -> None:
        write_rows(self._path(rows[0].episode_id), rows)

    def _path(self, name: str) -> Path:
        return self.kept / f"{name}.arrow"

    def append(self, rows: Sequence[Trajectory]) -> None:
        self.context.append(rows, shard=min(number_of(row.trajectory_id) for row in rows))
        for name in {row.episode_id for row in rows}:
            self._path(name).unlink(missing_ok=True)

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

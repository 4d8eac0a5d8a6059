"""What an iteration trains on, recorded before its steps: after a kill they are taken again from the record."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.schemas.training import ROUTES
from agentrl.schemas.trajectory import Trajectory
from agentrl.training.rows import TrainingRows, step_table

_KEY = b"agentrl.iteration"
_TARGETS, _ROUTES = ".targets", ".routes"
"""Endings of files beside that of an iteration."""


@dataclass(frozen=True)
class Recorded:
    """``parts`` are the rows of each optimiser step by its number, none if the update is skipped; ``targets`` those of
    the critic, ``lr_scale`` what the guard of off-policy training scales the learning rate by.

    ``metrics`` are those of the rollouts, ``records`` say of each: iteration, trajectory_id, advantage, trained.
    ``tickets`` has a row for each ticket of the batch (see :mod:`agentrl.online.coverage`), and ``state`` is that of
    the scheduler after the batch was taken.
    """

    iteration: int
    parts: list[tuple[int, TrainingRows]]
    targets: TrainingRows | None
    lr_scale: float
    metrics: dict[str, float]
    records: list[dict[str, Any]]
    tickets: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write a Parquet file of the rows, with the rest in its metadata. It is there whole or not at all. Targets and
        routes go into files beside it, first."""
        if self.targets is not None:
            _in_place(path.with_suffix(_TARGETS), step_table(self.iteration, [(0, self.targets)]))
        names = ("iteration", "lr_scale", "metrics", "records", "tickets", "state")
        about = json.dumps({name: getattr(self, name) for name in names})
        table = step_table(self.iteration, self.parts)
        if ROUTES in table.column_names:
            _in_place(path.with_suffix(_ROUTES), table.select([ROUTES]))
            table = table.drop_columns([ROUTES])
        _in_place(path, table.replace_schema_metadata({_KEY: about.encode()}))

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        table, routes = pq.read_table(path), path.with_suffix(_ROUTES)
        if routes.exists():
            table = table.append_column(ROUTES, pq.read_table(routes)[ROUTES])
        parts = parts_of(table)
        beside = path.with_suffix(_TARGETS)
        targets = TrainingRows.of_table(pq.read_table(beside)) if beside.exists() else None
        return cls(parts=parts, targets=targets, **json.loads(table.schema.metadata[_KEY]))


def files_of(path: Path) -> list[Path]:
    """The files of a recorded iteration that are read with it."""
    return [file for file in (path, *map(path.with_suffix, (_TARGETS, _ROUTES))) if file.exists()]


def drop_routes(folder: Path, iteration: int) -> None:
    """Remove the routes of iterations before this one, which are not trained on again."""
    for path in folder.glob(f"*{_ROUTES}"):
        if int(path.stem) < iteration:
            path.unlink()


def write_tokens(path: Path, seen: pa.Table) -> None:
    """Write what the update of a recorded iteration saw of its tokens beside it."""
    _in_place(path.with_suffix(".tokens"), seen)


def with_tokens(path: Path) -> pa.Table:
    """The rows of a recorded iteration, with what its update saw of their tokens, if that was written."""
    table, beside = pq.read_table(path).replace_schema_metadata(None), path.with_suffix(".tokens")
    if beside.exists():
        seen = pq.read_table(beside)
        for name in seen.column_names:
            table = table.append_column(name, seen[name])
    return table


def file_of(folder: Path, iteration: int) -> Path:
    """Where an iteration is recorded."""
    return folder / f"{iteration:06d}.parquet"


def parts_of(table: pa.Table) -> list[tuple[int, TrainingRows]]:
    """The rows of each optimiser step by its number; see :func:`agentrl.training.rows.step_table`."""
    steps = table["step"].to_numpy()
    return [
        (step, TrainingRows.of_table(table.filter(pa.array(steps == step)))) for step in dict.fromkeys(steps.tolist())
    ]


def _in_place(path: Path, table: Any) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


class Log(Protocol):
    """Where an online run writes what it made, and finds it again after a kill. Names are those of episodes, whose rows
    are one, or its segments in order."""

    def stored(self, names: Sequence[str]) -> dict[str, list[Trajectory]]:
        """The rows of those of these episodes that were appended before the run was killed, by name."""
        ...

    def under_way(self, names: Sequence[str]) -> dict[str, list[Trajectory]]:
        """The same of those that were kept before the run was killed, as they were before any reward was added."""
        ...

    def keep(self, rows: Sequence[Trajectory]) -> None:
        """Keep the rows of an episode until its group is appended. Called in threads."""
        ...

    def append(self, rows: Sequence[Trajectory]) -> None:
        """Append the rows of whole groups that are not stored."""
        ...

    def routes(self, ids: Sequence[str]) -> dict[str, bytes]:
        """The routes of rows that were appended, by their ids; those without any are left out."""
        ...

    def expire(self, iteration: int, version: int) -> None:
        """Remove the routes of iterations before this one, and of rows of policies older than ``version``: a
        checkpoint was written, and nothing is trained on with them any more."""
        ...

    def recorded(self, iteration: int) -> Recorded | None:
        """What was recorded of an iteration before the run was killed."""
        ...

    def record(self, made: Recorded) -> None:
        """Record an iteration. From then on its rollouts are trained on."""
        ...

    def record_tokens(self, iteration: int, seen: pa.Table) -> None:
        """Record what the update of an iteration saw of its tokens."""
        ...

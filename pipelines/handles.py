"""What flows along the edges of a pipeline: handles on data at rest. A stage receives handles, reads what it needs,
and returns new ones; the annotation of an input or output *is* its type in the pipeline file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.pipelines import displays
from agentrl.schemas.arrow import from_table
from agentrl.schemas.manifest import Kind
from agentrl.schemas.note import Note
from agentrl.schemas.pair import Pair
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, RewardComponent, Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

NOTEBOOK_ROWS = 20
"""Rows of a selection that a notebook shows."""

SELECTION_SCHEMA = pa.schema(
    [pa.field("trajectory_id", pa.string(), nullable=False), pa.field("weight", pa.float32(), nullable=False)]
)


@dataclass(frozen=True)
class Handle:
    """Data of one output. ``path`` is local; ``stage``, ``output`` and ``fingerprint`` say where it came from."""

    kind: ClassVar[Kind]
    path: Path
    stage: str
    output: str
    fingerprint: str


@dataclass(frozen=True)
class Table(Handle):
    """A Parquet file of any schema: metrics, evaluations."""

    kind: ClassVar[Kind] = Kind.TABLE

    def table(self) -> pa.Table:
        return pq.read_table(self.path)


@dataclass(frozen=True)
class Tasks(Handle):
    """A Parquet file of tasks."""

    kind: ClassVar[Kind] = Kind.TASKS

    def read(self) -> list[Task]:
        return list(from_table(Task, pq.read_table(self.path)))


@dataclass(frozen=True)
class Pairs(Handle):
    """A Parquet file of preference pairs."""

    kind: ClassVar[Kind] = Kind.PAIRS

    def read(self) -> list[Pair]:
        return list(from_table(Pair, pq.read_table(self.path)))


@dataclass(frozen=True)
class Scores(Handle):
    """A Parquet file of scores that scorers gave to trajectories, see :mod:`agentrl.schemas.score`."""

    kind: ClassVar[Kind] = Kind.SCORES

    def table(self) -> pa.Table:
        return pq.read_table(self.path)


@dataclass(frozen=True)
class Steps(Handle):
    """A Parquet file of what the turns of trajectories are worth, see :mod:`agentrl.schemas.step_value`."""

    kind: ClassVar[Kind] = Kind.STEPS

    def table(self) -> pa.Table:
        return pq.read_table(self.path)

    def read(self) -> list[StepValue]:
        return list(from_table(StepValue, self.table()))


@dataclass(frozen=True)
class NoteTable(Handle):
    """A Parquet file of notes."""

    kind: ClassVar[Kind] = Kind.NOTES

    def read(self) -> list[Note]:
        return list(from_table(Note, pq.read_table(self.path)))


@dataclass(frozen=True)
class Trajectories(Handle):
    """A selection of rows of the buffer: ids in order, with a weight each. The rows themselves stay in the buffer.
    ``scores``, of one scorer, take the place of their rewards."""

    kind: ClassVar[Kind] = Kind.TRAJECTORIES
    buffer: "TrajectoryBuffer"
    scores: pa.Table | None = None

    def selection(self) -> pa.Table:
        """The selection itself, with :data:`SELECTION_SCHEMA`."""
        return pq.read_table(self.path)

    def ids(self) -> list[str]:
        return self.selection()["trajectory_id"].to_pylist()

    def _repr_html_(self) -> str:
        chosen = self.selection()
        columns = ("trajectory_id", "success", "reward", "n_steps", "prompt")
        rows = self.buffer.read(chosen["trajectory_id"][:NOTEBOOK_ROWS].to_pylist(), columns).to_pylist()
        summary = f"{chosen.num_rows:,} rows, selected by {self.stage}/{self.fingerprint[:8]}"
        frame = displays.Frame()
        frame.add(f"<b>{displays.escaped(summary)}</b>")
        frame.add(displays.table(rows, columns))
        more = chosen.num_rows - len(rows)
        return frame.done(f"and {more:,} more rows" if more else "")

    def read(self) -> list[Trajectory]:
        """Whole rows, in the selection's order."""
        return self.rows(self.selection()["trajectory_id"])

    def rows(self, ids: pa.ChunkedArray) -> list[Trajectory]:
        """Whole rows, in the order asked."""
        rows = self.buffer.get_many(ids)
        if self.scores is None:
            return rows
        scores = self._scores_of(ids).to_pylist()
        return [
            row.model_copy(
                update={
                    "reward": score["reward"],
                    "success": score["success"],
                    "reward_components": [RewardComponent.model_validate(part) for part in score["components"]],
                }
            )
            for row, score in zip(rows, scores, strict=True)
        ]

    def trained_on(self) -> "Iterator[Trajectory]":
        """:meth:`read` without the rows that are tagged as not trained on, such as a judge's."""
        return (row for row in self.read() if NOT_TRAINED not in row.tags)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Only some columns of the rows, in the selection's order."""
        ids = self.selection()["trajectory_id"]
        table = self.buffer.read(ids, columns)
        if self.scores is None:
            return table
        own_scores = self._scores_of(ids)
        for name, column in _SCORED.items():
            if name in table.column_names:
                index = table.column_names.index(name)
                table = table.set_column(index, table.field(name), own_scores[column].cast(table.field(name).type))
        return table

    def _scores_of(self, ids: pa.ChunkedArray) -> pa.Table:
        assert self.scores is not None
        return self.scores.take(pc.index_in(ids, value_set=self.scores["trajectory_id"]))


_SCORED = {"reward": "reward", "success": "success", "reward_components": "components"}
"""Columns of trajectories -> those of scores."""


@dataclass(frozen=True)
class Model(Handle):
    """A model folder: config, safetensors, tokenizer with its chat template."""

    kind: ClassVar[Kind] = Kind.MODEL

    @property
    def name(self) -> str:
        """How rows of the buffer name this policy."""
        return f"{self.stage}/{self.fingerprint[:8]}"


@dataclass(frozen=True)
class RewardModel(Handle):
    """The folder of a reward model, see :mod:`agentrl.training.reward_model`. It scores, and cannot be sampled from."""

    kind: ClassVar[Kind] = Kind.REWARD_MODEL


@dataclass(frozen=True)
class Report(Handle):
    """A folder with ``report.md`` and ``report.html``."""

    kind: ClassVar[Kind] = Kind.REPORT


@dataclass(frozen=True)
class Folder(Handle):
    """A folder of anything else."""

    kind: ClassVar[Kind] = Kind.FOLDER

    def files(self) -> Iterator[Path]:
        return (path for path in sorted(self.path.rglob("*")) if path.is_file())


HANDLES: dict[Kind, type[Handle]] = {
    handle.kind: handle
    for handle in (Tasks, Trajectories, Pairs, Scores, Steps, NoteTable, Model, RewardModel, Table, Report, Folder)
}

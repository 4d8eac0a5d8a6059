"""Run one stage in a test: inputs from plain rows, outputs and metrics back, no pipeline file and no engine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines.handles import Handle, Model, NoteTable, Pairs, Scores, Steps, Table, Tasks, Trajectories
from agentrl.pipelines.stage import Context, Stage
from agentrl.schemas.arrow import to_table
from agentrl.schemas.note import Note
from agentrl.schemas.pair import Pair
from agentrl.schemas.score import SCORE_SCHEMA, TrajectoryScore
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


@dataclass(frozen=True)
class Result:
    """What a stage returned, by name of output, and the metrics that it set."""

    outputs: dict[str, Handle]
    metrics: dict[str, float | int | str | None]

    def __getitem__(self, output: str) -> Any:
        return self.outputs[output]


class Harness:
    """A store in a folder of the test's own, usually pytest's ``tmp_path``.

    harness = Harness(tmp_path)
    result = harness.run(score, {"threshold": 0.5}, trajectories=harness.trajectories(rows))
    assert result["kept"].ids() == ["a-1"]
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.seed = seed
        self.buffer = TrajectoryBuffer(folder / "store")
        self._count = 0

    def _context(self, stage: str) -> Context:
        self._count += 1
        name = f"{stage}-{self._count}"
        folder, scratch = self.folder / name / "folder", self.folder / name / "scratch"
        folder.mkdir(parents=True)
        scratch.mkdir()
        fingerprint = f"{self._count:032x}"
        return Context(
            stage=name,
            fingerprint=fingerprint,
            run_id="test",
            seed=self.seed,
            buffer=self.buffer,
            folder=folder,
            scratch=scratch,
        )

    def tasks(self, rows: Iterable[Task]) -> Tasks:
        return self._context("given").tasks(rows)

    def trajectories(self, rows: Iterable[Trajectory]) -> Trajectories:
        """Appends the rows to the buffer and selects them, in their order."""
        context, rows = self._context("given"), list(rows)
        context.append(rows)
        return context.select([row.trajectory_id for row in rows])

    def pairs(self, rows: Iterable[Pair]) -> Pairs:
        return self._context("given").pairs(rows)

    def scores(self, rows: Iterable[TrajectoryScore]) -> Scores:
        return self._context("given").scores(to_table(rows, SCORE_SCHEMA))

    def steps(self, rows: Iterable[StepValue]) -> Steps:
        return self._context("given").steps(rows)

    def notes(self, rows: Iterable[Note]) -> NoteTable:
        return self._context("given").notes(rows)

    def table(self, table: pa.Table) -> Table:
        return self._context("given").table(table)

    def model(self, write: Callable[[Path], object]) -> Model:
        """``write`` fills the folder that it is given."""
        return self._context("given").model(write)

    def run(self, stage: Stage, config: dict[str, Any] | None = None, /, **inputs: Handle | list[Any]) -> Result:
        """Run a stage. The config is validated as in a pipeline file; the inputs' kinds are checked.

        Raises pydantic's ValidationError for the config, TypeError for the inputs, and whatever the stage raises.
        """
        for name, declared in stage.inputs.items():
            given = inputs.get(name)
            if given is None and declared.required:
                raise TypeError(f"stage {stage.name} needs input {name!r} ({declared.kind})")
            for handle in given if isinstance(given, list) else [given] if given else []:
                if handle.kind is not declared.kind:
                    raise TypeError(f"input {name!r} of {stage.name} takes {declared.kind}, not {handle.kind}")
        context = self._context(stage.name)
        outputs = stage(context, stage.config.model_validate(config or {}), **inputs)
        return Result(outputs, context.metrics)

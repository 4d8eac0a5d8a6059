"""A stage: a function from typed inputs and a config to typed outputs, declared with a name and a version.

    class Scored(NamedTuple):
        kept: Trajectories
        scores: Table

    @stage("trajectories.score", version=1)
    def score(context: Context, config: ScoreConfig, trajectories: Trajectories, judge: Model | None = None) -> Scored:
        ...

The first two parameters are the context and the config (a pydantic model with ``extra="forbid"``). Every further one is
an input: its annotation is a handle of :mod:`agentrl.pipelines.handles`, ``Handle | None = None`` if it may be left
out, or ``list[Handle]`` if it takes several. The return annotation names the outputs: a NamedTuple of handles, or one
handle, whose output is then called by its kind.
"""

import inspect
import os
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AfterValidator, BaseModel, ConfigDict

from agentrl.pipelines.handles import (
    SELECTION_SCHEMA,
    Folder,
    Handle,
    Model,
    NoteTable,
    Pairs,
    Report,
    Scores,
    Steps,
    Table,
    Tasks,
    Trajectories,
)
from agentrl.pipelines.secrets import revealed
from agentrl.schemas.annotations import External as External
from agentrl.schemas.arrow import to_table
from agentrl.schemas.manifest import Kind
from agentrl.schemas.note import NOTE_SCHEMA, Note
from agentrl.schemas.pair import PAIR_SCHEMA, Pair
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.shards import ShardsNow
from agentrl.schemas.step_value import STEP_SCHEMA, StepValue
from agentrl.schemas.task import TASK_SCHEMA, Task
from agentrl.schemas.trajectory import Trajectory, row_fingerprint, trajectory_id

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.read.lookup import Ids
    from agentrl.datastore.table.ingest import OnError
    from agentrl.models.policy import Speaker


class StageConfig(BaseModel):
    """Base of every stage's config: unknown keys are errors, and what was read cannot be changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Choice:
    """Marks a config field that chooses an implementation by name: ``env: Annotated[str, Choice("environment")]``.

    The name is one of ours, or ``module:Class``. It is checked when the pipeline file is read, and the code of what is
    chosen enters the fingerprint.
    """

    kind: Literal["environment"]


_SECRET = re.compile(r"\$\{(\w+)\}")


def _check_secret(text: str) -> str:
    if not _SECRET.fullmatch(text):
        raise ValueError("write a secret as ${NAME_OF_AN_ENVIRONMENT_VARIABLE}, never as the secret itself")
    return text


Secret = Annotated[str, AfterValidator(_check_secret), "secret"]
"""A config field that holds ``${NAME}``. The value stays in the environment and is in neither fingerprint nor
manifest."""


def reveal(secret: str) -> str:
    """The value that a :data:`Secret` field stands for. Raises LookupError if the variable is not set.

    What the stage prints through Python, raises or measures shows ``***`` instead of it.
    """
    name = _check_secret(secret)[2:-1]
    if name not in os.environ:
        raise LookupError(f"environment variable {name} is not set; export it before the run")
    return revealed(os.environ[name])


class Progress(Protocol):
    """Called by a stage as it works. ``total`` is None if it is not known. Metrics are shown beside the bar."""

    def __call__(self, done: int, total: int | None = None, **metrics: float | int | str | ShardsNow) -> None: ...


def no_progress(done: int, total: int | None = None, **metrics: float | int | str | ShardsNow) -> None: ...


class Earlier(NamedTuple):
    """An artifact of the same stage that differs in one field of its config alone. ``value`` is its value of that
    field; ``open`` gives a handle on an output by its name."""

    name: str
    value: Any
    open: Callable[[str], Any]


def no_earlier(field: str) -> Sequence[Earlier]:
    return ()


@dataclass
class Context:
    """What a stage run is given besides its inputs and config.

    ``folder`` becomes the artifact when the stage returns; ``scratch`` survives a kill, so that a resumed run finds
    its checkpoints there, and is removed once the artifact is published. ``metrics`` end up in the manifest.
    ``made_again`` counts how often ``--force`` made the artifact again, each time with new rows in the buffer.
    ``chosen`` is what configs of the pipeline chose by name that this stage uses, as in ``environment lookup``; None in
    a test of one stage, where nothing is checked against it. ``pipeline`` is None there too.
    ``unlike_in`` gives the artifacts of this stage that differ from it in one field of the config alone, such as
    ``iterations``; none if the stage is forced. ``engine`` runs the shards of a stage that is divided.
    """

    stage: str
    fingerprint: str
    run_id: str
    seed: int
    buffer: "TrajectoryBuffer"
    folder: Path
    scratch: Path
    progress: Progress = no_progress
    metrics: dict[str, float | int | str | None] = field(default_factory=dict)
    made_again: int = 0
    chosen: frozenset[str] | None = None
    unlike_in: Callable[[str], Sequence[Earlier]] = no_earlier
    pipeline: str | None = None
    engine: ShardEngine = field(default_factory=ShardEngine)

    def _origin(self, output: str) -> dict[str, str]:
        return {"stage": self.stage, "output": output, "fingerprint": self.fingerprint}

    def _write(self, name: str, table: "pa.Table | pa.RecordBatchReader") -> Path:
        path = self.folder / f"{name}.parquet"
        batches = [table] if isinstance(table, pa.Table) else (pa.Table.from_batches([batch]) for batch in table)
        with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_table(batch)
        return path

    @contextmanager
    def live(self) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Yield a function that adds the metrics of a step, by their ``step``, to the live log of the run, from which
        others read them at once; see :mod:`agentrl.datastore.artifacts.live_metrics`. A step that a killed run added is
        not added again."""
        from agentrl.datastore.artifacts.live_metrics import LiveLog

        with LiveLog(self.buffer.storage, self.run_id, self.stage, self.scratch / "live.jsonl") as log:
            yield log.write

    def keep_tokenizer(self, speaker: "Speaker") -> None:
        """Keep the tokenizer of a policy in the store, under its fingerprint, so that the ids of rows become text
        without the model."""
        from agentrl.pipelines.tokenizers import keep_tokenizer

        if not keep_tokenizer(self.buffer.storage, speaker):
            warnings.warn(
                f"the tokenizer of {speaker.name} has no fast form, so the store cannot keep it: token ids become text "
                "with the model alone",
                stacklevel=2,
            )

    def trajectory_id(self, number: int) -> str:
        return trajectory_id(self.stage, self.fingerprint, number, self.made_again)

    def row_ids(self, failed: bool = False) -> list[str]:
        """Ids of the rows that this stage run has in the buffer, sorted; ``failed``: of attempts made again."""
        own = self.trajectory_id(0).removesuffix("000000")
        known = self.buffer.ids(self._row_fingerprint)
        return [name for name in known if ("~" in name and name.startswith(own)) == failed]

    @property
    def _row_fingerprint(self) -> str:
        return row_fingerprint(self.fingerprint, self.made_again)

    def has_shard(self, shard: int) -> bool:
        """Whether rows of this shard are in the buffer, from this run or one that was killed."""
        return self.buffer.has(self._row_fingerprint, shard)

    def stored(self, shard: int, ids: Iterable[str]) -> dict[str, Trajectory]:
        """Rows of this shard that are already in the buffer, from this run or one that was killed, by their id: those
        of ``ids`` that are there."""
        if not self.has_shard(shard):
            return {}
        known = set(self.row_ids())
        chosen = [name for name in ids if name in known]
        return dict(zip(chosen, self.buffer.get_many(chosen), strict=True))

    def append(
        self, trajectories: Iterable[Trajectory | pa.Table], shard: int = 0, on_error: "OnError" = "raise"
    ) -> int:
        """Append rows to the buffer with the lineage of this stage run, also if they are copies of another stage's
        rows. Tables come with an empty lineage. If the shard is there already, nothing is appended. Returns how many
        broken rows were set aside, which ``on_error="quarantine"`` does instead of raising InvalidRowsError."""
        fingerprint = self._row_fingerprint
        lineage = {"stage": self.stage, "fingerprint": fingerprint, "run_id": self.run_id, "pipeline": self.pipeline}
        rows: Any = (row if isinstance(row, pa.Table) else row.model_copy(update=lineage) for row in trajectories)
        done = self.buffer.append(
            rows,
            stage=self.stage,
            fingerprint=fingerprint,
            shard=shard,
            run_id=self.run_id,
            pipeline=self.pipeline,
            on_error=on_error,
        )
        return done.quarantined

    def select(
        self, ids: "Ids | None" = None, weights: Sequence[float] | None = None, name: str = "trajectories"
    ) -> Trajectories:
        """An output that selects rows: ``ids``, or all that this stage run appended. A weight is 1 if none is given."""
        chosen = self.row_ids() if ids is None else ids
        counts = np.ones(len(chosen), np.float32) if weights is None else list(weights)
        table = pa.table({"trajectory_id": chosen, "weight": counts}, schema=SELECTION_SCHEMA)
        return Trajectories(self._write(name, table), **self._origin(name), buffer=self.buffer)

    def tasks(self, rows: Iterable[Task], name: str = "tasks") -> Tasks:
        """An output of tasks, which are stored beside the buffer too."""
        table = to_table(rows, TASK_SCHEMA)
        self.buffer.keep_tasks(table)
        return Tasks(self._write(name, table), **self._origin(name))

    def pairs(self, rows: Iterable[Pair], name: str = "pairs") -> Pairs:
        return Pairs(self._write(name, to_table(rows, PAIR_SCHEMA)), **self._origin(name))

    def scores(self, table: pa.Table, name: str = "scores") -> Scores:
        return Scores(self._write(name, table), **self._origin(name))

    def steps(self, rows: Iterable[StepValue], name: str = "steps") -> Steps:
        return Steps(self._write(name, to_table(rows, STEP_SCHEMA)), **self._origin(name))

    def notes(self, rows: Iterable[Note], name: str = "notes") -> NoteTable:
        return NoteTable(self._write(name, to_table(rows, NOTE_SCHEMA)), **self._origin(name))

    def table(self, table: "pa.Table | pa.RecordBatchReader", name: str = "table") -> Table:
        """A Parquet file of any schema; batches of a reader are written as they come."""
        return Table(self._write(name, table), **self._origin(name))

    @contextmanager
    def growing_table(
        self, schema: pa.Schema, name: str = "table"
    ) -> Iterator[tuple[Table, Callable[[pa.Table], None]]]:
        """Yield a Parquet file and a function that adds rows to it. It is whole after the block."""
        path = self.folder / f"{name}.parquet"
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            yield Table(path, **self._origin(name)), writer.write_table

    def model(self, write: Callable[[Path], object], name: str = "model") -> Model:
        """A model folder; ``write`` fills the folder that it is given."""
        path = self.folder / name
        path.mkdir()
        write(path)
        return Model(path, **self._origin(name))

    def files(self, write: Callable[[Path], object], name: str) -> Folder:
        """A folder of anything; ``write`` fills the folder that it is given."""
        path = self.folder / name
        path.mkdir()
        write(path)
        return Folder(path, **self._origin(name))

    def report(self, files: Mapping[str, str], name: str = "report") -> Report:
        """A folder of text files, by name."""
        path = self.folder / name
        path.mkdir()
        for file, text in files.items():
            (path / file).write_text(text)
        return Report(path, **self._origin(name))


OF_ROWS = (Kind.TRAJECTORIES, Kind.PAIRS, Kind.STEPS, Kind.SCORES)
"""What a stage has done nothing with if it is empty. Tables and tasks may be: there may be no compositional tasks."""


@dataclass(frozen=True)
class Input:
    """One declared input of a stage."""

    kind: Kind
    required: bool
    many: bool


@dataclass(frozen=True)
class Stage:
    """A declared stage. ``outputs`` keeps the order of declaration."""

    name: str
    version: str
    function: Callable[..., Any]
    config: type[BaseModel]
    inputs: dict[str, Input]
    outputs: dict[str, Kind]
    requires: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, context: Context, config: BaseModel, **inputs: Any) -> dict[str, Handle]:
        """Run the function and return its outputs by name. A warning says if all of its outputs that hold rows are
        empty, with the counts in its metrics, which say why.

        Raises TypeError if the function returned something else than it declares.
        """
        result = self.function(context, config, **inputs)
        handles = [result] if isinstance(result, Handle) else list(result or ())
        for handle, (output, kind) in zip(handles, self.outputs.items(), strict=True):
            if handle.kind is not kind:
                raise TypeError(f"stage {self.name} returned {handle.kind} for output {output!r}, declared as {kind}")
        outputs = dict(zip(self.outputs, handles, strict=True))
        if empty := _all_empty(outputs):
            counts = [f"{name} {value}" for name, value in context.metrics.items() if isinstance(value, int) and value]
            why = ", ".join(counts) or "all its counts are 0"
            warnings.warn(f"made no {' and no '.join(empty)}: {why}", stacklevel=2)
        return outputs


def _all_empty(outputs: Mapping[str, Handle]) -> list[str]:
    """The names of the outputs that hold rows, if none of them holds any."""
    sizes = {name: pq.read_metadata(handle.path).num_rows for name, handle in outputs.items() if handle.kind in OF_ROWS}
    return [] if any(sizes.values()) else list(sizes)


def _is_handle(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Handle) and annotation is not Handle


def _input(name: str, annotation: Any, default: Any) -> Input:
    if isinstance(annotation, types.UnionType):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    many = get_origin(annotation) is list
    if many:
        [annotation] = get_args(annotation)
    if not _is_handle(annotation):
        raise TypeError(
            f"input {name!r} is annotated {annotation!r}; allowed are the handles of agentrl.pipelines.handles"
        )
    return Input(annotation.kind, required=default is inspect.Parameter.empty, many=many)


def _outputs(annotation: Any) -> dict[str, Kind]:
    if _is_handle(annotation):
        return {annotation.kind.value: annotation.kind}
    hints = get_type_hints(annotation) if hasattr(annotation, "_fields") else {}
    if not hints or not all(_is_handle(hint) for hint in hints.values()):
        raise TypeError(f"return annotation {annotation!r}: allowed are a handle or a NamedTuple of handles")
    return {name: hint.kind for name, hint in hints.items()}


def stage(
    name: str, *, version: int | str, requires: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Stage]:
    """Declare a function as a stage. Raise ``version`` when its results change for reasons that its code does not show.

    ``requires`` maps each package that the stage needs to our extra that has it. No run starts if one is missing.

    Raises TypeError at import if the signature is not that of a stage.
    """

    def declare(function: Callable[..., Any]) -> Stage:
        hints = get_type_hints(function)
        _context, config, *inputs = inspect.signature(function).parameters.values()
        return Stage(
            name=name,
            version=str(version),
            function=function,
            config=hints[config.name],
            inputs={p.name: _input(p.name, hints[p.name], p.default) for p in inputs},
            outputs=_outputs(hints["return"]),
            requires=requires or {},
        )

    return declare

"""Stages that make tasks."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
from pydantic import Field, ValidationError, field_validator

from agentrl.engines.seeds import stream
from agentrl.environments import EnvironmentChoice, load_environment
from agentrl.pipelines.handles import Tasks, Trajectories
from agentrl.pipelines.parts.common import environment
from agentrl.pipelines.parts.measured_tasks import MeasuredTasks, refuse_measured_tasks
from agentrl.pipelines.stage import Context, External, StageConfig, stage
from agentrl.pipelines.stages.imports import FormatChoice
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.choice import plain
from agentrl.schemas.task import Task


class GenerateConfig(StageConfig):
    env: EnvironmentChoice = Field(description="an environment's name, or {type: module:Class, ...its settings}")
    train: int = Field(512, ge=1, description="tasks that policies learn from")
    dev: int = Field(256, ge=0, description="settings are chosen on these")
    heldout: int = Field(512, ge=0, description="only results are reported on these")
    compositional: int = Field(
        0, ge=0, description="held-out tasks put together in ways that no other split has, from parts that it has"
    )


class Splits(NamedTuple):
    train: Tasks
    dev: Tasks
    heldout: Tasks
    compositional: Tasks


@stage("tasks.generate", version=2)
def generate(context: Context, config: GenerateConfig) -> Splits:
    """Draw tasks of one environment, in splits that share no question; it warns of tasks that are in two, and of splits
    with fewer tasks than were asked.

    Raises ValueError if ``compositional`` tasks are asked of an environment that does not set ``compositional = True``,
    or if two tasks have one id, and TypeError if ``tasks()`` returns something else than it should.
    """
    env = str(config.env)
    environment = load_environment(env)
    sizes = {"train": config.train, "dev": config.dev, "heldout": config.heldout}
    if config.compositional:
        if not getattr(environment, "compositional", False):
            raise ValueError(
                f"env {env!r} has no compositional split: set with.compositional to 0, or make tasks() give "
                "that split tasks of kinds of their own and set compositional = True in the class"
            )
        sizes["compositional"] = config.compositional
    tasks = environment.tasks(sizes, context.seed)
    _check_splits(env, tasks, sizes)
    # stages after this one look the environment and its settings up by its name
    splits = {
        name: [task.model_copy(update={"env": env, "split": name}) for task in tasks.get(name, [])]
        for name in Splits._fields
    }
    context.metrics.update({name: len(rows) for name, rows in splits.items()})
    return Splits(**{name: context.tasks(rows, name) for name, rows in splits.items()})


def _check_splits(env: str, tasks_of_splits: Any, sizes: Mapping[str, int]) -> None:
    """Check what ``tasks()`` of an environment returned; see :func:`generate`."""
    names = ", ".join(sizes)
    if not isinstance(tasks_of_splits, Mapping) or not set(tasks_of_splits) <= set(Splits._fields):
        what = (
            f"the splits {', '.join(map(str, tasks_of_splits))}"
            if isinstance(tasks_of_splits, Mapping)
            else f"a {type(tasks_of_splits).__name__}"
        )
        raise TypeError(f"tasks() of {env} returned {what}; return a dict of a list of Task for each of {names}")
    every = [(name, task) for name, tasks in tasks_of_splits.items() for task in tasks]
    if wrong := [task for _, task in every if not isinstance(task, Task)]:
        raise TypeError(
            f"tasks() of {env} returned {wrong[0]!r:.80} as a task; return lists of agentrl.schemas.task.Task"
        )
    ids = Counter(task.task_id for _, task in every)
    if doubled := [name for name, number in ids.items() if number > 1]:
        raise ValueError(
            f"{len(doubled)} ids of tasks of {env} are those of several tasks, such as {doubled[0]!r}: their rollouts "
            "would be compared as those of one; give each its own in all splits, for instance with the split's name"
        )
    seen: set[tuple[str, ...]] = set()
    for name, tasks in tasks_of_splits.items():
        asked = [(task.prompt, task.ground_truth, task.metadata, task.tools) for task in tasks]
        if again := sum(key in seen for key in asked):
            warnings.warn(
                f"{again} of {len(asked)} {name} tasks of {env} are tasks of another split too: what is measured on "
                "these splits is not measured on unseen tasks; draw each task once, and then split them",
                stacklevel=3,
            )
        seen.update(asked)
    for name, size in sizes.items():
        if len(tasks_of_splits.get(name, [])) < size:
            warnings.warn(
                f"{env} has {len(tasks_of_splits.get(name, []))} {name} tasks; {size} were asked for", stacklevel=3
            )


class TaskImportConfig(StageConfig):
    paths: list[Annotated[str, External("file")]] = Field(min_length=1, description="files; content counts")
    env: EnvironmentChoice | None = Field(
        None, description="environment of all tasks; one that names another is refused. None: tasks that are only read"
    )
    format: FormatChoice = Field(
        None, description="a format of docs/reference/formats.md, whose rows' tasks are taken; None: files of tasks"
    )
    split: str | None = Field(None, description="split of all tasks")
    columns: dict[str, str] = Field(
        {}, description="field of a task -> key of the record, as in {prompt: question, ground_truth: answer}"
    )

    @field_validator("columns")
    @classmethod
    def _are_fields(cls, columns: dict[str, str]) -> dict[str, str]:
        if unknown := set(columns) - set(Task.model_fields):
            raise ValueError(f"a task has no {sorted(unknown)}; its fields are {', '.join(Task.model_fields)}")
        return columns


@stage("tasks.import", version=1)
def import_(context: Context, config: TaskImportConfig) -> Tasks:
    """Tasks of files: JSON Lines, a JSON array or Parquet with a record per task, or the tasks of rows in another
    format. The fields are those of ``schemas/task.py``; ``columns`` says which key holds a field. A ``ground_truth``
    that ``columns`` names, and every ``answer``, is a value; a plain ``ground_truth`` is JSON text. Keys that are no
    fields are counted in the metrics, and doubled tasks come once."""
    if config.format:
        from agentrl.datastore.formats.imports import reading

        with reading(config.paths, config.format, stage=context.stage, prompts=True) as reading_files:
            rows = list(_of_rows(reading_files.tables(context.fingerprint)))
            ignored = Counter(reading_files.notes.ignored)
    else:
        rows, ignored = _of_files(config)
    rows = [_placed(row, config) for row in rows]
    tasks = _distinct(rows)
    context.metrics.update(tasks=len(tasks), doubled=len(rows) - len(tasks))
    if ignored:
        context.metrics["ignored"] = ", ".join(f"{key} {count}" for key, count in ignored.most_common())
    return context.tasks(tasks)


def _of_files(config: TaskImportConfig) -> tuple[list[Task], Counter[str]]:
    """Tasks of files of records, and the keys that are no fields with how often they occur."""
    from pathlib import Path

    from agentrl.datastore.formats.source import Source

    rows: list[Task] = []
    ignored: Counter[str] = Counter()
    lacking: Counter[str] = Counter()
    for path in config.paths:
        source = Source(Path(path))
        for record in source.records():
            if not isinstance(record, dict):
                raise ValueError(f"{source.place} is no object with the fields of a task")
            values, rest = _fields(record, config)
            ignored.update(rest)
            lacking.update(key for key in config.columns.values() if record.get(key) is None)
            try:
                rows.append(Task.model_validate(values))
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(map(str, first["loc"]))
                raise ValueError(
                    f"{source.place}: task field {field!r}: {first['msg']}; columns says which key of the record "
                    f"holds a field; its keys are {', '.join(map(str, record))}"
                ) from None
    if not rows:
        raise ValueError(f"{', '.join(config.paths)} hold no tasks")
    for key, number in lacking.items():
        field = next(name for name, column in config.columns.items() if column == key)
        if number == len(rows):
            raise ValueError(
                f"columns takes {field} from the key {key!r}, which no record of {', '.join(config.paths)} has; the "
                f"last has {', '.join(map(str, record))}"
            )
        warnings.warn(f"{number} of {len(rows)} records have no {key!r}, so their tasks have no {field}", stacklevel=3)
    return rows, ignored


def _fields(record: dict[str, Any], config: TaskImportConfig) -> tuple[dict[str, Any], list[str]]:
    """Fields of a task, and the keys of the record that are none."""
    from agentrl.datastore.formats.rows import task_id

    values: dict[str, Any] = {name: record[name] for name in Task.model_fields if record.get(name) is not None}
    if "answer" in record and "ground_truth" not in config.columns:
        values["ground_truth"] = json.dumps(record["answer"], ensure_ascii=False)
    for name, key in config.columns.items():
        value = record.get(key)
        if value is not None:
            values[name] = json.dumps(value, ensure_ascii=False) if name == "ground_truth" else value
    for name in ("tools", "metadata"):
        if name in values and not isinstance(values[name], str):
            values[name] = json.dumps(values[name], ensure_ascii=False)
    if isinstance(values.get("task_id"), int):  # files number their records
        values["task_id"] = str(values["task_id"])
    values.setdefault("env", str(config.env or "imported"))
    values.setdefault("split", config.split or "train")
    content = {name: values.get(name) for name in ("env", "prompt", "ground_truth", "metadata")}
    values.setdefault("task_id", task_id(values["env"], None, content))
    taken = {*Task.model_fields, "answer", *config.columns.values()}
    return values, [str(key) for key in record if key not in taken]


def _placed(task: Task, config: TaskImportConfig) -> Task:
    """A task with the split and the environment that the config says. Raises ValueError if it is of another."""
    env = str(config.env) if config.env else None
    if env and config.format is None and task.env not in (env, plain(env)):
        raise ValueError(f"task {task.task_id} is of env {task.env!r}, and with.env is {env!r}")
    more = {"env": env, "split": config.split}
    return task.model_copy(update={name: value for name, value in more.items() if value is not None})


def _distinct(tasks: Iterable[Task]) -> list[Task]:
    """Each task once. Raises ValueError if two differ and have one id."""
    by_id: dict[str, Task] = {}
    for task in tasks:
        if by_id.setdefault(task.task_id, task) != task:
            raise ValueError(f"two different tasks have the id {task.task_id!r}; give them ids of their own")
    return list(by_id.values())


_OF_A_ROW = ["task_id", "env", "split", "level", "prompt", "tools"]
"""Fields of a task that a row has."""


def _of_rows(tables: Iterable[pa.Table]) -> Iterator[Task]:
    """The tasks that trajectories attempted, from their rows only: without ground truth and metadata."""
    seen = set()
    for table in tables:
        for row in table.select(_OF_A_ROW).to_pylist():
            if row["task_id"] not in seen:
                seen.add(row["task_id"])
                yield Task(**row)


class FromTrajectoriesConfig(StageConfig):
    env: EnvironmentChoice | None = Field(
        None, description="environment of all tasks; rows of another are refused. None: tasks that are only read"
    )
    failed: Annotated[bool, ADDED] = Field(
        False, description="only tasks at which a row failed and none succeeded; rows without a verdict say nothing"
    )
    levels: Annotated[list[int] | None, ADDED] = Field(None, min_length=1, description="only tasks of these levels")


@stage("tasks.from_trajectories", version=1)
def from_trajectories(
    context: Context,
    config: FromTrajectoriesConfig,
    trajectories: list[Trajectories],
    tasks: list[Tasks] | None = None,
) -> Tasks:
    """The tasks that trajectories attempted, or only those ``failed`` or of some ``levels``, each once, in order. If
    ``tasks`` holds a task, it comes from there, with ground truth and metadata; otherwise it is made from the rows, and
    the metrics count it as ``without_ground_truth``."""
    whole = {task.task_id: task for handle in tasks or [] for task in handle.read()}
    rows: dict[str, Task] = {}
    verdicts: dict[str, set[bool | None]] = {}
    for selection in trajectories:
        for row in selection.table([*_OF_A_ROW, "success"]).to_pylist():
            verdicts.setdefault(row["task_id"], set()).add(row.pop("success"))
            rows.setdefault(row["task_id"], whole.get(row["task_id"]) or Task(**row))
    if config.levels:
        if absent := set(config.levels) - {task.level for task in rows.values()}:
            raise ValueError(f"levels: no row is of level {min(absent)}; leave it out")
        rows = {name: task for name, task in rows.items() if task.level in config.levels}
    if config.failed:
        rows = {name: task for name, task in rows.items() if verdicts[name] - {None} == {False}}
    env = str(config.env) if config.env else ""
    if wrong := [task for task in rows.values() if env and task.env != env and plain(task.env) != env]:
        raise ValueError(
            f"{len(wrong)} of {len(rows)} tasks are not of env {env!r}, {wrong[0].task_id} is of "
            f"{wrong[0].env!r}; narrow the rows with trajectories.select, where: env = '{env}'"
        )
    context.metrics.update(tasks=len(rows), without_ground_truth=sum(name not in whole for name in rows))
    return context.tasks(rows.values())


class VaryConfig(StageConfig):
    k: int = Field(1, ge=1, description="variants of each task")


@stage("tasks.vary", version=1)
def vary(context: Context, config: VaryConfig, tasks: list[Tasks], heldout: list[Tasks]) -> Tasks:
    """The tasks, and ``k`` variants of each that its environment makes by ``vary(task, random)``, such as one more step
    or another start. None is one of ``heldout``, by its prompt or by the goal that its environment names: wire all
    tasks there that anything is measured on. The metrics count what was left out, by reason.

    Raises ValueError that names an environment which makes no variants, or a task that is not of the train split.
    """
    given = [task for handle in tasks for task in handle.read()]
    held = [task for handle in heldout for task in handle.read()]
    environments = {task.env: environment(context, task.env) for task in (*given, *held)}
    refuse_measured_tasks(given)
    for task in given:
        if not hasattr(environments[task.env], "vary"):
            raise ValueError(
                f"env {task.env!r}, of task {task.task_id}, makes no variants; give it vary(task, random) -> a task, "
                "or leave its tasks out"
            )
    held_out, known = MeasuredTasks(environments, held), {task.prompt for task in given}
    dropped, made = Counter[str](), list[Task]()
    for number, task in enumerate(given):
        source: Any = environments[task.env]
        for sample in range(config.k):
            variant = source.vary(task, Random(stream(context.seed, "vary", number, sample)))
            why = "none_made" if variant is None else "doubled" if variant.prompt in known else held_out.why(variant)
            dropped.update([why] if why else [])
            if not why:
                known.add(variant.prompt)
                made.append(variant)
    context.metrics.update(tasks=len(given), variants=len(made), **dropped)
    return context.tasks([*given, *made])

"""Stages that make notes of attempts, for later ones."""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from agentrl.engines import EngineChoice
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Model, NoteTable, Tasks, Trajectories
from agentrl.pipelines.parts.budget import SamplingConfig
from agentrl.pipelines.parts.common import count, environment, load_policy, secrets_of
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.parts.in_context import check_training
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rewards.answers import final_answer
from agentrl.schemas.note import Note, NoteScope
from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

if TYPE_CHECKING:
    from agentrl.engines.configs import EngineConfig
    from agentrl.environments.base import Environment
    from agentrl.schemas.task import Task

By = Annotated[
    Literal["env"] | EngineChoice,
    Field(description="who writes: the environment (its reflect), or an engine that is asked what to do otherwise"),
]


class ReflectConfig(StageConfig):
    by: By = "env"
    memory: int = Field(3, ge=1, description="notes of each task that are kept, the newest")
    sampling: SamplingConfig = Field(
        SamplingConfig(max_turn_tokens=256), description="how an engine draws the tokens of a note"
    )


@stage("notes.reflect", version=1)
def reflect(
    context: Context,
    config: ReflectConfig,
    tasks: Tasks,
    trajectories: list[Trajectories],
    notes: NoteTable | None = None,
    model: Model | None = None,
) -> NoteTable:
    """Reflexion: a note of each failed attempt at a task that none of the given rows solved, at most ``memory`` for a
    task. ``notes`` of earlier rounds come first; how often they were shown and helped is counted. Rows of other splits
    than train are refused."""
    rows = list(rows_of(trajectories))
    _check_split(rows)
    earlier = notes.read() if notes else []
    check_training(earlier)
    by_id = {task.task_id: task for task in tasks.read()}
    failed, left = _failed(rows, config.memory)
    known = [row for row in failed if row.task_id in by_id]
    if isinstance(config.by, str):
        if model is not None:
            raise ValueError("by: env asks no model, so inputs.model would do nothing; leave it out, or name an engine")
        places = {name: environment(context, name) for name in sorted({row.env for row in known})}
        texts = [said_by(places[row.env], row, by_id[row.task_id]) for row in known]
        author = "env"
    else:
        texts = _by_engine(context, config.by, config.sampling, known, model)
        author = config.by.type
    made = [
        Note(
            note_id=context.trajectory_id(number),
            scope=NoteScope.TASK,
            task_id=row.task_id,
            env=row.env,
            split=row.split,
            text=text,
            made_from=row.trajectory_id,
            by=author,
        )
        for number, (row, text) in enumerate(zip(known, texts, strict=True))
        if text
    ]
    kept, repeated = _kept([*_counted(earlier, rows), *made], config.memory)
    context.metrics.update(
        failed=len(failed), made=len(made), unsaid=len(known) - len(made), repeated=repeated, notes=len(kept)
    )
    count(context, {**left, "unknown_tasks": len(failed) - len(known)})
    if known and not made:
        warnings.warn(f"no note was made of {len(known)} failed attempts by {author}", stacklevel=2)
    return context.notes(kept)


def _check_split(rows: Sequence[Trajectory]) -> None:
    if wrong := [row for row in rows if row.split != "train"]:
        raise ValueError(
            f"{len(wrong)} of {len(rows)} rows are of tasks that are not trained on: {wrong[0].trajectory_id} is of "
            f"split {wrong[0].split}. Notes from them would tell what is measured; choose rows with "
            "trajectories.select, where: split = 'train'"
        )


def _failed(rows: Sequence[Trajectory], most: int) -> tuple[list[Trajectory], Counter[str]]:
    """The last failed attempts of each task that was not solved, in order; and how many others were left out, by
    reason."""
    solved = {row.task_id for row in rows if row.success}
    failed: dict[str, list[Trajectory]] = {}
    left = Counter(unscored=0, not_trained=0, older=0)
    for row in rows:
        if NOT_TRAINED in row.tags:
            left["not_trained"] += 1
        elif row.success is None:
            left["unscored"] += 1
        elif not row.success and row.task_id not in solved:
            failed.setdefault(row.task_id, []).append(row)
    left["older"] = sum(max(0, len(rows_of_task) - most) for rows_of_task in failed.values())
    return [row for rows_of_task in failed.values() for row in rows_of_task[-most:]], left


def said_by(environment: "Environment", row: Trajectory, task: "Task") -> str:
    """What an environment says of a failed attempt; nothing if it has nothing to say.

    Raises ValueError if it never has.
    """
    reflect = getattr(environment, "reflect", None)
    if reflect is None:
        raise ValueError(
            f"environment {task.env!r} has no reflect(row, task), so it cannot write notes; set by to an engine, as in "
            "{type: openai, ...}, or give the class that method"
        )
    return str(reflect(row, task) or "").strip()


def _by_engine(
    context: Context, engine: "EngineConfig", drawn: SamplingConfig, rows: Sequence[Trajectory], model: Model | None
) -> list[str]:
    """What an engine says of failed attempts; nothing if it could not be asked."""
    from agentrl.environments.conversation import AskedOnce
    from agentrl.pipelines.methods.reflexion.reflection import NAME, reflections
    from agentrl.pipelines.stage import reveal
    from agentrl.rollouts.runner import Attempt, RolloutRunner

    if engine.exact and model is None:
        raise ValueError(f"engine {engine.type} samples from a model; wire inputs.model")
    if not engine.exact and model is not None:
        raise ValueError(f"engine {engine.type} samples from its own model; leave inputs.model out")
    if not rows:
        return []
    for secret in secrets_of([engine]):
        reveal(secret)
    policy = load_policy(model, engine) if model else None
    sampling = drawn.of(policy)
    attempts = [Attempt(task) for task in reflections(list(rows))]
    names = [row.trajectory_id for row in rows]
    with RolloutRunner(policy, engine.build(policy), AskedOnce(NAME), sampling) as runner:
        reflected = runner.run(attempts, stream(context.seed, "reflect"), names, source="reflection")
    count(context, {"foreign_tokens": sum(row.n_action_tokens for row in reflected)})
    return [(final_answer(row) or "").strip() for row in reflected]


def _counted(notes: Sequence[Note], rows: Sequence[Trajectory]) -> list[Note]:
    """Notes, with how often the rows were shown them, and how often those rows succeeded."""
    shown: dict[str, list[bool]] = {}
    for row in rows:
        for tag in row.tags:
            if tag.startswith("note:"):
                shown.setdefault(tag.removeprefix("note:"), []).append(bool(row.success))
    return [
        note.model_copy(update={"trials": note.trials + len(successes), "wins": note.wins + sum(successes)})
        for note in notes
        for successes in [shown.get(note.note_id, [])]
    ]


def _kept(notes: Sequence[Note], memory: int) -> tuple[list[Note], int]:
    """The newest notes of each task, each text once, in order; and how many texts came again."""
    by_task: dict[str | None, dict[str, Note]] = {}
    for note in notes:
        by_task.setdefault(note.task_id, {}).setdefault(note.text, note)
    kept = [note for notes_of_task in by_task.values() for note in list(notes_of_task.values())[-memory:]]
    return kept, len(notes) - sum(map(len, by_task.values()))

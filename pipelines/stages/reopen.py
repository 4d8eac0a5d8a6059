"""The stage that takes out what solved rows were shown."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING

from agentrl.engines.blocking import blocking
from agentrl.environments.adapted import protocol
from agentrl.environments.hosts import Threads
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.parts.common import count, environment, record_dialect, refuse_measured
from agentrl.pipelines.parts.in_context import EXPERIENCE, NOTE
from agentrl.pipelines.parts.stored_tasks import KnownTasks, TaskKey, key_of
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.rationalize import only_repeats, shown_after
from agentrl.rollouts.reopen import opening_of, reopened
from agentrl.schemas.trajectory import NOT_TRAINED

if TYPE_CHECKING:
    from agentrl.models.policy import Speaker
    from agentrl.schemas.task import Task
    from agentrl.schemas.trajectory import Message, Trajectory

SOURCE = "reopened"
AT_ONCE = 64
"""Rows that are read, and tasks that are begun, at once."""


class ReopenConfig(StageConfig):
    """There is nothing to set."""


@stage("trajectories.reopen", version=1)
def reopen(
    context: Context,
    config: ReopenConfig,
    trajectories: list[Trajectories],
    model: Model | None = None,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> Trajectories:
    """Context distillation: solved rows after the opening that their environment gives their task, without the notes,
    runs or hints that they were shown. They have the source ``reopened`` and the row as parent. Solved rows that were
    shown nothing are in the output as they are. ``model`` tokenises the openings of rows with tokens.

    A success is left out, and counted, if what it was shown holds the answer and no observation does
    (``ungrounded``), or if its environment begins the task otherwise than the row does (``other_opening``).

    Raises ValueError if a row is not of the train split, or of none of the tasks.
    """
    from agentrl.models.policy import Tokenizing

    drops: Counter[str] = Counter()
    solved = _solved(trajectories, drops)
    known = KnownTasks(trajectories, tasks)
    speaker = Tokenizing(model.path, model.name) if model else None
    if speaker:
        record_dialect(context, speaker)
    begun = blocking(_openings(context, known, solved.values()))
    ids = list(solved)
    made: list[Trajectory] = []
    plain: list[str] = []
    for start in range(0, len(ids), AT_ONCE):
        rows = trajectories[0].buffer.get_many(ids[start : start + AT_ONCE])
        for row in rows:
            task = known.of(row)
            opening = begun[key_of(row)]
            shown = shown_after(opening_of(row), opening)
            if shown is None:
                drops["other_opening"] += 1
            elif not shown:
                plain.append(row.trajectory_id)
            elif only_repeats(row, task, shown):
                drops["ungrounded"] += 1
            else:
                made.append(_reopened(row, opening, speaker, context.trajectory_id(len(made))))
        context.progress(start + len(rows), len(ids), reopened=len(made))
    context.append(made)
    count(context, {"reopened": len(made), "shown_nothing": len(plain), **dict(sorted(drops.items()))})
    return context.select([*plain, *(row.trajectory_id for row in made)])


def _solved(trajectories: list[Trajectories], drops: Counter[str]) -> dict[str, TaskKey]:
    """The rows that succeeded, by their ids, sorted, and the task of each."""
    columns = ["trajectory_id", "env", "task_id", "prompt", "split", "success", "tags"]
    rows = {row["trajectory_id"]: row for selection in trajectories for row in selection.table(columns).to_pylist()}
    refuse_measured({name: row["split"] for name, row in rows.items()})
    solved = {}
    for name, row in sorted(rows.items()):
        if NOT_TRAINED in row["tags"]:
            drops["not_trained"] += 1
        elif not row["success"]:
            drops["unscored" if row["success"] is None else "failed"] += 1
        else:
            solved[name] = (row["env"], row["task_id"], row["prompt"])
    return solved


async def _openings(context: Context, known: KnownTasks, wanted: Iterable[TaskKey]) -> "dict[TaskKey, list[Message]]":
    """What environments begin their tasks with. Tasks that are not known are left out."""
    tasks = [known.by_key[key] for key in dict.fromkeys(wanted) if key in known.by_key]
    places = {env: environment(context, env) for env in sorted({task.env for task in tasks})}
    host = Threads()

    async def opening(task: "Task") -> "list[Message]":
        episode = await protocol(places[task.env], host).reset(task)
        await episode.close()
        return list(episode.opening)

    begun: dict[TaskKey, list[Message]] = {}
    try:
        for start in range(0, len(tasks), AT_ONCE):
            part = tasks[start : start + AT_ONCE]
            begun.update(zip(map(key_of, part), await asyncio.gather(*map(opening, part)), strict=True))
    finally:
        await host.close()
        for family in places.values():
            if iscoroutinefunction(close := getattr(family, "close", None)):
                await close()
    return begun


def _reopened(row: "Trajectory", opening: "list[Message]", speaker: "Speaker | None", name: str) -> "Trajectory":
    if row.input_ids:
        if speaker is None:
            raise ValueError(f"{row.trajectory_id} has tokens; wire inputs.model, whose tokenizer they are of")
        if wrong := speaker.wrote(row.trajectory_id, row.tokenizer):
            raise ValueError(wrong)
    tags = [tag for tag in row.tags if not tag.startswith((NOTE, EXPERIENCE)) and tag != "hinted"]
    return reopened(row, opening, speaker.codec if speaker else None, name, SOURCE, tags=tags)

"""What rollouts are shown besides their task: runs of other tasks that succeeded."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from agentrl.rollouts.context import Shown
from pipelines.handles import Trajectories
from pipelines.stage import Context, StageConfig

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from schemas.task import Task

EXPERIENCE = "experience:"
"""How the tag begins that names a run which was shown."""

SOLVED_BEFORE = "Solved before:"


class ExperienceConfig(StageConfig):
    """Successful runs of the tasks that are most like this one, from the input ``experience``."""

    k: int = Field(3, ge=1, description="at most so many runs")
    max_tokens: int = Field(1024, ge=1, description="of all of them together")
    embedder: str = Field("embedded", description="sentence-transformers model or path, or the embedded default")


class ContextConfig(StageConfig):
    """One thing that is shown before the prompt."""

    experience: ExperienceConfig


def shown_to(
    context: Context,
    configs: Sequence[ContextConfig],
    tasks: "Sequence[Task]",
    experience: Sequence[Trajectories],
    policy: "Policy | None",
) -> Mapping[str, Shown]:
    """What each task is shown, by its id; a task of which nothing is like the others is not there.

    What is retrieved is a function of the rows of ``experience``, whose content is in the fingerprint: never the task
    itself, nor a row of another split than train. The metrics count both.

    Raises ValueError if the input is wired and nothing asks for it, or the other way round.
    """
    if bool(configs) != bool(experience):
        raise ValueError(
            "context asks for experience: wire inputs.experience, such as the successes of an earlier stage"
            if configs
            else "inputs.experience does nothing unless context asks for it: [{experience: {k: 3}}]"
        )
    found: dict[str, Shown] = {}
    if not configs:
        return found
    counted = policy.codec.count if policy is not None else None
    parts = [_experience(context, one.experience, tasks, experience, counted) for one in configs]
    for task in tasks:
        mine = [part[task.task_id] for part in parts if task.task_id in part]
        if mine:
            tags = tuple(dict.fromkeys(tag for one in mine for tag in one.tags))
            found[task.task_id] = Shown("\n\n".join(one.text for one in mine), tags)
    return found


def _experience(
    context: Context,
    config: ExperienceConfig,
    tasks: "Sequence[Task]",
    rows: Sequence[Trajectories],
    count: Callable[[str], int] | None,
) -> dict[str, Shown]:
    from datastore.retrieval.experience import estimate_tokens, experience
    from datastore.retrieval.pinned import PinnedIndex

    ids = pc.unique(pa.concat_arrays([one.selection()["trajectory_id"].combine_chunks() for one in rows]))
    index = PinnedIndex(context.buffer, ids, config.embedder)
    splits = context.buffer.read(ids, ["split"])["split"]
    found: dict[str, Shown] = {}
    for task in tasks:
        runs = experience(
            index,
            task.prompt,
            k=config.k,
            max_tokens=config.max_tokens,
            task_id=task.task_id,
            count=count or estimate_tokens,
        )
        if runs:
            text = "\n\n".join([SOLVED_BEFORE, *(run.text for run in runs)])
            found[task.task_id] = Shown(text, tuple(f"{EXPERIENCE}{run.trajectory_id}" for run in runs))
    others = len(splits) - pc.sum(pc.equal(splits, "train")).as_py()
    context.metrics.update(
        experience_rows=len(ids),
        experience_other_splits=others,
        experience_shown=sum(len(one.tags) for one in found.values()),
        experience_none=len(tasks) - len(found),
    )
    return found

"""The stage that gives tasks the calls of a success, for rewards that compare with them."""

import json
from typing import Any

from agentrl.pipelines.handles import Tasks, Trajectories
from agentrl.pipelines.parts.common import count
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.parts.retries import check_trained_on
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rewards.behaviour import arguments_of, calls_of
from agentrl.schemas.trajectory import NOT_TRAINED


class ReferenceConfig(StageConfig):
    """No settings."""


@stage("tasks.with_calls", version=1)
def with_calls(context: Context, config: ReferenceConfig, tasks: Tasks, trajectories: list[Trajectories]) -> Tasks:
    """The tasks that a given trajectory solved with a call, each with the calls of its shortest success as ``calls`` of
    its metadata, for the reward ``tool_match``. Tasks that no trajectory solved are left out and counted, and so are
    rows that are tagged as not trained on, and successes without a call or with one that cannot be read.

    Raises ValueError that names a task which is not of the train split.
    """
    rows = tasks.read()
    check_trained_on(rows)
    asked, calls = {task.task_id for task in rows}, dict[str, list[dict[str, Any]]]()
    left = {"not_trained": 0, "unreadable": 0, "without_calls": 0}
    for row in rows_of(trajectories):
        if not row.success or row.task_id not in asked:
            continue
        made = [{"name": call.name, "arguments": arguments_of(call)} for call in calls_of(row)]
        unreadable = any(call["arguments"] is None for call in made)
        if NOT_TRAINED in row.tags or unreadable or not made:
            left["not_trained" if NOT_TRAINED in row.tags else "unreadable" if unreadable else "without_calls"] += 1
        elif row.task_id not in calls or len(made) < len(calls[row.task_id]):
            calls[row.task_id] = made
    named = [
        task.model_copy(
            update={
                "metadata": json.dumps(json.loads(task.metadata) | {"calls": calls[task.task_id]}, ensure_ascii=False)
            }
        )
        for task in rows
        if task.task_id in calls
    ]
    if not named:
        raise ValueError(
            f"none of the {len(rows)} tasks has a success with a call among the given trajectories; wire an expert's "
            "demonstrations, or sample more"
        )
    context.metrics.update(tasks=len(rows), with_calls=len(named), unsolved=len(rows) - len(named))
    count(context, left)
    return context.tasks(named)

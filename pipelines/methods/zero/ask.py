"""Stages that ask a policy for tasks, and take those that it proposed."""

import json
from collections import Counter
from random import Random
from typing import Annotated, Any

from pydantic import Field

from agentrl.engines.seeds import stream
from agentrl.environments import EnvironmentChoice
from agentrl.environments.base import not_a_task
from agentrl.environments.propose import Propose, shown_by
from agentrl.environments.task_splits import digest
from agentrl.pipelines.handles import Tasks, Trajectories
from agentrl.pipelines.parts.common import count, environment, refuse_measured
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.parts.measured_tasks import MeasuredTasks, refuse_measured_tasks
from agentrl.pipelines.parts.stored_tasks import KnownTasks
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.choice import plain
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class AskConfig(StageConfig):
    env: EnvironmentChoice = Field("propose", validate_default=True, description="what takes proposals")
    n: int = Field(64, ge=1, description="tasks of proposing, each of which shows some of the given ones")
    shown: int = Field(1, ge=1, description="tasks that each shows, of one environment")
    tools: Annotated[bool, ADDED] = Field(
        False, description="the tools of that environment may be called before the proposal"
    )


@stage("tasks.to_propose", version=1)
def to_propose(context: Context, config: AskConfig, tasks: list[Tasks]) -> Tasks:
    """Tasks of proposing one more task like those that are shown (the references of Absolute Zero: Zhao et al. 2025,
    arXiv 2505.03335, section 3.3). The given ones are shown in turn, in an order of their own each time round.

    Raises ValueError that names an environment which takes no proposals, or a task that is not of the train split.
    """
    given = list({task.prompt: task for handle in tasks for task in handle.read()}.values())
    refuse_measured_tasks(given)
    by_env: dict[str, list[Task]] = {}
    for task in given:
        by_env.setdefault(task.env, []).append(task)
    askers = {env: Propose(env, config.tools) for env in sorted(by_env)}
    random, asked, queues = Random(stream(context.seed, "to_propose")), list[Task](), dict[str, list[Task]]()
    while given and len(asked) < config.n:
        env = sorted(by_env)[len(asked) % len(by_env)]
        if len(queues.get(env, [])) < config.shown:
            queues[env] = random.sample(by_env[env], len(by_env[env]))
        shown, queues[env] = queues[env][: config.shown], queues[env][config.shown :]
        name = digest(env, [task.prompt for task in shown], [task.metadata for task in shown])
        asked.append(askers[env].asking(shown, f"propose-{name}-{len(asked):05d}"))
    context.metrics.update(given=len(given), asked=len(asked))
    return context.tasks(asked)


class FromProposalsConfig(StageConfig):
    pass


@stage("tasks.from_proposals", version=1)
def from_proposals(
    context: Context, config: FromProposalsConfig, trajectories: list[Trajectories], heldout: list[Tasks]
) -> Tasks:
    """The tasks that rollouts of the environment ``propose`` made, each prompt once. None is one that was shown, or one
    of ``heldout``, by its prompt, by the goal that its environment names, or by how it is put together: wire all tasks
    there that anything is measured on. The metrics count what was refused, by reason."""
    rows = list(rows_of(trajectories))
    refuse_measured({row.trajectory_id: row.split for row in rows})
    held = [task for handle in heldout for task in handle.read()]
    made = {row.trajectory_id: made_by(row) for row in rows}
    names = {task.env for task in [*held, *filter(None, made.values())]}
    environments: dict[str, Any] = {name: environment(context, name) for name in sorted(names)}
    held_out, known = MeasuredTasks(environments, held), KnownTasks(trajectories)
    refused, tasks = Counter[str](), dict[tuple[str, str], Task]()
    for row in rows:
        task = made[row.trajectory_id]
        if task is None:
            why = not_a_task(reason(row)) if row.reward is not None else str(row.termination)
        elif task.prompt in {shown.prompt for shown in shown_by(known.of(row))}:
            why = "shown"
        else:
            why = held_out.why(task) or ("doubled" if named(task) in tasks else "")
        if task and not why:
            tasks[named(task)] = task
        refused.update([why] if why else [])
    count(context, dict(sorted(refused.items())))
    context.metrics.update(proposals=len(rows), tasks=len(tasks))
    return context.tasks(tasks.values())


def named(task: Task) -> tuple[str, str]:
    """What two proposals of the same task have in common: its environment and its prompt."""
    return task.env, task.prompt


def reason(row: Trajectory) -> str:
    """Why a proposal is no task, in a word; empty if its environment does not say."""
    return str(json.loads(row.final_state).get("why", ""))


def made_by(row: Trajectory) -> Task | None:
    """The task that a rollout of ``propose`` made; None if it made none.

    Raises ValueError that names a row of another environment.
    """
    state = json.loads(row.final_state)
    if plain(row.env) != Propose.name:
        raise ValueError(
            f"row {row.trajectory_id} is of env {row.env!r} and proposes nothing; wire rollouts of tasks.to_propose"
        )
    return Task.model_validate(state["made"]) if state and state["made"] else None

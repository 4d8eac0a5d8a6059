"""The stage that trains online: every iteration samples with the policy as it is, and takes one step."""

from typing import NamedTuple

import pyarrow as pa
from pydantic import Field

from agentrl.engines.base import Sampling
from agentrl.objectives import GRPO
from agentrl.optimizer import OptimizerConfig
from pipelines.handles import Model, Table, Tasks, Trajectories
from pipelines.stage import Context, StageConfig, stage
from pipelines.stages.policies import load_policy, only_env, rollouts


class Online(NamedTuple):
    model: Model
    trajectories: Trajectories
    steps: Table
    metrics: Table


class GRPOConfig(StageConfig):
    iterations: int = Field(25, ge=1)
    tasks: int = Field(32, ge=1, description="tasks of one iteration")
    samples: int = Field(8, ge=2, description="rollouts of each task, which form its group")
    objective: GRPO = GRPO()
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    max_turn_tokens: int = Field(40, ge=1)
    max_tokens: int = Field(192, ge=1)
    checkpoint_every: int = Field(5, ge=1, description="iterations between two points at which a killed run resumes")


@stage("train.grpo", version=1)
def grpo(context: Context, config: GRPOConfig, model: Model, tasks: Tasks) -> Online:
    """Group relative policy optimisation, at temperature 1 and fully on-policy.

    Every rollout lands in the buffer, with its log-probabilities and the version of the policy that sampled it. The
    table ``steps`` names the rollouts of each step with their advantages, so that any step can be computed again.
    """
    from agentrl.online import OnlineLoop, OnlineState

    policy = load_policy(model)
    sampling = Sampling(max_turn_tokens=config.max_turn_tokens, max_tokens=config.max_tokens)
    loop = OnlineLoop(
        policy,
        rollouts(policy, only_env(tasks), sampling),
        tasks.read(),
        config.objective,
        config.optimizer,
        iterations=config.iterations,
        tasks_per_step=config.tasks,
        samples=config.samples,
        seed=context.seed,
    )
    checkpoint = context.scratch / "checkpoint.pt"
    state = loop.restore(checkpoint) if checkpoint.exists() else OnlineState()
    while loop.iteration < config.iterations:
        iteration = loop.iteration
        first = iteration * config.tasks * config.samples
        step = loop.step([context.trajectory_id(first + number) for number in range(config.tasks * config.samples)])
        context.append(step.trajectories, shard=iteration)
        state.metrics.append(step.metrics)
        state.steps += step.records
        context.progress(iteration + 1, config.iterations, success=round(step.metrics["success"], 3))
        if loop.iteration % config.checkpoint_every == 0:
            loop.save(checkpoint, state)
    context.metrics.update(
        first_success=state.metrics[0]["success"],
        last_success=state.metrics[-1]["success"],
        dropped_groups=int(sum(row["dropped_groups"] for row in state.metrics)),
        groups=config.iterations * config.tasks,
    )
    return Online(
        context.model(policy.save),
        context.select(),
        context.table(pa.Table.from_pylist(state.steps), "steps"),
        context.table(pa.Table.from_pylist(state.metrics), "metrics"),
    )

"""Stages that train online: every iteration samples with the current policy, and updates it."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from agentrl.algorithms import PolicyGradientAlgorithm
from agentrl.algorithms.grpo import GRPO
from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.rewards import Rewards
from agentrl.rollouts.limits import Limits
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.trackers import Tracker
from pipelines.handles import Folder, Model, Table, Tasks, Trajectories
from pipelines.stage import Context, stage
from pipelines.stages.budget import TokenLimits, check_room
from pipelines.stages.checkpoints import Checkpoints, Keeper
from pipelines.stages.common import REWARDS, count, load_policy, rollout_runner, warn_of_splits
from pipelines.stages.outcomes import ENDS, MOST, warn_of_shares

if TYPE_CHECKING:
    from agentrl.online.loop import OnlineLoop, OnlineStep
    from schemas.task import Task


SHOWN = ("grad_norm", "reference_kl", "behaviour_kl")
"""Metrics of an iteration that its progress shows, beside success and reward, if the algorithm has them."""


class Online(NamedTuple):
    model: Model
    trajectories: Trajectories
    steps: Table
    batches: Table
    metrics: Table
    checkpoints: Folder


class OnlineConfig(TokenLimits):
    algorithm: PolicyGradientAlgorithm = Field(GRPO(), description="how rollouts update the policy")
    iterations: int = Field(25, ge=1)
    tasks: int = Field(32, ge=1, description="tasks of one iteration")
    samples: int = Field(8, ge=2, description="rollouts of each task, which form its group")
    updates: int = Field(1, ge=1, description="optimiser steps of one iteration, each over its share of the rollouts")
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    track: list[Tracker] = Field([], description="also send metrics to these, if they are installed")
    rewards: Rewards = Field([], description=REWARDS)
    engine: TokenEngineChoice = Field(DEFAULT_ENGINE, description="what samples; it needs token ids and log-probs")
    limits: Limits = Limits()
    checkpoints: Checkpoints = Checkpoints()
    checkpoint_every: int = Field(5, ge=1, description="iterations between two points at which a killed run resumes")


@stage("train.online", version=1)
def online(context: Context, config: OnlineConfig, model: Model, tasks: Tasks, dev: Tasks | None = None) -> Online:
    """Online reinforcement learning at temperature 1, by any algorithm of the union.

    Every rollout goes into the buffer, with its log-probabilities and the version of the policy that sampled it. The
    table ``steps`` lists the rollouts of each step with their advantages. ``batches`` holds the training rows of each
    optimiser step, so that any step can be computed again.
    """
    return _train(context, config, model, tasks, dev)


class GRPOConfig(OnlineConfig):
    algorithm: GRPO = Field(GRPO(), description="GRPO, and its settings")


@stage("train.grpo", version=2)
def grpo(context: Context, config: GRPOConfig, model: Model, tasks: Tasks, dev: Tasks | None = None) -> Online:
    """Group relative policy optimisation: ``train.online`` with ``algorithm: {type: grpo}``."""
    return _train(context, config, model, tasks, dev)


@contextmanager
def _loop(
    context: Context, config: OnlineConfig, model: Model, tasks: Tasks, dev: Tasks | None
) -> "Iterator[tuple[OnlineLoop, list[Task]]]":
    """The loop, and the tasks on which it is judged meanwhile. At the end its engine is closed."""
    from agentrl.online.loop import OnlineLoop

    policy, rows, judged = load_policy(model), tasks.read(), dev.read() if dev else []
    warn_of_splits(Counter(task.split for task in rows), "tasks")
    sampling = config.sampling(policy)
    with rollout_runner(
        context, policy, rows + judged, sampling, config.engine, config.limits, config.rewards, report=False
    ) as runner:
        check_room(policy, runner, rows + judged)
        yield (
            OnlineLoop(
                policy,
                runner,
                rows,
                config.algorithm,
                config.optimizer,
                iterations=config.iterations,
                tasks_per_step=config.tasks,
                samples=config.samples,
                seed=context.seed,
                updates=config.updates,
            ),
            judged,
        )


def _train(context: Context, config: OnlineConfig, model: Model, tasks: Tasks, dev: Tasks | None) -> Online:
    with _loop(context, config, model, tasks, dev) as (loop, judged):
        return _trained(context, config, loop, judged)


def _trained(context: Context, config: OnlineConfig, loop: "OnlineLoop", judged: "list[Task]") -> Online:
    from agentrl.training.rows import step_table
    from agentrl.training.trackers import track

    keeper = Keeper(context, config.checkpoints, loop, judged)
    state, before = keeper.begin(config.optimizer.schedule)
    with track(config.track, f"{context.stage}-{context.fingerprint[:8]}", context.folder / "tracking") as send:
        while loop.iteration < config.iterations:
            iteration, started = loop.iteration, time.perf_counter()
            step = _step(context, loop)
            context.append(step.trajectories, shard=iteration)
            batches = step_table(iteration, step.batches)
            pq.write_table(batches, keeper.batches / f"{iteration:06d}.parquet", compression="zstd")
            state.metrics.append(step.metrics)
            state.steps += step.records
            keeper.after(state)
            send(step.metrics)
            _report(context, config, step, time.perf_counter() - started)
            if loop.iteration % config.checkpoint_every == 0:
                keeper.checkpoint(state)
    means = {name: fmean(row.get(name, 0.0) for row in state.metrics) for name in ENDS}
    warn_of_shares(means, loop.made, sum(row["success"] for row in state.metrics))
    context.metrics.update(
        first_success=state.metrics[0]["success"],
        last_success=state.metrics[-1]["success"],
        dropped_groups=int(sum(row["dropped_groups"] for row in state.metrics)),
        groups=int(loop.drawn),
    )
    count(context, loop.runner.counts)
    batches = pa.concat_tables([pq.read_table(path) for path in sorted(keeper.batches.iterdir())])
    return Online(
        keeper.model(state),
        context.select(keeper.ids(before)),
        context.table(pa.Table.from_pylist(state.steps), "steps"),
        context.table(batches, "batches"),
        context.table(_metrics_table(state.metrics), "metrics"),
        keeper.folder(),
    )


def _step(context: Context, loop: "OnlineLoop") -> "OnlineStep":
    """One iteration. Rollouts that a killed run has put into the buffer are taken from there. If the loss is not
    finite, the iteration's rows are kept beside the last checkpoint."""
    from agentrl.training.batch import TrainingError
    from agentrl.training.rows import save_rows

    try:
        ids = map(context.trajectory_id, loop.numbers(loop.iteration))
        return loop.step(context.trajectory_id, context.stored(loop.iteration, ids))
    except TrainingError as error:
        if error.rows is None:
            raise
        failed = save_rows(context.scratch / "failed_step.parquet", error.rows)
        raise TrainingError(f"{error}; its rows are at {failed}, the last checkpoint beside them") from None


def _report(context: Context, config: OnlineConfig, step: "OnlineStep", seconds: float) -> None:
    """Show what moves. The loss does not: on fresh rollouts, advantages of mean 0 make it 0, whatever the gradient."""
    shown: dict[str, float | str] = {name: round(step.metrics[name], 3) for name in ("success", "reward")}
    for name in SHOWN:
        if name in step.metrics:
            shown[name] = float(f"{step.metrics[name]:.2g}")
    shown.update({name: f"{step.metrics[name]:.0%}" for name in ENDS if step.metrics[name] > MOST})
    shown["tokens/s"] = f"{sum(row.n_tokens for row in step.trajectories) / seconds:,.0f}"
    context.progress(int(step.metrics["step"]) + 1, config.iterations, **shown)


def _metrics_table(rows: list[dict[str, float]]) -> pa.Table:
    """Metrics of all iterations; an iteration without an update lacks some, which are null."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows], pa.float64()) for name in names})

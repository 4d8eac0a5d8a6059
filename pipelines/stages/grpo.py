"""Stages that train online: every iteration samples with the current policy, and updates it."""

import copy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from agentrl.algorithms.grpo import GRPO
from agentrl.engines.configs import VLLMConfig
from agentrl.online import coverage
from agentrl.online.starts import levels_of
from agentrl.online.tickets import Tickets
from agentrl.pipelines.handles import Folder, Model, NoteTable, Table, Tasks, Trajectories
from agentrl.pipelines.methods.distill.teaching import Teaching, teaching
from agentrl.pipelines.methods.echo.observed import weighing
from agentrl.pipelines.methods.team.frozen import Frozen
from agentrl.pipelines.parts.budget import check_room
from agentrl.pipelines.parts.common import load_policy, policy_to_train, rollout_runner, warn_of_splits
from agentrl.pipelines.parts.outcomes import ENDS, MOST, record_excluded_of, record_failures, warn_of_shares
from agentrl.pipelines.parts.replayed import Stored, begun, check_sources, reading, stored_groups
from agentrl.pipelines.stage import Context, stage
from agentrl.pipelines.stages.checkpoints import BATCHES, Keeper, number_of
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.pipelines.stages.online_log import OnlineLog
from agentrl.rollouts.continuations import check_replayable

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.online.learner import Learner
    from agentrl.online.loop import OnlineLoop, OnlineStep
    from agentrl.online.ranks import ModelsOnRanks
    from agentrl.online.replay import Replay
    from agentrl.online.teacher import Teacher


SHOWN = ("grad_norm", "reference_kl", "behaviour_kl", "level", "teacher_kl", "routes_missing")
"""Metrics of an iteration that its progress shows, beside success and reward, if the algorithm has them."""


class Online(NamedTuple):
    model: Model
    trajectories: Trajectories
    steps: Table
    batches: Table
    metrics: Table
    checkpoints: Folder
    coverage: Table


@stage("train.online", version=1)
def online(
    context: Context,
    config: OnlineConfig,
    model: Model,
    tasks: Tasks,
    dev: Tasks | None = None,
    teacher: Model | None = None,
    notes: NoteTable | None = None,
    replay: list[Trajectories] = [],  # noqa: B006  (an input that may be left out)
    starts: list[Trajectories] = [],  # noqa: B006  (an input that may be left out)
    speaker: Model | None = None,
    actor: Model | None = None,
) -> Online:
    """Online reinforcement learning at temperature 1, by any algorithm of the union. ``teacher`` is that of
    ``algorithm: {type: distill}``, which may see ``notes``. ``replay`` and ``starts`` are stored rows for the
    settings of these names. With ``team``, the agents that speak may be ``speaker``, or the one that acts ``actor``:
    these models are frozen, and their rows are not trained on.

    Every rollout goes into the buffer, with its log-probabilities and the version of the policy that sampled it. The
    table ``steps`` lists the rollouts of each step with their advantages. ``batches`` holds the training rows of each
    optimiser step, so that any step can be computed again. ``coverage`` has a row for each task that was drawn.
    """
    return _train(
        context, config, model, tasks, dev, Teaching(teacher, notes), Stored(replay, starts), Frozen(speaker, actor)
    )


class GRPOConfig(OnlineConfig):
    algorithm: GRPO = Field(GRPO(), description="GRPO, and its settings")


@stage("train.grpo", version=2)
def grpo(context: Context, config: GRPOConfig, model: Model, tasks: Tasks, dev: Tasks | None = None) -> Online:
    """Group relative policy optimisation: ``train.online`` with ``algorithm: {type: grpo}``."""
    return _train(context, config, model, tasks, dev)


@contextmanager
def _loop(
    context: Context,
    config: OnlineConfig,
    model: Model,
    tasks: Tasks,
    dev: Tasks | None,
    taught: Teaching,
    stored: Stored,
    frozen: Frozen,
) -> "Iterator[tuple[OnlineLoop, Keeper]]":
    """The loop, and what keeps its checkpoints. At the end its engine is closed."""
    from agentrl.online.curriculum import Curriculum, CurriculumConfig
    from agentrl.online.loop import OnlineLoop

    whole, judged = tasks.read(), dev.read() if dev else []
    warn_of_splits(Counter(task.split for task in whole), "tasks")
    by_id = {task.task_id: task for task in whole}
    tokens = config.optimizer.micro_tokens
    with (
        _policy(context, config, model) as (policy, models),
        teaching(config, config.algorithm, model, taught, policy, lambda row: by_id[row.task_id], tokens) as teacher,
    ):
        sampling = config.sampling(policy)
        learner = _learner(context, config, policy, models, teacher)
        again = _replay(context, config, stored.replay, policy)
        starts = begun(context, config, stored.starts, policy)
        rows = [*(start.task for start in starts), *whole]
        by_id |= {task.task_id: task for task in rows}
        spare = config.algorithm.resample * config.tasks
        tickets = Tickets(config.tasks, config.iterations, config.ahead, config.max_staleness, spare)
        levels = levels_of(starts, whole, config.starts.turns) if config.starts else [task.level for task in rows]
        draw = config.draw or (CurriculumConfig() if config.starts else None)
        curriculum = Curriculum(draw, levels, context.seed, config.tasks) if draw else None
        changes = tickets.overlaps and not models  # the model that samples would be trained meanwhile
        own = replace(policy, model=copy.deepcopy(policy.model)) if changes else None
        shown, engine = rows + judged, config.engine.with_routes() if config.routes else config.engine
        report, explore, team = False, config.explore, frozen.playing(config)
        with rollout_runner(
            context, policy, shown, sampling, engine, config.limits, config.rewards, report, own, explore, team=team
        ) as runner:
            check_room(policy, runner, shown)
            if continued := rows if config.fork and config.fork.rounds else rows[: len(starts)]:
                check_replayable(runner.environments(continued))
            log, prefixes, routes = OnlineLog(context), [start.prefix for start in starts], config.routes is not None
            runner.on_routes = log.keep_routes if routes else None
            with OnlineLoop(
                runner, learner, rows, tickets, log, context.trajectory_id, curriculum, again, prefixes, routes
            ) as loop:
                yield loop, Keeper(context, config.checkpoints, loop, judged)
            log.forget_routes()


def _learner(
    context: Context,
    config: OnlineConfig,
    policy: "Policy",
    models: "ModelsOnRanks | None",
    teacher: "Teacher | None",
) -> "Learner":
    from agentrl.online.learner import Learner

    return Learner(
        policy,
        config.algorithm,
        config.optimizer,
        iterations=config.iterations,
        samples=config.rollouts,
        seed=context.seed,
        updates=config.updates,
        models=models,
        record_tokens=config.record_tokens,
        observe=weighing(config.observe),
        teacher=teacher,
        fork=config.fork,
        replay=config.replay,
    )


def _replay(
    context: Context, config: OnlineConfig, stored: Sequence[Trajectories], policy: "Policy"
) -> "Replay | None":
    from agentrl.online.replay import Replay

    if config.replay is None:
        return None
    groups = stored_groups(stored, config.replay, config.algorithm, policy)
    read = reading(context.buffer, policy)
    return Replay(config.replay, config.algorithm, config.tasks, context.seed, groups, read)


@contextmanager
def _policy(context: Context, config: OnlineConfig, model: Model) -> "Iterator[tuple[Policy, ModelsOnRanks | None]]":
    """The policy, and the models on ranks, if there are some. Then this process has the model that the embedded engine
    samples with, and none for servers."""
    if config.deepspeed is None:
        yield policy_to_train(model, config.optimizer), None
        return
    from agentrl.models.policy import Policy
    from agentrl.online.ranks import ModelsOnRanks
    from agentrl.training.job import TrainingJob

    job = TrainingJob(
        objective=config.algorithm,
        optimizer=config.optimizer,
        deepspeed=config.deepspeed,
        steps=config.iterations * config.updates,
        updates=config.updates,
        seed=context.seed,
        start=str(model.path.absolute()),
        record_tokens=config.record_tokens,
    )
    served = isinstance(config.engine, VLLMConfig)
    policy = Policy.without_weights(model.path, model.name) if served else load_policy(model)
    with ModelsOnRanks(policy, job, context.scratch / "job", context.scratch / BATCHES) as models:
        yield policy, models


def _train(
    context: Context,
    config: OnlineConfig,
    model: Model,
    tasks: Tasks,
    dev: Tasks | None,
    taught: Teaching = Teaching(),  # noqa: B008  (immutable)
    stored: Stored = Stored(),  # noqa: B008  (immutable)
    frozen: Frozen = Frozen(),  # noqa: B008  (immutable)
) -> Online:
    check_sources(config, stored)
    frozen.check(config.team)
    with _loop(context, config, model, tasks, dev, taught, stored, frozen) as (loop, keeper):
        return _trained(context, config, loop, keeper)


def _trained(context: Context, config: OnlineConfig, loop: "OnlineLoop", keeper: Keeper) -> Online:
    from agentrl.online.recorded import with_tokens
    from agentrl.training.trackers import track

    state, before = keeper.begin(config.optimizer.schedule)
    name, folder = f"{context.stage}-{context.fingerprint[:8]}", context.folder / "tracking"
    with track(config.track, name, folder) as send, context.live() as live:
        for row in state.metrics:
            live(row)
        while loop.iteration < config.iterations:
            started = time.perf_counter()
            step = _step(context, loop)
            state.metrics.append(step.metrics)
            state.steps += step.records
            state.tickets += step.tickets
            keeper.after(state)
            live(step.metrics)
            send(step.metrics)
            _report(context, config, step, time.perf_counter() - started)
            if loop.iteration % config.checkpoint_every == 0:
                keeper.checkpoint(state)
                loop.log.expire(loop.iteration, loop.learner.policy.version - config.max_staleness)
    means = {name: fmean(row.get(name, 0.0) for row in state.metrics) for name in ENDS}
    warn_of_shares(means, loop.made, sum(row["success"] for row in state.metrics))
    ids = keeper.ids(before)
    _check_coverage(context, config, loop, state.tickets, ids)
    context.metrics.update(
        first_success=state.metrics[0]["success"],
        last_success=state.metrics[-1]["success"],
        dropped_groups=int(sum(row["dropped_groups"] for row in state.metrics)),
        groups=loop.tickets.next,
    )
    if config.replay:
        names = ("replay_rows", "replay_dropped", "replay_scaled")
        context.metrics.update({name: int(sum(row.get(name, 0) for row in state.metrics)) for name in names})
    record_failures(context, loop.runner)
    record_excluded_of(context, state.metrics, loop.made)
    tables = [with_tokens(path) for path in sorted(keeper.batches.glob("*.parquet"))]
    # an earlier run may not have recorded tokens, and an iteration without rows lacks a second stream
    batches = pa.concat_tables(tables, promote_options="default")
    return Online(
        keeper.model(state),
        context.select(ids),
        context.table(pa.Table.from_pylist(state.steps), "steps"),
        context.table(batches, "batches"),
        context.table(_metrics_table(state.metrics), "metrics"),
        keeper.folder(),
        context.table(pa.Table.from_pylist(state.tickets, coverage.SCHEMA), "coverage"),
    )


def _check_coverage(
    context: Context, config: OnlineConfig, loop: "OnlineLoop", tickets: list[dict[str, Any]], ids: list[str]
) -> None:
    """See :func:`agentrl.online.coverage.check`. ``ids`` are the rows that the buffer has."""
    rows = Counter(number // loop.per_ticket for number in {number_of(name) for name in ids})
    in_turn = None if loop.curriculum else len(loop.tasks)
    coverage.check(tickets, rows, loop.per_ticket, in_turn, config.max_staleness)
    turns = context.buffer.read(ids, ["n_steps"])["n_steps"]
    context.metrics.update(coverage.summary(tickets, int(pc.sum(turns).as_py() or 0)))


def _step(context: Context, loop: "OnlineLoop") -> "OnlineStep":
    """One iteration. If the loss is not finite, the iteration's rows are kept beside the last checkpoint."""
    from agentrl.training.batch import TrainingError
    from agentrl.training.rows import save_rows

    try:
        return loop.step()
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
    if step.again:
        shown["again"] = "from its record"
    else:
        shown["tokens/s"] = f"{step.tokens / seconds:,.0f}"
    context.progress(int(step.metrics["step"]) + 1, config.iterations, **shown)


def _metrics_table(rows: list[dict[str, float]]) -> pa.Table:
    """Metrics of all iterations; an iteration without an update lacks some, which are null."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows], pa.float64()) for name in names})

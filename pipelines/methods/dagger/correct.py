"""The stage by which an adviser corrects a student's rows."""

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.advantages.turns import own_turns
from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.parts.budget import SamplingConfig
from agentrl.pipelines.parts.common import (
    count,
    environment,
    load_policy,
    record_dialect,
    rollout_runner,
    warn_of_error,
)
from agentrl.pipelines.parts.continuing import TaskRow, rows_to_continue
from agentrl.pipelines.parts.outcomes import record_failures
from agentrl.pipelines.parts.shards import Shards
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.limits import Limits
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

ROWS_AT_ONCE = 64
"""Rows that are corrected at once, and appended together."""


class CorrectConfig(StageConfig):
    mode: Literal["label", "switch", "mix"] = Field(
        "label",
        description="label: what the adviser would say at the student's turns; switch: the student up to a turn drawn "
        "at random, then the adviser; mix: new rollouts of the rows' tasks, in which either has the turn",
    )
    beta: float | tuple[float, float] | None = Field(
        None,
        description="for mix: the adviser's share of the turns; [first, last]: that of the first and of the last of "
        "the k rollouts of each task, with equal steps between, as in [1.0, 0.0]",
    )
    k: int | None = Field(
        None,
        ge=1,
        description="label: at most so many turns of each row, drawn at random; null: all. switch: turns of each row; "
        "mix: rollouts of each task; null: 1",
    )
    sampling: SamplingConfig = SamplingConfig()
    engine: TokenEngineChoice = Field(DEFAULT_ENGINE, description="for mix: what samples the student's turns")
    limits: Limits = Limits()
    teacher_engine: Annotated[TokenEngineChoice, ADDED] = Field(
        DEFAULT_ENGINE, description="what samples the turns of inputs.teacher, by sampling"
    )

    @model_validator(mode="after")
    def _only_mix_has_a_share(self) -> "CorrectConfig":
        if (self.mode == "mix") != (self.beta is not None):
            raise ValueError("beta is the adviser's share of the turns in mode: mix, which needs it; others have none")
        if self.beta is not None and not all(0 <= share <= 1 for share in self.shares()):
            raise ValueError(f"beta is a share, from 0 to 1; it is {self.beta}")
        if not any(self.shares()) and self.mode == "mix":
            raise ValueError("beta: 0 leaves the adviser no turn, and there would be nothing to train on")
        if isinstance(self.beta, tuple) and (self.k or 1) == 1:
            raise ValueError(f"beta {list(self.beta)} changes over the k rollouts of a task; set k to 2 or more")
        return self

    def shares(self) -> list[float]:
        """The adviser's share in each of the rollouts of a task."""
        if not isinstance(self.beta, tuple):
            return [self.beta or 0.0] * (self.k or 1)
        first, last = self.beta
        steps = max(1, (self.k or 1) - 1)
        return [first + (last - first) * number / steps for number in range(self.k or 1)]


@stage("trajectories.correct", version=1)
def correct(
    context: Context,
    config: CorrectConfig,
    trajectories: list[Trajectories],
    model: Model,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
    teacher: Model | None = None,
) -> Trajectories:
    """A student's rows, corrected by what their environment advises, or by a ``teacher`` (DAgger). ``model`` is the
    student. The rows are trained on the adviser's tokens alone. Rows whose environment answers otherwise than it did
    are left out, and counted as ``diverged``; those whose environment fails are ``env_error``.

    Raises NoExpertError that names an environment without an adviser, and ValueError for one that is not replayable, or
    for a teacher with another tokenizer.
    """
    policy = load_policy(model, config.engine)
    record_dialect(context, policy)
    adviser = _teacher(config, teacher, policy)
    rows = rows_to_continue(context, trajectories, tasks, policy)
    if config.mode == "mix":
        _mixed(context, config, policy, rows, adviser)
    elif adviser is not None:
        _taught(context, config, policy, rows, adviser)
    else:
        _corrected(context, config, policy, rows)
    made = context.select()
    columns = made.table(["n_action_tokens", "n_tool_calls", "success"])
    scored = [success for success in columns["success"].to_pylist() if success is not None]
    context.metrics.update(
        rows=len(columns),
        foreign_tokens=sum(columns["n_action_tokens"].to_pylist()),
        **({"success": sum(scored) / len(scored)} if scored else {}),
    )
    return made


def _teacher(config: CorrectConfig, teacher: Model | None, student: "Policy") -> "Policy | None":
    """The teacher's policy. Its turns become rows of the student as they are sampled, so it has to have the student's
    vocabulary: rows that are encoded again would hold other tokens than the teacher was shown."""
    if teacher is None:
        if config.teacher_engine != DEFAULT_ENGINE:
            raise ValueError(
                "teacher_engine is set, but there is no teacher to ask; wire inputs.teacher, or leave it out"
            )
        return None
    from agentrl.online.teacher import check_vocabulary

    policy = load_policy(teacher, config.teacher_engine)
    check_vocabulary(policy, student)
    return policy


def _taught(
    context: Context, config: CorrectConfig, policy: "Policy", rows: Sequence[TaskRow], teacher: "Policy"
) -> None:
    """What a teacher says from the student's states on: one turn (label), or all to the end (switch)."""
    from agentrl.rollouts.continuations import check_replayable, node
    from agentrl.rollouts.corrections import SOURCE, taught
    from agentrl.rollouts.runner import Attempt

    label = config.mode == "label"
    attempts = {}
    for row, task, turns, names in _work(context, config, rows):
        for turn, name in zip(turns, names, strict=True):
            state = node(row, turn, task)
            attempts[name] = Attempt(task, 0, group=state.name, prefix=state.prefix, turns=1 if label else None)
    known, shards = [task for _, task in rows], Shards(context)
    sampling, calls = config.sampling.of(policy), 0
    with rollout_runner(
        context, policy, known, sampling, config.teacher_engine, config.limits, sampler=teacher
    ) as runner:
        check_replayable(runner.environments(known))
        for shard, start in enumerate(range(0, len(attempts), ROWS_AT_ONCE)):
            part = dict(list(attempts.items())[start : start + ROWS_AT_ONCE])
            if context.has_shard(shard):
                continue
            made = runner.run(list(part.values()), stream(context.seed, "taught", shard), list(part), source=SOURCE)
            calls += sum(attempt.prefix.tool_calls for attempt in part.values() if attempt.prefix) + sum(
                row.n_tool_calls for row in made
            )
            shards.append([kept for row in made if (kept := taught(row, teacher.name, label))], shard)
            context.progress(start + len(part), len(attempts))
    count(context, {"diverged": 0})
    record_failures(context, runner)
    context.metrics.update(environment_calls=calls)


def _corrected(context: Context, config: CorrectConfig, policy: "Policy", rows: Sequence[TaskRow]) -> None:
    from agentrl.engines.blocking import blocking
    from agentrl.rollouts.continuations import check_replayable

    places = {name: environment(context, name) for name in sorted({task.env for _, task in rows})}
    check_replayable(places)
    max_tokens = config.sampling.of(policy).max_tokens
    work = _work(context, config, rows)
    shards, replayed = Shards(context), 0
    drops: Drops = {"diverged": [], "env_error": []}
    for shard, start in enumerate(range(0, len(work), ROWS_AT_ONCE)):
        if context.has_shard(shard):
            continue
        part = work[start : start + ROWS_AT_ONCE]
        made = blocking(_all(part, config, policy, places, max_tokens, drops))
        fitting = [row for row in made if row.n_tokens <= max_tokens]
        shards.append(fitting, shard)
        replayed += sum(row.n_tool_calls for row, *_ in part)
        count(context, {"too_long": len(made) - len(fitting)})
        context.progress(start + len(part), len(work))
    count(context, {reason: len(of) for reason, of in drops.items()})
    context.metrics.update(environment_calls=replayed)
    warn_of_error(next(iter(drops["env_error"]), ""))


Work = tuple[Trajectory, Any, list[int], list[str]]
"""A row, its task, the turns to correct, and the names of the rows to make."""

Drops = dict[str, list[str]]
"""Why rows were dropped -> what was raised for each of them."""


def _work(context: Context, config: CorrectConfig, rows: Sequence[TaskRow]) -> list[Work]:
    """The turns of each row that are corrected, and the names of what is made of them."""
    work: list[Work] = []
    first = 0
    for number, (row, task) in enumerate(rows):
        turns = own_turns(row)
        if config.mode == "switch" or config.k is not None:
            drawn = Random(stream(context.seed, "turns", number)).sample(turns, min(config.k or 1, len(turns)))
            turns = sorted(drawn)
        names = [context.trajectory_id(first + index) for index in range(len(turns))]
        first += len(turns)
        work.append((row, task, turns, names))
    return work


async def _all(
    part: Sequence[Work], config: CorrectConfig, policy: "Policy", places: dict[str, Any], max_tokens: int, drops: Drops
) -> list[Trajectory]:
    """The corrected rows of all rows but those whose environment failed or went otherwise, which are ``drops``."""
    from agentrl.environments.adapted import protocol
    from agentrl.environments.hosts import Threads
    from agentrl.rollouts.corrections import labelled, switched

    host = Threads()
    acted = {name: protocol(environment, host) for name, environment in places.items()}

    async def one(row: Trajectory, task: Any, turns: list[int], names: list[str]) -> list[Trajectory]:
        environment = acted[task.env]
        if config.mode == "label":
            return await labelled(environment, row, task, turns, names, policy.codec)
        pairs = zip(turns, names, strict=True)
        return [await switched(environment, row, task, turn, name, policy.codec, max_tokens) for turn, name in pairs]

    try:
        results = await asyncio.gather(*(_kept(drops, one, *each) for each in part))
    finally:
        await host.close()
    return [row for several in results for row in several]


async def _kept(
    drops: Drops, work: Callable[..., Coroutine[Any, Any, list[Trajectory]]], *arguments: Any
) -> list[Trajectory]:
    from agentrl.environments.forks import DivergedError
    from agentrl.environments.scripted import NoExpertError

    try:
        return await work(*arguments)
    except NoExpertError:
        raise
    except DivergedError as error:
        drops["diverged"].append(str(error))
    except Exception:  # of the environment: it ends this episode alone
        drops["env_error"].append(traceback.format_exc())
    return []


def _mixed(
    context: Context, config: CorrectConfig, policy: "Policy", rows: Sequence[TaskRow], teacher: "Policy | None"
) -> None:
    """New rollouts of the rows' tasks, in which student and adviser take turns."""
    from agentrl.rollouts.corrections import ADVISER, SOURCE
    from agentrl.rollouts.runner import Attempt

    known = list({task.task_id: task for _, task in rows}.values())
    samples = config.k or 1
    named = {
        context.trajectory_id(number): (number, task)
        for number, task in enumerate(task for task in known for _ in range(samples))
    }
    shares = config.shares()
    attempts = {
        name: Attempt(
            task,
            number % samples,
            group=context.trajectory_id(number - number % samples),
            advised=shares[number % samples],
        )
        for name, (number, task) in named.items()
    }
    shards = Shards(context)
    missing = shards.missing(attempts)
    with rollout_runner(
        context,
        policy,
        known,
        config.sampling.of(policy),
        config.engine,
        config.limits,
        teacher=config.teacher_engine.build(teacher) if teacher else None,
    ) as runner:
        made = runner.run(list(missing.values()), stream(context.seed, "mixed"), list(missing), source=SOURCE)
    by = teacher.name if teacher else ADVISER
    shards.append([row.model_copy(update={"policy": f"{by} and {policy.name}"}) for row in made], 0)
    shards.finish(1)
    record_failures(context, runner)

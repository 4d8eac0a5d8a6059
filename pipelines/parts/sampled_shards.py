"""Shards of rollouts, made in the process of the stage, or by workers that have a copy of the policy each."""

import asyncio
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pyarrow as pa

from agentrl.datastore.shards.shard import Shard, digest_of, finished
from agentrl.engines.base import Sampling
from agentrl.engines.configs import EngineConfig
from agentrl.engines.seeds import stream
from agentrl.environments import load_environment
from agentrl.pipelines.handles import Model
from agentrl.pipelines.parts.budget import check_room
from agentrl.pipelines.parts.common import begin_rollouts, check_model, rollout_runner
from agentrl.pipelines.parts.dividing import dividing
from agentrl.pipelines.parts.failed_attempts import FailedAttempts
from agentrl.pipelines.parts.outcomes import EpisodeCounts
from agentrl.pipelines.parts.shared_limits import with_shared_limit, with_shared_limits
from agentrl.pipelines.stage import Context
from agentrl.rewards.component import Reward
from agentrl.rollouts.exploring import Explore
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.openings import Opener
from agentrl.rollouts.progress import EpisodeReport
from agentrl.rollouts.segments import by_attempt
from agentrl.schemas.arrow import from_table, to_table
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Termination, Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.rollouts.runner import Attempt, RolloutRunner
    from agentrl.schemas.task import Task


Missing: TypeAlias = "Mapping[int, Mapping[str, Attempt]]"
"""The attempts of each shard that are to be made, by the ids of their rows."""
Keep: TypeAlias = Callable[[int, Sequence[Trajectory]], None]
"""Is given the rows of a shard."""


class RolloutSetup(NamedTuple):
    """With what attempts are sampled. ``model``: the folder of the policy, and what rows call it; None: the engine is
    an endpoint, which has a model of its own."""

    model: tuple[Path, str] | None
    engine: EngineConfig
    sampling: Sampling
    limits: Limits
    rewards: tuple[Reward, ...]
    explore: Explore


class SampledShard(NamedTuple):
    """What a shard leaves: rows in the order of its attempts, the rows of each attempt that failed by no doing of the
    policy and was made again, and what went wrong."""

    rows: pa.Table
    failed: list[pa.Table]
    counts: EpisodeCounts


def divides(shards: ShardEngine, engine: EngineConfig) -> bool:
    """Whether workers are to sample. Without a name of what runs shards rollouts are made where the model is already;
    and servers, or an engine with GPUs of its own, take all of them."""
    return shards.type not in (None, "here") and not engine.elsewhere


def policy_to_divide(model: Model | None, engine: EngineConfig) -> "Policy | None":
    """The tokenizer and the shapes of the model that workers load; None for an endpoint. Raises ValueError as
    :func:`policy_of` does."""
    from agentrl.models.policy import Policy

    check_model(model, engine)
    return None if model is None else Policy.without_weights(model.path, model.name)


def sample_here(
    context: Context, setup: RolloutSetup, policy: "Policy | None", missing: Missing, keep: Keep
) -> EpisodeCounts:
    """Make the attempts of each shard, by their ids, in this process, and call ``keep`` with the rows of each when they
    are all there. Returns what went wrong in episodes."""
    tasks = [attempt.task for attempts in missing.values() for attempt in attempts.values()]
    with rollout_runner(
        context, policy, tasks, setup.sampling, setup.engine, setup.limits, setup.rewards, explore=setup.explore
    ) as runner:
        check_room(policy, runner, *_opened(missing.values()))
        runner.report = EpisodeReport(len(tasks), runner.on_progress)
        # an engine that is reproducible begins each shard from nothing, so that a resumed run makes the same rows
        rounds = [{shard: missing[shard]} for shard in missing] if runner.engine.reproducible else [missing]
        for shards in rounds:
            runner.wait(_at_once(context, runner, shards, keep))
    return EpisodeCounts(runner.counts, runner.tries, runner.first)


async def _at_once(context: Context, runner: "RolloutRunner", missing: Missing, keep: Keep) -> None:
    """Sample shards at once, and keep each when it is whole."""
    attempts = {name: attempt for of_shard in missing.values() for name, attempt in of_shard.items()}
    if not attempts:
        return
    if len(missing) > 1:  # numbers are those within a shard
        attempts = {name: replace(attempt, number=None) for name, attempt in attempts.items()}
    shard_of = {name: shard for shard, of_shard in missing.items() for name in of_shard}
    made: dict[int, dict[str, list[Trajectory]]] = {shard: {} for shard in missing}
    seed = stream(context.seed, "sample", min(missing))
    async with aclosing(runner.groups(list(attempts.values()), seed, list(attempts))) as groups:
        async for group in groups:
            whole = made[shard := shard_of[group[0].episode_id]]
            whole.update((rows[0].episode_id, rows) for rows in by_attempt(group))
            if len(whole) == len(missing[shard]):
                del made[shard]
                await asyncio.to_thread(keep, shard, [row for name in missing[shard] for row in whole[name]])


def sample_divided(
    context: Context, setup: RolloutSetup, policy: "Policy | None", missing: Missing, keep: Keep
) -> EpisodeCounts:
    """The same by workers; ``keep`` is called when all of them are done. With an engine that is reproducible the rows
    are those that one process makes. What a shard made counts after a kill. Raises ValueError if prompts leave no
    room."""
    envs = {name for attempts in missing.values() for name in _envs(attempts)}
    places = begin_rollouts(context, policy, envs, [setup.engine, *setup.rewards])
    check_room(policy, Opener(places, setup.sampling, setup.limits), *_opened(missing.values()))
    with dividing(context) as divide, FailedAttempts(context) as failed:
        assert divide.work is not None
        if setup.model and divide.shared:  # workers do not see the store's own folder
            setup = setup._replace(model=(_copied(setup.model[0], divide.work), setup.model[1]))
        setup = setup._replace(
            engine=with_shared_limit(f"engine {setup.engine.type}", setup.engine, context.engine),
            rewards=tuple(with_shared_limits(setup.rewards, context.engine)),
        )
        made = _MadeShards(divide.work, keep, failed)
        left = {shard: made.left(shard, attempts) for shard, attempts in missing.items()}
        paths = {shard: made.path(shard, attempts) for shard, attempts in left.items() if attempts}
        shards = [
            Shard(f"rollouts of shard {shard}", f"{__name__}:sample_shard", (path, left[shard], seed, setup))
            for shard, path in paths.items()
            for seed in [stream(context.seed, "sample", shard)]
        ]
        divide.run(shards, "rollouts")
        for shard, path in paths.items():
            made.take(shard, path)
    return made.counts


class _MadeShards:
    """What shards made, in the folder ``work``: ``keep`` is called with their rows, and ``failed`` with those of each
    attempt that was made again."""

    def __init__(self, work: Path, keep: Keep, failed: FailedAttempts) -> None:
        self._work, self._keep, self._failed = work, keep, failed
        self.counts = EpisodeCounts()

    def path(self, shard: int, attempts: Iterable[str]) -> Path:
        """Of what is made of these attempts, by their ids."""
        return self._work / f"{shard}-{digest_of(*attempts)}.made"

    def left(self, shard: int, attempts: "Mapping[str, Attempt]") -> "dict[str, Attempt]":
        """The attempts of a shard that are to be made. What a run made that was killed is taken, without rows that
        ended by ``infra_error``: they say nothing of the policy."""
        left = dict(attempts)
        while left and (path := self.path(shard, left)).exists():
            again = self.take(shard, path, lasting=True)
            left = {name: attempt for name, attempt in left.items() if name in again}
        return left

    def take(self, shard: int, path: Path, lasting: bool = False) -> set[str]:
        """Keep the rows of a shard, only those that did not end by ``infra_error`` if they are to be ``lasting``.
        Returns the ids of the other attempts."""
        made: SampledShard = pickle.loads(path.read_bytes())
        rows = list(from_table(Trajectory, made.rows))
        others = {row.episode_id for row in rows if lasting and row.termination is Termination.INFRA_ERROR}
        self._keep(shard, [row for row in rows if row.episode_id not in others])
        for attempt in made.failed:
            self._failed(list(from_table(Trajectory, attempt)))
        self.counts.add(made.counts)
        self.counts.counts -= Counter(infra_errors=len(others))  # they are counted as what comes of them then
        path.unlink()
        return others


def sample_shard(path: Path, attempts: "Mapping[str, Attempt]", seed: int, setup: RolloutSetup) -> None:
    """Make attempts, by their ids, and write what came of them."""
    from agentrl.rollouts.runner import RolloutRunner

    policy = _loaded(*setup.model) if setup.model else None
    places = {name: load_environment(name) for name in _envs(attempts)}
    failed: list[Sequence[Trajectory]] = []
    built = setup.engine.build(policy)
    with RolloutRunner(
        policy,
        built,
        places,
        setup.sampling,
        setup.rewards,
        setup.limits,
        explore=setup.explore,
        on_failed=failed.append,
    ) as runner:
        rows = runner.run(list(attempts.values()), seed, list(attempts))
    counts = EpisodeCounts(runner.counts, runner.tries, runner.first)
    made = SampledShard(_table(rows), [_table(some) for some in failed], counts)
    with finished(path) as unfinished:
        unfinished.write_bytes(pickle.dumps(made))


@lru_cache(maxsize=1)
def _loaded(path: Path, name: str) -> "Policy":
    """The policy, which a worker keeps for its next shard."""
    from agentrl.models.policy import Policy

    return Policy.load(path, name)


def _copied(model: Path, work: Path) -> Path:
    """A copy of a model's folder that workers see."""
    copy = work / f"model-{digest_of(str(model))}"
    if not copy.exists():
        shutil.copytree(model, unfinished := copy.with_suffix(".tmp"), dirs_exist_ok=True)
        unfinished.rename(copy)
    return copy


def _opened(shards: "Iterable[Mapping[str, Attempt]]") -> "tuple[list[Task], Callable[[Task], str]]":
    """The tasks that are attempted, each once, and what their openings show."""
    attempts = {attempt.task.task_id: attempt for of_shard in shards for attempt in of_shard.values()}
    return [attempt.task for attempt in attempts.values()], lambda task: attempts[task.task_id].hint


def _envs(attempts: "Mapping[str, Attempt]") -> list[str]:
    return sorted({attempt.task.env for attempt in attempts.values()})


def _table(rows: Sequence[Trajectory]) -> pa.Table:
    return to_table(rows, TRAJECTORY_SCHEMA)

"""The stages that measure a policy, and compare what was measured."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from agentrl.engines import EngineChoice
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Model, Table, Tasks, Trajectories
from agentrl.pipelines.methods.lats.grow import TreeSearchConfig
from agentrl.pipelines.methods.lats.searched import PICKED, WITH_FEEDBACK, searched
from agentrl.pipelines.parts.budget import Compressing, check_room
from agentrl.pipelines.parts.common import count, environment, policy_of, rollout_runner, secrets_of
from agentrl.pipelines.parts.measures import (
    EVERY,
    FAILURES,
    SPENT,
    Attempted,
    Optimum,
    attempted,
    choices,
    parts,
    summary,
)
from agentrl.pipelines.parts.outcomes import out_of_context, record_failures, warn_of_ends
from agentrl.pipelines.parts.shards import Shards
from agentrl.pipelines.stage import Context, StageConfig, reveal, stage
from agentrl.rewards import Components
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.segments import by_episode, episode_of, whole
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory as Row

if TYPE_CHECKING:
    from agentrl.pipelines.results.compare import Arm


class EvaluateConfig(Compressing):
    samples: int = Field(1, ge=1, description="attempts at each task at temperature 1; several give pass@k and pass^k")
    best_of: Components = Field(
        [], description="a scorer that picks one of the samples of each task: what is picked counts as best_of_n"
    )
    search: Annotated[TreeSearchConfig | None, ADDED] = Field(
        None,
        description="also search each task by a tree, as search.tree does: what best_of picks of its rows counts as "
        "best_of_search; with oracle, what is solved is 'pass@budget with feedback'",
    )
    engine: EngineChoice = DEFAULT_ENGINE
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _has_a_choice(self) -> "EvaluateConfig":
        if self.best_of and self.samples == 1:
            raise ValueError("best_of picks one of several samples; set samples to 2 or more")
        if self.search and self.compress:
            raise ValueError("search goes on from turns of rows, which compress cuts; leave one of them out")
        if not self.engine.exact and (self.search or self.compress):
            raise ValueError(
                f"{'search' if self.search else 'compress'} needs token ids, which engine {self.engine.type} does not "
                "give; leave it out"
            )
        if not self.engine.exact and self.max_turn_tokens is None:
            raise ValueError("max_turn_tokens is not set, and an endpoint names no default: set it")
        if self.search and not self.search.oracle and not self.best_of:
            raise ValueError(
                "search gives many rows of a task, and nothing picks one: set best_of, which picks one of the samples "
                "too, or search.oracle: true, if the search may look at rewards"
            )
        return self


class Evaluation(NamedTuple):
    results: Table
    trajectories: Trajectories


DECODINGS = {"sampled": 1.0, "greedy": 0.0}
ROWS_AT_ONCE = 256


@stage("evaluate.policy", version=2)
def evaluate(context: Context, config: EvaluateConfig, tasks: Tasks, model: Model | None = None) -> Evaluation:
    """``samples`` attempts at each task at temperature 1, and one greedy, with Wilson 95 % intervals of success.

    ``results`` has a row for each decoding, environment (empty: all; named if there are several) and level (-1: all):
    policy, decoding, temperature, split, env, level, tasks, attempts, successes, success, low, high, pass@k and pass^k
    for several samples, best_of_n, with a search best_of_search or "pass@budget with feedback" and search_tokens (of a
    task), steps, steps_over_optimum (of successes, over what the task's metadata says in ``optimal_steps`` or the
    environment's expert takes), tokens, tool_errors, recovered (share of rollouts with a tool error that succeed),
    valid_calls (share of calls that fit a tool's schema), format_errors, violations_per_1000, and the shares of
    rollouts that failed by each of :data:`agentrl.pipelines.parts.measures.FAILURES`. The policy is the model, or if
    the engine is an endpoint, what is behind it: then prompt_tokens, completion_tokens, cost_usd and latency_s too.
    Episodes whose environment failed are in none of them; the metrics count them as ``unscored``.
    """
    from agentrl.rollouts.runner import Attempt, tickets

    policy, rows = policy_of(model, config.engine), tasks.read()
    split = "+".join(sorted({task.split for task in rows}))
    attempts: dict[str, dict[str, Attempt]] = {}
    for decoding, temperature in DECODINGS.items():
        first = sum(len(ours) for ours in attempts.values())
        attempts[decoding] = tickets(rows, config.samples if temperature else 1, context.trajectory_id, first)
    named = model.stage if model else getattr(config.engine, "model", config.engine.type)
    with rollout_runner(context, policy, rows, config.sampling(policy), config.engine, config.limits) as runner:
        shards = Shards(context)
        for shard, (decoding, all_) in enumerate(attempts.items()):
            if ours := shards.missing(all_):
                with_sampling = runner.sampling_as(config.sampling(policy, temperature=DECODINGS[decoding]))
                check_room(policy, with_sampling, rows)
                made = with_sampling.run(list(ours.values()), stream(context.seed, "evaluate", shard), list(ours))
                shards.append([row.model_copy(update={"tags": [decoding, *row.tags]}) for row in made], shard)
        shards.finish(len(attempts))
        found = None
        if config.search:
            number, shard = sum(map(len, attempts.values())), 1 + len(attempts)
            found = searched(context, config.search, config.best_of, runner, rows, number, shard)
    optimum = Optimum(rows, {name: environment(context, name) for name in {task.env for task in rows}})
    results: list[dict[str, Any]] = []
    for decoding, temperature in DECODINGS.items():
        table = context.buffer.read(list(attempts[decoding]), ["success", "termination"])
        warn_of_ends(table, f"{decoding} rollouts")
        if config.compress:
            count(context, {"out_of_context": out_of_context(table)})
        count(context, {"unscored": table["success"].null_count} if table["success"].null_count else {})
        by_id = {name: attempt.task for name, attempt in attempts[decoding].items()}
        measured = _measured(context, config if temperature else _once(config), by_id, optimum)
        if not measured:
            raise ValueError(f"no {decoding} episode could be scored; the rows' tags say how their environment failed")
        which = {"policy": named, "decoding": decoding, "temperature": temperature, "split": split}
        for (env, level), part in parts(measured).items():
            more = found.of(env, level) if found and temperature else {}
            results.append({**which, "env": env, "level": level, **summary(part), **more})
    record_failures(context, runner)
    context.metrics.update(policy=named, n_tasks=len(rows), split=split, **_metrics(results))
    ids = [name for ours in attempts.values() for name in ours] if found else None
    return Evaluation(context.table(_table(results), "results"), context.select(ids))


def _once(config: EvaluateConfig) -> EvaluateConfig:
    """The same for one attempt at each task."""
    return config.model_copy(update={"samples": 1, "best_of": []})


MORE = (
    "best_of_n",
    PICKED,
    WITH_FEEDBACK,
    "search_tokens",
    "steps_over_optimum",
    "recovered",
    "valid_calls",
    "violations_per_1000",
    *FAILURES,
    *SPENT,
)
"""Columns of the results at temperature 1 that are metrics too, beside success and passes."""


def _metrics(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of the stage, from the results over all environments and levels."""
    overall = {row["decoding"]: row for row in results if (row["env"], row["level"]) == (EVERY, -1)}
    sampled, greedy = overall["sampled"], overall["greedy"]
    found = {"success": sampled["success"], "success_low": sampled["low"], "success_high": sampled["high"]}
    found |= {"greedy": greedy["success"], "greedy_low": greedy["low"], "greedy_high": greedy["high"]}
    found |= {name: value for name, value in sampled.items() if "pass" in name or name in MORE}
    return {name: value for name, value in found.items() if value is not None}


def _measured(context: Context, config: EvaluateConfig, tasks: dict[str, Task], optimum: Optimum) -> list[Attempted]:
    """What counts of each rollout, by id, that was scored; whole tickets are read at a time. The segments of an
    episode are one rollout."""
    for secret in secrets_of(config.best_of):
        reveal(secret)
    names, size = list(tasks), max(1, ROWS_AT_ONCE // config.samples) * config.samples
    later: dict[str, list[str]] = defaultdict(list)
    for name in context.row_ids() if config.compress else []:
        if (episode := episode_of(name)) != name:
            later[episode].append(name)
    found = []
    for start in range(0, len(names), size):
        ids = [one for name in names[start : start + size] for one in (name, *later[name])]
        episodes = map(whole, by_episode(context.buffer.get_many(ids)))
        rows = [row for row in episodes if row.success is not None]
        chosen: dict[str, float] = {}
        if config.best_of:
            groups: dict[str | None, list[Row]] = defaultdict(list)
            for row in rows:
                groups[row.group_id].append(row)
            chosen = blocking(_picked(config, list(groups.values()), tasks))
        found += [attempted(row, optimum.of(row), chosen.get(row.trajectory_id)) for row in rows]
    return found


async def _picked(config: EvaluateConfig, groups: Sequence[list[Row]], tasks: dict[str, Task]) -> dict[str, float]:
    try:
        work = (choices(group, tasks[group[0].trajectory_id], config.best_of) for group in groups)
        found = await asyncio.gather(*work)
    finally:
        for one in config.best_of:
            await one.close()
    return {
        row.trajectory_id: chance
        for group, chances in zip(groups, found, strict=True)
        for row, chance in zip(group, chances, strict=True)
    }


def _table(results: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows of results; what one of them lacks is null, and a column without any value is of numbers."""
    names = list(dict.fromkeys(name for row in results for name in row))
    columns = {name: pa.array([row.get(name) for row in results]) for name in names}
    return pa.table(
        {name: pc.cast(one, pa.float64()) if pa.types.is_null(one.type) else one for name, one in columns.items()}
    )


class CompareConfig(StageConfig):
    greedy: bool = Field(False, description="compare greedy attempts; else those at temperature 1")


class Compared(NamedTuple):
    differences: Table
    tasks: Table


@stage("evaluate.compare", version=1)
def compare(context: Context, config: CompareConfig, attempts: list[Trajectories]) -> Compared:
    """How evaluations differ on the same tasks, those after the first from the first; evaluations that differ by their
    seeds alone are one arm.

    ``differences`` has a row for each later arm: arm, than, mean (the difference of success), low, high (bootstrap over
    tasks), p (McNemar's exact test, if all outcomes are 0 or 1), tasks, gained, lost, unshared, verdict in
    words, and if each task was attempted several times, for pass@k of k 2, 4, ... the difference, its interval and the
    p of a paired randomization test. ``tasks`` lists each task of both: env, task_id, prompt, before, after, and
    whether it was gained or lost.
    """
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.pipelines.results.compare import compared, measure, verdict
    from agentrl.pipelines.results.passes import pass_differences

    catalog = Catalog(context.buffer.store)
    found = compared([measure(catalog, one, greedy=config.greedy) for one in attempts])
    if len(found.arms) < 2:
        raise ValueError(
            "attempts holds one arm; wire rollouts of two evaluations or more that differ not by seed alone"
        )
    differences: list[dict[str, Any]] = []
    tasks: list[dict[str, Any]] = []
    for arm, one in found.differences():
        names = {"arm": arm.name, "than": found.arms[0].name}
        said = verdict(arm, found.arms[0], one)
        row: dict[str, Any] = {**names, **vars(one), "verdict": said}
        for passed in pass_differences(arm, found.arms[0]):
            row |= passed.columns()
        differences.append(row)
        context.metrics[f"{arm.name} - {found.arms[0].name}"] = one.mean
        context.metrics[f"verdict on {arm.name}"] = said
        tasks += [{**names, **change} for change in _changes(arm, found.arms[0])]
    return Compared(context.table(_table(differences), "differences"), context.table(_table(tasks), "tasks"))


def _changes(arm: "Arm", than: "Arm") -> list[dict[str, Any]]:
    return [
        {
            "env": env,
            "task_id": task_id,
            "prompt": prompt,
            "before": before,
            "after": after,
            "change": "gained" if after > before else "lost" if after < before else "same",
        }
        for (env, task_id, prompt), (before, after) in arm.beside(than).items()
    ]

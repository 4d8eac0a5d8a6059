"""The stages that measure a policy, and compare what was measured."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from agentrl.engines import EngineChoice
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.pipelines.handles import Model, Table, Tasks, Trajectories
from agentrl.pipelines.methods.lats.grow import TreeSearchConfig
from agentrl.pipelines.methods.lats.searched import PICKED, WITH_FEEDBACK, SearchedTasks, searched
from agentrl.pipelines.parts.budget import Compressing
from agentrl.pipelines.parts.common import count, environment, policy_of, rollout_runner, secrets_of
from agentrl.pipelines.parts.control import SHARDS, Rounds, TriedTemperature, best, choose_temperature, refuse_shared
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
from agentrl.pipelines.parts.outcomes import out_of_context, record_excluded, record_failures, warn_of_ends
from agentrl.pipelines.stage import Context, StageConfig, reveal, stage
from agentrl.rewards import Components
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.segments import by_attempt, episode_of, whole
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import CONTROL, INFRASTRUCTURE
from agentrl.schemas.trajectory import Trajectory as Row

if TYPE_CHECKING:
    from agentrl.pipelines.results.arms import Arm
    from agentrl.rollouts.attempts import Attempt


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
        if self.search and self.search.judge == "reward_model":
            raise ValueError(
                "search.judge: reward_model is an input of search.tree, which evaluate.policy lacks; ask models by "
                "judge: {engines: [...]}, or leave it out"
            )
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


class DecodedAttempts(NamedTuple):
    """Attempts at the tasks, by the ids of their rows, that are measured as one decoding."""

    decoding: str
    temperature: float
    attempts: "Mapping[str, Attempt]"


@stage("evaluate.policy", version=2)
def evaluate(
    context: Context, config: EvaluateConfig, tasks: Tasks, model: Model | None = None, dev: Tasks | None = None
) -> Evaluation:
    """``samples`` attempts at each task at temperature 1, and one greedy, with Wilson 95 % intervals of success. With
    ``dev``, other tasks, the control for sharpening too: attempts at the temperature that solves most of these, one of
    :data:`agentrl.pipelines.parts.control.TEMPERATURES`.

    ``results`` has a row for each decoding (``sampled``, ``greedy``, ``control``; ``dev``: the dev tasks at one
    temperature), environment (empty: all; named if there are several) and level (-1: all): policy, split, decoding,
    temperature, env, level, tasks, attempts, successes, success, low, high, pass@k and pass^k for several samples,
    best_of_n, with a search best_of_search or "pass@budget with feedback" and search_tokens (of a task), steps,
    steps_over_optimum (of successes, over what the task's metadata says in ``optimal_steps`` or the environment's
    expert takes), tokens, tool_errors, recovered (share of rollouts with a tool error that succeed), valid_calls (share
    of calls that fit a tool's schema), format_errors, violations_per_1000, and the shares of rollouts that failed by
    each of :data:`agentrl.pipelines.parts.measures.FAILURES`. The policy is the model, or if the engine is an
    endpoint, what is behind it: then prompt_tokens, completion_tokens, cost_usd and latency_s too. Episodes whose
    environment failed are in none of them; the metrics count them as ``unscored``, and if there are some, results have
    their number in ``excluded``. The metric ``first_action_s`` is the mean of seconds that an attempt at temperature 1
    took to its first message, beside the others of its batch. ``trajectories`` leaves out attempts at dev tasks.
    """
    policy, rows, others = policy_of(model, config.engine), tasks.read(), dev.read() if dev else None
    if others is not None:
        refuse_shared(rows, others)
    split = _splits(rows)
    named = model.stage if model else getattr(config.engine, "model", config.engine.type)
    every = [*rows, *(others or [])]
    with rollout_runner(context, policy, every, config.sampling(policy), config.engine, config.limits) as runner:
        rounds = Rounds(context, config, policy, runner)
        rounds.expect((1 + config.samples) * len(rows), others or [])
        measurements = _usual(rounds, config, rows)
        number, shard = sum(len(measurement.attempts) for measurement in measurements), 1 + len(DECODINGS)
        tried: list[TriedTemperature] = []
        if others is not None:
            tried, control = _control(rounds, config, rows, others, measurements)
            measurements += control
            number, shard = number + len(tried) * len(others) + config.samples * len(rows), shard + SHARDS
        runner.report = None
        search_result = (
            searched(context, config.search, config.best_of, runner, rows, number, shard) if config.search else None
        )
    optimum = Optimum(rows, {name: environment(context, name) for name in {task.env for task in rows}})
    which = {"policy": named, "split": split}
    scored = {part.decoding: _scored(context, config, part, optimum) for part in measurements}
    results = [
        {**which, **row}
        for measurement in measurements
        for row in _results(
            measurement,
            scored[measurement.decoding],
            _excluded(context, measurement),
            search_result if measurement.decoding == "sampled" else None,
        )
    ]
    if tried and best(tried) in DECODINGS.values():
        results += [{**row, "decoding": CONTROL} for row in results if row["temperature"] == best(tried)]
    record_failures(context, runner)
    context.metrics.update(**which, n_tasks=len(rows), **_metrics(results))
    if seconds := [row.first_action_s for row in scored["sampled"] if row.first_action_s is not None]:
        context.metrics["first_action_s"] = round(fmean(seconds), 4)  # of results, digests must not depend on time
    results += [{**which, "split": _splits(others or []), **trial.result()} for trial in tried]
    ids = _row_ids(context, measurements) if search_result or tried else None
    return Evaluation(context.table(_table(results), "results"), context.select(ids))


def _splits(tasks: Sequence[Task]) -> str:
    return "+".join(sorted({task.split for task in tasks}))


def _usual(rounds: Rounds, config: EvaluateConfig, tasks: Sequence[Task]) -> list[DecodedAttempts]:
    """The attempts at temperature 1, and the greedy ones."""
    from agentrl.rollouts.attempts import tickets

    measurements: list[DecodedAttempts] = []
    for decoding, temperature in DECODINGS.items():
        first = sum(len(measurement.attempts) for measurement in measurements)
        samples = config.samples if temperature else 1
        measurements.append(
            DecodedAttempts(decoding, temperature, tickets(tasks, samples, rounds.context.trajectory_id, first))
        )
    for shard, measurement in enumerate(measurements):
        rounds.play(measurement.attempts, measurement.temperature, [measurement.decoding], tasks, shard)
    rounds.shards.finish(len(measurements))
    return measurements


def _control(
    rounds: Rounds, config: EvaluateConfig, tasks: Sequence[Task], dev: Sequence[Task], usual: Sequence[DecodedAttempts]
) -> tuple[list[TriedTemperature], list[DecodedAttempts]]:
    """What was tried on dev tasks, and the attempts at the best temperature; none if the ``usual`` ones are at it."""
    from agentrl.rollouts.attempts import tickets

    number, shard = sum(len(measurement.attempts) for measurement in usual), 1 + len(usual)
    tried = choose_temperature(rounds, dev, number, shard)
    temperature = best(tried)
    if temperature in DECODINGS.values():
        return tried, []
    rounds.expect(config.samples * len(tasks))
    first = number + len(tried) * len(dev)
    attempts = tickets(tasks, config.samples, rounds.context.trajectory_id, first)
    rounds.play(attempts, temperature, [CONTROL], tasks, shard + SHARDS - 2)
    rounds.shards.finish(shard + SHARDS - 1)
    return tried, [DecodedAttempts(CONTROL, temperature, attempts)]


def _scored(
    context: Context, config: EvaluateConfig, measurement: DecodedAttempts, optimum: Optimum
) -> list[Attempted]:
    """What counts of the rollouts of a measurement that could be scored; what is wrong with the others is counted.
    Raises ValueError if none could be."""
    table = context.buffer.read(list(measurement.attempts), ["task_id", "success", "termination"])
    warn_of_ends(table, f"{measurement.decoding} rollouts")
    record_excluded(context, table, f"{measurement.decoding} rollouts")
    if config.compress:
        count(context, {"out_of_context": out_of_context(table)})
    count(context, {"unscored": table["success"].null_count} if table["success"].null_count else {})
    chosen = config if measurement.decoding == "sampled" else config.model_copy(update={"best_of": []})
    tasks = {name: attempt.task for name, attempt in measurement.attempts.items()}
    measured = _measured(context, chosen, tasks, optimum)
    if not measured:
        raise ValueError(
            f"no {measurement.decoding} episode could be scored; the rows' tags say how their environment failed"
        )
    return measured


def _excluded(context: Context, measurement: DecodedAttempts) -> Counter[tuple[str, int]]:
    """How many attempts failed by no doing of the policy, by the environments and levels of results."""
    ends = context.buffer.read(list(measurement.attempts), ["env", "level", "termination"]).to_pylist()
    failed = [(row["env"], row["level"]) for row in ends if row["termination"] in INFRASTRUCTURE]
    return Counter(part for env, level in failed for part in product((EVERY, env), (-1, level)))


def _results(
    measurement: DecodedAttempts,
    measured: Sequence[Attempted],
    failed: Mapping[tuple[str, int], int],
    search_result: SearchedTasks | None,
) -> Iterator[dict[str, Any]]:
    """A row of results for each environment and level, with what a search ``found``."""
    for (env, level), part in parts(measured).items():
        more = search_result.of(env, level) if search_result else {}
        more = {**more, "excluded": failed[env, level]} if failed else more
        which = {"decoding": measurement.decoding, "temperature": measurement.temperature, "env": env, "level": level}
        yield {**which, **summary(part), **more}


def _row_ids(context: Context, measurements: Sequence[DecodedAttempts]) -> list[str]:
    """The rows of these attempts, later segments too."""
    episodes = {name for measurement in measurements for name in measurement.attempts}
    return [name for name in context.row_ids() if episode_of(name) in episodes]


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
    sampled = overall["sampled"]
    names = {"success": "sampled", "greedy": "greedy", CONTROL: CONTROL}
    metrics: dict[str, Any] = {}
    for name, result in ((name, overall[decoding]) for name, decoding in names.items() if decoding in overall):
        metrics |= {name: result["success"], f"{name}_low": result["low"], f"{name}_high": result["high"]}
    if CONTROL in overall:
        metrics["control_temperature"] = overall[CONTROL]["temperature"]
    metrics |= {name: value for name, value in sampled.items() if "pass" in name or name in MORE}
    return {name: value for name, value in metrics.items() if value is not None}


def _measured(context: Context, config: EvaluateConfig, tasks: dict[str, Task], optimum: Optimum) -> list[Attempted]:
    """What counts of each rollout, by id, that was scored; whole tickets are read at a time. The segments of an
    episode are one rollout."""
    for secret in secrets_of(config.best_of):
        reveal(secret)
    names, size = list(tasks), max(1, ROWS_AT_ONCE // config.samples) * config.samples
    later: dict[str, list[str]] = defaultdict(list)
    for name in context.row_ids():
        if (episode := episode_of(name)) != name:
            later[episode].append(name)
    measured = []
    for start in range(0, len(names), size):
        ids = [name_of_attempt for name in names[start : start + size] for name_of_attempt in (name, *later[name])]
        episodes = map(whole, by_attempt(context.buffer.get_many(ids)))
        rows = [row for row in episodes if row.success is not None]
        chosen: dict[str, float] = {}
        if config.best_of:
            groups: dict[str | None, list[Row]] = defaultdict(list)
            for row in rows:
                groups[row.group_id].append(row)
            chosen = blocking(_picked(config, list(groups.values()), tasks))
        measured += [attempted(row, optimum.of(row), chosen.get(row.trajectory_id)) for row in rows]
    return measured


async def _picked(config: EvaluateConfig, groups: Sequence[list[Row]], tasks: dict[str, Task]) -> dict[str, float]:
    try:
        work = (choices(group, tasks[group[0].trajectory_id], config.best_of) for group in groups)
        chosen = await asyncio.gather(*work)
    finally:
        for reward in config.best_of:
            await reward.close()
    return {
        row.trajectory_id: chance
        for group, chances in zip(groups, chosen, strict=True)
        for row, chance in zip(group, chances, strict=True)
    }


def _table(results: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows of results; what one of them lacks is null, and a column without any value is of numbers."""
    names = list(dict.fromkeys(name for row in results for name in row))
    columns = {name: pa.array([row.get(name) for row in results]) for name in names}
    return pa.table(
        {
            name: pc.cast(column, pa.float64()) if pa.types.is_null(column.type) else column
            for name, column in columns.items()
        }
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
    tasks), p (McNemar's exact test, if all outcomes are 0 or 1), tasks, gained, lost, unshared, verdict in words, word
    (what it gained over the control for sharpening, see :mod:`agentrl.statistics.sharpening`), and if each task was
    attempted several times, for pass@k of k 2, 4, ... the difference, its interval and the p of a paired randomization
    test. ``tasks`` lists each task of both: env, task_id, prompt, before, after, and whether it was gained or lost.
    """
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.pipelines.results.compare import compared, with_gains
    from agentrl.pipelines.results.measured import measure
    from agentrl.pipelines.results.passes import pass_differences

    catalog = Catalog(context.buffer.store)
    comparison = compared([measure(catalog, selection, greedy=config.greedy) for selection in attempts])
    comparison = replace(with_gains(catalog, comparison), greedy=config.greedy)
    if len(comparison.arms) < 2:
        raise ValueError(
            "attempts holds one arm; wire rollouts of two evaluations or more that differ not by seed alone"
        )
    differences: list[dict[str, Any]] = []
    tasks: list[dict[str, Any]] = []
    for arm, contrast in comparison.differences():
        names = {"arm": arm.name, "than": comparison.arms[0].name}
        conclusion, gain = comparison.said(arm, contrast), comparison.gains.get(arm.name)
        word = gain.pooled.word.value if gain else None
        row: dict[str, Any] = {**names, **vars(contrast), "verdict": conclusion, "word": word}
        for passed in pass_differences(arm, comparison.arms[0]):
            row |= passed.columns()
        differences.append(row)
        context.metrics[f"{arm.name} - {comparison.arms[0].name}"] = contrast.mean
        context.metrics[f"verdict on {arm.name}"] = conclusion
        tasks += [{**names, **change} for change in _changes(arm, comparison.arms[0])]
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

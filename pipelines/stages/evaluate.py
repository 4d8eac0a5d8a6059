"""The stage that measures a policy."""

from typing import NamedTuple

import pyarrow as pa

from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.engines.streams import stream
from agentrl.rollouts.limits import Limits
from agentrl.statistics.intervals import wilson
from pipelines.handles import Model, Table, Tasks, Trajectories
from pipelines.stage import Context, stage
from pipelines.stages.budget import TokenLimits, check_room
from pipelines.stages.common import count, load_policy, rollout_runner
from pipelines.stages.outcomes import warn_of_ends


class EvaluateConfig(TokenLimits):
    engine: TokenEngineChoice = DEFAULT_ENGINE
    limits: Limits = Limits()


class Evaluation(NamedTuple):
    results: Table
    trajectories: Trajectories


DECODINGS = {"sampled": 1.0, "greedy": 0.0}


@stage("evaluate.policy", version=1)
def evaluate(context: Context, config: EvaluateConfig, model: Model, tasks: Tasks) -> Evaluation:
    """One attempt at each task at temperature 1, and one greedy, with Wilson 95 % intervals of success.

    ``results`` has a row for each decoding and level (level -1: all): policy, decoding, temperature, split, level,
    tasks, successes, success, low, high, tokens, tool_errors, format_errors. Episodes whose environment failed are
    in none of them; the metrics count them as ``unscored``.
    """
    from agentrl.rollouts.runner import Attempt

    policy, rows = load_policy(model), tasks.read()
    split = "+".join(sorted({task.split for task in rows}))
    sampled = [context.trajectory_id(number) for number in range(len(DECODINGS) * len(rows))]
    ids_of = {one: sampled[place * len(rows) :][: len(rows)] for place, one in enumerate(DECODINGS)}
    with rollout_runner(context, policy, rows, config.sampling(policy), config.engine, config.limits) as runner:
        for shard, (decoding, ids) in enumerate(ids_of.items()):
            if not context.has_shard(shard, ids):
                with_sampling = runner.sampling_as(config.sampling(policy, temperature=DECODINGS[decoding]))
                check_room(policy, with_sampling, rows)
                attempts = [Attempt(task, group=name) for task, name in zip(rows, ids, strict=True)]
                made = with_sampling.run(attempts, stream(context.seed, "evaluate", shard), ids)
                context.append([row.model_copy(update={"tags": [decoding, *row.tags]}) for row in made], shard)
    results = []
    for decoding, temperature in DECODINGS.items():
        columns = ["level", "success", "n_tokens", "n_tool_errors", "termination"]
        table = context.buffer.read(ids_of[decoding], columns)
        warn_of_ends(table, f"{decoding} rollouts")
        outcome = table.filter(table["success"].is_valid()).to_pylist()
        if not outcome:
            raise ValueError(f"no {decoding} episode could be scored; the rows' tags say how their environment failed")
        count(context, {"unscored": table["success"].null_count} if table["success"].null_count else {})
        for level in [-1, *sorted({row["level"] for row in outcome})]:
            part = [row for row in outcome if level in (-1, row["level"])]
            which = {"policy": model.stage, "decoding": decoding, "temperature": temperature, "split": split}
            results.append({**which, "level": level, **_summary(part)})
    count(context, runner.counts)
    overall = {row["decoding"]: row for row in results if row["level"] == -1}
    context.metrics.update(
        policy=model.stage,
        n_tasks=len(rows),
        split=split,
        success=overall["sampled"]["success"],
        success_low=overall["sampled"]["low"],
        success_high=overall["sampled"]["high"],
        greedy=overall["greedy"]["success"],
        greedy_low=overall["greedy"]["low"],
        greedy_high=overall["greedy"]["high"],
    )
    return Evaluation(context.table(pa.Table.from_pylist(results), "results"), context.select())


def _summary(rows: list[dict]) -> dict[str, float]:
    successes = sum(row["success"] for row in rows)
    low, high = wilson(successes, len(rows))
    return {
        "tasks": len(rows),
        "successes": successes,
        "success": successes / len(rows),
        "low": low,
        "high": high,
        "tokens": sum(row["n_tokens"] for row in rows) / len(rows),
        "tool_errors": sum(row["n_tool_errors"] for row in rows) / len(rows),
        "format_errors": sum(row["termination"] == "format_error" for row in rows) / len(rows),
    }

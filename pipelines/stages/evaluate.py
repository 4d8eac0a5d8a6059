"""The stage that measures a policy."""

from typing import NamedTuple

import pyarrow as pa

from agentrl.engines.streams import stream
from agentrl.statistics.intervals import wilson
from pipelines.handles import Model, Table, Tasks, Trajectories
from pipelines.stage import Context, stage
from pipelines.stages.budget import TokenLimits, check_room
from pipelines.stages.common import load_policy, only_env, rollout_runner
from pipelines.stages.outcomes import warn_of_ends


class EvaluateConfig(TokenLimits):
    pass


class Evaluation(NamedTuple):
    results: Table
    trajectories: Trajectories


DECODINGS = {"sampled": 1.0, "greedy": 0.0}


@stage("evaluate.policy", version=1)
def evaluate(context: Context, config: EvaluateConfig, model: Model, tasks: Tasks) -> Evaluation:
    """One attempt at each task at temperature 1, and one greedy, with Wilson 95 % intervals of success.

    ``results`` has a row for each decoding and level (level -1: all): policy, decoding, temperature, split, level,
    tasks, successes, success, low, high, tokens, tool_errors, format_errors.
    """
    from agentrl.rollouts.runner import Attempt

    policy, rows = load_policy(model), tasks.read()
    split = "+".join(sorted({task.split for task in rows}))
    env, results = only_env(context, rows), []
    for shard, (decoding, temperature) in enumerate(DECODINGS.items()):
        sampling = config.sampling(policy, temperature=temperature)
        ids = [context.trajectory_id(shard * len(rows) + number) for number in range(len(rows))]
        if not context.has_shard(shard, ids):
            draws = stream(context.seed, "evaluate", shard)
            attempts = [Attempt(task, group=name) for task, name in zip(rows, ids, strict=True)]
            runner = rollout_runner(policy, env, sampling)
            check_room(policy, runner.environment, rows, sampling)
            made = runner.run(attempts, draws, ids)
            context.append([row.model_copy(update={"tags": [decoding]}) for row in made], shard)
        columns = ["level", "success", "n_tokens", "n_tool_errors", "termination"]
        table = context.buffer.read(ids, columns)
        warn_of_ends(table, f"{decoding} rollouts")
        outcome = table.to_pylist()
        for level in [-1, *sorted({row["level"] for row in outcome})]:
            part = [row for row in outcome if level in (-1, row["level"])]
            which = {"policy": model.stage, "decoding": decoding, "temperature": temperature, "split": split}
            results.append({**which, "level": level, **_summary(part)})
        context.progress(shard + 1, len(DECODINGS))
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

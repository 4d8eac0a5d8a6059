"""The experiment of ``methods.py`` about new tasks from failed ones: few tasks are given, in `words`.

Both halves of the budget are rollouts of the given tasks, the second by the policy that learned from the first; or the
second half is of variants of the tasks of which fewer than half of the first rollouts succeeded: all variants, or those
in WebRL's band of pass rates. As many rollouts of tasks that were really drawn are what variants could reach at best.
"""

from dataclasses import replace
from typing import Any

from arms import SMALL, Arm, Spent, gain, table
from methods import (
    SAMPLES,
    TASKS,
    Setting,
    curated,
    judged,
    of_rollouts,
    online,
    other_draws,
    prepared,
    rollouts,
    seeds,
    successes,
)

GIVEN, EACH = (4, 2) if SMALL else (64, 32)
"""Tasks that are given, and rollouts of each in the first half."""
TRIED = 2 if SMALL else 8
"""Rollouts of each variant."""
IN_BAND = "pass_rate between 0.05 and 0.75"
SAME = {"the same tasks": 1, "the same tasks, keep 8": 8}


def propose(env: str) -> bool:
    from agentrl.pipelines.stages.trajectories import sample

    arms = {name: Arm(name) for name in ("warm", *SAME, "variants", "variants in the band", "drawn tasks", "GRPO")}
    for seed, folder in seeds(f"propose {env}", arms):
        setting = prepared(env, seed, folder)
        every = setting.tasks.read()
        arms["warm"].add(judged(setting, setting.warm), Spent())
        given, others = setting.harness.tasks(every[:GIVEN]), setting.harness.tasks(every[GIVEN:])
        first = setting.harness.run(sample, {"samples": EACH}, model=setting.warm, tasks=given)["trajectories"]
        begun = of_rollouts(first)
        model, more = curated(setting, [successes(setting, [first], keep=1)])
        begun, after = begun + more, replace(setting, warm=model)

        hard = selected(setting, [first], "pass_rate < 0.5")
        made, cost = of_variants(after, given, hard, begun.sampled)
        same, spent = rollouts(after, given, cost.sampled)
        drawn, beside = rollouts(after, others, cost.sampled)
        second = {
            "variants": (made, 1, cost),
            "variants in the band": ([selected(setting, made, IN_BAND)], 1, cost),
            "drawn tasks": (drawn, 1, beside),
            **{name: (same, keep, spent) for name, keep in SAME.items()},
        }
        for name, (rows, keep, paid) in second.items():
            model, more = curated(setting, [successes(setting, [first, *rows], keep=keep)])
            arms[name].add(judged(setting, model), begun + paid + more)
        iterations = max(1, 2 * GIVEN * EACH // (TASKS * SAMPLES))
        model, more, _ = online(replace(setting, tasks=given), iterations=iterations)
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\npropose, {env}: {GIVEN} tasks are given, {2 * GIVEN * EACH:,} rollouts a seed")
    table(arms)
    best = max(SAME, key=lambda name: sum(sum(outcomes.values()) for outcomes in arms[name].best))
    met = gain(f"propose, {env}", arms, best, "variants in the band")
    gain(f"propose, {env}, band", arms, "variants", "variants in the band")
    gain(f"propose, {env}, what could be reached", arms, "variants in the band", "drawn tasks")
    return met


def of_variants(setting: Setting, given: Any, hard: Any, wanted: int) -> tuple[list[Any], Spent]:
    """Rollouts of variants of the tasks of ``hard`` rows, until so many tokens are sampled."""
    from agentrl.pipelines.stages.tasks import from_trajectories, vary
    from agentrl.pipelines.stages.trajectories import sample

    run = setting.harness.run
    tasks = run(from_trajectories, trajectories=[hard], tasks=[given])["tasks"]
    matches, spent, seen = list[Any](), Spent(), {task.prompt for task in given.read()}
    while spent.sampled < wanted and not (SMALL and matches):
        with other_draws(setting.harness, len(matches)):
            varied = run(vary, {"k": 1}, tasks=[tasks], heldout=setting.heldout)["tasks"].read()
            new = [task for task in varied if task.prompt not in seen]
            seen |= {task.prompt for task in new}
            rows = run(sample, {"samples": TRIED}, model=setting.warm, tasks=setting.harness.tasks(new))
        matches.append(rows["trajectories"])
        spent += of_rollouts(matches[-1])
    return matches, spent


def selected(setting: Setting, selections: list[Any], where: str) -> Any:
    """The rows of the tasks for which an expression is true."""
    from agentrl.pipelines.stages.select import select

    config = {"version": setting.harness.buffer.version, "rules": [{"rule": "group", "where": where}]}
    return setting.harness.run(select, config, trajectories=selections)["trajectories"]

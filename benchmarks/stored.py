"""The experiments of ``methods.py`` about what is learned from stored rollouts.

- replay: supervised training on successes as they are drawn, or on two of each task; and GRPO on groups drawn alike, or
  by how far their rewards are apart (`words`, `rooms`, `lookup`).
- counterfactual: RLOO on four continuations of each state, credited to their first turns (`credit: fork_turn`) or to
  all new turns, and on whole rollouts of as many sampled tokens (`words`, `rooms`).
- online_starts: GRPO online from states of stored successes first, and from whole tasks (`words`).
- online_replay: GRPO online with rollouts of earlier iterations mixed into each step, and without, of as many rollouts
  (`words`); with SPLIT=dev every setting of :data:`MIXED`, otherwise the share that did best there, drawn both ways.
"""

from typing import Any

from arms import SMALL, Arm, Spent, gain, table
from branching import STEPS, as_online, grouped, of_continuations, settings, trained
from courses import COURSES
from methods import (
    BATCH,
    ITERATIONS,
    SAMPLES,
    SPLIT,
    TASKS,
    Setting,
    curated,
    judged,
    of_rollouts,
    online,
    prepared,
    rejected,
    rollouts,
    seeds,
    successes,
)
from methods_signals import beside_grpo

GROUPS = STEPS * BATCH // SAMPLES
"""Groups that offline training takes once."""


REJECTIONS = {"rejection": {"keep": 2}, "rejection, keep 1": {"keep": 1}, "rejection, agree 2": {"agree": 2}}
"""Those of a task that are kept. Which is best is written in :mod:`courses`."""


def replay(env: str) -> bool:
    """Four fifths of the stored groups are not drawn: offline training has fewer steps than there are rows."""
    from agentrl.pipelines.stages.train import offline
    from agentrl.pipelines.stages.trajectories import reject, sample

    draws = {"GRPO, groups alike": {"alpha": 0.0}, "GRPO, by surprise": {"priority": "surprise"}}
    arms = {name: Arm(name) for name in ("warm", *REJECTIONS, "success first", "GRPO", *draws)}
    for seed, folder in seeds(f"replay {env}", arms):
        setting = prepared(env, seed, folder)
        run = setting.harness.run
        arms["warm"].add(judged(setting, setting.warm), Spent())
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        rows = run(sample, {"samples": SAMPLES}, model=setting.warm, tasks=tasks)["trajectories"]
        spent = of_rollouts(rows)
        chosen = {name: run(reject, how, trajectories=[rows])["trajectories"] for name, how in REJECTIONS.items()}
        n = max(1, len(chosen["rejection"].ids()))
        chosen["success first"] = drawn(setting, rows, {"strategy": "success_first", "n": n})
        for name, selection in chosen.items():
            model, more = curated(setting, [selection])
            arms[name].add(judged(setting, model), spent + more)
        for name, draw in draws.items():
            groups = drawn(setting, rows, {"strategy": "prioritized", "of": "groups", "n": GROUPS, **draw})
            model, more = trained(setting, offline, {"algorithm": {"type": "grpo"}}, trajectories=[groups])
            arms[name].add(judged(setting, model), spent + more)
        model, more, _ = online(setting)
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\nreplay, {env}: {TASKS * ITERATIONS * SAMPLES:,} rollouts a seed, {GROUPS} of {TASKS * ITERATIONS} groups")
    table(arms)
    best = next(name for name, how in REJECTIONS.items() if how == COURSES[env].keeps)
    first_gained = gain(f"replay, {env}, supervised", arms, best, "success first")
    return gain(f"replay, {env}, GRPO", arms, "GRPO, groups alike", "GRPO, by surprise") and first_gained


def drawn(setting: Setting, rows: Any, draw: dict[str, Any]) -> Any:
    """A selection of these rows."""
    from agentrl.pipelines.stages.select import select

    config = {"version": setting.harness.buffer.version, "draw": draw}
    return setting.harness.run(select, config, trajectories=[rows])["trajectories"]


MIXED = {
    f"replay {share}, {draw}": {"share": share, "draw": draw}
    for share in (0.25, 0.5)
    for draw in ("uniform", "priority")
}
CHOSEN = "replay 0.5, uniform"
"""Did best on dev tasks of seed 10."""
BY_PRIORITY = "replay 0.5, priority"


def online_replay(env: str) -> bool:
    mixed = MIXED if SPLIT == "dev" else {name: MIXED[name] for name in (CHOSEN, BY_PRIORITY)}
    arms = beside_grpo("online_replay", env, {name: {"replay": replay} for name, replay in mixed.items()})
    met = [gain(f"online_replay, {env}, {name}", arms, "GRPO", name) for name in mixed]
    return gain(f"online_replay, {env}, draws", arms, CHOSEN, BY_PRIORITY) and all(met)


LONGER = 2
"""Times the iterations of the other experiments: rollouts from states have about half of the turns."""
FROM_STATES = {"starts": {"turns": 3}, "draw": {"start": [0.5, 0.3, 0.2], "gate": 0.7, "window": 256, "easier": 0.15}}
"""Those of the method's file, with fewer turns: a question takes four at most."""


def online_starts(env: str) -> bool:
    """GRPO from whole tasks, and from states of successes first, which are rollouts of the same policy, at as many
    sampled tokens: rollouts that begin in the middle are shorter, so there are more iterations."""
    from agentrl.pipelines.stages.trajectories import sample, synthesize

    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", "GRPO, from states")}
    for seed, folder in seeds(f"online_starts {env}", arms):
        setting = prepared(env, seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        rows = setting.harness.run(sample, {"samples": 2}, model=setting.warm, tasks=setting.tasks)["trajectories"]
        begun = of_rollouts(rows)
        if SMALL:  # the policy solves nothing
            rows = setting.harness.run(synthesize, tasks=setting.tasks)["trajectories"]
        model, spent, levels = online(setting, states=rows, iterations=LONGER * ITERATIONS, **FROM_STATES)
        print(f"online_starts, {env}, seed {seed}: level {levels[-1:]} at the end", flush=True)
        arms["GRPO, from states"].add(judged(setting, model), begun + spent)
        budget = begun.sampled + spent.sampled
        of_an_iteration = TASKS * SAMPLES * begun.sampled / len(rows.ids())
        model, spent, _ = online(setting, iterations=max(1, round(budget / of_an_iteration)))
        arms["GRPO"].add(judged(setting, model), spent)
        model, spent, _ = rejected(setting, setting.tasks, budget)
        arms["rejection"].add(judged(setting, model), spent)
    print(f"\nonline_starts, {env}: {LONGER * ITERATIONS} iterations from states a seed")
    table(arms)
    return gain(f"online_starts, {env}", arms, "GRPO", "GRPO, from states")


RLOO_LR = 1e-4
"""Did best for whole rollouts on dev tasks of `words`, of seed 10, as 3e-4 did; 1e-3 lost half of what was known."""


def counterfactual(env: str) -> bool:
    from agentrl.pipelines.methods.fork.fork import fork
    from agentrl.pipelines.stages.train import offline
    from agentrl.pipelines.stages.trajectories import sample

    ways = {"RLOO, first turns": {"credit": "fork_turn"}, "RLOO, new turns": {}}
    optimizer = {"lr": RLOO_LR, "schedule": "linear"}
    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", "RLOO, whole rollouts", *ways)}
    for setting, tasks in settings(f"counterfactual {env}", arms, env=env):
        run = setting.harness.run
        rows = run(sample, {"samples": 2}, model=setting.warm, tasks=tasks)["trajectories"]
        forked = run(fork, {"at": "uncertain", "turns": 1, "k": 4}, model=setting.warm, trajectories=[rows])
        cost = of_rollouts(rows) + of_continuations(forked)
        for name, credit in ways.items():
            config = {"algorithm": {"type": "rloo", **credit}, "optimizer": optimizer}
            model, more = trained(setting, offline, config, trajectories=[forked["trajectories"]])
            arms[name].add(judged(setting, model), cost + more)
        others, spent = rollouts(setting, tasks, cost.sampled)
        config = {"algorithm": {"type": "rloo"}, "optimizer": optimizer}
        model, more = trained(setting, offline, config, trajectories=grouped(setting, others))
        arms["RLOO, whole rollouts"].add(judged(setting, model), spent + more)
        model, more = as_online(setting, others)
        arms["GRPO"].add(judged(setting, model), more)
        model, more = curated(setting, [successes(setting, others)])
        arms["rejection"].add(judged(setting, model), spent + more)
    print(f"\ncounterfactual, {env}: the least certain turn of two rollouts of each task")
    table(arms)
    met = gain(f"counterfactual, {env}", arms, "RLOO, whole rollouts", "RLOO, first turns")
    return gain(f"counterfactual, {env}, credit", arms, "RLOO, new turns", "RLOO, first turns") and met

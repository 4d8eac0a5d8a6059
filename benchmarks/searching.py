"""The experiments of ``methods.py`` about tree search, in `rooms` or `words`.

- search: train tasks of levels 4 to 6 that trees or plain rollouts of as many tokens solve, and held-out success after
  one supervised stage on what was solved. Trees are guided by how many continuations end alike.
- guided: the same with a judge of known quality, as in LATS or Agent Q, or with continuations that are cut and judged.
- valued: the same in `words` with a process reward model, trained on rollouts of other tasks, in the judge's place.
- preferred: DPO on pairs of steps, from such a tree as in Agent Q, or from whole rollouts of as many tokens.
- reflected: train tasks of levels 4 to 6 that trees solve which may look at rewards, with notes of what failed and
  without, or plain retries of as many tokens.
"""

import sys
from dataclasses import replace
from typing import Any

from arms import SMALL, Arm, Spent, gain, table
from branching import STATES, as_online, of_continuations, of_levels, settings, trained
from methods import Setting, curated, judged, of_rollouts, prepared, rollouts, seeds, successes
from methods_signals import noted, retried, solved_by

ROUNDS = 2 if SMALL else 8
JUDGED = {"judge": {"engines": [{"type": "scripted_judge:Guide", "right": 0.8}]}}
GUIDED = {
    "LATS": JUDGED,
    "Agent Q": {**JUDGED, "select": "agentq", "c": 1.0},
    "cut after 3 turns": {**JUDGED, "simulate": 3},
}

SEARCHED = 4 if SMALL else 128
"""Tasks that are searched with a reward model."""
FIT = {
    "kind": "prm",
    "steps": 2 if SMALL else 200,
    "batch": 8 if SMALL else 64,
    "optimizer": {"lr": 2e-3, "schedule": "linear", "warmup": 0 if SMALL else 20},
    "holdout": 0.1,
}
"""How the process reward model is trained: settings of ``reward_model.py``."""

LEARNED = {"": "context", ", whole": "trained"}
"""A success of a tree is learned from where it was forked, or whole, with what its parents sampled."""


def search(env: str) -> bool:
    """What a search finds that as many tokens of plain rollouts do not, and what one learns from it."""
    return _searched("search", env, {"search": {}})


def guided(env: str) -> bool:
    """The judge knows the map. Foreign tokens are the numbers that it writes; what it reads is not counted."""
    return _searched("guided", env, GUIDED)


def _searched(experiment: str, env: str, ways: dict[str, dict[str, Any]]) -> bool:
    """The first of the ways has :data:`ROUNDS` rounds, and the others sample as many tokens of each task."""
    from agentrl.pipelines.methods.lats.search import tree

    learned = [name + how for name in ways for how in LEARNED]
    arms = {name: Arm(name) for name in ("warm", "GRPO", "rollouts", *learned)}
    result = {name: Arm(name) for name in ("rollouts", *ways)}
    for setting, tasks in settings(f"{experiment} {env}", arms, result, env=env, levels=frozenset({4, 5, 6})):
        run, rows, budget = setting.harness.run, dict[str, tuple[list[Any], Spent]](), 0
        for name, way in ways.items():
            limit = {"rounds": 8 * ROUNDS, "budget_tokens": budget} if budget else {"rounds": ROUNDS}
            made = run(tree, {"branch": 3, "depth": 10, **limit, **way}, model=setting.warm, tasks=tasks)
            cost = of_continuations(made) + Spent(foreign=int(made.metrics.get("judged", 0)))
            budget = budget or cost.sampled // STATES
            rows[name] = [made["trajectories"]], cost
        others, spent = rollouts(setting, tasks, budget * STATES)
        rows["rollouts"] = others, spent
        model, more = as_online(setting, others)
        arms["GRPO"].add(judged(setting, model), more)
        for name, (selections, cost) in rows.items():
            result[name].add(solved(tasks, selections), cost)
            good = [successes(setting, selections)]
            for how, prefixes in LEARNED.items() if name in ways else {"": "context"}.items():
                model, more = curated(setting, good, prefixes=prefixes)
                arms[name + how].add(judged(setting, model), cost + more)
        by_difficulty(others, result)
    print(f"\n{experiment}, {env}, levels 4 to 6: train tasks solved, of {STATES} a seed")
    table(result)
    met = [gain(f"{name}, {env}, train tasks", result, "rollouts", name) for name in ways]
    print(f"{experiment}, {env}, levels 4 to 6: held-out success after one supervised stage on what was solved")
    table(arms)
    return all([gain(f"{name}, {env}", arms, "rollouts", name) for name in learned] + met)


def valued(env: str) -> bool:
    """Trees that a process reward model guides, trees without a judge, and plain rollouts of as many tokens; and plain
    rollouts of as many tokens as the guided trees and the rollouts that taught the reward model."""
    from agentrl.pipelines.methods.lats.search import tree

    ways = {"tree": {}, "PRM": {"judge": "reward_model"}}
    result = {name: Arm(name) for name in ("one rollout", "rollouts", *ways, "rollouts, more", "PRM, charged")}
    arms = {name: Arm(name) for name in ("warm", *result) if name != "one rollout"}
    for seed, folder in seeds(f"valued {env}", arms, result):
        setting = halved(prepared(env, seed, folder))
        arms["warm"].add(judged(setting, setting.warm), Spent())
        run, tasks = setting.harness.run, setting.harness.tasks(setting.tasks.read()[:SEARCHED])
        model, taught = reward_model(setting)
        rows = dict[str, tuple[list[Any], Spent]]()
        for name, way in ways.items():
            inputs = {"reward_model": model} if way else {}
            made = run(tree, {"rounds": 1 if SMALL else 4, **way}, model=setting.warm, tasks=tasks, **inputs)
            rows[name] = [made["trajectories"]], of_continuations(made)
        charged = rows["PRM"][1] + taught
        rows["PRM, charged"] = rows["PRM"][0], charged
        rows["rollouts, more"] = rollouts(setting, tasks, charged.sampled)
        rows["rollouts"] = first(rows["rollouts, more"][0], rows["PRM"][1].sampled)
        rows["one rollout"] = first(rows["rollouts"][0], 1)
        for name, arm in result.items():
            selections, cost = rows[name]
            arm.add(solved(tasks, selections), cost)
            if name in arms and name != "PRM, charged":
                policy, more = curated(setting, [successes(setting, selections)], prefixes="trained")
                arms[name].add(judged(setting, policy), cost + more)
        arms["PRM, charged"].add(arms["PRM"].solved[-1], arms["PRM"].costs[-1] + taught)
        by_difficulty(rows["rollouts"][0], result)
    pairs = [("rollouts", "PRM"), ("tree", "PRM"), ("rollouts, more", "PRM, charged"), ("rollouts", "tree")]
    print(f"\nvalued, {env}: train tasks solved, of {SEARCHED} a seed")
    table(result)
    met = [gain(f"{name}, {env}, train tasks", result, before, name, start="one rollout") for before, name in pairs]
    print(f"valued, {env}: held-out success after one supervised stage on what was solved")
    table(arms)
    return all([gain(f"{name}, {env}", arms, before, name) for before, name in pairs] + met)


def halved(setting: Setting) -> Setting:
    """A setting that is judged by every second task."""
    fewer = {name: setting.harness.tasks(getattr(setting, name).read()[::2]) for name in ("judged", "dev")}
    return replace(setting, **fewer)


def first(selections: list[Any], wanted: int) -> tuple[list[Any], Spent]:
    """The first of these selections that have so many sampled tokens together."""
    matches, spent = list[Any](), Spent()
    while spent.sampled < wanted and len(matches) < len(selections):
        matches.append(selections[len(matches)])
        spent += of_rollouts(matches[-1])
    return matches, spent


def reward_model(setting: Setting) -> tuple[Any, Spent]:
    """A process reward model of rollouts of the train tasks that are not searched, and what these cost."""
    from agentrl.pipelines.methods.reward_model.train import train
    from agentrl.pipelines.methods.slicing.steps import value
    from agentrl.pipelines.stages.trajectories import sample, synthesize

    run, others = setting.harness.run, setting.harness.tasks(setting.tasks.read()[STATES:])
    rows = run(sample, {"samples": 1}, model=setting.warm, tasks=others)["trajectories"]
    # A policy that has learned nothing never succeeds, and values must differ.
    known = [rows, *([run(synthesize, tasks=others)["trajectories"]] if SMALL else [])]
    steps = run(value, {"where": "all", "k": 4}, model=setting.warm, trajectories=known)
    made = run(train, FIT, model=setting.warm, trajectories=known, values=[steps["steps"]])
    print(f"reward model, seed {setting.harness.seed}: {made.metrics}", file=sys.stderr, flush=True)
    return made["reward_model"], of_rollouts(rows) + of_continuations(steps)


def preferred() -> bool:
    """The turns of a tree are worth the mean reward behind them, or what ReST-MCTS* makes of the ends behind them."""
    from agentrl.pipelines.methods.agentq.pairs import agentq
    from agentrl.pipelines.methods.lats.search import tree
    from agentrl.pipelines.stages.train import dpo

    values = {"DPO, tree": "shepherd", "DPO, tree, ReST": "rest"}
    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", "DPO, whole rollouts", *values)}
    grown = {"branch": 3, "depth": 10, "rounds": ROUNDS, **GUIDED["Agent Q"]}
    preferring = {"margin": 0.25, "per_task": 8, "apart": False}
    for setting, tasks in settings("preferred", arms):
        run, cost = setting.harness.run, Spent()
        for name, value in values.items():
            made = run(tree, {**grown, "value": value}, model=setting.warm, tasks=tasks)
            cost = of_continuations(made) + Spent(foreign=int(made.metrics["judged"]))
            result = run(agentq, preferring, trajectories=[made["trajectories"]], values=[made["steps"]])
            print(f"{name}: {result.metrics}", file=sys.stderr, flush=True)
            model, more = trained(setting, dpo, {"beta": 0.1}, pairs=[result["pairs"]])
            arms[name].add(judged(setting, model), cost + more)
        others, spent = rollouts(setting, tasks, cost.sampled)
        result = run(agentq, preferring, trajectories=others)
        print(f"DPO, whole rollouts: {result.metrics}", file=sys.stderr, flush=True)
        model, more = trained(setting, dpo, {"beta": 0.1}, pairs=[result["pairs"]])
        arms["DPO, whole rollouts"].add(judged(setting, model), spent + more)
        model, more = as_online(setting, others)
        arms["GRPO"].add(judged(setting, model), more)
        model, more = curated(setting, [successes(setting, others)])
        arms["rejection"].add(judged(setting, model), spent + more)
    print(f"\npreferred, rooms: trees of {STATES} tasks a seed")
    table(arms)
    met = [gain(f"preferred, rooms, {name}", arms, "DPO, whole rollouts", name) for name in values]
    return all(met)


def reflected() -> bool:
    """The environment writes the notes, of rewards, so all three may look at them: each task ends with its first
    success. The policy has imitated an expert who was shown notes."""
    from agentrl.pipelines.methods.lats.search import tree
    from agentrl.pipelines.stages.trajectories import sample

    ways = {"search": {}, "search with notes": {"reflect": "env"}}
    arms = {name: Arm(name) for name in ("plain retries", *ways)}
    grown = {"branch": 3, "depth": 10, "rounds": ROUNDS, "oracle": True}
    for seed, folder in seeds("reflected", arms):
        setting = of_levels(noted("rooms", seed, folder), frozenset({4, 5, 6}))
        tasks = setting.harness.tasks(setting.tasks.read()[:STATES])
        setting, run = replace(setting, tasks=tasks), setting.harness.run
        for name, way in ways.items():
            made = run(tree, {**grown, **way}, model=setting.warm, tasks=tasks)
            arms[name].add(solved(tasks, [made["trajectories"]]), of_continuations(made))
            print(f"reflected, seed {seed}, {name}: {made.metrics}", file=sys.stderr, flush=True)
        first = run(sample, {"samples": 1}, model=setting.warm, tasks=tasks)["trajectories"]
        spent = of_rollouts(first)
        later, more = retried(setting, first, arms["search"].costs[-1].sampled - spent.sampled, "plain retries")
        arms["plain retries"].add({**solved_by(first), **later}, spent + more)
    print(f"\nreflected, rooms, levels 4 to 6: train tasks solved, of {STATES} a seed")
    table(arms)
    met = gain("reflected, rooms, search", arms, "plain retries", "search")
    return gain("reflected, rooms", arms, "search", "search with notes") and met


def solved(tasks: Any, selections: list[Any]) -> dict[str, float]:
    """Task -> whether one of these rows solved it."""
    result = {task.task_id: 0.0 for task in tasks.read()}
    for selection in selections:
        for row in selection.table(["task_id", "success"]).to_pylist():
            result[row["task_id"]] = max(result[row["task_id"]], float(bool(row["success"])))
    return result


def by_difficulty(rollouts: list[Any], actual: dict[str, Arm]) -> None:
    """Print what the newest run of each arm solved of the levels, with how often plain rollouts succeed at each."""
    rows = [row for rollout in rollouts for row in rollout.table(["task_id", "level", "success"]).to_pylist()]
    level = {row["task_id"]: row["level"] for row in rows}
    for item in sorted(set(level.values())):
        plain = [bool(row["success"]) for row in rows if row["level"] == item]
        ours = [name for name in level if level[name] == item]
        shares = {name: sum(arm.runs[-1][task] for task in ours) / len(ours) for name, arm in actual.items()}
        share = sum(plain) / len(plain)
        print(f"level {item}: plain success {share:.3f}{' (below .1)' if share < 0.1 else ''}, solved: "
              + ", ".join(f"{name} {value:.3f}" for name, value in shares.items()), flush=True)  # fmt: skip

"""The experiment of ``methods.py`` about a policy that proposes tasks and solves them, in `words`, where few tasks are
given: rounds of as many sampled tokens, each trained on twice by the same algorithm.

Beside both rewards of proposals: proposals that are made and never rewarded, and rollouts of the given tasks alone.
And whether given tasks of `program_io` teach anything.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from arms import SMALL, Arm, Spent, gain, table
from courses import COURSES
from methods import (
    BATCH,
    Setting,
    expert,
    imitated,
    judged,
    of_rollouts,
    online,
    other_draws,
    prepared,
    rejected,
    seeds,
    trained_tokens,
)

GIVEN, ASKED, PROPOSALS, SOLUTIONS = (4, 4, 2, 2) if SMALL else (64, 32, 4, 8)
"""Tasks that are given; tasks of proposing in a round, proposals of each, and solutions of each proposed task."""
ROUNDS, PASSES, LR = 1 if SMALL else 3, 2, 1e-3
"""Rounds, how often the rows of one are trained on, and the learning rate."""
ONE_IN = 2
"""One in so many of the tasks that other methods are judged by."""
REWARDS: dict[str, Any] = {
    "Absolute Zero": {"reward": {"type": "absolute_zero"}, "invalid": -1.0},
    "R-Zero": {"reward": {"type": "r_zero"}, "invalid": 0.0, "within": 0.25},
    "no reward": {},
}


@dataclass
class Round:
    """What a round trains on, and what it sampled."""

    rows: list[Any]
    scores: list[Any]
    spent: Spent


def zero(env: str) -> bool:
    """What rewarded proposals add to proposals, and these to the given tasks."""
    arms = {name: Arm(name) for name in ("warm", "given tasks", *REWARDS)}
    for seed, folder in seeds(f"zero {env}", arms):
        setting = _prepared(env, seed, folder)
        given = setting.harness.tasks(setting.tasks.read()[:GIVEN])
        arms["warm"].add(judged(setting, setting.warm), Spent())
        budgets: list[int] = []
        for name in (*REWARDS, "given tasks"):
            model, spent, known = setting.warm, Spent(), given
            for number in range(ROUNDS):
                with other_draws(setting.harness, number):
                    if name == "given tasks":
                        played = _solved(setting, model, given, budgets[number])
                    else:
                        played, known = _self_play(setting, model, [given, known], REWARDS[name])
                    budgets.append(played.spent.sampled)
                    model, tokens = _learned(setting, model, played)
                spent += played.spent + Spent(trained=tokens)
            arms[name].add(judged(setting, model), spent)
            print(f"{env}, seed {seed}, {name}: {sum(arms[name].best[-1].values()):.0f} at its best", flush=True)
    print(f"\nzero, {env}: {GIVEN} tasks are given, {ROUNDS} rounds")
    table(arms)
    met = [gain(f"zero, {env}, {name}", arms, "given tasks", name) for name in REWARDS]
    for name in ("Absolute Zero", "R-Zero"):
        gain(f"zero, {env}, the reward of {name}", arms, "no reward", name)
    return all(met[:2])


def program_io() -> bool:
    """What GRPO and rejection of as many rollouts add in `program_io`, on given tasks, to a policy that has imitated
    the expert: without that, one that proposes has nothing to gain there either."""
    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO")}
    for seed, folder in seeds("program_io", arms):
        setting = prepared("program_io", seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        model, spent, _ = online(setting)
        arms["GRPO"].add(judged(setting, model), spent)
        model, spent, _ = rejected(setting, setting.tasks, spent.sampled)
        arms["rejection"].add(judged(setting, model), spent)
    print("\nprogram_io: outputs of programs that no train task has")
    table(arms)
    return gain("program_io", arms, "rejection", "GRPO")


def _prepared(env: str, seed: int, folder: Any) -> Setting:
    """A policy that has imitated an expert in both roles."""
    from agentrl.pipelines.methods.zero.ask import to_propose
    from agentrl.pipelines.stages.trajectories import synthesize

    harness, tasks, shown = expert(env, seed, folder)
    asked = harness.run(to_propose, {"n": COURSES[env].train}, tasks=[tasks["train"]])["tasks"]
    proposing = harness.run(synthesize, tasks=asked)["trajectories"]
    setting = imitated("both roles", env, harness, tasks, [shown, proposing], kinds=1.5)
    fewer = {name: harness.tasks(getattr(setting, name).read()[::ONE_IN]) for name in ("judged", "dev")}
    return replace(setting, **fewer)


def _self_play(setting: Setting, model: Any, known: list[Any], config: dict[str, Any]) -> tuple[Round, Any]:
    """A round of proposals and solutions, and the tasks that were proposed. Without a ``config`` proposals are not
    trained on."""
    from agentrl.pipelines.methods.zero.ask import from_proposals, to_propose
    from agentrl.pipelines.methods.zero.judge import judge
    from agentrl.pipelines.stages.trajectories import sample

    run = setting.harness.run
    asked = run(to_propose, {"n": ASKED}, tasks=known)["tasks"]
    proposals = run(sample, {"samples": PROPOSALS}, model=model, tasks=asked)["trajectories"]
    made = run(from_proposals, trajectories=[proposals], heldout=setting.heldout)
    solutions = run(sample, {"samples": SOLUTIONS}, model=model, tasks=made["tasks"])["trajectories"]
    inputs = {"proposals": [proposals], "tasks": [made["tasks"]], "solutions": [solutions]}
    result = run(judge, {**config, "scorer": "zero"}, **inputs)
    print(f"{made.metrics} {result.metrics}", flush=True)
    rows = [result["solutions"], *([result["proposals"]] if config else [])]
    return Round(rows, [result["scores"]], of_rollouts(proposals) + of_rollouts(solutions)), made["tasks"]


def _solved(setting: Setting, model: Any, tasks: Any, wanted: int) -> Round:
    """Rollouts of some tasks, as many of each, until so many tokens are sampled."""
    from agentrl.pipelines.stages.trajectories import sample

    rows, spent = list[Any](), Spent()
    while spent.sampled < wanted and not (SMALL and rows):
        with other_draws(setting.harness, len(rows)):
            made = setting.harness.run(sample, {"samples": SOLUTIONS // 2}, model=model, tasks=tasks)
        rows.append(made["trajectories"])
        spent += of_rollouts(rows[-1])
    return Round(rows, [], spent)


def _learned(setting: Setting, model: Any, played: Round) -> tuple[Any, int]:
    """The policy after a round, and the tokens that it was trained on."""
    from agentrl.pipelines.stages.train import offline

    rows = sum(len(selection.ids()) for selection in played.rows)
    config = {
        "algorithm": {"type": "reinforce++", "per_level": True},
        "steps": max(1, ceil(PASSES * rows / (2 * BATCH))),
        "batch": 2 * BATCH,
        "optimizer": {"lr": LR, "schedule": "linear"},
        "scorer": "zero" if played.scores else None,
    }
    try:
        made = setting.harness.run(offline, config, model=model, trajectories=played.rows, scores=played.scores)
    except ValueError as error:  # all rewards of the round are equal, as those of a policy that learned nothing
        print(f"a round taught nothing: {error}", flush=True)
        return model, 0
    return made["model"], trained_tokens(made)

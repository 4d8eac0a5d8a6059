"""The experiment of ``methods.py`` about several agents: in `words`, a planner says which relations a question asks
for, and a walker looks them up. Demonstrations know what three of ten words mean; the others are learned from rewards.

- teams: online GRPO of one model that is both, with joint credit, or with the walker's alternatives after the same plan
  (marginal credit); of two models, the planner's with a frozen walker and then the walker's with that planner; and of
  one agent alone. All sample as many tokens.
"""

from dataclasses import replace
from typing import Any

from arms import SMALL, Arm, Solved, Spent, gain, measured, table
from methods import BATCH, Setting, judged, online, prepared, seeds

BUDGET = 1_000 if SMALL else 80_000
"""Sampled tokens of a method and a seed."""
TASKS, SAMPLES, ACTS = (4, 4, 2) if SMALL else (16, 8, 4)
STEPS, JUDGED, DEV = (2, 4, 2) if SMALL else (200, 256, 64)
LR = 2e-3
PLAN = {"name": "planner", "ask": "plan?"}
JOINT: dict[str, Any] = {
    "team": {"speakers": [PLAN]}, "samples": SAMPLES, "algorithm": {"type": "grpo", "credit": "joint"},
}  # fmt: skip
MARGINAL: dict[str, Any] = {
    "team": {"speakers": [PLAN], "acts": ACTS}, "samples": SAMPLES // ACTS,
    "algorithm": {"type": "grpo", "credit": "fork_turn"},
}  # fmt: skip


def teams() -> bool:
    names = ("warm", "GRPO, joint", "GRPO, marginal", "GRPO, in turn", "warm, alone", "GRPO, alone")
    arms = {name: Arm(name) for name in names}
    for seed, folder in seeds("teams", arms):
        alone = prepared_small(seed, folder)
        setting = shown_both(alone)
        plan, walk = lengths(setting)
        arms["warm"].add(together(setting, setting.warm), Spent())
        model, spent = trained(setting, TASKS * SAMPLES * (plan + walk), **JOINT)
        arms["GRPO, joint"].add(together(setting, model), spent)
        model, spent = trained(setting, TASKS * MARGINAL["samples"] * (plan + ACTS * walk), **MARGINAL)
        arms["GRPO, marginal"].add(together(setting, model), spent)
        planner, walker, spent = in_turn(setting, 2 * TASKS * SAMPLES * (plan + walk))
        arms["GRPO, in turn"].add(together(setting, walker, planner), spent)
        arms["warm, alone"].add(judged(alone, alone.warm), Spent())
        model, spent = trained(alone, TASKS * SAMPLES * walk, samples=SAMPLES)
        arms["GRPO, alone"].add(judged(alone, model), spent)
    print(f"\nteams, words: a planner and a walker, about {BUDGET:,} sampled tokens a seed, learning rate {LR}")
    table({name: arms[name] for name in names[:4]})
    table({name: arms[name] for name in names[4:]}, names[4])
    gain("teams, words, two models in turn", arms, "GRPO, joint", "GRPO, in turn")
    met = gain("teams, words, marginal credit", arms, "GRPO, joint", "GRPO, marginal")
    return gain("teams, words, a team", arms, "GRPO, alone", "GRPO, joint", start="warm, alone") and met


def trained(setting: Setting, each: float, **config: Any) -> tuple[Any, Spent]:
    """The warm policy after as many iterations as sample :data:`BUDGET` tokens, if one samples ``each``."""
    model, spent, _ = online(setting, tasks=TASKS, iterations=max(1, round(BUDGET / each)), lr=LR, **config)
    return model, spent


def in_turn(setting: Setting, each: float) -> tuple[Any, Any, Spent]:
    """A planner after half of the budget with the warm policy as its walker, a walker after the other half with that
    planner, and what both spent."""
    planner, first = trained(setting, each, inputs={"actor": setting.warm}, **JOINT)
    walker, second = trained(setting, each, inputs={"speaker": planner}, **JOINT)
    return planner, walker, first + second


def prepared_small(seed: int, folder: Any) -> Setting:
    """A model that has imitated the expert, which acts alone."""
    setting = prepared("words", seed, folder)
    held, dev = setting.judged.read()[:JUDGED], setting.dev.read()[:DEV]
    return replace(setting, judged=setting.harness.tasks(held), dev=setting.harness.tasks(dev))


def shown_both(alone: Setting) -> Setting:
    """The same model after steps on both agents' rows of what the expert did."""
    from agentrl.pipelines.methods.team.cast import cast
    from agentrl.pipelines.stages.train import sft
    from agentrl.pipelines.stages.trajectories import synthesize

    run = alone.harness.run
    walks = run(synthesize, alone.course.shown, tasks=alone.tasks)["trajectories"]
    both = run(cast, {"say": ["rel"]}, trajectories=[walks])["trajectories"]
    config = {"steps": STEPS, "batch": BATCH, "optimizer": {"lr": 5e-3, "schedule": "cosine", "warmup": STEPS // 10}}
    return replace(alone, warm=run(sft, config, model=alone.warm, trajectories=[both])["model"])


def acted(setting: Setting, tasks: Any, model: Any, speaker: Any = None, **config: Any) -> Any:
    """Rollouts of both agents."""
    from agentrl.pipelines.methods.team.team import team

    other = {"speaker": speaker} if speaker else {}
    config = {"speakers": [PLAN], "samples": 1, **config}
    return setting.harness.run(team, config, model=model, tasks=tasks, **other)["trajectories"]


def together(setting: Setting, model: Any, speaker: Any = None) -> Solved:
    """What one rollout of both agents solves of each task."""

    def play(tasks: Any, temperature: float) -> dict[str, float]:
        rows = acted(setting, tasks, model, speaker, sampling={"temperature": temperature})
        result = rows.table(["task_id", "agent", "success"]).to_pylist()
        return {row["task_id"]: float(bool(row["success"])) for row in result if row["agent"] == "walker"}

    return measured(play, setting.dev, setting.judged)


def lengths(setting: Setting) -> tuple[float, float]:
    """Tokens that the warm policy samples on dev tasks for a plan and for a walk, on average."""
    number, counts = len(setting.dev.read()), {"planner": 0, "walker": 0}
    for row in acted(setting, setting.dev, setting.warm).table(["agent", "n_action_tokens"]).to_pylist():
        counts[row["agent"]] += row["n_action_tokens"]
    return counts["planner"] / number, counts["walker"] / number

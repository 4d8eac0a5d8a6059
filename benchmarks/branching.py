"""The experiments of ``methods.py`` about continued rows: what they gain over whole rollouts of as many sampled tokens.

- slicing: GRPO on stored rows of `rooms`, whole rows or by the values of their turns (`bisect`).
- pairs: DPO on pairs of steps, from continuations at uncertain turns or from whole rollouts.
- dagger: as many turns of an adviser, on its own states or on the student's.
- search: successes of a tree search, or of plain rollouts, learned once.
"""

import sys
from collections.abc import Iterator
from typing import Any

from methods import (
    CURATED_STEPS,
    LR,
    SAMPLES,
    SMALL,
    Arm,
    Setting,
    Spent,
    curated,
    gain,
    judged,
    of_rollouts,
    prepared,
    seeds,
    table,
)

STATES, STEPS = (16, 2) if SMALL else (192, 40)
"""Tasks whose rollouts are looked at, and training steps of offline methods."""


def settings(experiment: str, arms: dict[str, Arm], env: str = "rooms") -> Iterator[tuple[Setting, Any]]:
    """A setting for each seed, and the first :data:`STATES` of its tasks; the warm policy is judged."""
    for seed, folder in seeds(experiment, arms):
        setting = prepared(env, seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        yield setting, setting.harness.tasks(setting.tasks.read()[:STATES])


def rollouts(setting: Setting, tasks: Any, tokens: int) -> tuple[Any, Spent]:
    """Selections of whole rollouts of the warm policy, one more of each task until ``tokens`` are sampled."""
    from pipelines.stages.trajectories import sample

    found, spent = [], Spent()
    while spent.sampled < tokens:
        found.append(setting.harness.run(sample, {"samples": 1}, model=setting.warm, tasks=tasks)["trajectories"])
        spent += of_rollouts(found[-1])
    return found, spent


def of_continuations(made: Any) -> Spent:
    return Spent(int(made.metrics["sampled_tokens"]), 0, int(made.metrics["environment_calls"]), 0)


def trained(setting: Setting, stage: Any, config: dict[str, Any], **inputs: Any) -> tuple[Any, Spent]:
    """The warm policy after :data:`STEPS` steps of a stage, and the tokens in the rows that it was trained on."""
    optimizer = {"lr": LR["dpo" if stage.name == "train.dpo" else "offline"], "schedule": "linear"}
    config = {"steps": STEPS, "batch": 32, "optimizer": optimizer, **config}
    try:
        made = setting.harness.run(stage, config, model=setting.warm, **inputs)
    except ValueError as error:
        if "nothing to train on" not in str(error):
            raise
        print(f"{stage.name}: {error}; the warm policy is judged", flush=True)
        return setting.warm, Spent()
    counts = [sum(row["mask"]) for row in made["rows"].table().select(["mask"]).to_pylist()]
    return made["model"], Spent(trained=round(STEPS * 32 * sum(counts) / max(1, len(counts))))


def learned(setting: Setting, selections: list[Any]) -> tuple[Any, Spent]:
    """The warm policy after supervised steps on these rows, if there are some."""
    return curated(setting, selections) if any(one.ids() for one in selections) else (setting.warm, Spent())


def slicing() -> bool:
    """What one learns from stored rows of long walks if forks say which turn lost."""
    from pipelines.stages.steps import value
    from pipelines.stages.train import offline
    from pipelines.stages.trajectories import reject, sample

    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO, whole rows", "GRPO, values")}
    for setting, tasks in settings("slicing", arms):
        run = setting.harness.run
        rows = run(sample, {"samples": SAMPLES}, model=setting.warm, tasks=tasks)["trajectories"]
        steps = run(value, {"where": "bisect", "k": 8}, model=setting.warm, trajectories=[rows])
        cost = of_rollouts(rows) + of_continuations(steps)
        config = {"algorithm": {"type": "grpo", "credit": "values"}}
        model, more = trained(
            setting, offline, config, trajectories=[rows, steps["trajectories"]], steps=[steps["steps"]]
        )
        arms["GRPO, values"].add(judged(setting, model), cost + more)
        others, spent = rollouts(setting, tasks, cost.sampled)
        model, more = trained(setting, offline, {"algorithm": {"type": "grpo"}}, trajectories=grouped(setting, others))
        arms["GRPO, whole rows"].add(judged(setting, model), spent + more)
        good = run(reject, {"keep": 2}, trajectories=others)["trajectories"]
        model, more = learned(setting, [good])
        arms["rejection"].add(judged(setting, model), spent + more)
    print(f"\nslicing, rooms: rollouts of {STATES} tasks a seed")
    table(arms)
    return gain("slicing, rooms", arms["GRPO, whole rows"], arms["GRPO, values"])


def grouped(setting: Setting, selections: list[Any]) -> list[Any]:
    """The rows of several runs of one policy as groups of their tasks."""
    rows = [row for one in selections for row in one.read()]
    update = [{"trajectory_id": f"g-{n}", "episode_id": f"g-{n}", "group_id": None} for n in range(len(rows))]
    return [setting.harness.trajectories([row.model_copy(update=new) for row, new in zip(rows, update, strict=True)])]


def pairs() -> bool:
    """Pairs of steps from four continuations of the least certain turn, or from whole rollouts."""
    from pipelines.stages.fork import fork
    from pipelines.stages.pairs import agentq
    from pipelines.stages.train import dpo
    from pipelines.stages.trajectories import reject, sample

    arms = {name: Arm(name) for name in ("warm", "rejection", "DPO, whole rollouts", "DPO, continuations")}
    for setting, tasks in settings("pairs", arms):
        run = setting.harness.run
        rows = run(sample, {"samples": 2}, model=setting.warm, tasks=tasks)["trajectories"]
        forked = run(fork, {"at": "uncertain", "turns": 1, "k": 4}, model=setting.warm, trajectories=[rows])
        cost = of_rollouts(rows) + of_continuations(forked)
        config = {"margin": 0.25, "per_task": 8}
        made = run(agentq, config, trajectories=[rows, forked["trajectories"]])
        print(f"pairs of continuations: {made.metrics}", file=sys.stderr, flush=True)
        model, more = trained(setting, dpo, {"beta": 0.1}, pairs=made["pairs"])
        arms["DPO, continuations"].add(judged(setting, model), cost + more)
        others, spent = rollouts(setting, tasks, cost.sampled)
        made = run(agentq, config, trajectories=others)
        model, more = trained(setting, dpo, {"beta": 0.1}, pairs=made["pairs"])
        arms["DPO, whole rollouts"].add(judged(setting, model), spent + more)
        model, more = learned(setting, [run(reject, {"keep": 2}, trajectories=others)["trajectories"]])
        arms["rejection"].add(judged(setting, model), spent + more)
    print(f"\npairs, rooms: rollouts of {STATES} tasks a seed")
    table(arms)
    return gain("pairs, rooms", arms["DPO, whole rollouts"], arms["DPO, continuations"])


def dagger() -> bool:
    """As many turns of an adviser: on the walks of the expert itself, or in the states of the student."""
    from pipelines.stages.correct import correct
    from pipelines.stages.trajectories import reject, sample, synthesize

    arms = {name: Arm(name) for name in ("warm", "rejection", "expert's states", "student's states")}
    for setting, tasks in settings("dagger", arms):
        run = setting.harness.run
        rows = run(sample, {"samples": 1}, model=setting.warm, tasks=tasks)["trajectories"]
        labels = run(correct, {"mode": "label"}, model=setting.warm, trajectories=[rows])
        told = Spent(foreign=int(labels.metrics["foreign_tokens"]), calls=int(labels.metrics["environment_calls"]))
        model, more = learned(setting, [labels["trajectories"]])
        arms["student's states"].add(judged(setting, model), of_rollouts(rows) + told + more)
        turns, shown = len(labels["trajectories"].ids()), []
        for walk in run(synthesize, tasks=setting.tasks)["trajectories"].read():
            if turns > 0:
                shown.append(walk.model_copy(update={"trajectory_id": f"w-{len(shown)}"}))
                turns -= walk.n_steps
        expert = setting.harness.trajectories(shown)
        model, _ = learned(setting, [expert])
        calls = sum(walk.n_tool_calls for walk in shown)
        more = Spent(trained=round(CURATED_STEPS * 32 * told.foreign / max(1, len(shown))))  # text, of as many turns
        arms["expert's states"].add(judged(setting, model), Spent(foreign=told.foreign, calls=calls) + more)
        others, spent = rollouts(setting, tasks, of_rollouts(rows).sampled + told.foreign)
        model, more = learned(setting, [run(reject, {"keep": 2}, trajectories=others)["trajectories"]])
        arms["rejection"].add(judged(setting, model), spent + more)
    print(f"\ndagger, rooms: walks of {STATES} tasks a seed")
    table(arms)
    return gain("dagger, rooms", arms["expert's states"], arms["student's states"], by="foreign")


def search() -> bool:
    """What a search finds that as many tokens of plain rollouts do not, and what one learns from it."""
    from pipelines.stages.search import tree
    from pipelines.stages.trajectories import reject

    arms = {name: Arm(name) for name in ("warm", "rollouts", "search")}
    for setting, tasks in settings("search", arms):
        run = setting.harness.run
        made = run(tree, {"branch": 3, "rounds": 2 if SMALL else 8, "depth": 10}, model=setting.warm, tasks=tasks)
        cost = of_continuations(made)
        model, more = learned(setting, [run(reject, {"keep": 2}, trajectories=[made["trajectories"]])["trajectories"]])
        arms["search"].add(judged(setting, model), cost + more)
        others, spent = rollouts(setting, tasks, cost.sampled)
        ends = [row for one in others for row in one.table(["task_id", "success"]).to_pylist()]
        solved = {row["task_id"] for row in ends if row["success"]}
        print(f"solved by search {made.metrics['solved_tasks']}, by rollouts {len(solved)} of {STATES}")
        model, more = learned(setting, [run(reject, {"keep": 2}, trajectories=others)["trajectories"]])
        arms["rollouts"].add(judged(setting, model), spent + more)
    print(f"\nsearch, rooms: trees of {STATES} tasks a seed")
    table(arms)
    return gain("search, rooms", arms["rollouts"], arms["search"])

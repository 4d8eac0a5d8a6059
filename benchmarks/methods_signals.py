"""What signals on tokens, a curriculum and notes gain at an equal budget; part of :mod:`benchmarks.methods`, which runs
them.

- curriculum: GRPO over levels 1 to 6 of `rooms`, or 1 to 3 of `words`, every task in turn or by a curriculum, with as
  many tokens.
- echo: GRPO with and without cross-entropy on observations (`rooms`, and `words` and `lookup`, whose facts nobody can
  know).
- rwml: GRPO on predictions of observations before GRPO on walks, against GRPO on walks alone (`words`, `rooms`,
  `lookup`).
- reflexion: retries with notes of what failed, and without, of as many tokens (`lookup`, `rooms`): tasks solved, of
  those that failed.
- resample: GRPO with turns sampled again that are as uncertain as the one before (`words`, `rooms`).
- rank: GRPO by the places that a judge of known quality gives the rollouts of a group, alone and beside the verifier's
  reward (`words`, `rooms`).
"""

import sys
from dataclasses import replace
from typing import Any

from arms import Arm, Spent, gain, table
from methods import (
    ITERATIONS,
    SAMPLES,
    SPLIT,
    TASKS,
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
)

SHOWING = {"context": [{"notes": {}}]}
LEVELS = {"start": [0.8, 0.2], "gate": 0.7, "window": 256, "easier": 0.15}
DRAWS = {
    "levels": LEVELS,
    "levels, gate 0.5": {**LEVELS, "gate": 0.5},
    "pass rates": {"start": [0.2, 0.5, 0.3], "gate": 0.99, "band": [0.1, 0.9]},
    "levels, gate 0.5, and pass rates": {**LEVELS, "gate": 0.5, "band": [0.1, 0.9]},
}
"""Curricula: by levels alone, by pass rates alone (levels have the shares that the tasks of `words` have), or both."""
CHOSEN = {"rooms": "levels", "words": "pass rates"}
RESAMPLED = {"eta": 0.003, "tries": 2}


def curriculum(env: str) -> bool:
    """GRPO with every task in turn, and by a curriculum; rejection beside them. Walks of low levels are short, so the
    curriculum has a third more iterations, and the others have as many tokens as it sampled. With SPLIT=dev every
    way of :data:`DRAWS` is tried, without the others."""
    ways = {f"GRPO, {name}": draw for name, draw in DRAWS.items()}
    ways = ways if SPLIT == "dev" else {f"GRPO, {CHOSEN[env]}": DRAWS[CHOSEN[env]]}
    plain = () if SPLIT == "dev" else ("rejection", "GRPO")
    arms = {name: Arm(name) for name in ("warm", *plain, *ways)}
    for seed, folder in seeds(f"curriculum {env}", arms):
        setting = prepared("rooms 1-6" if env == "rooms" else env, seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        for name, draw in ways.items():
            model, spent, levels = online(setting, draw=draw, iterations=ITERATIONS * 4 // 3)
            arms[name].add(judged(setting, model), spent)
            print(f"{name}, seed {seed}: level of each iteration {levels}", file=sys.stderr, flush=True)
        if not plain:
            continue
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        model, more, each = rejected(setting, tasks, spent.sampled)
        arms["rejection"].add(judged(setting, model), more)
        model, more, _ = online(setting, iterations=max(1, round(spent.sampled / each / TASKS / SAMPLES)))
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\ncurriculum, {env}: {ITERATIONS * 4 // 3} iterations of {TASKS} tasks a seed")
    table(arms)
    met = [gain(f"{name}, {env}", arms, before, name) for name in ways for before in plain]
    return all(met)


def resample(env: str) -> bool:
    """Refused turns are sampled tokens too, so the others have as many."""
    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", "GRPO, resampled turns")}
    algorithm = {"type": "grpo", "off_policy": {"truncate": 2.0}}
    for seed, folder in seeds(f"resample {env}", arms):
        setting = prepared(env, seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        model, spent, _ = online(setting, algorithm=algorithm, explore={"resample": RESAMPLED})
        arms["GRPO, resampled turns"].add(judged(setting, model), spent)
        print(f"resample, seed {seed}: {spent.sampled - spent.trained:,} tokens refused", file=sys.stderr, flush=True)
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        model, more, each = rejected(setting, tasks, spent.sampled)
        arms["rejection"].add(judged(setting, model), more)
        rounds = max(1, round(spent.sampled / each / TASKS / SAMPLES))
        model, more, _ = online(setting, algorithm=algorithm, iterations=rounds)
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\nresample, {env}: {TASKS * ITERATIONS * SAMPLES:,} rollouts a seed with resampled turns")
    table(arms)
    return gain(f"resample, {env}", arms, "GRPO", "GRPO, resampled turns")


def rank(env: str) -> bool:
    """The judge knows successes from failures with probability 0.8, and nothing else. Foreign tokens are the numbers
    that it writes; what it reads is not counted."""
    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", "GRPO, ranks", "GRPO, verifier + ranks")}
    judge = {"type": "scripted_judge:Scripted", "right": 0.8, "orders": 2}
    rewards = {"GRPO": [], "GRPO, ranks": [{**judge, "alone": True}], "GRPO, verifier + ranks": [judge]}
    rows = TASKS * ITERATIONS * SAMPLES
    for seed, folder in seeds(f"rank {env}", arms):
        setting = prepared(env, seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        for name, given in rewards.items():
            model, spent, _ = online(setting, rewards=given)
            arms[name].add(judged(setting, model), spent + Spent(foreign=2 * rows if given else 0))
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        model, more, _ = rejected(setting, tasks, arms["GRPO"].costs[-1].sampled)
        arms["rejection"].add(judged(setting, model), more)
    print(f"\nrank, {env}: {rows:,} rollouts a seed, a judge that is right with probability 0.8")
    table(arms)
    met = gain(f"rank, {env}, alone", arms, "GRPO", "GRPO, ranks")
    return gain(f"rank, {env}", arms, "GRPO", "GRPO, verifier + ranks") and met


def beside_grpo(method: str, env: str, ways: dict[str, dict[str, Any]]) -> dict[str, Arm]:
    """GRPO, and GRPO with each of the settings ``ways``, beside rejection sampling of as many tokens; printed."""
    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", *ways)}
    for seed, folder in seeds(f"{method} {env}", arms):
        setting = prepared(env, seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        for name in ("GRPO", *ways):
            model, spent, _ = online(setting, **ways.get(name, {}))
            arms[name].add(judged(setting, model), spent)
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        model, spent, _ = rejected(setting, tasks, arms["GRPO"].costs[-1].sampled)
        arms["rejection"].add(judged(setting, model), spent)
    print(f"\n{method}, {env}: {TASKS * ITERATIONS * SAMPLES:,} rollouts a seed")
    table(arms)
    return arms


def echo(env: str) -> bool:
    arms = beside_grpo("echo", env, {"GRPO + observations": {"observe": {"tool": 0.1}}})
    return gain(f"echo, {env}", arms, "GRPO", "GRPO + observations")


def rwml(env: str) -> bool:
    """As many sampled tokens: of rollouts, or first of predictions and then of rollouts. A prediction is a few tokens,
    so most of them are of rollouts either way. All policies have seen some predictions demonstrated."""
    from agentrl.pipelines.methods.rwml.predict import predict
    from agentrl.pipelines.stages.trajectories import synthesize

    names = ("warm", "rejection", "GRPO", "GRPO + observations", "world model, then GRPO")
    arms, worlds = ({name: Arm(name) for name in names} for _ in range(2))
    for seed, folder in seeds(f"rwml {env}", arms, worlds):
        harness, tasks, walks = expert(env, seed, folder)
        made = harness.run(predict, {"turns": 1, "heldout": 0.2}, trajectories=[walks])
        shown = harness.run(synthesize, {"coverage": 0.3}, tasks=made["train"])["trajectories"]
        setting = imitated("predicting", env, harness, tasks, [walks, shown])
        asked = made["heldout"].read()
        few = max(1, len(asked) // 4)
        of_dev, of_judged = harness.tasks(asked[:few]), harness.tasks(asked[few:] or asked)  # small: there is one
        of_world = replace(setting, tasks=made["train"], judged=of_judged, dev=of_dev)
        result = {"warm": (setting.warm, Spent())}
        model, spent, _ = online(setting)
        result["GRPO"] = model, spent
        result["GRPO + observations"] = online(setting, observe={"tool": 0.1})[:2]
        some = harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        result["rejection"] = rejected(setting, some, spent.sampled)[:2]
        world, before, _ = online(of_world, iterations=max(1, ITERATIONS // 2))
        left = (spent.sampled - before.sampled) / (spent.sampled / ITERATIONS)
        model, spent, _ = online(replace(setting, warm=world), iterations=max(1, round(left)))
        result["world model, then GRPO"] = model, spent + before
        for name, (model, spent) in result.items():
            arms[name].add(judged(setting, model), spent)
            worlds[name].add(judged(of_world, model), spent)
    print(f"\nrwml, {env}: what is known of the world (predictions that are right)")
    table(worlds)
    print(f"rwml, {env}: rollouts, as many sampled tokens as {TASKS * ITERATIONS * SAMPLES:,} of them a seed have")
    table(arms)
    return gain(f"rwml, {env}", arms, "GRPO", "world model, then GRPO")


def reflexion(env: str) -> bool:
    """Rounds of two retries of what is not solved yet, until both have sampled as many tokens as four attempts at each
    task that one rollout failed would. The notes come from the environment, so they cost no tokens but those that are
    read."""
    from agentrl.pipelines.stages.trajectories import sample

    arms = {name: Arm(name) for name in ("plain retries", "retries with notes")}
    for seed, folder in seeds(f"reflexion {env}", arms):
        setting = noted(env, seed, folder)
        first = setting.harness.run(sample, {"samples": 1}, model=setting.warm, tasks=setting.tasks)["trajectories"]
        failed = first.table(["success", "n_action_tokens"]).to_pylist()
        budget = 4 * sum(row["n_action_tokens"] for row in failed if not row["success"])
        for name, arm in arms.items():
            arm.add(*retried(setting, first, budget, name))
    print(f"\nreflexion, {env}: tasks solved by retries of as many tokens, of those that one rollout failed")
    table(arms)
    return gain(f"reflexion, {env}", arms, "plain retries", "retries with notes")


def noted(env: str, seed: int, folder: Any) -> Setting:
    """A model that has imitated an expert who was shown notes of up to three other attempts: as many as rollouts are
    shown later. Two notes were noise to a policy that had never seen more than one."""
    from agentrl.pipelines.methods.reflexion.notes import reflect
    from agentrl.pipelines.stages.trajectories import synthesize

    errs = {"noise": 0.6, "coverage": 0.4}
    harness, tasks, slips = expert(env, seed, folder, **errs)
    others = []
    for number in range(2):
        with other_draws(harness, number):
            others.append(harness.run(synthesize, errs, tasks=tasks["train"])["trajectories"])
    slipped = harness.run(reflect, tasks=tasks["train"], trajectories=[slips, *others])["notes"]
    shown = harness.run(synthesize, SHOWING, tasks=tasks["train"], notes=slipped)["trajectories"]
    return imitated("shown notes", env, harness, tasks, [shown])


def retried(setting: Setting, first: Any, budget: int, name: str) -> tuple[dict[str, float], Spent]:
    """What rounds of retries solved of the tasks that ``first`` failed, and what they cost. Each round is printed."""
    from agentrl.pipelines.methods.reflexion.notes import reflect
    from agentrl.pipelines.stages.trajectories import sample

    harness, solved, spent, rows, notes = setting.harness, dict[str, float](), Spent(), first, dict[str, Any]()
    curve = []
    while spent.sampled < budget and not (solved and all(solved.values())):
        with other_draws(harness, len(curve)):
            if name == "retries with notes":
                made = harness.run(reflect, tasks=setting.tasks, trajectories=[rows], **notes)
                notes = {"notes": made["notes"]}
            config = {"retries": 2, **(SHOWING if notes else {})}
            wired = {"model": setting.warm, "tasks": setting.tasks, "trajectories": [rows], **notes}
            rows = harness.run(sample, config, **wired)["trajectories"]
        solved = {task: max(solved.get(task, 0.0), won) for task, won in {**solved, **solved_by(rows)}.items()}
        spent += of_rollouts(rows)
        curve.append(f"{sum(solved.values()) / len(solved):.3f} with {spent.sampled:,}")
    print(f"seed {harness.seed}, {name}, share solved with sampled tokens: {'; '.join(curve)}", flush=True)
    return solved, spent


def solved_by(rows: Any) -> dict[str, float]:
    """Task -> whether one of these rows solved it."""
    result: dict[str, float] = {}
    for row in rows.table(["task_id", "success"]).to_pylist():
        result[row["task_id"]] = max(result.get(row["task_id"], 0.0), float(bool(row["success"])))
    return result

"""What memory gains at an equal budget; part of :mod:`benchmarks.methods`, which runs them.

- experience: held-out tasks with 0, 1 or 3 runs of other tasks in sight (`lookup`, `rooms`), by a policy that was shown
  such runs in its demonstrations and by one that was not; and what one learns from rollouts that saw three, without
  them.
- guidance: tasks that nothing solved, tried again with notes and kept without them, against as many plain rollouts
  (`words`, `rooms`; in `lookup` no task stays unsolved): supervised, and as preferences over the failures without
  guidance.
- star: the same with the answer as a hint (`words`, `rooms`, `lookup`).
- splice: rejection sampling on rollouts, with and without failed ones that go on as a success did (`rooms`, `lookup`);
  success, and in `rooms` recovery after a planted wrong turn.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arms import Arm, Solved, Spent, gain, measured, table
from branching import STATES, recovery, trained
from courses import COURSES
from methods import (
    ITERATIONS,
    SAMPLES,
    TASKS,
    Setting,
    curated,
    expert,
    imitated,
    judged,
    of_rollouts,
    online,
    prepared,
    rollouts,
    seeds,
    successes,
)
from methods_signals import SHOWING, noted

LONG = 768
"""Tokens of a row that has runs in sight."""

MANY = TASKS * ITERATIONS
"""Tasks whose rollouts are looked at."""


def experience(env: str) -> bool:
    from agentrl.pipelines.stages.reopen import reopen
    from agentrl.pipelines.stages.trajectories import sample, synthesize

    shown = {f"{kind}, k {k}": Arm(f"{kind}, k {k}") for kind in ("not shown", "shown") for k in (0, 1, 3)}
    arms = {name: Arm(name) for name in ("warm", "rejection", "rejection, k 3", "GRPO")}
    for seed, folder in seeds(f"experience {env}", shown, arms):
        harness, tasks, walks = expert(env, seed, folder)
        given = {"tasks": tasks["train"], "experience": [walks]}
        seen = harness.run(synthesize, seeing(3), **given)["trajectories"]
        settings = {
            "not shown": imitated("warm and long", env, harness, tasks, [walks], LONG),
            "shown": imitated("shown and long", env, harness, tasks, [walks, seen], LONG),
        }
        for kind, setting in settings.items():
            for k in (0, 1, 3):
                shown[f"{kind}, k {k}"].add(*seen_by(setting, walks, k))
        setting = settings["shown"]
        some = harness.tasks(setting.tasks.read()[:STATES])
        arms["warm"].add(judged(setting, setting.warm), Spent())
        for name, k in (("rejection", 0), ("rejection, k 3", 3)):
            wired = {"experience": [walks]} if k else {}
            rows = harness.run(sample, {"samples": SAMPLES, **seeing(k)}, model=setting.warm, tasks=some, **wired)
            good = successes(setting, [rows["trajectories"]])
            good = harness.run(reopen, trajectories=[good], model=setting.warm, tasks=[some])["trajectories"]
            model, more = curated(setting, [good])
            arms[name].add(judged(setting, model), of_rollouts(rows["trajectories"]) + more)
        model, more, _ = online(setting, iterations=max(1, STATES // TASKS))
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\nexperience, {env}: held-out tasks with k runs of other tasks in sight; tokens of these rollouts")
    table(shown)
    print(f"experience, {env}: held-out tasks alone, after {STATES * SAMPLES:,} rollouts a seed with k runs in sight")
    table(arms)
    met = [
        gain(f"experience, {env}, {kind}, k {k}", shown, f"{kind}, k 0", f"{kind}, k {k}", start=arms["warm"])
        for kind in ("not shown", "shown")
        for k in (1, 3)
    ]
    return gain(f"experience, {env}, learned from", arms, "rejection", "rejection, k 3") and met[-1]


def seen_by(setting: Setting, walks: Any, k: int) -> tuple[Solved, Spent]:
    """What a policy solves with ``k`` of these walks in sight, and the tokens of that at temperature 1."""
    from agentrl.pipelines.stages.trajectories import sample

    wired, spent = {"experience": [walks]} if k else {}, Spent()

    def play(tasks: Any, temperature: float) -> dict[str, float]:
        nonlocal spent
        config = {"samples": 1, "sampling": {"temperature": temperature}, **seeing(k)}
        made = setting.harness.run(sample, config, model=setting.warm, tasks=tasks, **wired)["trajectories"]
        spent = of_rollouts(made) if temperature == 1 else spent
        return {row["task_id"]: float(row["success"]) for row in made.table(["task_id", "success"]).to_pylist()}

    return measured(play, setting.dev, setting.judged), spent


def seeing(k: int) -> dict[str, Any]:
    """The setting of stages that show ``k`` runs."""
    return {"context": [{"experience": {"k": k, "max_tokens": 400}}]} if k else {}


def guidance(env: str) -> bool:
    """The notes come from the environment, so they cost no tokens but those that are read. It says which call of an
    attempt was wrong first: in `words` that tells what a word does not mean."""
    from agentrl.pipelines.methods.eto.outcome import outcome
    from agentrl.pipelines.methods.reflexion.notes import reflect
    from agentrl.pipelines.methods.star.rationalize import rationalize
    from agentrl.pipelines.stages.train import dpo
    from agentrl.pipelines.stages.trajectories import sample

    names = ("warm", "rejection", "guidance", "DPO", "DPO, guided", "GRPO")
    arms = {name: Arm(name) for name in names}
    for seed, folder in seeds(f"guidance {env}", arms):
        setting = noted(env, seed, folder)
        harness = setting.harness
        arms["warm"].add(judged(setting, setting.warm), Spent())
        some = harness.tasks(setting.tasks.read()[:MANY])
        first = harness.run(sample, {"samples": SAMPLES // 2}, model=setting.warm, tasks=some)["trajectories"]
        notes = harness.run(reflect, tasks=some, trajectories=[first])["notes"]
        made = harness.run(
            rationalize, {"samples": SAMPLES, **SHOWING},
            model=setting.warm, tasks=some, trajectories=[first], notes=notes,
        )  # fmt: skip
        print(f"guidance, {env}, seed {seed}: {made.metrics}", file=sys.stderr, flush=True)
        for name, plain, guided, spent in retried_or_plain("guidance", setting, some, first, made):
            good = successes(setting, plain)
            model, taught = curated(setting, [good, *guided])
            arms[name].add(judged(setting, model), spent + taught)
            pairs = harness.run(outcome, trajectories=[*guided, *plain], model=setting.warm)["pairs"]
            model, taught = trained(setting, dpo, {"beta": 0.1}, pairs=[pairs])
            arms["DPO, guided" if guided else "DPO"].add(judged(setting, model), spent + taught)
        model, more = grpo_on_as_many(setting, first, made)
        arms["GRPO"].add(judged(setting, model), more)
    most = min(MANY, COURSES[env].train)
    print(
        f"\nguidance, {env}: {SAMPLES // 2} rollouts of {most} tasks a seed, {SAMPLES} more of those that none solved"
    )
    table(arms)
    met = gain(f"guidance, {env}", arms, "rejection", "guidance")
    return gain(f"guidance, {env}, DPO", arms, "DPO", "DPO, guided") and met


def star(env: str) -> bool:
    """Tasks that no rollout solved tried again with the answer as a hint, or as often without."""
    from agentrl.pipelines.methods.star.rationalize import rationalize
    from agentrl.pipelines.stages.trajectories import sample

    arms = {name: Arm(name) for name in ("warm", "rejection", "STaR", "GRPO")}
    for seed, folder in seeds(f"star {env}", arms):
        setting = hinting(env, seed, folder)
        harness = setting.harness
        arms["warm"].add(judged(setting, setting.warm), Spent())
        some = harness.tasks(setting.tasks.read()[:MANY])
        config = {"samples": SAMPLES // 2}
        first = harness.run(sample, config, model=setting.warm, tasks=some)["trajectories"]
        made = harness.run(rationalize, config, model=setting.warm, tasks=some, trajectories=[first])
        print(f"star, {env}, seed {seed}: {made.metrics}", file=sys.stderr, flush=True)
        for name, plain, hinted, spent in retried_or_plain("STaR", setting, some, first, made):
            good = successes(setting, plain)
            model, taught = curated(setting, [good, *hinted])
            arms[name].add(judged(setting, model), spent + taught)
        model, more = grpo_on_as_many(setting, first, made)
        arms["GRPO"].add(judged(setting, model), more)
    most = min(MANY, COURSES[env].train)
    print(f"\nstar, {env}: {SAMPLES // 2} rollouts of {most} tasks a seed, as many more of those that none solved")
    table(arms)
    return gain(f"star, {env}", arms, "rejection", "STaR")


def hinting(env: str, seed: int, folder: Path) -> Setting:
    """A policy whose demonstrations show the answer in a share of 0.15. The expert of `words` that is shown an answer
    knows which kind of value is asked for, though not which links: so hints tell it a part of what words mean."""
    from agentrl.environments.lookup import LINKS
    from agentrl.environments.words import WordsEnvironment
    from agentrl.rollouts.demonstrations import demonstrate
    from agentrl.rollouts.rationalize import HINT

    if env != "words":
        harness, tasks, shown = expert(env, seed, folder, hinted=0.15)
        return imitated("hinted", env, harness, tasks, [shown])
    harness, tasks, shown = expert(env, seed, folder)
    knows = WordsEnvironment(names=COURSES[env].environment["names"])
    knows.unknown &= frozenset(LINKS)
    some = tasks["train"].read()[:: round(1 / 0.15)]
    hinted = [demonstrate(knows, task, 0.0, 0, f"hinted-{task.task_id}", HINT) for task in some]
    return imitated("hinted", env, harness, tasks, [shown, harness.trajectories(hinted)])


def retried_or_plain(
    name: str, setting: Setting, tasks: Any, first: Any, made: Any
) -> Iterator[tuple[str, list[Any], list[Any], Spent]]:
    """Rollouts, retries that were shown something, and what both cost: for the method with retries ``made``, and for
    rejection sampling, which spends as many tokens on plain rollouts of the same tasks."""
    harness = setting.harness
    shown, failed = of_hinted(harness), unsolved(tasks, first)
    others, plain = rollouts(setting, harness.tasks(failed), shown.sampled) if failed else ([], Spent())
    yield name, [first], [made["trajectories"]], of_rollouts(first) + shown
    yield "rejection", [first, *others], [], of_rollouts(first) + plain


def grpo_on_as_many(setting: Setting, first: Any, made: Any) -> tuple[Any, Spent]:
    """The warm policy after GRPO on as many rollouts as there were, retries included."""
    rows = len(first.ids()) + int(made.metrics["retries"])
    model, spent, _ = online(setting, iterations=max(1, round(rows / (TASKS * SAMPLES))))
    return model, spent


def of_hinted(harness: Any) -> Spent:
    """What the retries with notes or hints cost. They are in the buffer, and in no output."""
    query = (
        "SELECT sum(n_action_tokens) AS tokens, sum(n_tool_calls) AS calls FROM trajectories WHERE source = 'hinted'"
    )
    [row] = harness.buffer.sql(query).to_dicts()
    return Spent(row["tokens"] or 0, 0, row["calls"] or 0)


def unsolved(tasks: Any, rows: Any) -> list[Any]:
    """The tasks that none of these rows solved."""
    solved = {row["task_id"] for row in rows.table(["task_id", "success"]).to_pylist() if row["success"]}
    return [task for task in tasks.read() if task.task_id not in solved]


def splice(env: str) -> bool:
    """The replays that prove splices are calls; another baseline gets as many, as further rollouts."""
    from agentrl.pipelines.methods.splice.splice import splice as stage
    from agentrl.pipelines.stages.trajectories import sample

    more_calls = "rejection, as many calls"
    arms, recovered = (
        {name: Arm(name) for name in ("warm", "rejection", more_calls, "rejection + splice", "GRPO")} for _ in range(2)
    )

    def add(setting: Setting, name: str, model: Any, spent: Spent) -> None:
        if model is setting.warm and name != "warm":  # there was nothing to learn from
            arms[name].add(arms["warm"].solved[-1], spent)
            recovered[name].add(recovered["warm"].solved[-1], spent)
            return
        arms[name].add(judged(setting, model), spent)
        recovered[name].add(recovery(setting, model) if env == "rooms" else {}, spent)

    for seed, folder in seeds(f"splice {env}", arms, recovered):
        setting = prepared(env, seed, folder)
        run = setting.harness.run
        add(setting, "warm", setting.warm, Spent())
        tasks = setting.harness.tasks(setting.tasks.read()[:MANY])
        rows = run(sample, {"samples": SAMPLES}, model=setting.warm, tasks=tasks)["trajectories"]
        spent = of_rollouts(rows)
        good = successes(setting, [rows])
        model, more = curated(setting, [good])
        add(setting, "rejection", model, spent + more)
        made = run(stage, {"per_task": 2}, trajectories=[rows], model=setting.warm, tasks=[tasks])
        print(f"splice, {env}, seed {seed}: {made.metrics}", file=sys.stderr, flush=True)
        proved = Spent(foreign=int(made.metrics["foreign_tokens"]), calls=int(made.metrics["environment_calls"]))
        model, more = curated(setting, [good, made["trajectories"]])
        add(setting, "rejection + splice", model, spent + proved + more)
        others, beside = rollouts(setting, tasks, proved.calls, by="calls")
        model, more = curated(setting, [successes(setting, [rows, *others])])
        add(setting, more_calls, model, spent + beside + more)
        model, more, _ = online(setting)
        add(setting, "GRPO", model, more)
    print(f"\nsplice, {env}: {MANY * SAMPLES:,} rollouts a seed")
    table(arms)
    met = gain(f"splice, {env}", arms, "rejection", "rejection + splice")
    met = gain(f"splice, {env}", arms, more_calls, "rejection + splice", by="calls") and met
    if env == "rooms":
        print("splice, rooms: success after a planted wrong turn")
        table(recovered)
        met = gain("splice, recovery", recovered, "rejection", "rejection + splice") and met
    return met

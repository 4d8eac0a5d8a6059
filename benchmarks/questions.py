"""The experiments of ``methods.py`` about questions whose answers are searched for, in `search_qa`.

- research: GRPO on the F1 of answers, a wrong one in the right form being worth a tenth, and GRPO on exact match, where
  questions have terms that the expert guesses.
- webshaper: supervised steps on as many tokens of the expert's rows, of the given questions again, or of these and
  their expansions; what a policy then solves of held-out questions, and of their expansions.
"""

import json
import sys
from dataclasses import replace
from typing import Any

from arms import SMALL, Arm, Solved, Spent, gain, table
from branching import of_expert
from courses import COURSES
from methods import Setting, curated, judged, online, prepared, seeds

ENV = "search_qa"
TERMS, WORLDS = "search_qa, terms", "search_qa, worlds"
ITERATIONS, TASKS, JUDGED, DEV = (1, 4, 4, 2) if SMALL else (64, 16, 384, 32)
"""Of GRPO; and held-out tasks, and dev tasks on which a temperature is chosen."""


def _prepared(seed: int, folder: Any, course: str, n: int = JUDGED) -> Setting:
    """A policy that has imitated the expert, and at most ``n`` tasks to judge it by."""
    setting = prepared(course, seed, folder)
    given = setting.harness.tasks
    return replace(setting, judged=given(setting.judged.read()[:n]), dev=given(setting.dev.read()[:DEV]))


def research() -> bool:
    """The same tasks, in an environment of either reward; a success is an exact match in both."""
    arms = {name: Arm(name) for name in ("warm", "GRPO", "ReSearch")}
    shaped = [{"type": "format", "weight": 0.1, "unrewarded": True}]
    for seed, folder in seeds("research", arms):
        setting = _prepared(seed, folder, TERMS)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        for name, reward, more in (("GRPO", "exact", {}), ("ReSearch", "f1", {"rewards": shaped})):
            config = {key: value for key, value in COURSES[TERMS].environment.items() if key != "type"}
            env = ENV + json.dumps({**config, "reward": reward}, sort_keys=True)
            tasks = [task.model_copy(update={"env": env}) for task in setting.tasks.read()]
            other = replace(setting, tasks=setting.harness.tasks(tasks))
            model, spent, _ = online(
                other, iterations=ITERATIONS, tasks=TASKS, updates=4, limits={"max_steps": 5}, **more
            )
            arms[name].add(judged(setting, model), spent)
    print(f"\nresearch, {TERMS}: GRPO in {ITERATIONS} iterations of {TASKS} tasks")
    table(arms)
    return gain(f"research, {TERMS}", arms, "GRPO", "ReSearch")


GIVEN, HELD = (8, 4) if SMALL else (1500, 192)
"""Questions that are expanded, and questions of a kind that a policy is judged by."""
STEPS, BATCH = (2, 4) if SMALL else (300, 16)
"""Supervised steps on the given questions again; on longer rows, fewer of as many tokens."""
ARMS = {"given again": 1, "one layer": 2, "two layers": 3}
"""Arm -> of how many layers its rows are, the given questions included."""


def webshaper() -> bool:
    """The rows are the expert's, so this is imitation on harder questions. All arms begin as the policy that has
    imitated the expert on the given questions."""
    from agentrl.pipelines.stages.trajectories import synthesize

    kinds = ("given", "one layer", "two layers")
    tables = {kind: {name: Arm(name) for name in ("warm", *ARMS)} for kind in kinds}
    for seed, folder in seeds("webshaper", *tables.values()):
        setting = _prepared(seed, folder, WORLDS, HELD)
        harness = setting.harness
        held = _layers(setting, setting.judged, [setting.tasks])
        given = harness.tasks(setting.tasks.read()[:GIVEN])
        layers = _layers(setting, given, [*setting.heldout, *held])
        print(f"webshaper, seed {seed}: {[len(layer.read()) for layer in (*held, *layers)]}", file=sys.stderr)
        rows = [harness.run(synthesize, {"noise": 0.0}, tasks=layer)["trajectories"] for layer in layers]
        every = replace(setting, judged=harness.tasks([task for layer in held for task in layer.read()]))
        shares = [of_expert(setting, row).foreign / max(1, len(row.ids())) for row in rows]
        counts = [len(row.ids()) for row in rows]
        _add(tables, "warm", held, judged(every, setting.warm), Spent())
        for name, number in ARMS.items():
            mean = sum(a * b for a, b in zip(shares[:number], counts, strict=False)) / sum(counts[:number])
            model, spent = curated(setting, rows[:number], round(STEPS * shares[0] / mean), batch=BATCH)
            _add(tables, name, held, judged(every, model), spent)
    met = []
    for kind, arms in tables.items():
        print(f"\nwebshaper, {WORLDS}: success at held-out questions, {kind}")
        table(arms)
        met += [gain(f"{name}, {kind}", arms, "given again", name, by="trained") for name in list(ARMS)[1:]]
    return all(met)


def _layers(setting: Setting, tasks: Any, heldout: list[Any]) -> list[Any]:
    """These questions, and two layers on them by the scripted expander, of whom none is one of ``heldout``. It takes
    train tasks alone, so what a policy is judged by is named so."""
    from agentrl.pipelines.methods.zero.ask import from_proposals, to_propose
    from agentrl.pipelines.stages.trajectories import synthesize

    run, layers = setting.harness.run, [tasks]
    known = setting.harness.tasks([task.model_copy(update={"split": "train"}) for task in tasks.read()])
    for _ in range(2):
        asked = run(to_propose, {"n": len(known.read()), "tools": True}, tasks=[known])["tasks"]
        rows = run(synthesize, {"noise": 0.0}, tasks=asked)["trajectories"]
        known = run(from_proposals, trajectories=[rows], heldout=heldout)["tasks"]
        layers.append(known)
    return layers


def _add(tables: dict[str, dict[str, Arm]], name: str, held: list[Any], solved: Solved, spent: Spent) -> None:
    """Tell what was solved by kinds of questions."""
    for arms, layer in zip(tables.values(), held, strict=True):
        names = {task.task_id for task in layer.read()}
        runs = ({key: run[key] for key in run if key in names} for run in (solved.sampled, solved.greedy, solved.best))
        arms[name].add(Solved(*runs, solved.temperature), spent)

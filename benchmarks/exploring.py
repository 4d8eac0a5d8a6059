"""The experiments of ``methods.py`` about rollouts that keep apart or end their reasoning, in `words`.

- diverse: rejection sampling on rollouts of a task that keep apart, by diverse beam search's penalty.
- thinking: GRPO of a policy whose demonstrator rambled, with reasoning ended that gets nowhere, and without, of as many
  sampled tokens; and the warm policy itself.
"""

import json
from collections.abc import Generator
from dataclasses import replace
from random import Random

from arms import SMALL, Arm, Spent, gain, table
from courses import COURSES
from methods import (
    ITERATIONS,
    SAMPLES,
    SPLIT,
    TASKS,
    curated,
    judged,
    of_rollouts,
    online,
    prepared,
    seeds,
    successes,
)
from searching import solved

from agentrl.environments.words import WordsEnvironment
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message

DIVERSITIES = (0.5, 2.0)
DIVERSITY = 0.5
"""Fixed beforehand; with SPLIT=dev both are tried."""


def diverse() -> bool:
    """What rollouts that keep apart solve of the train tasks, and what is learned from it."""
    from agentrl.pipelines.stages.trajectories import sample

    apart = DIVERSITIES if SPLIT == "dev" and not SMALL else (DIVERSITY,)
    names = {0.0: "rejection", **{value: f"rejection, diversity {value:g}" for value in apart}}
    arms = {name: Arm(name) for name in ("warm", *names.values(), "GRPO")}
    reached = {name: Arm(name) for name in names.values()}
    for seed, folder in seeds("diverse", arms, reached):
        setting = prepared("words", seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        for value, name in names.items():
            config = {"samples": SAMPLES, "sampling": {"diversity": value}}
            rows = setting.harness.run(sample, config, model=setting.warm, tasks=tasks)["trajectories"]
            spent = of_rollouts(rows)
            reached[name].add(solved(tasks, [rows]), spent)
            model, more = curated(setting, [successes(setting, [rows])])
            arms[name].add(judged(setting, model), spent + more)
        model, spent, _ = online(setting)
        arms["GRPO"].add(judged(setting, model), spent)
    print(f"\ndiverse, words: train tasks that are solved by one of {SAMPLES} rollouts")
    table(reached)
    print("diverse, words: held-out tasks")
    table(arms)
    met = [gain(f"diverse, words, {name}", arms, "rejection", name) for name in list(names.values())[1:]]
    for name in list(names.values())[1:]:
        gain(f"diverse, words, {name}, train tasks", reached, "rejection", name)
    return all(met)


RAMBLES, LONGEST = 0.4, 60
"""The share of turns before which the demonstrator rambles, and most names that it mentions then."""


class Rambling(WordsEnvironment):
    """`words` with a demonstrator that reasons in vain before some of its turns: it mentions people, in no order and of
    any number. A turn has room for 40 tokens, so that one that goes on for too long makes no call."""

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        people = list(json.loads(task.metadata)["facts"])
        turns, answers = super().demonstrate(task, noise, random), None
        while True:
            try:
                turn = turns.send(answers)  # type: ignore[arg-type]  (None begins it)
            except StopIteration:
                return
            names = random.choices(people, k=random.randint(1, LONGEST)) if random.random() < RAMBLES else []
            answers = yield turn.model_copy(update={"reasoning": " ".join(names)}) if names else turn


COURSES["words, rambling"] = replace(
    COURSES["words"], environment={"type": "exploring:Rambling", "names": 64}, context=384
)
ENDED = {"thinking": {"eta": 1.0, "window": 8}}


def thinking() -> bool:
    """The warm policy and GRPO, with reasoning that is ended and without. Policies are judged as they were trained."""
    arms = {name: Arm(name) for name in ("warm", "warm, ended", "GRPO", "GRPO, ended")}
    for seed, folder in seeds("thinking", arms):
        setting = prepared("words, rambling", seed, folder)
        for name, more in (("", {}), (", ended", {"explore": ENDED})):
            arms[f"warm{name}"].add(judged(setting, setting.warm, **more), Spent())
            model, spent, _ = online(setting, **more)
            arms[f"GRPO{name}"].add(judged(setting, model, **more), spent)
    print("\nthinking, words with a demonstrator that rambles")
    table(arms)
    gain("thinking, words, the warm policy", arms, "warm", "warm, ended")
    return gain("thinking, words", arms, "GRPO", "GRPO, ended")

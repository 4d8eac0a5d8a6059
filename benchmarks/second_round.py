"""What pairs teach after rejection sampling, in `words`; part of :mod:`benchmarks.methods`, which runs it.

After a round of rejection sampling the policy samples again, and a second round follows. Then DPO learns from the rows
of the second round once more, in which failures count too: by ETO's pairs of whole rollouts, or by Agent Q's of steps.
Beside them are the two rounds without that, and one round on as many tokens. GRPO is not: in `words` it is far below
rejection sampling of as many tokens.
"""

import sys
from dataclasses import replace
from typing import Any

from arms import Arm, Spent, gain, table
from branching import trained
from methods import SAMPLES, SPLIT, Setting, curated, judged, of_rollouts, prepared, rollouts, seeds, successes

WAYS = {f"{kind}, {lr:g}": (kind, lr) for kind in ("outcome pairs", "step pairs") for lr in (5e-5, 2e-4)}
EACH = max(1, SAMPLES // 4)
"""Rollouts of each task in a round."""
CHOSEN = ("outcome pairs, 0.0002", "step pairs, 0.0002")
"""Did best on dev tasks of seed 10."""


def second_round() -> bool:
    from agentrl.pipelines.stages.trajectories import sample

    ways = {name: way for name, way in WAYS.items() if SPLIT == "dev" or name in CHOSEN}
    plain = () if SPLIT == "dev" else ("rejection",)
    arms = {name: Arm(name) for name in ("warm", *plain, "rejection, twice", *ways)}
    for seed, folder in seeds("second_round", arms):
        setting = prepared("words", seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        run, config = setting.harness.run, {"samples": EACH}
        first = run(sample, config, model=setting.warm, tasks=setting.tasks)["trajectories"]
        model, more = curated(setting, [successes(setting, [first])])
        begun = of_rollouts(first) + more
        after = replace(setting, warm=model)
        second = run(sample, config, model=model, tasks=setting.tasks)["trajectories"]
        spent = begun + of_rollouts(second)
        model, more = curated(after, [successes(setting, [first, second])])
        arms["rejection, twice"].add(judged(setting, model), spent + more)
        for name, (kind, lr) in ways.items():
            preferred, taught = preferring(replace(setting, warm=model), second, kind, lr)
            arms[name].add(judged(setting, preferred), spent + more + taught)
        if not plain:
            continue
        half = of_rollouts(first).sampled // EACH // 2  # of a pass over the tasks: the nearest number of passes
        others, cost = rollouts(setting, setting.tasks, spent.sampled - half)
        model, more = curated(setting, [successes(setting, others)])
        arms["rejection"].add(judged(setting, model), cost + more)
    print(f"\nsecond_round, words: two rounds of {EACH} rollouts of each task a seed")
    table(arms)
    met = [gain(f"{name}, words", arms, other, name) for name in ways for other in ("rejection, twice", *plain)]
    return all([*met, *(gain("twice, words", arms, other, "rejection, twice") for other in plain)])


def preferring(setting: Setting, rows: Any, kind: str, lr: float) -> tuple[Any, Spent]:
    """A policy after DPO on pairs of these rows, with a little of the chosen sides' own likelihood."""
    from agentrl.pipelines.methods.agentq.pairs import agentq
    from agentrl.pipelines.methods.eto.outcome import outcome
    from agentrl.pipelines.stages.train import dpo

    stage, config = (outcome, {}) if kind == "outcome pairs" else (agentq, {"margin": 0.25, "per_task": 4})
    made = setting.harness.run(stage, config, trajectories=[rows])
    print(f"{kind}: {made.metrics}", file=sys.stderr, flush=True)
    config = {"beta": 0.1, "nll": 0.2, "optimizer": {"lr": lr, "schedule": "linear"}}
    return trained(setting, dpo, config, pairs=[made["pairs"]])

"""The experiment of ``methods.py`` about hindsight: rejection sampling on rollouts, with and without failed ones
relabelled (`words`; `rooms`, also silent; `lookup`)."""

import sys
from collections import Counter

from arms import Arm, Spent, gain, table
from methods import (
    ITERATIONS,
    SAMPLES,
    TASKS,
    curated,
    judged,
    of_rollouts,
    online,
    prepared,
    rollouts,
    seeds,
    successes,
)


def hindsight(env: str) -> bool:
    """The same rollouts with and without what failed ones did achieve, against GRPO with as many. New tasks are
    verified by making the calls of rows again; another baseline gets as many calls, as further rollouts."""
    from agentrl.pipelines.methods.hindsight.relabel import relabel
    from agentrl.pipelines.stages.trajectories import sample

    more_calls = "rejection, as many calls"
    arms = {name: Arm(name) for name in ("warm", "rejection", more_calls, "rejection + hindsight", "GRPO")}
    shifts: Counter[tuple[int, int]] = Counter()
    for seed, folder in seeds(f"hindsight {env}", arms):
        setting = prepared(env, seed, folder)
        run = setting.harness.run
        config = {"samples": SAMPLES}
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        rows = run(sample, config, model=setting.warm, tasks=tasks)["trajectories"]
        spent = of_rollouts(rows)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        good = successes(setting, [rows])
        model, more = curated(setting, [good])
        arms["rejection"].add(judged(setting, model), spent + more)
        made = run(
            relabel, {"cap": len(good.ids()) // 4 or None, "detours": "masked" if "rooms" in setting.env else "kept"},
            trajectories=[rows], heldout=setting.heldout, model=setting.warm, tasks=[tasks],
        )  # fmt: skip
        print(f"{env}, seed {seed}: {made.metrics}", file=sys.stderr, flush=True)
        new = made["trajectories"]
        replayed = Spent(calls=int(made.metrics["environment_calls"]))
        model, more = curated(setting, [good, new])
        arms["rejection + hindsight"].add(judged(setting, model), spent + replayed + more)
        shifts.update(
            {(level["asked"], level["achieved"]): level["rows"] for level in made["levels"].table().to_pylist()}
        )
        others, beside = rollouts(setting, tasks, replayed.calls, by="calls")
        model, more = curated(setting, [successes(setting, [rows, *others])])
        arms[more_calls].add(judged(setting, model), spent + beside + more)
        model, more, _ = online(setting)
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\nhindsight, {env}: {TASKS * ITERATIONS * SAMPLES:,} rollouts a seed")
    table(arms)
    print(f"levels asked -> achieved: {', '.join(f'{a} -> {b}: {n}' for (a, b), n in sorted(shifts.items()))}")
    met = gain(f"hindsight, {env}", arms, "rejection", "rejection + hindsight")
    return gain(f"hindsight, {env}", arms, more_calls, "rejection + hindsight", by="calls") and met

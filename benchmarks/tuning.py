"""What the baselines of ``methods.py`` solve of dev tasks with other settings: those of its courses are chosen by this.

Run it with ``SPLIT=dev`` and seeds that no result is reported on, as in ``SPLIT=dev SEEDS="10 11" METHODS=tune``.
"""

from arms import Arm, Spent, learned, line, table
from methods import ITERATIONS, SAMPLES, SPLIT, TASKS, curated, judged, of_rollouts, online, prepared, seeds

RATES = {"words": (1e-3, 2e-3, 4e-3), "lookup": (5e-4, 1e-3, 2e-3), "rooms": (1e-4, 3e-4, 1e-3)}
"""Of GRPO."""
SFT_RATES = {"words": (1e-3, 2e-3, 4e-3), "lookup": (5e-4, 1e-3, 2e-3), "rooms": (5e-4, 1e-3, 2e-3)}
KEEPS = ({"keep": 1}, {"agree": 2})


def tune(env: str) -> bool:
    """Rejection sampling and GRPO at several learning rates, and with both ways to keep successes, on as many rollouts.
    Returns whether a setting of each gains over the warm policy; without that, no method can be said to gain nothing.
    """
    from agentrl.pipelines.stages.trajectories import reject, sample

    if SPLIT != "dev":
        raise SystemExit("tune chooses settings, so it judges on dev tasks: set SPLIT=dev")
    ways = [(name, number) for item in KEEPS for name, number in item.items()]
    kept = {f"{name} {number}, {lr:g}": ({name: number}, lr) for name, number in ways for lr in SFT_RATES[env]}
    rates = {f"GRPO, {lr:g}": lr for lr in RATES[env]}
    arms = {name: Arm(name) for name in ("warm", *kept, *rates)}
    for seed, folder in seeds(f"tune {env}", arms):
        setting = prepared(env, seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * ITERATIONS])
        rows = setting.harness.run(sample, {"samples": SAMPLES}, model=setting.warm, tasks=tasks)["trajectories"]
        for name, (how, lr) in kept.items():
            good = setting.harness.run(reject, how, trajectories=[rows])["trajectories"]
            model, more = curated(setting, [good], lr=lr)
            arms[name].add(judged(setting, model), of_rollouts(rows) + more)
        for name, lr in rates.items():
            model, spent, _ = online(setting, lr=lr)
            arms[name].add(judged(setting, model), spent)
    print(f"\ntune, {env}: {TASKS * ITERATIONS * SAMPLES:,} rollouts a seed, dev tasks")
    table(arms)
    best = [max(names, key=lambda name: sum(sum(run.values()) for run in arms[name].best)) for names in (kept, rates)]
    words = {name: learned(arms, "warm", arms[name]) for name in best}
    return line(f"tune, {env}, the best: {words}", set(words.values()) == {"adds"}, "both add")

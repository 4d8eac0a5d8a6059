"""A real small model with three seeds, each in a fresh store: what DPO and GRPO add, greedily, to the control
for sharpening of the policy that they start from, its best temperature, chosen on dev tasks.

make bench-real                          # after make smollm; hours of processor time
SEEDS="0" FILES="chain_sum" python benchmarks/real.py
CHECK=1 ...                              # exit code 1 if a target is missed

A line for each figure, with its target and `met` or `MISSED`.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from quickstart import ROOT, run

FILES = os.environ.get("FILES", "chain_sum math_tools words_smollm").split()
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0 1 2").split()]
LEARNED = ["longer", "rejected", "dpo", "grpo"]
FIRST = {"chain_sum": "shots", "math_tools": "base", "words_smollm": "base"}
BY_REWARD = ["dpo", "grpo"]
P, HOURS, FAMILIES = 0.05, 4.0, 2

Outcomes = Mapping[str, bool]


def outcomes(store: str, stage: str, decoding: str) -> Outcomes:
    """Whether each held-out task was solved, by its id."""
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.flows.api.run import stage_result

    table = stage_result(Catalog(store), stage).output("trajectories").table(["task_id", "tags", "success"])  # type: ignore[attr-defined]
    return {row["task_id"]: bool(row["success"]) for row in table.to_pylist() if decoding in row["tags"]}


def changed(before: Outcomes, after: Outcomes) -> tuple[int, int]:
    """How many tasks were gained, and how many lost."""
    if before.keys() != after.keys():
        raise SystemExit("the two evaluations are of other tasks, and cannot be compared")
    gained = sum(after[task] and not before[task] for task in before)
    return gained, sum(before[task] and not after[task] for task in before)


def line(text: str, met: bool) -> bool:
    print(f"{text}  {'met' if met else 'MISSED'}", flush=True)
    return met


def family(name: str) -> bool:
    """Run all seeds of a pipeline file; returns whether rewards add something in it."""
    from agentrl.statistics.paired import mcnemar

    pooled = {arm: [0, 0] for arm in LEARNED}
    hours = 0.0
    for seed in SEEDS:
        with TemporaryDirectory(prefix=f"agentrl-{name}-") as store:
            done = run(seed, store, f"real/{name}", [FIRST[name], "warm", *LEARNED])
            hours += done.cpu_s / 3600
            at = done.metrics["warm"]["control_temperature"]
            control = outcomes(store, "eval_warm", {0.0: "greedy", 1.0: "sampled"}.get(at, "control"))
            for arm, metrics in done.metrics.items():
                shown = {
                    key: metrics[key]
                    for key in ("success", "greedy", "control", "control_temperature")
                    if key in metrics
                }
                print(f"{name}, seed {seed}, {arm}: {shown}", flush=True)
            for arm in LEARNED:
                for position, number in enumerate(changed(control, outcomes(store, f"eval_{arm}", "greedy"))):
                    pooled[arm][position] += number
    adds = False
    for arm, (gained, lost) in pooled.items():
        p = mcnemar(gained, lost)
        text = f"{name}: {arm}, greedy over the control of warm: {gained} gained, {lost} lost, p {p:.2g}"
        if arm in BY_REWARD:
            adds |= line(f"{text}, target p < {P}", gained > lost and p < P)
        else:
            print(text, flush=True)
    line(f"{name}: {hours:.2f} CPU hours, target at most {HOURS:g}", hours <= HOURS)
    return adds


def main() -> int:
    if not (ROOT / "build" / "smollm" / "config.json").is_file():
        raise SystemExit("there is no build/smollm; make smollm")
    matches = [family(name) for name in FILES]
    enough = line(
        f"families in which DPO or GRPO adds: {sum(matches)} of {len(matches)}, target {FAMILIES}",
        sum(matches) >= FAMILIES,
    )
    return int(os.environ.get("CHECK") == "1" and not enough)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())

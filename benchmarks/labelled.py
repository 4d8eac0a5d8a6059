"""An inverse model that labels logs (VPT): how many labels are right, and what imitating the labelled logs is worth
beside the few rows with calls alone, and beside as many rows with their own calls.

    SEEDS="0 1 2" PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/labelled.py lookup
    SPLIT=dev SEEDS=10 ...      # where settings were chosen
    SCALE=small ...             # everything runs, nothing is learned
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from arms import SMALL, Arm, Solved, Spent, gain, line, measured, table

from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.vpt.inverse import inverse
from agentrl.pipelines.methods.vpt.label import label_calls
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import sample, synthesize

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0" if SMALL else "0 1 2").split()]
SPLIT = os.environ.get("SPLIT", "heldout")
FEW, LOGS, JUDGED, DEV = (8, 8, 4, 2) if SMALL else (64, 1000, 128, 24)
STEPS = {"inverse": 2, "policy": 2} if SMALL else {"inverse": 160, "policy": int(os.environ.get("STEPS", "160"))}
BEDS: dict[str, dict[str, Any]] = {
    "lookup": {"noise": 0.0, "window": {"before": None, "after": 1}},
    "rooms": {"noise": 0.1, "window": {"before": 1, "after": 1}},
}
TRIES = {"tries": 2 if SMALL else 16, "hide": True}
ARMS = ("64 rows", "64 rows, fewer steps", "labels by replay", "their own calls")


def taught(harness: Harness, rows: list[Any], steps: int, context: int = 256) -> tuple[Any, Spent]:
    """A policy that imitates rows from random weights."""
    optimizer = {"lr": 5e-3, "schedule": "cosine", "warmup": min(20, steps // 2)}
    model = {"init": "tiny", "size": {"context": context}}
    made = harness.run(sft, {"model": model, "steps": steps, "batch": 32, "optimizer": optimizer}, trajectories=rows)
    return made["model"], Spent(trained=round(sum(row["tokens"] for row in made["metrics"].table().to_pylist())))


def judged(harness: Harness, model: Any, tasks: Any) -> Solved:
    def play(of: Any, temperature: float) -> dict[str, float]:
        config = {"samples": 1, "sampling": {"temperature": temperature}}
        rows = harness.run(sample, config, model=model, tasks=of)["trajectories"]
        return {row["task_id"]: float(row["success"]) for row in rows.table(["task_id", "success"]).to_pylist()}

    dev = tasks["dev"].read()
    of_split = harness.tasks(dev[DEV:]) if SPLIT == "dev" else tasks[SPLIT]
    return measured(play, harness.tasks(dev[:DEV]), of_split)


def of_seed(bed: str, seed: int, folder: Path, arms: dict[str, Arm]) -> dict[str, dict[str, Any]]:
    """Fill the arms with a seed; the metrics of labels."""
    harness, settings = Harness(folder, seed), BEDS[bed]
    sizes = {"train": FEW + LOGS, "dev": DEV + JUDGED, "heldout": JUDGED}
    tasks = harness.run(generate, {"env": bed, **sizes})
    shown = harness.run(synthesize, {"noise": settings["noise"]}, tasks=tasks["train"])["trajectories"]
    known, hidden = (
        harness.trajectories(row.model_copy(update={"trajectory_id": f"{name}-{row.trajectory_id}"}) for row in part)
        for name, part in (("few", shown.read()[:FEW]), ("log", shown.read()[FEW:]))
    )
    asked = harness.run(inverse, settings["window"], trajectories=[known])["trajectories"]
    model, _ = taught(harness, [asked], STEPS["inverse"], 192)
    config, inputs = {**settings["window"], **TRIES}, {"trajectories": [hidden], "model": model}
    labelled = harness.run(label_calls, config, **inputs, tasks=[tasks["train"]])
    likeliest = harness.run(label_calls, {**config, "verify": "share", "threshold": 0, "tries": 2}, **inputs)
    labels = {"replay": labelled.metrics, "likeliest call": likeliest.metrics}
    print(f"{bed}, seed {seed}: {labels}", flush=True)
    rows = {
        **{name: [known] for name in ARMS[:2]},
        "labels by replay": [known, labelled["trajectories"]],
        "their own calls": [known, hidden],
    }
    for name, given in rows.items():
        steps = STEPS["policy"] // 3 if "fewer" in name else STEPS["policy"]
        policy, spent = taught(harness, given, max(1, steps))
        arms[name].add(judged(harness, policy, tasks), spent)
        print(f"{bed}, seed {seed}, {name}: {sum(arms[name].best[-1].values()) / JUDGED:.3f}", flush=True)
    return labels


def main() -> None:
    bed = sys.argv[1] if len(sys.argv) > 1 else "lookup"
    arms, metrics = {name: Arm(name) for name in ARMS}, list[dict[str, dict[str, Any]]]()
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            metrics.append(of_seed(bed, seed, Path(folder), arms))
    print(f"\n{bed}: {FEW} rows with calls, {LOGS} logs, {len(SEEDS)} seeds, {JUDGED} {SPLIT} tasks")
    for number, of_seeds in enumerate(metrics):
        made, likeliest = of_seeds["replay"], of_seeds["likeliest call"]
        print(
            f"seed {SEEDS[number]}: {made.get('labelled')} of {LOGS} logs labelled, {made.get('labels')} calls, "
            f"{made.get('right', 0):.3f} of them right; of the likeliest calls {likeliest.get('right', 0):.3f}"
        )
    table(arms, start="64 rows")
    share = sum(of_seeds["replay"].get("labelled", 0) for of_seeds in metrics) / (LOGS * len(SEEDS))
    line(f"logs that are labelled by replay: {share:.3f}", share > 0.5, "> 0.5")
    alone = max(ARMS[:2], key=lambda name: sum(sum(run.values()) for run in arms[name].best))
    for before, after in ((alone, "labels by replay"), ("labels by replay", "their own calls")):
        gain(f"{bed}, {after}", arms, before, after, by="trained", start="64 rows")


if __name__ == "__main__":
    main()

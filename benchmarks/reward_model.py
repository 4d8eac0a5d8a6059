"""Reward models in ``words``: how well they hold and rank on tasks that they were not trained on, and what picking one
of eight attempts by their scores is worth beside the first, the majority and the best.

    SEEDS="0 1 2" PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/reward_model.py
    SPLIT=dev SEEDS=10 ...      # where settings were chosen
    TASKS=512 STEPS=300 ...     # twice the tasks
    ONLY=ORM ...                # without the balanced ORM and the PRM, which take more than half of the time
    ONLY=inverse ...            # the inverse PRM alone, of the demonstrator's successes
    GAMMA=0.5 ...               # its discount
    UNKNOWN=0 WARM=74 ...       # a demonstrator that knows all words, and a policy that imitated it for 74 steps
    KEPT=folder SEEDS=0 ...     # what a seed gave is kept there, and read by later runs: seeds can run side by side
"""

import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.methods.reward_model.picked import ScoredAttempt, by_task, picks
from agentrl.pipelines.methods.reward_model.score import score
from agentrl.pipelines.methods.reward_model.train import train
from agentrl.pipelines.methods.slicing.steps import value
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import reject, sample, synthesize
from agentrl.rewards.answers import final_answer
from agentrl.statistics.intervals import wilson
from agentrl.statistics.paired import difference

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0 1 2").split()]
SPLIT = os.environ.get("SPLIT", "heldout")
KEPT, ONLY = os.environ.get("KEPT"), os.environ.get("ONLY")
TRAIN = int(os.environ.get("TASKS", "256"))
JUDGED, SAMPLES, K = TRAIN // 2, 8, 4
ENV = {"type": "words", "names": 64, "unknown": int(os.environ.get("UNKNOWN", "7"))}
WARM = {
    "model": {"init": "tiny", "size": {"context": 192, "vocabulary": 640}},
    "steps": int(os.environ.get("WARM", "200")),
    "batch": 32,
    "optimizer": {"lr": 5e-3, "schedule": "cosine", "warmup": 20},
}
FIT: dict[str, Any] = {
    "steps": int(os.environ.get("STEPS", "200")),
    "batch": 64,
    "optimizer": {"lr": float(os.environ.get("LR", "2e-3")), "schedule": "linear", "warmup": 20},
    "holdout": 0.1,
}
GAMMA = float(os.environ.get("GAMMA", "0"))
MEASURES = ("base_rate", "auc", "auc_within", "brier", "brier_base", "ece")
Run = dict[str, float]


def picked_by(done: Result, rows: Any) -> dict[str, Run]:
    """What each way of picking solves, by task."""
    scores = {entry["trajectory_id"]: entry["components"] for entry in done["scores"].table().to_pylist()}
    attempts = [
        ScoredAttempt(
            row.task_id, [row.trajectory_id], scores[row.trajectory_id][-1]["value"], row.success, final_answer(row)
        )
        for row in rows.read()
        if scores[row.trajectory_id]
    ]
    runs: dict[str, Run] = defaultdict(dict)
    for task in by_task(attempts):
        for name, solved in picks(task).items():
            runs[name][task[0].task] = solved
    return runs


Arms = dict[str, tuple[dict[str, Any], Run]]
"""The metrics of a reward model, none for what is no model, and what it picks, by arm."""


def of_seed(seed: int, folder: Path) -> Arms:
    """Train and measure the models of a seed."""
    harness = Harness(folder, seed)
    tasks = harness.run(generate, {"env": ENV, "train": TRAIN, "dev": JUDGED, "heldout": JUDGED})
    expert = harness.run(synthesize, tasks=tasks["train"])["trajectories"]
    warm = harness.run(sft, WARM, trajectories=[expert])["model"]
    rows = harness.run(sample, {"samples": SAMPLES}, model=warm, tasks=tasks["train"])["trajectories"]
    judged = harness.run(sample, {"samples": SAMPLES}, model=warm, tasks=tasks[SPLIT])["trajectories"]
    arms: Arms = {}
    outcomes = {"model": warm, "trajectories": [rows]}
    for name, more in {"ORM": {}, "ORM, balanced": {"balance": "task"}}.items():
        if ONLY in (None, name):
            made = harness.run(train, {**FIT, "kind": "orm", **more}, **outcomes)
            arms |= scored(seed, name, made, judged, harness, {})
    if ONLY in (None, "inverse"):
        shown = harness.run(reject, {"keep": 1}, trajectories=[expert])["trajectories"]
        made = harness.run(train, {**FIT, "kind": "inverse", "gamma": GAMMA}, **outcomes, demonstrations=[shown])
        for over in ("min", "mean", "last"):
            arms |= scored(seed, f"inverse, {over}", made, judged, harness, {"over": over})
    if ONLY:
        return arms
    some = harness.run(sample, {"samples": 1}, model=warm, tasks=tasks["train"])["trajectories"]
    steps = harness.run(value, {"where": "all", "k": K}, trajectories=[some], model=warm)["steps"]
    made = harness.run(train, {**FIT, "kind": "prm"}, model=warm, trajectories=[some], values=[steps])
    for over in ("min", "last"):
        arms |= scored(seed, f"PRM, {over}", made, judged, harness, {"over": over})
    return arms


def scored(seed: int, name: str, made: Result, judged: Any, harness: Harness, config: dict[str, Any]) -> Arms:
    """What a reward model is measured at, and what it and others pick."""
    done = harness.run(score, config, reward_model=made["reward_model"], trajectories=[judged])
    solved = picked_by(done, judged)
    picks_of_it = solved.pop("best_of_n")
    shown = {key: round(float(done.metrics[key] or 0), 3) for key in MEASURES}
    others = {key: round(fmean(run.values()), 3) for key, run in solved.items()}
    print(f"seed {seed}, {name}: {shown} picked {fmean(picks_of_it.values()):.3f} {others}", flush=True)
    return {name: (done.metrics, picks_of_it), **{way: ({}, run) for way, run in solved.items()}}


def kept(seed: int) -> Arms:
    """What a seed gave, measured now unless it was kept."""
    path = Path(KEPT) / f"{SPLIT}-{seed}.json" if KEPT else None
    if path and path.exists():
        return {name: (metrics, run) for name, (metrics, run) in json.loads(path.read_text()).items()}
    with tempfile.TemporaryDirectory() as folder:
        arms = of_seed(seed, Path(folder))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(arms))
    return arms


def main() -> None:
    measured: dict[str, list[dict[str, Any]]] = defaultdict(list)
    runs: dict[str, list[Run]] = defaultdict(list)
    for seed in SEEDS:
        for name, (metrics, run) in kept(seed).items():
            runs[name].append(run)
            if metrics:
                measured[name].append(metrics)
    print(f"\n{len(SEEDS)} seeds, {JUDGED} {SPLIT} tasks, {SAMPLES} attempts each")
    print(f"{'':<16}" + "".join(f"{name:>12}" for name in MEASURES))
    for arm, each in measured.items():
        print(f"{arm:<16}" + "".join(f"{fmean(float(metrics[name]) for metrics in each):>12.3f}" for name in MEASURES))
    print(f"\n{'picked by':<16} {'solved':>7}  {'95 % interval':<16} {'over the majority':<28} over the first")
    for way, each in runs.items():
        total = sum(map(len, each))
        solved = sum(sum(run.values()) for run in each)
        low, high = wilson(solved, total)
        gains = [difference(runs[other], each, same_seeds=True) for other in ("majority", "first")]
        told = [f"{gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})" for gain in gains]
        print(f"{way:<16} {solved / total:>7.3f}  {low:.3f} to {high:.3f}   {told[0]:<28} {told[1]}")
    if "ORM" not in runs:
        return
    helps = difference(runs["majority"], runs["ORM"], same_seeds=True).low > 0
    holds = all(metrics["brier"] < metrics["brier_base"] for metrics in measured["ORM"])
    print(f"\nORM: Brier below the base rate on each seed: {'yes' if holds else 'MISSED'}")
    print(f"ORM: picks better than the majority, beyond the interval: {'yes' if helps else 'MISSED'}")


if __name__ == "__main__":
    main()

"""Agentic continual pre-training (AgentFounder) in ``words``: texts of decisions before the imitation of successes,
beside the successes alone, in as many steps and for as many trained tokens.

    SEEDS="0 1 2" PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/texts.py
    KINDS="plan reason" ...     # other texts
    SPLIT=dev SEEDS=10 ...      # judge on dev tasks
    SCALE=small ...             # everything runs, nothing is learned
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from arms import SMALL, Arm, Spent, gain, table
from labelled import DEV, JUDGED, SEEDS, SPLIT, judged

from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agentfounder.as_text import as_text
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import reject, sample, synthesize

BED = {"type": "words", "names": 64}
TRAIN = 24 if SMALL else 512
STEPS = {"warm": 2, "texts": 2, "after": 2} if SMALL else {"warm": 200, "texts": 60, "after": 60}
LR = {"warm": 5e-3, "texts": 2e-3, "after": 2e-3}
SIZE = {"context": 384, "vocabulary": 640}
KINDS = os.environ.get("KINDS", "decide").split()
ARMS = ("warm", "successes", "successes, as many tokens", "texts first")


def trained(harness: Harness, rows: Any, phase: str, steps: int = 0, **start: Any) -> tuple[Any, Spent]:
    """A policy after a phase of supervised steps, from random weights if there is no model to start from."""
    fresh = {} if start else {"model": {"init": "tiny", "size": SIZE}}
    optimizer = {"lr": LR[phase], "schedule": "linear" if start else "cosine"}
    config = {**fresh, "steps": steps or STEPS[phase], "batch": 32, "optimizer": optimizer}
    made = harness.run(sft, config, trajectories=[rows], **start)
    return made["model"], Spent(trained=round(sum(row["tokens"] for row in made["metrics"].table().to_pylist())))


def of_seed(seed: int, folder: Path, arms: dict[str, Arm]) -> None:
    harness = Harness(folder, seed)
    tasks = harness.run(generate, {"env": BED, "train": TRAIN, "dev": DEV + JUDGED, "heldout": JUDGED})
    shown = harness.run(synthesize, tasks=tasks["train"])["trajectories"]
    warm, spent = trained(harness, shown, "warm")
    arms["warm"].add(judged(harness, warm, tasks), spent)
    rows = harness.run(sample, {"samples": 2}, model=warm, tasks=tasks["train"])["trajectories"]
    forking = {"at": "all", "k": 1}
    forked = harness.run(fork, forking, model=warm, tasks=[tasks["train"]], trajectories=[rows])["trajectories"]
    good = shown if SMALL else harness.run(reject, {"keep": 1}, trajectories=[rows, forked])["trajectories"]
    model, alone = trained(harness, good, "after", model=warm)
    arms["successes"].add(judged(harness, model, tasks), alone)

    texts = harness.run(as_text, {"kinds": KINDS}, trajectories=[shown, rows, forked])
    model, spent = trained(harness, texts["trajectories"], "texts", model=warm)
    model, more = trained(harness, good, "after", model=model)
    both = spent + more
    arms["texts first"].add(judged(harness, model, tasks), both)
    model, spent = trained(harness, good, "after", round(STEPS["after"] * both.trained / alone.trained), model=warm)
    arms["successes, as many tokens"].add(judged(harness, model, tasks), spent)
    shares = {name: round(sum(arm.best[-1].values()) / JUDGED, 3) for name, arm in arms.items()}
    print(f"seed {seed}: {texts.metrics}, {len(good.ids())} successes; {shares}", flush=True)


def main() -> None:
    arms = {name: Arm(name) for name in ARMS}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            of_seed(seed, Path(folder), arms)
    print(f"\nwords, texts of {' and '.join(KINDS)}: {len(SEEDS)} seeds, {JUDGED} {SPLIT} tasks")
    table(arms)
    for baseline in ARMS[1:3]:
        gain("words, texts first", arms, baseline, "texts first", by="trained")


if __name__ == "__main__":
    main()

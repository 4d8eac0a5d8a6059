"""The experiment of ``methods.py`` about a library of skills, in `lookup`: one policy imitates successes as they are,
the other the same successes with skills in place of their calls; each from random weights, in as many steps."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from arms import SMALL, line
from courses import COURSES
from methods import BATCH, SEEDS, trained_tokens

TRAIN, JUDGED = (24, 4) if SMALL else (768, 512)
COLUMNS = ("success", "n_steps", "n_action_tokens", "n_tokens")


class Played(NamedTuple):
    """Of one rollout of each task: success, turns, tokens that were sampled, and all tokens of the conversation."""

    success: dict[str, float]
    turns: dict[str, float]
    sampled: dict[str, float]
    whole: dict[str, float]


def library() -> bool:
    """What skills change in success, turns and tokens."""
    from agentrl.pipelines.harness import Harness
    from agentrl.pipelines.methods.voyager.skills import skills, with_library
    from agentrl.pipelines.stages.tasks import generate
    from agentrl.pipelines.stages.trajectories import reject, synthesize

    played: dict[str, list[Played]] = {f"{arm}, {at}": [] for at in ("greedy", "T 1") for arm in ("calls", "skills")}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            harness = Harness(Path(folder), seed)
            tasks = harness.run(generate, {"env": "lookup", "train": TRAIN, "dev": 1, "heldout": JUDGED})
            config = {"noise": 0.2, "coverage": 0.5}
            shown = harness.run(synthesize, config, tasks=tasks["train"])["trajectories"]
            made = harness.run(skills, trajectories=[shown], tasks=[tasks["train"]])
            print(
                f"skills, seed {seed}: {[line['name'] for line in made['tried'].table().to_pylist() if line['kept']]}"
            )
            arms = {
                "calls": (harness.run(reject, trajectories=[shown])["trajectories"], tasks["heldout"]),
                "skills": (
                    made["trajectories"],
                    harness.run(with_library, tasks=tasks["heldout"], notes=made["notes"])["tasks"],
                ),
            }
            for arm, (rows, judged) in arms.items():
                model, tokens = _taught(harness, rows)
                print(f"{arm}, seed {seed}: {len(rows.ids())} rows, {tokens:,} trained tokens", flush=True)
                for at, temperature in (("greedy", 0.0), ("T 1", 1.0)):
                    played[f"{arm}, {at}"].append(_played(harness, model, judged, temperature))
    return _print(played)


def _taught(harness: Any, rows: Any) -> tuple[Any, int]:
    from agentrl.pipelines.stages.train import sft

    steps = 2 if SMALL else COURSES["lookup"].warm_steps
    config = {
        "model": {"init": "tiny", "size": {"context": 320}},
        "steps": steps,
        "batch": BATCH,
        "optimizer": {"lr": 5e-3, "schedule": "cosine", "warmup": min(20, steps // 2)},
    }
    made = harness.run(sft, config, trajectories=[rows])
    return made["model"], trained_tokens(made)


def _played(harness: Any, model: Any, tasks: Any, temperature: float) -> Played:
    from agentrl.pipelines.stages.trajectories import sample

    config = {"samples": 1, "sampling": {"temperature": temperature}}
    rows = (
        harness.run(sample, config, model=model, tasks=tasks)["trajectories"].table(["task_id", *COLUMNS]).to_pylist()
    )
    return Played(*({row["task_id"]: float(row[name] or 0) for row in rows} for name in COLUMNS))


def _print(played: dict[str, list[Played]]) -> bool:
    from agentrl.statistics.sharpening import paired

    print(f"\nlibrary, lookup: {TRAIN} tasks a seed, half of them shown")
    met = []
    for at in ("greedy", "T 1"):
        before, after = played[f"calls, {at}"], played[f"skills, {at}"]
        for number, what in enumerate(Played._fields):
            means = [
                sum(sum(run[number].values()) for run in runs) / sum(len(run[number]) for run in runs)
                for runs in (before, after)
            ]
            contrast = paired([run[number] for run in before], [run[number] for run in after])
            figure = (
                f"library, {at}, {what}: {means[0]:.3f} -> {means[1]:.3f}, {contrast.mean:+.3f} "
                f"({contrast.low:+.3f} to {contrast.high:+.3f})"
            )
            if what == "success":
                met.append(line(figure, contrast.low > -0.03, "not 0.03 less"))
            elif what == "whole":
                print(figure)
            else:
                met.append(line(figure, contrast.high < 0, "fewer"))
    return all(met)

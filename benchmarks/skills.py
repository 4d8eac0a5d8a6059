"""The experiments of ``methods.py`` about a library of skills. ``library``, in `lookup`: one policy imitates successes
as they are, the other the same successes with skills in place of their calls; each from random weights, in as many
steps. ``retrieved``: which skills are offered, and whether a held-out task can be solved with them."""

import tempfile
from collections import Counter
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
                    harness.run(with_library, tasks=tasks["heldout"], notes=made["notes"], tests=made["tests"])[
                        "tasks"
                    ],
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


FAMILIES = ("lookup",) if SMALL else ("lookup", "math", "office", "shop", "search_qa")


def retrieved() -> bool:
    """How often the ``k`` skills that a held-out task is offered hold one of those that the expert's calls there are
    made with: by the words of the library's tests, by their vectors, or by how often skills were called."""
    met = []
    for family in FAMILIES:
        counts, tasks, sizes = Counter[tuple[int, str]](), 0, []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                usable, offered, size = _retrieved(Path(folder), seed, family)
            tasks, sizes = tasks + len(usable), [*sizes, size]
            for (k, way), each in offered.items():
                counts[k, way] += sum(bool(set(names) & usable[task]) for task, names in each.items())
        print(
            f"retrieved, {family}: {sizes} skills, {tasks} held-out tasks whose expert's calls are made with one",
            flush=True,
        )
        for k in (1, 2):
            shares = {way: counts[k, way] / max(tasks, 1) for way in WAYS}
            figure = ", ".join(f"{way} {share:.3f}" for way, share in shares.items())
            met.append(
                line(
                    f"retrieved, {family}, k {k}: {figure}",
                    shares["words"] >= shares["most called"],
                    "no less by words",
                )
            )
    return all(met)


WAYS = {"words": None, "vectors": "minilm", "most called": ""}


def _retrieved(folder: Path, seed: int, family: str) -> tuple[dict[str, set[str]], dict[Any, Any], int]:
    """The skills that the expert's calls are made with, by held-out task; those that it is offered, by ``k`` and way;
    and how many there are."""
    from agentrl.pipelines.harness import Harness
    from agentrl.pipelines.methods.voyager.again import with_skills
    from agentrl.pipelines.methods.voyager.induce import induced
    from agentrl.pipelines.methods.voyager.retrieval import fitting, skill_of
    from agentrl.pipelines.methods.voyager.skills import skills
    from agentrl.pipelines.stages.tasks import generate
    from agentrl.pipelines.stages.trajectories import synthesize

    harness = Harness(folder, seed)
    train, judged = (24, 4) if SMALL else (384, 256)
    tasks = harness.run(generate, {"env": family, "train": train, "dev": 1, "heldout": judged})
    shown = harness.run(synthesize, tasks=tasks["train"])["trajectories"]
    libraries = {
        embedder: harness.run(skills, {"n": 24, "embedder": embedder}, trajectories=[shown], tasks=[tasks["train"]])
        for embedder in (None, "minilm")
    }
    notes = libraries[None]["notes"].read()
    by_name = {each.skill.name: each for each in induced([row for row in shown.read() if row.success], 4, 3)}
    library = [by_name[skill_of(note).name] for note in notes]
    rows = harness.run(synthesize, tasks=tasks["heldout"])["trajectories"].read()
    usable = {row.task_id: names for row in rows if row.success and (names := with_skills(row, library)[1])}
    prompts = {task.task_id: task.prompt for task in tasks["heldout"].read() if task.task_id in usable}
    offered = {}
    for way, embedder in WAYS.items():
        tests = [] if embedder == "" else libraries[embedder]["tests"].table().to_pylist()
        for k in (1, 2):
            chosen = fitting(notes, tests, list(prompts.values()), k)
            offered[k, way] = {task: [skill.name for skill in each] for task, each in zip(prompts, chosen, strict=True)}
    return usable, offered, len(notes)

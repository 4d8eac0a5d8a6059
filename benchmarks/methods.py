"""What methods gain at an equal budget, on held-out tasks.

Every method starts from one supervised policy for each seed and spends the same budget: sampled tokens, foreign tokens
(a teacher's, a judge's), environment calls and trained tokens are counted and printed. Rejection sampling and GRPO are
always among the baselines, with settings that did best on dev tasks (``tune``). Success is measured on held-out tasks
at temperature 1, greedily, and at each policy's best temperature, which is the control for sharpening: see ``arms.py``.

- tune: what rejection sampling and GRPO solve of dev tasks at three learning rates, and with two ways to keep rows.
- the others: see :data:`MODULES`, and what the modules say that it names.

    python benchmarks/methods.py                    # 3 seeds, 512 held-out tasks
    METHODS=hindsight python benchmarks/methods.py  # some
    COURSES=words ...                               # what a method is run in, if it is run in several
    SPLIT=dev ...                                   # judge on dev tasks, on which settings are chosen
    SEEDS="0 1" ...                                 # other seeds
    KEEP=folder ...                                 # keep warm policies and results of each seed for later runs
    SCALE=small ...                                 # one seed, below a minute: everything runs, nothing is learned
    CHECK=1 ...                                     # exit code 1 if a target is missed
"""

import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from arms import SMALL, Arm, Solved, Spent, measured
from courses import COURSES, Course

os.environ["OMP_NUM_THREADS"] = "1"  # a small model: a second thread costs more than it brings
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0" if SMALL else "0 1 2").split()]
SPLIT = os.environ.get("SPLIT", "heldout")
if SMALL and "KEEP" not in os.environ:  # experiments of a process share their warm policies
    SHARED = tempfile.TemporaryDirectory()
    os.environ["KEEP"] = SHARED.name
KEEP = Path(os.environ["KEEP"], str(os.getpid()) if SMALL else "") if "KEEP" in os.environ else None
JUDGED, DEV = (4, 2) if SMALL else (512, 128)
"""Tasks that are judged, and dev tasks on which a policy's temperature is chosen."""
BATCH = 4 if SMALL else 32
CURATED_STEPS = 2 if SMALL else 60
TASKS, SAMPLES, ITERATIONS = (4, 2, 1) if SMALL else (32, 8, 24)
ROUNDS = 1
"""Of further rollouts at small scale, where budgets need not be equal."""


def seeds(experiment: str, *tables: dict[str, Arm]) -> Iterator[tuple[int, Path]]:
    """Each seed that is not in :data:`KEEP`, and a folder for it. What an experiment adds to each arm is kept there."""
    arms = [arm for table in tables for arm in table.values()]
    for seed in SEEDS:
        kept = KEEP and KEEP / f"{experiment} {SPLIT} {seed}.json"
        if kept and kept.exists():
            for arm, stored in zip(arms, json.loads(kept.read_text()), strict=True):
                arm.restored(stored)
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield seed, Path(folder)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([arm.kept() for arm in arms]))


@dataclass(frozen=True)
class Setting:
    """One environment and one seed: tasks, a warm policy, and the model that it starts from."""

    env: str
    harness: Any
    tasks: Any
    judged: Any
    dev: Any
    heldout: list[Any]
    warm: Any
    taught: int = 0
    """Tokens that the warm policy was trained on."""

    @property
    def course(self) -> Course:
        return COURSES[self.env]


def expert(env: str, seed: int, folder: Path, **config: Any) -> tuple[Any, Any, Any]:
    """A store, tasks, and demonstrations of an expert."""
    from agentrl.environments.rooms.environment import Rooms
    from agentrl.pipelines.harness import Harness
    from agentrl.pipelines.stages.tasks import generate
    from agentrl.pipelines.stages.trajectories import synthesize

    if SMALL:
        Rooms.max_steps = 2  # a policy that has learned nothing talks until its last step
    harness = Harness(folder, seed)
    course = COURSES[env]
    sizes = {"train": course.train, "dev": min(JUDGED, course.judged), "heldout": min(JUDGED, course.judged)}
    tasks = harness.run(generate, {"env": course.environment, **sizes})
    shown = harness.run(synthesize, {**course.shown, **config}, tasks=tasks["train"])["trajectories"]
    return harness, tasks, shown


def imitated(
    name: str, env: str, harness: Any, tasks: Any, shown: list[Any], context: int = 0, kinds: float = 1, **base: Any
) -> Setting:
    """A model that has imitated these rows, of the course's context, or of ``context`` tokens, with the course's steps
    for each of so many ``kinds`` of rows. ``model`` gives one to begin with. ``name`` says which rows, in :data:`KEEP`.
    """
    from agentrl.pipelines.stages.train import sft

    course, kept = COURSES[env], KEEP and KEEP / f"{name} {env} {harness.seed}"
    if kept and kept.exists():
        warm = harness.model(lambda to: shutil.copytree(kept, to, dirs_exist_ok=True))
        taught = int(kept.with_suffix(".tokens").read_text())
    else:
        optimizer = {"lr": 5e-3, "schedule": "cosine", "warmup": min(20, course.warm_steps // 2)}
        config = {
            "steps": max(1, round(kinds * course.warm_steps)),
            "batch": course.batch or BATCH,
            "optimizer": optimizer,
        }
        if not base:
            config["model"] = {
                "init": "tiny",
                "size": {"context": context or course.context, "vocabulary": course.vocabulary, **course.size},
            }
        made = harness.run(sft, config, trajectories=shown, **base)
        warm, taught = made["model"], trained_tokens(made)
        if kept:
            shutil.copytree(warm.path, kept)
            kept.with_suffix(".tokens").write_text(str(taught))
    dev = tasks["dev"].read()
    judged = harness.tasks(dev[DEV:]) if SPLIT == "dev" else tasks[SPLIT]
    measuring = {"judged": judged, "dev": harness.tasks(dev[:DEV]), "heldout": [tasks["dev"], tasks["heldout"]]}
    return Setting(env, harness, tasks["train"], warm=warm, taught=taught, **measuring)


def prepared(env: str, seed: int, folder: Path) -> Setting:
    """A model that has imitated an expert on the train tasks."""
    harness, tasks, shown = expert(env, seed, folder)
    return imitated("warm", env, harness, tasks, [shown])


def judged(setting: Setting, model: Any, **more: Any) -> Solved:
    """What a policy solves, of one rollout of each task, by ``more`` settings of ``trajectories.sample``."""
    from agentrl.pipelines.stages.trajectories import sample

    def play(tasks: Any, temperature: float) -> dict[str, float]:
        config = {"samples": 1, "sampling": {"temperature": temperature}, **more}
        made = setting.harness.run(sample, config, model=model, tasks=tasks)
        rows = made["trajectories"].table(["task_id", "success"]).to_pylist()
        return {row["task_id"]: float(row["success"]) for row in rows}

    return measured(play, setting.dev, setting.judged)


def of_rollouts(rows: Any) -> Spent:
    import pyarrow.compute as pc

    table = rows.table(["n_action_tokens", "n_tool_calls"])
    return Spent(pc.sum(table["n_action_tokens"]).as_py() or 0, 0, pc.sum(table["n_tool_calls"]).as_py() or 0, 0)


def rollouts(setting: Setting, tasks: Any, wanted: int, by: str = "sampled") -> tuple[Any, Spent]:
    """Selections of whole rollouts of the warm policy, one more of each task until so many tokens are ``sampled``, or
    ``calls`` made."""
    from agentrl.pipelines.stages.trajectories import sample

    matches, spent = [], Spent()
    while getattr(spent, by) < wanted and not (SMALL and len(matches) == ROUNDS):
        with other_draws(setting.harness, len(matches)):
            made = setting.harness.run(sample, {"samples": 1}, model=setting.warm, tasks=tasks)
        matches.append(made["trajectories"])
        spent += of_rollouts(matches[-1])
    return matches, spent


@contextmanager
def other_draws(harness: Any, number: int) -> Iterator[None]:
    """With equal seeds, rollouts of the same tasks would be the same again: those in this block are drawn otherwise."""
    seed = harness.seed
    harness.seed = seed + 1000 * (1 + number)
    try:
        yield
    finally:
        harness.seed = seed


def rejected(setting: Setting, tasks: Any, wanted: int) -> tuple[Any, Spent, float]:
    """The warm policy after rejection sampling on so many sampled tokens, what it spent, and the tokens of a rollout on
    average."""
    made, spent = rollouts(setting, tasks, wanted)
    model, more = curated(setting, [successes(setting, made)])
    return model, spent + more, spent.sampled / max(1, sum(len(row.ids()) for row in made))


def successes(setting: Setting, selections: list[Any], **keeps: int) -> Any:
    """What the best rejection sampling keeps of rollouts, or one that ``keeps`` otherwise."""
    from agentrl.pipelines.stages.trajectories import reject

    return setting.harness.run(reject, keeps or setting.course.keeps, trajectories=selections)["trajectories"]


def curated(
    setting: Setting, selections: list[Any], steps: int = CURATED_STEPS, lr: float | None = None, **more: Any
) -> Any:
    """The warm policy after supervised steps on these rows, and the tokens that it was trained on."""
    from agentrl.pipelines.stages.train import sft

    if not any(selection.ids() for selection in selections):
        return setting.warm, Spent()
    optimizer = {"lr": lr or setting.course.sft_lr, "schedule": "linear"}
    config = {"steps": steps, "batch": BATCH, "optimizer": optimizer, **more}
    made = setting.harness.run(sft, config, trajectories=selections, model=setting.warm)
    return made["model"], Spent(trained=trained_tokens(made))


def trained_tokens(made: Any) -> int:
    """Tokens that a stage trained on, by its metrics."""
    return round(sum(row["tokens"] for row in made["metrics"].table().to_pylist()))


def online(setting: Setting, states: Any = None, inputs: Any = None, **settings: Any) -> tuple[Any, Spent, list[float]]:
    """The warm policy after GRPO, from the rows ``states`` if there are any, with other ``inputs``; what it spent, and
    the level of each iteration that had one."""
    from agentrl.pipelines.stages.grpo import online as stage

    warmup, lr = min(4, settings.get("iterations", ITERATIONS) // 2), settings.pop("lr", setting.course.lr)
    optimizer = {"lr": lr, "schedule": "linear", "warmup": warmup, **settings.pop("optimizer", {})}
    config = {
        "iterations": ITERATIONS, "tasks": TASKS, "samples": SAMPLES, "checkpoints": {"last": 0}, **settings,
        "optimizer": optimizer, "checkpoint_every": 1000,
    }  # fmt: skip
    inputs = {**(inputs or {}), **({"starts": [states]} if states else {})}
    made = setting.harness.run(stage, config, model=setting.warm, tasks=setting.tasks, **inputs)
    spent, metrics = of_rollouts(made["trajectories"]), made["metrics"].table().to_pylist()
    levels = [row["level"] for row in metrics if row.get("level")]
    replayed = round(sum(row.get("replayed_calls", 0) for row in metrics))
    refused = int(made.metrics.get("resampled_tokens", 0))
    trained = spent.sampled + tokens_again(setting, made)
    return made["model"], spent + Spent(sampled=refused, trained=trained, calls=replayed), levels


def tokens_again(setting: Setting, made: Any) -> int:
    """Tokens of stored rollouts that an online stage trained on beside what it sampled."""
    ids = [row["trajectory_id"] for row in made["steps"].table().to_pylist() if row.get("replay_weight")]
    rows = list(set(ids))
    sizes = dict(
        zip(rows, setting.harness.buffer.read(rows, ["n_action_tokens"])["n_action_tokens"].to_pylist(), strict=True)
    )
    return sum(sizes[name] for name in ids)


MODULES = {
    "tuning": ("tune",),
    "relabelled": ("hindsight",),
    "methods_signals": ("curriculum", "echo", "rwml", "reflexion", "resample", "rank"),
    "taught": ("distill", "self_distill", "labels"),
    "branching": ("slicing", "pairs", "eto", "ipr", "dagger", "tree"),
    "second_round": ("second_round",),
    "searching": ("search", "guided", "valued", "preferred", "reflected"),
    "memory": ("experience", "guidance", "star", "splice"),
    "teams": ("teams",),
    "compression": ("compress", "segment"),
    "stored": ("replay", "online_replay", "online_starts", "counterfactual"),
    "useful_calls": ("filter_calls",),
    "proposing": ("propose",),
    "self_play": ("zero", "program_io"),
    "skills": ("library", "retrieved"),
    "named": ("toolrl", "agenttuning"),
    "questions": ("research", "webshaper"),
    "believing": ("confidence", "self_rewarding"),
    "algorithms": ("algorithms", "updates"),
    "exploring": ("diverse", "thinking"),
    "programs": ("programs",),
    "proposed_programs": ("kodcode", "kodcode_taught"),
}
"""Module -> the methods whose experiments lie there, as functions of their names."""
METHODS = {name: module for module, names in MODULES.items() for name in names}
COURSES_OF = {
    "tune": ("words", "lookup", "rooms"),
    "hindsight": ("words", "lookup", "rooms", "rooms, silent"),
    **dict.fromkeys(("online_replay", "online_starts", "propose", "toolrl", "zero"), ("words",)),
    **dict.fromkeys(("confidence", "self_rewarding", "algorithms", "updates", "valued"), ("words",)),
    "distill": ("words", "lookup"),
    **dict.fromkeys(("curriculum", "tree"), ("words", "rooms")),
    **dict.fromkeys(("search", "guided"), ("rooms", "rooms, little warmed")),
    **dict.fromkeys(("resample", "rank", "pairs", "counterfactual", "slicing"), ("words", "rooms")),
    **dict.fromkeys(("echo", "replay", "rwml"), ("words", "rooms", "lookup")),
    **dict.fromkeys(("reflexion", "experience"), ("lookup", "rooms")),
    **dict.fromkeys(("self_distill", "splice"), ("rooms", "lookup")),
    "guidance": ("words", "rooms"),
    "star": ("words", "rooms", "lookup"),
}
"""What an experiment is run in, if it is run in several; if it is small, the first of them."""


def done(name: str) -> tuple[str, list[bool], float]:
    """What small experiments of a method print, whether targets are met, and processor seconds."""
    started, text = time.process_time(), io.StringIO()
    with redirect_stdout(text) if SMALL else nullcontext():
        experiment = getattr(import_module(METHODS[name]), name)
        given = os.environ.get("COURSES", "").split("; ")
        courses = [course for course in COURSES_OF.get(name, ()) if given == [""] or course in given]
        courses = courses[: 1 if SMALL else None]
        met = [experiment(course) for course in courses] or [experiment()]
    return text.getvalue(), met, time.process_time() - started


def main() -> int:
    every = [name for name in METHODS if name != "tune" or SPLIT == "dev"]
    chosen = os.environ.get("METHODS", ",".join(every)).split(",")
    print(f"{len(SEEDS)} seeds x {JUDGED} {SPLIT} tasks", flush=True)
    met, seconds = [], 0.0
    with ProcessPoolExecutor(2, get_context("spawn")) as workers:
        each = workers.map if SMALL else map  # most of what is small is stages that begin and end, in one thread
        for text, more, took in each(done, chosen):
            print(text, end="", flush=True)
            met, seconds = met + more, seconds + took
    print(f"\n{seconds:.0f} processor seconds")
    return int(os.environ.get("CHECK") == "1" and not all(met))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())

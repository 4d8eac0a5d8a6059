"""What methods gain at an equal budget, on held-out tasks.

Every method starts from one supervised policy for each seed and spends the same budget: sampled tokens, foreign tokens
(a teacher's, a judge's), environment calls and trained tokens are counted and printed. Rejection sampling and GRPO are
always among the baselines. Success is that at temperature 1 on held-out tasks, with Wilson 95 % intervals over the
tasks of all seeds; a gain is a paired difference over tasks and seeds, with a bootstrap interval.

- hindsight: rejection sampling on rollouts, with and without failed ones relabelled (`rooms`, also silent; `lookup`).
- curriculum, distill, self_distill, echo, rwml, reflexion, resample, rank: see :mod:`methods_signals`.
- slicing, pairs, eto, ipr, dagger, tree: see ``branching.py``.
- search, guided, preferred, reflected: see ``searching.py``.
- experience, guidance, star, splice: see ``memory.py``; teams: see ``teams.py``.
- compress, segment: see ``compression.py``; replay, counterfactual: see ``stored.py``.

    python benchmarks/methods.py                    # 3 seeds, 512 held-out tasks
    METHODS=hindsight python benchmarks/methods.py  # some
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
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a small model: a second thread costs more than it brings
SMALL = os.environ.get("SCALE") == "small"
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0" if SMALL else "0 1 2").split()]
SPLIT = os.environ.get("SPLIT", "heldout")
if SMALL and "KEEP" not in os.environ:  # experiments of a process share their warm policies
    SHARED = tempfile.TemporaryDirectory()
    os.environ["KEEP"] = SHARED.name
KEEP = Path(os.environ["KEEP"], str(os.getpid()) if SMALL else "") if "KEEP" in os.environ else None
JUDGED = 4 if SMALL else 512
BATCH = 4 if SMALL else 32
CURATED_STEPS = 2 if SMALL else 60
TASKS, SAMPLES, ITERATIONS = (4, 2, 1) if SMALL else (32, 8, 24)
ROUNDS = 1
"""Of further rollouts at small scale, where budgets need not be equal."""
LR = {"sft": 1e-3, "offline": 1e-4, "dpo": 2e-5}
"""Learning rates, chosen on dev tasks of seed 0 for the baselines, as those of GRPO; methods have the same."""
WITHIN = 0.15
"""How far the budgets of two methods may be apart."""


@dataclass
class Spent:
    """What a method used, beside its warm policy."""

    sampled: int = 0
    foreign: int = 0
    calls: int = 0
    trained: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Arm:
    """A method over all seeds: what it solved, by seed and task, and what it spent."""

    name: str
    runs: list[dict[str, float]] = field(default_factory=list)
    costs: list[Spent] = field(default_factory=list)

    def add(self, run: dict[str, float], spent: Spent) -> None:
        self.runs.append(run)
        self.costs.append(spent)

    @property
    def spent(self) -> Spent:
        return sum(self.costs, Spent())


def seeds(experiment: str, *tables: dict[str, Arm]) -> Iterator[tuple[int, Path]]:
    """Each seed that is not in :data:`KEEP`, and a folder for it. What an experiment adds to each arm is kept there."""
    arms = [arm for table in tables for arm in table.values()]
    for seed in SEEDS:
        kept = KEEP and KEEP / f"{experiment} {SPLIT} {seed}.json"
        if kept and kept.exists():
            for arm, (run, spent) in zip(arms, json.loads(kept.read_text()), strict=True):
                arm.add(run, Spent(**spent))
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield seed, Path(folder)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([(arm.runs[-1], vars(arm.costs[-1])) for arm in arms]))


@dataclass(frozen=True)
class Setting:
    """One environment and one seed: tasks, a warm policy, and the model that it starts from."""

    env: str
    harness: Any
    tasks: Any
    judged: Any
    heldout: list[Any]
    warm: Any


@dataclass(frozen=True)
class Course:
    """How a policy is warmed in an environment, and the learning rate of GRPO after that."""

    environment: Any
    train: int
    context: int
    lr: float
    warm_steps: int = 500
    shown: dict[str, Any] = field(default_factory=dict)


ROOMS = {"type": "rooms", "spoken": True}
# Of the 2,256 pairs of rooms all that are not judged: from half of them no policy learns ways between new ones.
PAIRS = 1232
COURSES = {
    "rooms": Course(ROOMS, PAIRS, 256, 3e-4),
    "rooms, silent": Course({"type": "rooms"}, PAIRS, 256, 3e-4),
    "rooms, little warmed": Course(ROOMS, PAIRS, 256, 3e-4, warm_steps=360),
    "rooms 1-6": Course({**ROOMS, "levels": [1, 2, 3, 4, 5, 6]}, 1024, 256, 3e-4),
    "rooms, 30 steps": Course(ROOMS, PAIRS, 704, 3e-4, shown={"noise": 0.4}),  # walks that are long
    "lookup": Course("lookup", 768, 192, 1e-3, warm_steps=160, shown={"noise": 0.2, "coverage": 0.5}),
}
if SMALL:
    COURSES = {name: replace(course, train=24, warm_steps=8) for name, course in COURSES.items()}


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
    sizes = {"train": course.train, "dev": JUDGED, "heldout": JUDGED}
    tasks = harness.run(generate, {"env": course.environment, **sizes})
    shown = harness.run(synthesize, {**course.shown, **config}, tasks=tasks["train"])["trajectories"]
    return harness, tasks, shown


def imitated(
    name: str, env: str, harness: Any, tasks: Any, shown: list[Any], context: int = 0, kinds: int = 1, **base: Any
) -> Setting:
    """A model that has imitated these rows, of the course's context, or of ``context`` tokens, with the course's steps
    for each of so many ``kinds`` of rows. ``model`` gives one to begin with. ``name`` says which rows, in :data:`KEEP`.
    """
    from agentrl.pipelines.stages.train import sft

    course, kept = COURSES[env], KEEP and KEEP / f"{name} {env} {harness.seed}"
    if kept and kept.exists():
        warm = harness.model(lambda to: shutil.copytree(kept, to, dirs_exist_ok=True))
    else:
        optimizer = {"lr": 5e-3, "schedule": "cosine", "warmup": min(20, course.warm_steps // 2)}
        config = {"steps": kinds * course.warm_steps, "batch": BATCH, "optimizer": optimizer}
        if not base:
            config["model"] = {"init": "tiny", "size": {"context": context or course.context}}
        warm = harness.run(sft, config, trajectories=shown, **base)["model"]
        if kept:
            shutil.copytree(warm.path, kept)
    return Setting(env, harness, tasks["train"], tasks[SPLIT], [tasks["dev"], tasks["heldout"]], warm)


def prepared(env: str, seed: int, folder: Path) -> Setting:
    """A model that has imitated an expert on the train tasks."""
    harness, tasks, shown = expert(env, seed, folder)
    return imitated("warm", env, harness, tasks, [shown])


def judged(setting: Setting, model: Any) -> dict[str, float]:
    """Task -> success of one rollout at temperature 1."""
    from agentrl.pipelines.stages.trajectories import sample

    made = setting.harness.run(sample, {"samples": 1}, model=model, tasks=setting.judged)
    rows = made["trajectories"].table(["task_id", "success"]).to_pylist()
    return {row["task_id"]: float(row["success"]) for row in rows}


def of_rollouts(rows: Any) -> Spent:
    import pyarrow.compute as pc

    table = rows.table(["n_action_tokens", "n_tool_calls"])
    return Spent(pc.sum(table["n_action_tokens"]).as_py(), 0, pc.sum(table["n_tool_calls"]).as_py(), 0)


def rollouts(setting: Setting, tasks: Any, wanted: int, by: str = "sampled") -> tuple[Any, Spent]:
    """Selections of whole rollouts of the warm policy, one more of each task until so many tokens are ``sampled``, or
    ``calls`` made."""
    from agentrl.pipelines.stages.trajectories import sample

    found, spent = [], Spent()
    while getattr(spent, by) < wanted and not (SMALL and len(found) == ROUNDS):
        with other_draws(setting.harness, len(found)):
            made = setting.harness.run(sample, {"samples": 1}, model=setting.warm, tasks=tasks)
        found.append(made["trajectories"])
        spent += of_rollouts(found[-1])
    return found, spent


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
    from agentrl.pipelines.stages.trajectories import reject

    made, spent = rollouts(setting, tasks, wanted)
    good = setting.harness.run(reject, {"keep": 2}, trajectories=made)["trajectories"]
    model, more = curated(setting, [good])
    return model, spent + more, spent.sampled / max(1, sum(len(one.ids()) for one in made))


def curated(
    setting: Setting, selections: list[Any], steps: int = CURATED_STEPS, lr: float = LR["sft"], **more: Any
) -> Any:
    """The warm policy after supervised steps on these rows, and the tokens that it was trained on."""
    from agentrl.pipelines.stages.train import sft

    if not any(one.ids() for one in selections):
        return setting.warm, Spent()
    config = {"steps": steps, "batch": BATCH, "optimizer": {"lr": lr, "schedule": "linear"}, **more}
    made = setting.harness.run(sft, config, trajectories=selections, model=setting.warm)
    return made["model"], Spent(trained=round(sum(row["tokens"] for row in made["metrics"].table().to_pylist())))


def online(setting: Setting, **settings: Any) -> tuple[Any, Spent, list[float]]:
    """The warm policy after GRPO, what it spent, and the level of each iteration that had one."""
    from agentrl.pipelines.stages.grpo import online as stage

    warmup = min(4, settings.get("iterations", ITERATIONS) // 2)
    config = {
        "iterations": ITERATIONS, "tasks": TASKS, "samples": SAMPLES, "checkpoints": {"last": 0}, **settings,
        "optimizer": {"lr": COURSES[setting.env].lr, "schedule": "linear", "warmup": warmup},
        "checkpoint_every": 1000,
    }  # fmt: skip
    made = setting.harness.run(stage, config, model=setting.warm, tasks=setting.tasks)
    spent, metrics = of_rollouts(made["trajectories"]), made["metrics"].table().to_pylist()
    levels = [row["level"] for row in metrics if row.get("level")]
    replayed = round(sum(row.get("replayed_calls", 0) for row in metrics))
    refused = int(made.metrics.get("resampled_tokens", 0))
    return made["model"], spent + Spent(sampled=refused, trained=spent.sampled, calls=replayed), levels


def hindsight(env: str) -> bool:
    """The same rollouts with and without what failed ones did achieve, against GRPO with as many. New tasks are
    verified by making the calls of rows again; another baseline gets as many calls, as further rollouts."""
    from agentrl.pipelines.methods.hindsight.relabel import relabel
    from agentrl.pipelines.stages.trajectories import reject, sample

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
        good = run(reject, {"keep": 2}, trajectories=[rows])["trajectories"]
        model, more = curated(setting, [good])
        arms["rejection"].add(judged(setting, model), spent + more)
        made = run(
            relabel, {"cap": len(good.ids()) // 4 or None, "detours": "kept" if setting.env == "lookup" else "masked"},
            trajectories=[rows], heldout=setting.heldout, model=setting.warm, tasks=[tasks],
        )  # fmt: skip
        print(f"{env}, seed {seed}: {made.metrics}", file=sys.stderr, flush=True)
        new = made["trajectories"]
        replayed = Spent(calls=int(made.metrics["environment_calls"]))
        model, more = curated(setting, [good, new])
        arms["rejection + hindsight"].add(judged(setting, model), spent + replayed + more)
        shifts.update({(one["asked"], one["achieved"]): one["rows"] for one in made["levels"].table().to_pylist()})
        others, beside = rollouts(setting, tasks, replayed.calls, by="calls")
        model, more = curated(setting, [run(reject, {"keep": 2}, trajectories=[rows, *others])["trajectories"]])
        arms[more_calls].add(judged(setting, model), spent + beside + more)
        model, more, _ = online(setting)
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\nhindsight, {env}: {TASKS * ITERATIONS * SAMPLES:,} rollouts a seed")
    table(arms)
    print(f"levels asked -> achieved: {', '.join(f'{a} -> {b}: {n}' for (a, b), n in sorted(shifts.items()))}")
    met = gain(f"hindsight, {env}", arms["rejection"], arms["rejection + hindsight"])
    return gain(f"hindsight, {env}", arms[more_calls], arms["rejection + hindsight"], by="calls") and met


def table(arms: dict[str, Arm]) -> None:
    from agentrl.statistics.intervals import wilson

    print(f"{'method':<24} {'success':>7}  {'95 % interval':<15} {'each seed':<20} "
          f"{'sampled':>10} {'foreign':>8} {'calls':>8} {'trained':>10}")  # fmt: skip
    for arm in arms.values():
        solved, total = sum(sum(run.values()) for run in arm.runs), sum(map(len, arm.runs))
        low, high = wilson(solved, total)
        each = " ".join(f"{sum(run.values()) / len(run):.3f}" for run in arm.runs)
        spent = " ".join(
            f"{number:>{width},}" for number, width in zip(vars(arm.spent).values(), (10, 8, 8, 10), strict=True)
        )
        print(f"{arm.name:<24} {solved / total:>7.3f}  {low:.3f} to {high:.3f}  {each:<20} {spent}")


def gain(name: str, before: Arm, after: Arm, by: str = "sampled") -> bool:
    """Print how much is gained at an equal budget, of tokens that were sampled or ``foreign``, or of
    ``calls``, and whether it was."""
    from agentrl.statistics.paired import difference

    found = difference(before.runs, after.runs, same_seeds=True)
    what = by if by == "calls" else f"{by} tokens"
    ratio = getattr(after.spent, by) / max(1, getattr(before.spent, by))
    met = [
        line(f"{name}: {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f}) over {before.name}",
             found.low > 0, "the interval above 0"),
        line(f"{name}: {ratio:.2f} of the {what} of {before.name}", abs(ratio - 1) <= WITHIN,
             f"within {WITHIN:.0%}"),
    ]  # fmt: skip
    return all(met)


def line(figure: str, met: bool, target: str) -> bool:
    print(f"{figure} (target {target}): {'met' if met else 'MISSED'}", flush=True)
    return met


MODULES = {
    "methods": ("hindsight",),
    "methods_signals": ("curriculum", "distill", "self_distill", "echo", "rwml", "reflexion", "resample", "rank"),
    "branching": ("slicing", "pairs", "eto", "ipr", "dagger", "tree"),
    "searching": ("search", "guided", "preferred", "reflected"),
    "memory": ("experience", "guidance", "star", "splice"),
    "teams": ("teams",),
    "compression": ("compress", "segment"),
    "stored": ("replay", "counterfactual"),
}
"""Module -> the methods whose experiments lie there, as functions of their names."""
METHODS = {name: module for module, names in MODULES.items() for name in names}
COURSES_OF = {
    "hindsight": ("rooms", "rooms, silent", "lookup"),
    **dict.fromkeys(("search", "guided"), ("rooms", "rooms, little warmed")),
    **dict.fromkeys(("self_distill", "echo", "rwml", "star", "splice", "replay"), ("rooms", "lookup")),
}
"""What an experiment is run in, if it is run in several; if it is small, the first of them."""


def done(name: str) -> tuple[str, list[bool], float]:
    """What the experiments of a method print if they are small, whether targets are met, and processor seconds."""
    started, said = time.process_time(), io.StringIO()
    with redirect_stdout(said) if SMALL else nullcontext():
        experiment = getattr(import_module(METHODS[name]), name)
        courses = COURSES_OF.get(name, ())[: 1 if SMALL else None]
        met = [experiment(course) for course in courses] or [experiment()]
    return said.getvalue(), met, time.process_time() - started


def main() -> int:
    chosen = os.environ.get("METHODS", ",".join(METHODS)).split(",")
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

"""The experiment of ``methods.py`` about programs that unit tests judge: functions to write, those of level 1 of `code`
whose steps have no number.

From one warm policy, with as many rollouts: rejection sampling, whose plain retries are the baseline of retries that
are shown an error (STaR with errors); GRPO on success; and RLEF, CodeRL and PPOCoder, each with the rewards and
the algorithm of its pipeline file. Their tasks are the same, and all are judged by success.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import yaml
from arms import SMALL, Arm, Spent, gain, table
from memory import retried_or_plain
from methods import COURSES, JUDGED, Setting, curated, expert, imitated, judged, online, seeds, successes

from agentrl.engines.blocking import blocking
from agentrl.environments.code import checks, environment
from agentrl.environments.code.programs import KINDS, ProgramStep, with_bug
from agentrl.environments.code.workspace import Workspace
from agentrl.pipelines.file.document import METHODS
from agentrl.pipelines.handles import Tasks
from agentrl.pipelines.harness import Harness
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.rationalize import literal
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

CODE: dict[str, Any] = COURSES["code"].environment
DOUBTFUL = "code, doubtful"
TURNS = 8
"""A look at the file, three times an edit and a run of the tests, and the end, as in RLEF's file."""
SIZES = {"train": COURSES["code"].train, "dev": JUDGED, "heldout": JUDGED}
ONE_IN = dict.fromkeys(("code", DOUBTFUL), 1) if SMALL else {"code": 8, DOUBTFUL: 3}
"""One in so many of the tasks that other methods are judged by: running programs takes long."""
FIRST, RETRIES = (1, 1) if SMALL else (2, 2)
"""Rollouts of each task, and retries of each that none of these solved."""
GROUPS = {"tasks": 2, "samples": 2} if SMALL else {"tasks": 16, "samples": 4, "updates": 2}
"""Of an iteration, with as many rollouts as in the pipeline files."""
ERROR = "An attempt ended with: {error}"
HINTED = 7
"""One in so many tasks is shown with an error too, since a small policy is lost at an opening that it never saw."""
KIND_OF = {kind.right.replace("{k}", str(k)): kind.name for kind in KINDS for k in range(kind.low, kind.high + 1)}
THREADS = 8
"""That wait for the programs of demonstrations."""
FILES = ("RLEF", "CodeRL", "PPOCoder")


def programs() -> bool:
    """What rewards of tests, errors and syntax add to success."""
    rewarded = {"GRPO": (CODE, {"type": "grpo"}), **{name: _file(name.lower()) for name in FILES}}
    arms = {name: Arm(name) for name in ("warm", "rejection", "STaR, errors", *rewarded)}
    for seed, folder in seeds("programs", arms):
        setting = doubtful(seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        _say(seed, arms["warm"])
        rollouts = _curated(seed, setting, arms)
        iterations = max(1, round(rollouts / (GROUPS["tasks"] * GROUPS["samples"])))
        for name, (env, algorithm) in rewarded.items():
            how = {"iterations": iterations, "algorithm": algorithm, **GROUPS}
            model, spent, _ = online(_paid(setting, env), **how)
            arms[name].add(judged(setting, model), spent)
            _say(seed, arms[name])
    print(f"\nprograms: {FIRST} rollouts of each task, and {RETRIES} more of each that none solved")
    table(arms)
    met = [gain(f"programs, {name}", arms, "rejection", name) for name in ("STaR, errors", *FILES)]
    met += [gain(f"programs, {name}", arms, "GRPO", name) for name in FILES]
    return all(met)


def coding(seed: int, folder: Path) -> Setting:
    """A policy that has imitated an expert who writes functions, with fewer tasks to judge it by."""
    environment.Code.max_steps = 2 if SMALL else TURNS  # a policy that has learned nothing goes on until its last step
    harness, tasks, shown = expert("code", seed, folder)
    more = harness.trajectories(_with_errors(tasks["train"]))
    return _of_fewer(imitated("with errors", "code", harness, tasks, [shown, more]))


def doubtful(seed: int, folder: Path) -> Setting:
    """A policy that has imitated an expert, and as many authors who write bugs: it knows how to write functions, and
    has to learn which are right. They are those whose steps have no number, which a small policy copies badly.
    """
    from agentrl.pipelines.stages.tasks import generate
    from agentrl.pipelines.stages.trajectories import synthesize

    environment.Code.max_steps = 2 if SMALL else TURNS
    harness = Harness(folder, seed)
    tasks = harness.run(generate, {"env": CODE, **SIZES, "train": COURSES[DOUBTFUL].train})
    train = harness.tasks(_without_numbers(tasks["train"]))
    shown = harness.run(synthesize, {}, tasks=train)["trajectories"]
    others = [harness.trajectories(rows) for rows in (_with_errors(train), _mistaken(train, seed))]
    given = {**tasks.outputs, "train": train}
    return _of_fewer(imitated("doubtful", DOUBTFUL, harness, given, [shown, *others]))


def _without_numbers(tasks: Any) -> list[Task]:
    return [task for task in tasks.read() if SMALL or not any(letter.isdigit() for letter in task.prompt)]


def _of_fewer(setting: Setting) -> Setting:
    """The setting with fewer tasks to judge by, and in the course of doubt, with those of its kind."""
    kept = _without_numbers if setting.env == DOUBTFUL else Tasks.read
    few = {name: kept(getattr(setting, name))[:: ONE_IN[setting.env]] for name in ("judged", "dev")}
    return replace(setting, **{name: setting.harness.tasks(rows) for name, rows in few.items()})


def _with_errors(train: Any) -> list[Trajectory]:
    """Demonstrations of some tasks that are shown what the tests say of another task's program."""
    env, some = environment.Code(), train.read()[::HINTED]
    return [
        demonstrate(env, task, 0.0, 0, f"hinted-{task.task_id}", ERROR.replace("{error}", literal(_error(task, other))))
        for task, other in zip(some, [*some[1:], some[0]], strict=True)
    ]


def _mistaken(train: Any, seed: int) -> list[Trajectory]:
    """Demonstrations of each task by an author who writes a bug of its kind, and ends whatever the tests say."""
    env = environment.Code()

    def demonstrated(task: Task) -> Trajectory:
        main = json.loads(task.ground_truth)["main.py"]
        head, middle, right = main.rstrip().rpartition("return ")
        bug = with_bug(ProgramStep(KIND_OF[right], "", right, right), Random(f"{seed}-{task.task_id}")).written
        wrong = task.model_copy(update={"ground_truth": json.dumps({"main.py": f"{head}{middle}{bug}\n"})})
        return demonstrate(env, wrong, 0.0, 0, f"mistaken-{task.task_id}")

    with ThreadPoolExecutor(THREADS) as threads:  # that wait for programs
        return list(threads.map(demonstrated, train.read()))


def _error(task: Task, other: Task) -> str:
    """What the tests of a task say of another's program."""
    about, right, wrong = (json.loads(text) for text in (task.metadata, task.ground_truth, other.ground_truth))
    head, middle, _ = right["main.py"].rpartition("return ")
    files = Workspace(about["files"] | {"main.py": head + middle + wrong["main.py"].rpartition("return ")[2]})
    return blocking(checks.visible_tests(environment.CodeConfig().sandbox, files, about["shown"]))[0][-300:]


def _file(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment and the algorithm of a method's pipeline file."""
    stages = yaml.safe_load((METHODS / name / "pipeline.yaml").read_text())["stages"]
    return stages["tasks"]["with"]["env"], stages[name]["with"]["algorithm"]


def _paid(setting: Setting, env: dict[str, Any]) -> Setting:
    """The same tasks with an environment's rewards."""
    from agentrl.pipelines.stages.tasks import generate

    name = str(generate.config.model_validate({"env": env}).env)
    rows = [task.model_copy(update={"env": name}) for task in setting.tasks.read()]
    return replace(setting, tasks=setting.harness.tasks(rows))


def _curated(seed: int, setting: Setting, arms: dict[str, Arm]) -> int:
    """Add the policies that learn from successes, and return how many rollouts the one with hints took."""
    from agentrl.pipelines.methods.star.rationalize import rationalize
    from agentrl.pipelines.stages.trajectories import sample

    first = setting.harness.run(sample, {"samples": FIRST}, model=setting.warm, tasks=setting.tasks)["trajectories"]
    config = {"hint": ERROR, "samples": RETRIES}
    made = setting.harness.run(rationalize, config, model=setting.warm, tasks=setting.tasks, trajectories=[first])
    print(f"programs, seed {seed}: {made.metrics}", flush=True)
    for name, plain, hinted, spent in retried_or_plain("STaR, errors", setting, setting.tasks, first, made):
        model, taught = curated(setting, [successes(setting, plain), *hinted], batch=setting.course.batch)
        arms[name].add(judged(setting, model), spent + taught)
        _say(seed, arms[name])
    return len(first.ids()) + int(made.metrics["retries"])


def _say(seed: int, arm: Arm) -> None:
    """A line for those who wait."""
    newest = arm.solved[-1]
    shares = [sum(run.values()) / len(run) for run in (newest.sampled, newest.greedy, newest.best)]
    print(f"programs, seed {seed}, {arm.name}: {' '.join(f'{share:.3f}' for share in shares)}", file=sys.stderr)

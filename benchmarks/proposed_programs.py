"""The experiments of ``methods.py`` about functions that are proposed with a solution and tests, as in KodCode.

- kodcode: a scripted writer proposes functions of level 1 of `code`, right ones and some with planted faults; what
  becomes of each.
- kodcode_taught: rejection sampling on few given tasks and what was kept of the proposals, beside as many tokens on the
  given tasks alone.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from arms import SMALL, Arm, Spent, gain, table
from methods import SEEDS, curated, judged, of_rollouts, rollouts, seeds, successes
from programs import CODE, SIZES, coding

from agentrl.engines.base import Session, Turn
from agentrl.engines.configs import EngineConfig
from agentrl.environments.code.programs import ProgramStep, Values, draw_steps, draw_values, run, sentence, with_bug
from agentrl.environments.code.repositories import INPUTS, NOUNS, VERBS
from agentrl.pipelines.harness import Harness
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role

if TYPE_CHECKING:
    from agentrl.engines.base import Engine
    from agentrl.models.policy import Policy

GIVEN, RIGHT, EACH, SAMPLES = (4, 4, 1, 1) if SMALL else (64, 128, 24, 3)
"""Tasks that are given, proposals without a fault, those with each fault, and rollouts of each task."""
ASKED = 10
"""Proposals of one reply."""
FAULTS = (
    *("a wrong solution", "a wrong test", "a solution that does not compile", "a form without tests"),
    *("one that was proposed before", "a held-out task"),
)
"""What no task may become of."""
UNSEEN = ("the same mistake in both", "a held-out function by another name")
"""Faults that nothing can see which compares a solution with its tests, and prompts with prompts."""


class Writer(EngineConfig):
    """In the place of a model that writes: the proposals of a file, in their order."""

    exact: ClassVar[bool] = False
    type: str
    file: str

    def build(self, policy: "Policy | None") -> "Engine":
        return _Writing(json.loads(Path(self.file).read_text()))


class _Writing:
    """Answers with text alone."""

    exact, reproducible, version = False, True, 0

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        return Session(key=key, root=root)

    async def turn(self, session: Session, *_: object, **__: object) -> Turn:
        now, self.texts = self.texts[:ASKED], self.texts[ASKED:]
        return Turn([], [], [], "stop", Message(role=Role.ASSISTANT, content=json.dumps({"tasks": now})))

    async def close(self) -> None:
        """There is nothing to close."""


def kodcode() -> bool:
    """What is kept of proposals, and why the others are refused."""
    from agentrl.pipelines.stages.tasks import generate

    fates: Counter[tuple[str, str]] = Counter()
    for seed in SEEDS:
        with TemporaryDirectory() as folder:
            harness = Harness(Path(folder), seed)
            tasks = harness.run(generate, {"env": CODE, **SIZES})
            given = harness.tasks(tasks["train"].read()[:GIVEN])
            _proposed(harness, given, [tasks["dev"], tasks["heldout"]], fates)
    print(f"\nkodcode: {fates.total()} proposals")
    met = [_fate(kind, fates) for kind in ("right", *FAULTS, *UNSEEN)]
    return all(met)


def kodcode_taught() -> bool:
    """What tasks that were kept are worth."""
    from agentrl.pipelines.stages.trajectories import sample

    arms = {name: Arm(name) for name in ("warm", "given tasks", "given and proposed")}
    for seed, folder in seeds("kodcode", arms):
        setting = coding(seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        given = setting.harness.tasks(setting.tasks.read()[:GIVEN])
        proposed = _proposed(setting.harness, given, setting.heldout, Counter())
        both = setting.harness.tasks([*given.read(), *proposed.read()])
        made = setting.harness.run(sample, {"samples": SAMPLES}, model=setting.warm, tasks=both)["trajectories"]
        spent = of_rollouts(made)
        same, beside = rollouts(setting, given, spent.sampled)
        for name, rows, cost in (("given tasks", same, beside), ("given and proposed", [made], spent)):
            model, taught = curated(setting, [successes(setting, rows)])
            arms[name].add(judged(setting, model), cost + taught)
    print(f"\nkodcode: {GIVEN} tasks are given")
    table(arms)
    return gain("kodcode", arms, "given tasks", "given and proposed")


def _fate(kind: str, fates: Counter[tuple[str, str]]) -> bool:
    """Print what became of the proposals of a kind. Returns whether nothing with a fault was kept, and nothing that
    agrees with itself was called no task: it may still be one that there is already."""
    now = {fate: number for (other, fate), number in sorted(fates.items()) if other == kind}
    met = ("kept" if kind in FAULTS else "not_a_task") not in now
    print(f"  {kind}: {', '.join(f'{number} {fate}' for fate, number in now.items())}{'' if met else ' MISSED'}")
    return met


def _proposed(harness: Harness, given: Any, heldout: list[Any], fates: Counter[tuple[str, str]]) -> Any:
    """The tasks that became of the proposals, whose fates are counted."""
    from agentrl.pipelines.methods.webrl.propose import propose

    random = Random(harness.seed)
    written = proposals(random, [task for handle in heldout for task in handle.read()])
    file = harness.folder / "proposals.json"
    file.write_text(json.dumps([json.dumps(body) for _, body in written]))
    by = {"engines": [{"type": "proposed_programs:Writer", "file": str(file)}], "asked": ASKED, "retries": 0}
    config = {"by": by, "n": len(written), "requests": -(-len(written) // ASKED), "shown": min(2, GIVEN)}
    made = harness.run(propose, config, tasks=[given], heldout=heldout)
    rows = made["proposals"].table().to_pylist()
    for (kind, body), row in zip(written, rows, strict=True):
        assert row["text"] == json.dumps(body), "proposals are considered in the order in which they are written"
        fates[kind, row["refused"] or "kept"] += 1
    return made["tasks"]


def proposals(random: Random, heldout: Sequence[Task]) -> list[tuple[str, dict[str, Any]]]:
    """What the writer writes, with its kind, in an order of chance; what was proposed before comes at the end."""
    made = [("right", _right(*_drawn(random))) for _ in range(RIGHT)]
    for kind in (*FAULTS, *UNSEEN):
        if kind != "one that was proposed before":
            made += [(kind, _faulty(kind, random, task)) for task in random.sample(heldout, EACH)]
    again = [("one that was proposed before", body) for _, body in random.sample(made[:RIGHT], EACH)]
    random.shuffle(made)
    return made + again


def _faulty(kind: str, random: Random, heldout: Task) -> dict[str, Any]:
    """A proposal with a fault, which may be that it is a held-out task."""
    if kind in ("a held-out task", "a held-out function by another name"):
        return _of_task(heldout, "" if kind == "a held-out task" else "other_")
    name, step, inputs = _drawn(random)
    bugged = with_bug(step, random)
    while run([bugged], inputs[-1], written=True) == run([step], inputs[-1]):  # a test shows the bug
        name, step, inputs = _drawn(random)
        bugged = with_bug(step, random)
    body = _right(name, step, inputs)
    if kind == "a wrong test":
        body["tests"][random.randrange(INPUTS)][1][0] += 1
    elif kind == "a form without tests":
        del body["tests"]
    elif kind == "a solution that does not compile":
        body["solution"] = body["solution"].replace("return", "return (")
    else:
        body["solution"] = f"def {name}(values):\n    return {bugged.written}\n"
    if kind == "the same mistake in both":
        body["tests"] = [[[values], run([bugged], values, written=True)] for values in inputs]
    return body


def _drawn(random: Random) -> tuple[str, ProgramStep, list[Values]]:
    """A name, a step, and inputs whose results all differ."""
    while True:
        [step] = draw_steps(1, random)
        inputs = [draw_values(random) for _ in range(INPUTS)]
        results = [run([step], values) for values in inputs]
        if all(results) and len(set(map(str, results))) == INPUTS:
            return f"{random.choice(VERBS)}_{random.choice(NOUNS)}", step, inputs


def _right(name: str, step: ProgramStep, inputs: Sequence[Values]) -> dict[str, Any]:
    """A proposal whose solution gives the results of its tests."""
    tests = [[[values], run([step], values)] for values in inputs]
    return _form(name, f"{sentence([step])}.", f"def {name}(values):\n    return {step.right}\n", tests)


def _form(name: str, question: str, solution: str, tests: list[Any]) -> dict[str, Any]:
    return {"question": question, "function": name, "parameters": ["values"], "solution": solution, "tests": tests}


def _of_task(task: Task, before: str) -> dict[str, Any]:
    """The proposal of a task that there is, with words before the function's name."""
    about, solution = json.loads(task.metadata), json.loads(task.ground_truth)["main.py"]
    checks = [*about["shown"].values(), *about["calls"].values()]
    name = before + checks[0][1]
    solution = solution.replace("def ", f"def {before}")
    return _form(name, task.prompt.partition(": ")[2], solution, [check[2:] for check in checks])

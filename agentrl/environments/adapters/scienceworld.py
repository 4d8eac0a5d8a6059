"""``scienceworld``: tasks of ScienceWorld, elementary science in a house that is told in words. The policy acts by the
tool ``act``, whose texts the package reads. One Java program serves all episodes of a process, each its own world."""

import json
import shutil
from collections.abc import Generator
from functools import cache
from random import Random
from threading import Lock
from typing import Annotated, Any

from pydantic import Field

from agentrl.environments.adapters.gymnasium import acting, tool
from agentrl.environments.base import Observation, Score
from agentrl.schemas.installation import install_hint
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall

TURN = Lock()  # worlds of one program answer wrongly if threads act in two at once
SPLITS = {"train": "Train", "dev": "Dev", "heldout": "Test"}


@cache
def _program() -> Any:
    if not shutil.which("java"):
        raise ValueError("environment scienceworld needs Java; apt-get install default-jre-headless")
    try:
        from scienceworld import ScienceWorldEnv
    except ImportError:
        raise ValueError(f"environment scienceworld needs its package; {install_hint('scienceworld')}") from None
    return ScienceWorldEnv()


def world(task: str, variation: int, simplification: str, *, solved: bool = False) -> Any:
    """A world of its own; if it is to be ``solved``, with a way to do the task, which takes seconds."""
    with TURN:
        made = _program()._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        made.load(task, variation, simplification, solved)
        made.reset()
    return made


def done(world: Any, action: str) -> str:
    """What comes of an action."""
    with TURN:
        return str(world.step(action))


class ScienceWorld:
    """``task`` is one of the package's. Its variations are the tasks, in the splits of the package."""

    name, version, replayable = "scienceworld", "1", True

    def __init__(
        self,
        task: Annotated[str, Field(description="of the package, such as find-living-thing", min_length=1)],
        simplification: Annotated[str, Field(description="of the package: easy is all of them; empty: none")] = "easy",
        max_steps: Annotated[int, Field(ge=1, description="assistant messages of an episode")] = 100,
    ) -> None:
        self.task, self.simplification, self.max_steps = task, simplification, max_steps

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Variations in an order that the seed draws. Raises ValueError if the package has no such task, or fewer."""
        program, random = _program(), Random(seed)
        if self.task not in (known := program.get_task_names()):
            raise ValueError(f"scienceworld has no task {self.task!r}; it has {', '.join(sorted(known))}")
        if unknown := set(self.simplification.split(",")) - {"", "easy", *program.get_possible_simplifications()}:
            raise ValueError(f"scienceworld has no simplification {min(unknown)!r}")
        first, splits = world(self.task, 0, self.simplification), {}
        offered = json.dumps([tool(None, f"Do one of: {', '.join(first.getPossibleActions())}.")])
        for split, size in sizes.items():
            numbers = list(getattr(first, f"getVariations{SPLITS[split]}")()) if size else []
            if size > len(numbers):
                raise ValueError(f"{split}: {size} tasks are asked for, and {self.task} has {len(numbers)}")
            splits[split] = [
                Task(
                    task_id=f"{self.task}-{number}", env=self.name, split=split, tools=offered, verifier="environment",
                    prompt=world(self.task, number, self.simplification).getTaskDescription(),
                    metadata=json.dumps({"variation": number}),
                )
                for number in random.sample(numbers, size)
            ]  # fmt: skip
        return splits

    def episode(self, task: Task) -> "Experiment":
        return Experiment(self, task)

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """A way that the package knows, and with probability ``noise`` before each of its steps, something possible."""
        own = world(self.task, json.loads(task.metadata)["variation"], self.simplification, solved=True)
        for number, action in enumerate(list(own.getGoldActionSequence())):
            while random.random() < noise:
                stray = random.choice(sorted(own.getValidActionObjectCombinations()))
                yield acting(stray, number)
                done(own, stray)
            yield acting(action, number)
            done(own, action)
        yield Message(role=Role.ASSISTANT, content="I have done what I know.")


class Experiment:
    """One attempt. The score of the package, from 0 to 1, is the return; a mistake that cannot be mended ends it."""

    def __init__(self, environment: ScienceWorld, task: Task) -> None:
        self.task, self.steps, self.value = task, 0, 0.0
        self.world = world(environment.task, json.loads(task.metadata)["variation"], environment.simplification)

    def opening(self) -> str:
        seen = done(self.world, "look around")
        self.value = float(self.world.getScore())  # which may begin above 0
        return f"{self.task.prompt}\n\n{seen}"

    def call(self, call: ToolCall) -> Observation:
        given = call.parsed()
        if call.name != "act" or not isinstance(given, dict) or not isinstance(given.get("action"), str):
            return Observation('the only tool is act, with {"action": "..."}', error=True)
        seen, before, self.value = done(self.world, given["action"]), self.value, float(self.world.getScore())
        self.steps, ended = self.steps + 1, self.value < 0 or bool(self.world.getCompleted())
        return Observation(seen, seen.startswith("No known action"), self.value - before, ended)

    def score(self, answer: str | None) -> Score:
        return Score(self.value >= 1, (RewardComponent(name="score", value=max(0.0, self.value)),))

    def state(self) -> dict[str, Any]:
        return {"score": self.value, "steps": self.steps}

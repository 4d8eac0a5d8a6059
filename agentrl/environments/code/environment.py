"""The environment ``code``. A task is a function to write (levels 1 and 2), or bugs to fix in a small repository (3 to
5). The policy reads, searches and edits files, runs the tests that it sees, and ends with a message without calls.

Hidden calls decide: those that gave a wrong result before (fail to pass), and those that gave the right one and still
must (pass to pass). See :mod:`agentrl.environments.code.checks` for why they cannot be gamed.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.environments.base import Score
from agentrl.environments.code.checks import right_calls, visible_tests
from agentrl.environments.code.repositories import drafts
from agentrl.environments.code.workspace import Workspace, patch, similarity
from agentrl.environments.drawing import Draft
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.tools import tool
from agentrl.sandbox import Bubblewrap, ResourceLimits, Sandbox
from schemas.task import Task
from schemas.trajectory import Message, RewardComponent

LIMITS = ResourceLimits(cpu_s=5, wall_s=20, memory_mb=128, processes=16, file_mb=4, disk_mb=16, output_kb=64)
Line = Annotated[int, Field(ge=1)]


class CodeConfig(FamilyConfig):
    sandbox: Sandbox = Field(Bubblewrap(limits=LIMITS), description="where code runs: bubblewrap, docker, or unsafe")
    reward: Literal["binary", "share"] = Field(
        "binary", description="1 if all hidden calls are right, or the share of the failing ones that now are, times "
        "the share of the others that still are",
    )  # fmt: skip
    similarity: float = Field(0.0, ge=0, le=1, description="weight of the patch's similarity to the right one (SWE-RL)")


class CodeEpisode(ToolEpisode["Code"]):
    """One attempt. Its files are in memory; only copies of them are ever run."""

    def __init__(self, family: "Code", task: Task) -> None:
        super().__init__(family, task)
        self.given: dict[str, Any] = json.loads(task.metadata)
        self.solution: dict[str, str] = self.given["files"] | json.loads(task.ground_truth)
        self.files = Workspace(self.given["files"])
        self.seen: set[str] = set()
        self.tested: dict[str, str] = {}
        """The files as they were when the tests were last run."""

    @tool
    def read(self, path: str, first: Line = 1, last: Line | None = None) -> str:
        """Show a file.

        path: of the file
        first: line to begin with
        last: line to end with
        """
        text = self.files.read(path, first, last)
        self.seen.add(path)
        return text

    @tool
    def search(self, text: str) -> str:
        """Find lines that contain a text; an empty text lists the files.

        text: what to find
        """
        return self.files.search(text)

    @tool
    def edit(self, path: str, old: str, new: str) -> str:
        """Change a file.

        path: of the file
        old: text that is there once; empty to write the whole file
        new: text in its place
        """
        return self.files.edit(path, old, new)

    @tool
    async def run_tests(self) -> str:
        """Run the tests in test_main.py. Further tests decide in the end."""
        self.tested = dict(self.files)
        return await visible_tests(self.family.config.sandbox, self.files)

    async def score(self) -> Score:
        tests = await right_calls(self.family.config.sandbox, self.files, self.given["calls"])
        failing, passing = ([tests[name] for name in self.given[kind]] for kind in ("fail_to_pass", "pass_to_pass"))
        success = all(failing) and all(passing)
        value = float(success)
        if self.family.config.reward == "share":
            value = sum(failing) / len(failing) * (sum(passing) / len(passing) if passing else 1.0)
        made = patch(self.given["files"], self.files)
        components = [RewardComponent(name="tests", value=value)]
        if weight := self.family.config.similarity:
            alike = similarity(made, patch(self.given["files"], self.solution))
            components.append(RewardComponent(name="similarity", value=alike, weight=weight))
        return Score(success, tuple(components), {"tests": tests, "patch": made})

    def advise(self) -> Message:
        """Read what is to be changed, change it, run the tests, and end."""
        wrong = [path for path in self.solution if self.files.get(path) != self.solution[path]]
        if wrong and wrong[0] not in self.seen:
            return self.calling("read", path=wrong[0])
        if wrong:
            return self._correction(wrong[0])
        if self.tested != self.files:
            return self.calling("run_tests")
        return self.saying("done")

    def _correction(self, path: str) -> Message:
        """An edit of the first line that differs from the solution; of the whole file if that line is not unique."""
        now, then = self.files.get(path, "").splitlines(), self.solution[path].splitlines()
        differ = [number for number, (ours, right) in enumerate(zip(now, then, strict=False)) if ours != right]
        if not differ or "\n".join(now).count(now[differ[0]]) != 1 or not now[differ[0]]:
            return self.calling("edit", path=path, old="", new=self.solution[path])
        first = differ[0]
        new = then[first : len(then) - len(now) + first + 1] if len(then) > len(now) else [then[first]]
        return self.calling("edit", path=path, old=now[first], new="\n".join(new))


class Code(Family):
    """The environment; see the module's docstring."""

    name = "code"
    version = "1"
    max_steps = 16
    verifier = "tests"
    levels = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.2, 5: 0.2}  # noqa: RUF012  (a constant of the protocol)
    episode = CodeEpisode
    config: CodeConfig
    of_no_task = frozenset({"faults", "sandbox", "reward", "similarity"})

    def __init__(self, config: CodeConfig = CodeConfig()) -> None:  # noqa: B008  (frozen)
        super().__init__(config)

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        return drafts(level, random)

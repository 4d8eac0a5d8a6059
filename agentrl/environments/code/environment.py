"""The environment ``code``. A task is a function to write (levels 1 and 2), or bugs to fix in a small repository (3 to
5). The policy reads, searches and edits files, runs the tests that it sees, and ends with a message without calls.

Hidden calls decide: those that gave a wrong result before (fail to pass), and those that gave the right one and still
must (pass to pass). See :mod:`agentrl.environments.code.checks` for why they cannot be gamed.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from pydantic import Field

from agentrl.environments.base import Score
from agentrl.environments.code.checks import right_calls, visible_tests
from agentrl.environments.code.episode import CodingConfig, CodingEpisode
from agentrl.environments.code.repositories import drafts
from agentrl.environments.family import Family
from agentrl.environments.task_splits import Draft
from agentrl.sandbox import Bubblewrap, ResourceLimits, Sandbox
from agentrl.schemas.task import Task

LIMITS = ResourceLimits(cpu_s=5, wall_s=20, memory_mb=128, processes=16, file_mb=4, disk_mb=16, output_kb=64)


class CodeConfig(CodingConfig):
    sandbox: Sandbox = Field(Bubblewrap(limits=LIMITS), description="where code runs: bubblewrap, docker, or unsafe")


class CodeEpisode(CodingEpisode["Code"]):
    """One attempt."""

    def __init__(self, family: "Code", task: Task) -> None:
        self.metadata: dict[str, Any] = json.loads(task.metadata)
        files: dict[str, str] = self.metadata["files"]
        super().__init__(family, task, files, files | json.loads(task.ground_truth))
        self.share = 0.0

    async def report(self) -> str:
        """The reward of this step is by how much the share of right visible tests grows. It does not come from the
        tests in the workspace, which the policy may edit."""
        sandbox = self.family.config.sandbox
        printed, right = await visible_tests(sandbox, self.files, self.metadata["shown"])
        share = sum(right.values()) / len(right)
        self.earn(share - self.share)
        self.share = share
        return printed

    async def score(self) -> Score:
        tests = await right_calls(self.family.config.sandbox, self.files, self.metadata["calls"])
        return self.graded(tests, self.metadata["fail_to_pass"], self.metadata["pass_to_pass"])


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

"""The environment ``repository``. A task is an issue of a real repository; the tools are those of ``code``. Tests that
the policy does not see decide: fail to pass, and pass to pass (SWE-bench)."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from pydantic import Field

from agentrl.environments.base import Score
from agentrl.environments.code.episode import CodingConfig, CodingEpisode
from agentrl.environments.family import Family
from agentrl.environments.repository.instances import instances, patched, snapshot
from agentrl.environments.repository.testing import HiddenTests, visible_report
from agentrl.environments.task_splits import Draft
from agentrl.sandbox import Bubblewrap, Docker, ResourceLimits, Sandbox
from agentrl.schemas.annotations import External
from agentrl.schemas.task import Task

LIMITS = ResourceLimits(cpu_s=120, wall_s=300, memory_mb=2048, processes=128, file_mb=64, disk_mb=1024, output_kb=1024)


class RepositoryConfig(CodingConfig):
    file: Annotated[str, External("file")] = Field(description="JSON Lines in SWE-bench's form; its content counts")
    repositories: str = Field(description="folder with a git clone of each repository, as owner/name or owner__name")
    packages: list[str] | None = Field(
        None, description="folders with pytest and with what the repositories import; None: those of this interpreter",
    )  # fmt: skip
    sandbox: Sandbox = Field(Bubblewrap(limits=LIMITS), description="where tests run: bubblewrap, docker, or unsafe")


class RepositoryEpisode(CodingEpisode["Repository"]):
    """One attempt."""

    def __init__(self, family: "Repository", task: Task) -> None:
        self.metadata: dict[str, Any] = json.loads(task.metadata)
        files = family.files(self.metadata)
        super().__init__(family, task, files, patched(files, json.loads(task.ground_truth)))

    async def report(self) -> str:
        return await visible_report(self.family.sandbox, self.files, self.family.packages)

    async def score(self) -> Score:
        failed, passed = self.metadata["fail_to_pass"], self.metadata["pass_to_pass"]
        files = await asyncio.to_thread(patched, self.given, self.metadata["test_patch"])
        hidden = HiddenTests([*failed, *passed], files, self.family.packages)
        hidden = replace(hidden, told=await self._told(hidden))
        tests, forged = await hidden.report(self.family.sandbox, self.files)
        return self.graded(tests, failed, passed, forged=forged)

    async def _told(self, hidden: HiddenTests) -> Mapping[str, Set[str]]:
        """What the right patch tells; it is run once for all attempts at a task."""
        known = self.family.told
        async with self.family.calibrating.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self.task.task_id not in known:
                known[self.task.task_id] = await hidden.told_by(self.family.sandbox, self.solution)
            return known[self.task.task_id]


class Repository(Family):
    """The environment; see the module's docstring."""

    name = "repository"
    version = "1"
    max_steps = 40
    verifier = "tests"
    levels = {1: 1.0}  # noqa: RUF012  (a constant of the protocol)
    episode = RepositoryEpisode
    config: RepositoryConfig
    of_no_task = frozenset({"faults", "sandbox", "reward", "similarity", "repositories", "packages"})

    def __init__(self, config: RepositoryConfig) -> None:
        super().__init__(config)
        self.packages = [] if isinstance(config.sandbox, Docker) else config.packages or [_site_packages()]
        self.told: dict[str, Mapping[str, Set[str]]] = {}
        self.calibrating: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self.sandbox = config.sandbox
        if isinstance(self.sandbox, Bubblewrap):
            readable = tuple(dict.fromkeys([*self.sandbox.readable, *self.packages]))
            self.sandbox = self.sandbox.model_copy(update={"readable": readable})

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        known_instances = instances(Path(self.config.file).expanduser())
        random.shuffle(known_instances)
        for instance in known_instances:
            metadata = instance.model_dump(include={"instance_id", "repo", "base_commit", "test_patch"})
            metadata |= {"fail_to_pass": instance.fail_to_pass, "pass_to_pass": instance.pass_to_pass}
            yield Draft(instance.problem_statement, instance.patch, metadata, key=instance.instance_id)

    async def reset(self, task: Task) -> RepositoryEpisode:
        """Raises ValueError if a clone or its commit is missing, or if the patch of the task does not fit."""
        return await asyncio.to_thread(RepositoryEpisode, self, task)

    def files(self, metadata: dict[str, Any]) -> dict[str, str]:
        """The repository as the task finds it."""
        folder = Path(self.config.repositories).expanduser()
        return dict(snapshot(folder, metadata["repo"], metadata["base_commit"]))


def _site_packages() -> str:
    """The folder that pytest is installed in. Raises ValueError if it is not."""
    spec = importlib.util.find_spec("pytest")
    if spec is None or spec.origin is None:
        raise ValueError("the environment repository runs pytest; pip install pytest, or set `packages`")
    return str(Path(spec.origin).parents[1])

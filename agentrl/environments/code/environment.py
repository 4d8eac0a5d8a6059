"""The environment ``code``. A task is a function to write (levels 1 and 2), or bugs to fix in a small repository (3 to
5). The policy reads, searches and edits files, runs the tests that it sees, and ends with a message without calls.

Hidden calls decide: those that gave a wrong result before (fail to pass), and those that gave the right one and still
must (pass to pass). See :mod:`agentrl.environments.code.checks` for why they cannot be gamed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.environments.base import Score
from agentrl.environments.code.checks import right_calls, syntax_match, visible_tests
from agentrl.environments.code.episode import CodingConfig, CodingEpisode
from agentrl.environments.code.programs import LEAST_KNOWN, understood
from agentrl.environments.code.proposed import FORM, draft_of
from agentrl.environments.code.repositories import drafts
from agentrl.environments.family import Family
from agentrl.environments.task_splits import Draft
from agentrl.sandbox import Bubblewrap, ResourceLimits, Sandbox
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import RewardComponent

LIMITS = ResourceLimits(cpu_s=5, wall_s=20, memory_mb=128, processes=16, file_mb=4, disk_mb=16, output_kb=64)


class CodeOutcomes(BaseModel):
    """What a program is worth by how the hidden calls fared, from -1 to 1; the defaults are CodeRL's (Le et al. 2022,
    equation 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    passed: float = Field(1.0, ge=-1, le=1, description="all results are right")
    failed: float = Field(-0.3, ge=-1, le=1, description="a result is wrong")
    error: float = Field(-0.6, ge=-1, le=1, description="a call raised an error, or never came back")
    uncompiled: float = Field(-1.0, ge=-1, le=1, description="a module does not compile")

    @model_validator(mode="after")
    def _passing_is_best(self) -> "CodeOutcomes":
        if self.passed <= max(self.failed, self.error, self.uncompiled):
            raise ValueError(
                f"outcomes.passed {self.passed:g} must be above the others, or nothing asks for right code"
            )
        return self


class CodeConfig(CodingConfig):
    sandbox: Sandbox = Field(Bubblewrap(limits=LIMITS), description="where code runs: bubblewrap, docker, or unsafe")
    outcomes: CodeOutcomes | None = Field(
        None, description="what passing, a wrong result, an error and code that does not compile are worth, in place "
        "of 1 and 0 ({}: 1, -0.3, -0.6, -1, as in CodeRL)",
    )  # fmt: skip
    syntax: float = Field(
        0.0, ge=0, le=1, description="weight of the share of the right code's syntax subtrees that are there (PPOCoder)"
    )
    invalid: float | None = Field(
        None, ge=0, le=1, description="what a run of the tests costs whose code does not compile, as reward of its "
        "step, in place of rewards for visible tests that pass (RLEF: 0.2)",
    )  # fmt: skip
    unknown: int = Field(
        0,
        ge=0,
        le=len(LEAST_KNOWN),
        description=f"kinds of steps, of {len(LEAST_KNOWN)}, that the scripted expert does not know: it takes each for "
        "one of these at random",
    )

    @model_validator(mode="after")
    def _rewards_agree(self) -> "CodeConfig":
        if self.outcomes and self.reward == "share":
            raise ValueError("outcomes takes the place of reward: share; leave one of them out")
        if self.similarity + self.syntax > 1:
            raise ValueError(
                f"similarity {self.similarity:g} and syntax {self.syntax:g} together are above 1: the tests carry at "
                "least half"
            )
        return self


class CodeEpisode(CodingEpisode["Code"]):
    """One attempt."""

    def __init__(self, family: "Code", task: Task) -> None:
        self.metadata: dict[str, Any] = json.loads(task.metadata)
        files: dict[str, str] = self.metadata["files"]
        super().__init__(family, task, files, files | json.loads(task.ground_truth))
        self.share = 0.0

    def intended(self) -> Mapping[str, str]:
        """The solution, with guesses for the steps that the expert does not know: of one task always the same."""
        unknown, random = self.family.config.unknown, Random(self.task.task_id)
        return {path: self._guessed(path, unknown, random) for path in self.solution} if unknown else self.solution

    def _guessed(self, path: str, unknown: int, random: Random) -> str:
        """A file of the solution as the expert writes it, with guesses for the steps that it adds and does not know."""
        given, lines = self.given.get(path, "").splitlines(), []
        for line in self.solution[path].splitlines():
            start = re.match(r" *(return|values =) ", line)
            if start and line not in given:
                line = start[0] + understood(line[start.end() :], unknown, random)
            lines.append(line)
        return "\n".join(lines) + "\n"

    async def report(self) -> str:
        """The reward of this step is by how much the share of right visible tests grows, or with ``invalid`` what code
        that does not compile costs. It does not come from the tests in the workspace, which the policy may edit."""
        sandbox = self.family.config.sandbox
        printed, right, fared = await visible_tests(sandbox, self.files, self.metadata["shown"])
        if self.family.config.invalid is not None:
            self.earn(-self.family.config.invalid if fared == "uncompiled" else 0.0)
            return printed
        share = sum(right.values()) / len(right)
        self.earn(share - self.share)
        self.share = share
        return printed

    async def score(self) -> Score:
        config, metadata = self.family.config, self.metadata
        tests, fared = await right_calls(config.sandbox, self.files, metadata["calls"])
        value = getattr(config.outcomes, fared) if config.outcomes else None
        score = self.graded(tests, metadata["fail_to_pass"], metadata["pass_to_pass"], value, execution=fared)
        if not config.syntax:
            return score
        alike = await syntax_match(config.sandbox, self.files, self.solution)
        return replace(
            score, components=(*score.components, RewardComponent(name="syntax", value=alike, weight=config.syntax))
        )


class Code(Family):
    """The environment; see the module's docstring."""

    name = "code"
    version = "1"
    max_steps = 16
    verifier = "tests"
    levels = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.2, 5: 0.2}  # noqa: RUF012  (a constant of the protocol)
    episode = CodeEpisode
    config: CodeConfig
    proposal = FORM
    of_no_task = frozenset({"faults", "sandbox", "reward", "similarity", "outcomes", "syntax", "invalid", "unknown"})

    def __init__(self, config: CodeConfig = CodeConfig()) -> None:  # noqa: B008  (frozen)
        super().__init__(config)

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        return drafts(level, random)

    async def proposed(self, text: str, like: Task, random: Random) -> Task | None:
        """The task of a function that somebody proposes in the form :attr:`proposal`; None if its solution and its
        tests do not agree, in the sandbox."""
        draft = await draft_of(text, self.config.sandbox)
        return self.derived(like, draft, like.level) if draft else None

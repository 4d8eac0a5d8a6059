"""What an episode of work on code does: tools over files, an expert that knows the solution, and the reward."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from agentrl.environments.base import Score
from agentrl.environments.code.workspace import Workspace, patch, similarity
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.tools import tool
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent

F = TypeVar("F", bound=Family)
Line = Annotated[int, Field(ge=1)]


class CodingConfig(FamilyConfig):
    reward: Literal["binary", "share"] = Field(
        "binary", description="1 if all hidden tests pass, or the share of the failing ones that pass now, times the "
        "share of the others that still pass",
    )  # fmt: skip
    similarity: float = Field(0.0, ge=0, le=1, description="weight of the patch's similarity to the right one (SWE-RL)")


class CodingEpisode(ToolEpisode[F], Generic[F]):
    """One attempt. Its files are in memory; only copies of them are ever run. ``given`` are the files as they were,
    ``solution`` those that are right."""

    def __init__(self, family: F, task: Task, given: Mapping[str, str], solution: Mapping[str, str]) -> None:
        super().__init__(family, task)
        self.given, self.solution = given, solution
        self.files = Workspace(given)
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
        """Run the tests that are there. Further tests decide in the end."""
        self.tested = dict(self.files)
        return await self.report()

    async def report(self) -> str:
        """What the tests that the policy sees say of its files."""
        raise NotImplementedError

    def graded(
        self,
        tests: Mapping[str, bool],
        failed: Sequence[str],
        passed: Sequence[str],
        value: float | None = None,
        **state: Any,
    ) -> Score:
        """The score, from the report of the hidden tests and from the names of those that failed before and those that
        passed. The reward is ``value``, if it is given."""
        failing, passing = ([tests.get(name, False) for name in names] for names in (failed, passed))
        success = all(failing) and all(passing)
        config: Any = self.family.config
        if value is None:
            value = float(success)
        if config.reward == "share":
            value = sum(failing) / len(failing) * (sum(passing) / len(passing) if passing else 1.0)
        made = patch(self.given, self.files)
        components = [RewardComponent(name="tests", value=value)]
        if config.similarity:
            alike = similarity(made, patch(self.given, self.solution))
            components.append(RewardComponent(name="similarity", value=alike, weight=config.similarity))
        return Score(success, tuple(components), {"tests": dict(tests), "patch": made, **state})

    def advise(self) -> Message:
        """Read what is to be changed, change it, run the tests, and end."""
        intended = self.intended()
        wrong = [path for path in intended if self.files.get(path) != intended[path]]
        if wrong and wrong[0] not in self.seen:
            return self.calling("read", path=wrong[0])
        if wrong:
            return self._correction(wrong[0], intended[wrong[0]])
        if self.tested != self.files:
            return self.calling("run_tests")
        return self.saying("done")

    def intended(self) -> Mapping[str, str]:
        """The files as an expert means to leave them."""
        return self.solution

    def _correction(self, path: str, text: str) -> Message:
        """An edit of the first line that differs from ``text``; of the whole file if that line is not unique."""
        now, then = self.files.get(path, "").splitlines(), text.splitlines()
        differ = [number for number, (ours, right) in enumerate(zip(now, then, strict=False)) if ours != right]
        if not differ or "\n".join(now).count(now[differ[0]]) != 1 or not now[differ[0]]:
            return self.calling("edit", path=path, old="", new=text)
        first = differ[0]
        new = then[first : len(then) - len(now) + first + 1] if len(then) > len(now) else [then[first]]
        return self.calling("edit", path=path, old=now[first], new="\n".join(new))

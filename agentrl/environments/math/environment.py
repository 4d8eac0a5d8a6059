"""The environment ``math``. A task is a word problem; its level is the number of calculations that it takes. Answers
are compared by the library math-verify, so ``\\frac{84}{2}`` or "There are 42 eggs." is as good as 42."""

import asyncio
import json
from collections.abc import Iterator
from fractions import Fraction
from random import Random
from typing import Any, Literal

from pydantic import Field

from agentrl.environments.base import Observation, Score
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.interpreter import LIMITS, Interpreter
from agentrl.environments.math.calculator import calculate, shown
from agentrl.environments.math.problems import WordProblem, compose, longer
from agentrl.environments.task_splits import Draft
from agentrl.environments.tools import ToolError, tool
from agentrl.rewards.mathematics import math_equal
from agentrl.sandbox import Bubblewrap, Sandbox
from agentrl.schemas.installation import missing
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall, Trajectory


class MathConfig(FamilyConfig):
    largest: int = Field(900, ge=20, le=100_000, description="greatest number of a problem's text, about")
    tool: Literal["calculator", "python"] = Field(
        "calculator", description="python runs programs in a sandbox (ReTool)"
    )
    sandbox: Sandbox = Field(Bubblewrap(limits=LIMITS), description="of python: bubblewrap, docker, or unsafe")


class MathEpisode(ToolEpisode["Math"]):
    """One attempt at a problem. ``reached`` are the calls that gave the result of each calculation. Classes derived
    from this one have the tool, which ``ask`` calls."""

    def ask(self, expression: str) -> Message:
        """A message that has an expression calculated."""
        raise NotImplementedError

    def __init__(self, family: "Math", task: Task) -> None:
        super().__init__(family, task)
        self.sums = problem_of(task).sums()
        self.reached: dict[int, int] = {}

    def observed(self, call: ToolCall, seen: Observation) -> None:
        value = number_in(seen.content)
        for number, (_, result) in enumerate(self.sums):
            if value == result and number not in self.reached and len(self.reached) == number:
                self.reached[number] = self.calls - 1
                self.earn(1 / len(self.sums))

    async def score(self) -> Score:
        """A plain number is compared here; any other answer is compared by the process of math-verify."""
        number, right = number_in(self.answer or ""), self.sums[-1][1]
        state: dict[str, Any] = {"answer": self.answer}
        success = number == right
        if number is None and self.answer:
            try:
                success = await asyncio.to_thread(math_equal, self.answer, str(right))
            except TimeoutError:
                state["timeout"] = True
        state["subgoals"] = [self.reached.get(number) for number in range(len(self.sums))]
        return Score(success, (RewardComponent(name="math", value=float(success)),), state)

    def advise(self) -> Message:
        """The next calculation, or the answer."""
        if len(self.reached) < len(self.sums):
            return self.ask(self.sums[len(self.reached)][0])
        return self.saying(str(self.sums[-1][1]))

    def stray(self, random: Random) -> Message:
        expression, result = self.sums[min(len(self.reached), len(self.sums) - 1)]
        if random.random() < 0.3:
            return self.saying(str(result))
        wrong = random.choice("+-*")
        return self.ask("".join(wrong if character in "+-*/" else character for character in expression))


class CalculatorEpisode(MathEpisode):
    @tool
    def calculate(self, expression: str) -> str:
        """Calculate. Reply with the number alone, without a call, when you know the answer.

        expression: numbers with + - * / // % ** and brackets
        """
        try:
            return shown(calculate(expression))
        except ValueError as error:
            raise ToolError(str(error)) from None

    def ask(self, expression: str) -> Message:
        return self.calling("calculate", expression=expression)


class ProgramEpisode(Interpreter, MathEpisode):
    @property
    def sandbox(self) -> Sandbox:
        return self.family.config.sandbox

    def ask(self, expression: str) -> Message:
        return self.calling("python", code=expression)


class Math(Family):
    """The environment; see the module's docstring."""

    name = "math"
    version = "2"
    max_steps = 12
    verifier = "math"
    levels = {1: 0.1, 2: 0.2, 3: 0.2, 4: 0.2, 5: 0.15, 6: 0.15}  # noqa: RUF012
    episode: type[MathEpisode]
    config: MathConfig
    of_no_task = frozenset({"faults", "sandbox"})

    def __init__(self, config: MathConfig = MathConfig()) -> None:  # noqa: B008  (frozen)
        if lacking := missing("math_verify", "math"):
            raise ValueError(f"answers of math are compared by math-verify: {lacking}")
        self.episode = {"calculator": CalculatorEpisode, "python": ProgramEpisode}[config.tool]
        super().__init__(config)

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        while True:
            yield _draft(compose(level, random, self.config.largest))

    def achieved(self, row: Trajectory, task: Task) -> list[Task]:
        """The beginning of the problem, if the answer of a row is right for it."""
        last = row.messages[-1]
        number = number_in(last.content) if last.role is Role.ASSISTANT and not last.tool_calls else None
        shorter = problem_of(task).until(int(number)) if number is not None and number.denominator == 1 else None
        return [self.derived(task, _draft(shorter), len(shorter.sums()))] if shorter else []

    def vary(self, task: Task, random: Random) -> Task:
        """The problem with one more step."""
        problem = problem_of(task)
        more = None
        while more is None:
            more = longer(problem, 2, random, self.config.largest)
        return self.derived(task, _draft(more), len(more.sums()))


def number_in(text: str) -> Fraction | None:
    """The number that a text is, thousands separators, units and a closing point aside. None if it is no number."""
    bare = text.strip().rstrip(".").replace(",", "")
    try:
        return Fraction(bare)
    except (ValueError, ZeroDivisionError):
        return None


def problem_of(task: Task) -> WordProblem:
    metadata: dict[str, Any] = json.loads(task.metadata)
    return WordProblem(**{**metadata, "steps": [tuple(step) for step in metadata["steps"]]})


def _draft(problem: WordProblem) -> Draft:
    metadata = {"place": problem.place, "things": problem.things, "start": problem.start, "steps": list(problem.steps)}
    return Draft(problem.prompt, str(problem.answer), metadata)

"""Functions to write that somebody proposes, with a solution and tests, which have to agree (KodCode: Xu et al. 2025,
arXiv 2503.02951, section 3: a question is kept if its solution passes its tests)."""

import json
import keyword
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentrl.environments.code.checks import right_calls
from agentrl.environments.code.repositories import STUB, VISIBLE
from agentrl.environments.code.workspace import Workspace
from agentrl.environments.task_splits import Draft
from agentrl.sandbox import Sandbox

FORM = (
    'a JSON object {"question": "what the function returns, in a sentence or two", "function": "its name", '
    '"parameters": ["their names"], "solution": "its whole code in Python, which needs no import", '
    '"tests": [[[arguments], result], ...]} with 6 to 12 tests whose arguments and results are JSON, usual cases and '
    "rare ones"
)
LONGEST_TEST = 1000
"""Characters of a test."""

Name = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,39}$")]


class ProposedFunction(BaseModel):
    """``tests`` are arguments and result; the policy sees the first two, and the others decide."""

    model_config = ConfigDict(extra="forbid")

    question: str = Field(min_length=10, max_length=1000)
    function: Name
    parameters: list[Name] = Field(max_length=6)
    solution: str = Field(max_length=4000)
    tests: list[tuple[list[Any], Any]] = Field(min_length=VISIBLE + 2, max_length=32)

    @field_validator("tests")
    @classmethod
    def _are_literals(cls, tests: list[tuple[list[Any], Any]]) -> list[tuple[list[Any], Any]]:
        for test in tests:
            if len(json.dumps(test)) > LONGEST_TEST:
                raise ValueError(f"a test has at most {LONGEST_TEST} characters")
        return tests

    @property
    def head(self) -> str:
        return f"def {self.function}({', '.join(self.parameters)}):\n    {self.question!a}\n"

    def call(self, arguments: list[Any]) -> str:
        return f"{self.function}({', '.join(map(repr, arguments))})"

    def visible(self) -> str:
        """The tests that the policy sees."""
        text = f"from main import {self.function}\n"
        for number, (arguments, result) in enumerate(self.tests[:VISIBLE], 1):
            asked = self.call(arguments)
            text += f"\n\ndef test_{number}():\n    got = {asked}\n    assert got == {result!r}, got\n"
        return text


async def draft_of(text: str, sandbox: Sandbox) -> Draft | None:
    """The task of a proposal in the form :data:`FORM`; None if it has another form, if its solution does not give the
    results of its tests, or if these are all equal, so that a constant would pass."""
    try:
        made = ProposedFunction.model_validate_json(text)
    except ValidationError:
        return None
    names = [made.function, *made.parameters]
    equal = len({ascii(result) for _, result in made.tests}) == 1
    arguments = {len(given) for given, _ in made.tests}
    if (
        any(map(keyword.iskeyword, names))
        or len(set(names)) < len(names)
        or equal
        or arguments != {len(made.parameters)}
    ):
        return None
    calls = {
        f"main.{made.function} {number}": ("main", made.function, *test) for number, test in enumerate(made.tests, 1)
    }
    right, _ = await right_calls(sandbox, Workspace({"main.py": made.solution}), calls)
    return _draft(made, calls) if all(right.values()) else None


def _draft(made: ProposedFunction, calls: Mapping[str, tuple[str, str, list[Any], Any]]) -> Draft:
    files = {"main.py": f"{made.head}{STUB}\n", "test_main.py": made.visible()}
    hidden = dict(list(calls.items())[VISIBLE:])
    shown = {f"test_{number}": call for number, call in enumerate(list(calls.values())[:VISIBLE], 1)}
    prompt = f"In main.py, write {made.function}({', '.join(made.parameters)}): {made.question}"
    about = {"files": files, "shown": shown, "calls": hidden, "fail_to_pass": list(hidden), "pass_to_pass": []}
    return Draft(prompt, {"main.py": made.solution}, about)

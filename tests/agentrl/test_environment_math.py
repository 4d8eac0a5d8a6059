"""``math``: problems whose numbers are right, and a calculator that nothing hangs."""

import ast
import contextlib
import time
from fractions import Fraction
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.blocking import blocking
from agentrl.environments.base import Score
from agentrl.environments.math import environment
from agentrl.environments.math.calculator import calculate, shown
from agentrl.environments.math.environment import Math, MathConfig, number_in, problem_of
from agentrl.environments.math.problems import WordProblem, compose
from agentrl.rewards.mathematics import math_equal
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([20, 900, 5000]))
def test_the_calculations_of_a_problem_give_its_answer(seed: int, count: int, largest: int) -> None:
    problem = compose(count, Random(seed), largest)
    sums = problem.sums()
    assert len(sums) == count
    assert all(calculate(expression) == result for expression, result in sums)
    assert str(problem.answer) not in problem.prompt.replace("?", " ").replace(".", " ").split()


def test_a_problem_told_in_words() -> None:
    problem = WordProblem("A farm", "eggs", 100, [("crates", 3, 20), ("break", 25, 0), ("share", 4, 0)])
    assert problem.prompt == (
        "A farm has 100 eggs. Then 3 crates with 20 eggs each arrive. Of these, 25 % break and are thrown away. They "
        "are shared equally among 4 rooms, and one room is looked at. How many eggs are there now?"
    )
    assert problem.sums() == [("3*20", 60), ("100+60", 160), ("160*25/100", 40), ("160-40", 120), ("120/4", 30)]
    assert problem.until(120) == WordProblem("A farm", "eggs", 100, problem.steps[:2])
    assert problem.until(30) is problem.until(60) is None


def test_an_answer_too_early_solves_the_beginning() -> None:
    environment = Math()
    task = next(task for task in environment.tasks({"train": 40}, 0)["train"] if task.level == 6)
    row = demonstrate(environment, task, 0.0, 0, "t")
    problem = problem_of(task)
    inner = WordProblem(problem.place, problem.things, problem.start, problem.steps[:2])
    early = Message(role=Role.ASSISTANT, content=str(inner.answer))
    [made] = environment.achieved(row.model_copy(update={"messages": [*row.messages[:-1], early]}), task)
    assert problem_of(made).answer == inner.answer
    assert made.level < 6
    assert environment.achieved(row, task) == []


def test_small_numbers() -> None:
    tasks = Math(MathConfig(largest=20, levels=[1])).tasks({"train": 50}, 0)["train"]
    assert all(problem_of(task).start <= 20 for task in tasks)


numbers = st.integers(-9999, 9999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda t: f"({''.join(t)})"),
    max_leaves=8,
)


@given(expressions)
def test_the_calculator_agrees_with_python(expression: str) -> None:
    try:
        right = eval(compile(ast.parse(expression, mode="eval"), "", "eval"))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            calculate(expression)
    else:
        assert calculate(expression) == right


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        ("7/2*2", "7"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("-(3)", "-3"),
        ("10**20", "100000000000000000000"),
    ],
)
def test_results_are_exact(expression: str, text: str) -> None:
    assert shown(calculate(expression)) == text


@given(st.text(max_size=250))
@settings(max_examples=100)
def test_any_text_is_a_number_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(calculate(text), Fraction)


HOSTILE = [
    "9**9**9", "9**999**999", "(" * 99 + "1" + ")" * 99, "9" * 200, "1" * 201, "import os", "True+1", "x", "f(1)",
    "1e999999999", "10**1000*10**1000", "1,2", "",
]  # fmt: skip


@pytest.mark.parametrize("expression", HOSTILE)
def test_nothing_hangs_the_calculator(expression: str) -> None:
    started = time.process_time()
    with contextlib.suppress(ValueError):
        calculate(expression)
    assert time.process_time() - started < 0.5


ANSWERS = [("42", 42), (" 1,234. ", 1234), ("3.50", Fraction(7, 2)), ("about 3", None), ("", None), ("1/0", None)]


@pytest.mark.parametrize(("text", "number"), ANSWERS)
def test_answers_are_numbers(text: str, number: Fraction | None) -> None:
    assert number_in(text) == number


def outcome(answer: str) -> tuple[Task, Score]:
    async def go() -> tuple[Task, Score]:
        [task] = Math().tasks({"train": 1}, 0)["train"]
        episode = await Math().reset(task)
        number = problem_of(task).answer
        await episode.step(episode.saying(answer.format(n=number, twice=2 * number, more=number + 1)))
        return task, await episode.score()

    return blocking(go())


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("{n}", True),
        ("There are {n} now.", True),
        (r"\boxed{{{n}}}", True),
        (r"$\frac{{{twice}}}{{2}}$", True),
        ("{more}", False),
        ("There are {more} now.", False),
        (r"\boxed{{{more}}}", False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_answers_are_compared_as_mathematics(answer: str, right: bool) -> None:
    task, score = outcome(answer)
    assert (score.success, score.reward, task.verifier) == (right, float(right), "math")


def test_an_answer_that_is_never_compared_is_wrong_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "math_equal", partial(math_equal, timeout_s=1.0))
    _, score = outcome("$9^{{9^{{9^{{9}}}}}}$")
    assert (score.success, score.state["timeout"]) == (False, True)


def test_without_math_verify_there_is_no_math(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.schemas.installation.is_installed", lambda _: False)
    with pytest.raises(ValueError, match="math_verify is not installed: pip install"):
        Math()

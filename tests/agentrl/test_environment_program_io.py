"""``program_io``: tasks of three kinds, what is right, proposals that the executor takes, and those that it refuses."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.base import NoTaskError, Score
from agentrl.environments.program_io.environment import EIGHTHS, ProgramIO, ProgramIOConfig
from agentrl.environments.program_io.programs import LEVELS, PROBES, known_by
from agentrl.environments.program_io.proposed import Proposal, execute, read
from agentrl.environments.program_io.values import arguments, literal, unfenced
from agentrl.pipelines.parts.measured_tasks import MeasuredTasks
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role

ENV = ProgramIO()
HERE = ENV.config.sandbox
FAST = HERE.model_copy(update={"limits": HERE.limits.model_copy(update={"cpu_s": 1, "wall_s": 2.0})})
DOUBLE = "def f(values):\n    return [2 * value for value in values]"


def like(kind: str) -> Task:
    """A task of a kind, which proposals are like."""
    return load_environment(f'program_io{{"kinds": ["{kind}"], "levels": [1]}}').tasks({"train": 1}, 0)["train"][0]


def proposed(kind: str, text: str) -> Task:
    return blocking(ENV.proposed(text, like(kind), Random(0)))


def answered(task: Task, answer: str, environment: ProgramIO = ENV) -> Score:
    async def go() -> Any:
        episode = await environment.reset(task)
        assert (await episode.step(Message(role=Role.ASSISTANT, content=answer))).done
        return await episode.score()

    return blocking(go())


def fares(task: Task, answer: str) -> str:
    score = answered(task, answer)
    assert (score.success, score.reward) == ((True, 1.0) if score.state["execution"] == "right" else (False, 0.0))
    return str(score.state["execution"])


def test_deduction_asks_for_an_output_and_compares_values() -> None:
    task = proposed("deduction", f"{DOUBLE}\nf([3, -1])")
    assert task.prompt == f"{DOUBLE}\nf([3, -1]) == ?\nReply with the value of ? alone."
    assert (task.split, task.tools, json.loads(task.ground_truth)) == ("train", "[]", "[6, -2]")
    assert [fares(task, text) for text in ("[6, -2]", " [6,-2] ", "[6.0, -2]", "```python\n[6, -2]\n```")] == [
        "right"
    ] * 4
    assert [fares(task, text) for text in ("[6, 2]", "[-2, 6]", "'[6, -2]'")] == ["wrong"] * 3
    texts = ("", "f([3, -1])", "[2 * 3, -2]", "It is [6, -2].", "[" * 400, "-" * 499 + "1", "1+" * 249 + "1", "9" * 501)
    assert [fares(task, text) for text in texts] == ["unreadable"] * len(texts)
    unordered = proposed("deduction", "def f(text):\n    return set(text), {'n': len(text)}\nf('ab')")
    assert fares(unordered, "({'b', 'a'}, {'n': 2})") == "right"


def test_abduction_takes_any_input_with_that_output() -> None:
    program = "def f(values, last):\n    return sorted(values)[-last:]"
    task = proposed("abduction", f"{program}\nf([1, 5, 3], 2)")
    assert task.prompt == f"{program}\nf(?) == [3, 5]\nReply with a value of ? alone, any that makes this true."
    assert [fares(task, text) for text in ("[1, 5, 3], 2", "[5, 3], 2", "(3, 5), 9")] == ["right"] * 3
    assert [fares(task, text) for text in ("[1, 5, 3], 1", "[3, 4], 2")] == ["wrong"] * 2
    assert [fares(task, text) for text in ("[3, 5]", "3, 5", "")] == ["raised"] * 3
    assert [fares(task, text) for text in ("[3, 5], 2) or f([1], 1", "open('/etc/passwd'), 1")] == ["unreadable"] * 2


def test_induction_asks_for_a_program_and_judges_it_on_other_inputs() -> None:
    calls = "\n".join(f"f({values})" for values in ([1], [2, 3], [4, 4], [5, 0]))
    task = proposed("induction", f"{DOUBLE}\n{calls}\n# twice each")
    assert task.prompt == (
        "f([1]) == [2]\nf([2, 3]) == [4, 6]\n# twice each\n"
        "Reply with a Python function f alone that does this to other inputs too."
    )
    right = ("def f(x):\n    return [v + v for v in x]", "```python\nf = lambda x: [v * 2 for v in x]\n```", DOUBLE)
    assert [fares(task, text) for text in right] == ["right"] * 3
    assert fares(task, "def f(x):\n    return {'[1]': [2], '[2, 3]': [4, 6]}.get(str(x))") == "wrong", (
        "those shown alone"
    )
    assert [fares(task, text) for text in ("def f(x): return 1 / 0", "def g(x): return x")] == ["raised"] * 2
    assert [fares(task, text) for text in ("def f(x) return x", "", "x" * 2001)] == ["unreadable"] * 3


CHEATS = {
    "looks for the expected values": (
        "import gc, glob, sys\n"
        "def f(values):\n"
        "    calls = eval(open('/tmp/work/check/calls').read())\n"
        "    seen = [open(path, errors='replace').read() for path in glob.glob('/tmp/work/**/*.*', recursive=True)]\n"
        "    print(seen, sys.argv, calls)\n"
        "    mine = next(call for call in calls if values in call[2])\n"
        "    return mine[3] if len(mine) > 3 else next(v for v in gc.get_objects() if v == [2 * n for n in [9]])"
    ),
    "is equal to all": "class Any(list):\n    __eq__ = lambda *_: True\ndef f(values): return Any()",
    "never ends": "while True: pass",
    "prints without end": "while True: print('lots of text' * 100)",
    "returns what is huge": "def f(values): return list(range(10 ** 6))",
    "ends before the calls": "import os; os._exit(0)",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_infers_nothing_is_not_paid(cheat: str) -> None:
    calls = "\n".join(f"f({values})" for values in ([1], [2, 3], [4, 4], [5, 0]))
    task = proposed("induction", f"{DOUBLE}\n{calls}")
    score = answered(task, CHEATS[cheat], ProgramIO(ProgramIOConfig(sandbox=FAST)))
    assert (score.success, score.reward) == (False, 0.0)
    assert score.state["execution"] in ("wrong", "raised", "stopped")


REFUSED = {
    "no call": ("deduction", DOUBLE, "form"),
    "no program": ("deduction", "f([1])", "form"),
    "two calls where one is asked": ("abduction", f"{DOUBLE}\nf([1])\nf([2])", "form"),
    "few calls": ("induction", f"{DOUBLE}\nf([1])\nf([2])", "form"),
    "a call twice": ("induction", f"{DOUBLE}\nf([1])\nf([2])\nf([3])\nf([2])", "form"),
    "an input that is calculated": ("deduction", f"{DOUBLE}\nf([1] * 3)", "form"),
    "text below": ("deduction", f"{DOUBLE}\nf([1])\nThat is all.", "form"),
    "a long program": ("deduction", f"{DOUBLE}{' ' * 2000}\nf([1])", "form"),
    "reads a file": ("deduction", "def f(path):\n    return open(path).read()\nf('/etc/passwd')", "forbidden"),
    "imports": ("deduction", "import random\ndef f(n):\n    return random.random()\nf(1)", "forbidden"),
    "looks around": ("deduction", "def f(n):\n    return n.__class__.__mro__\nf(1)", "forbidden"),
    "no Python": ("deduction", "def f(n) return n\nf(1)", "uncompiled"),
    "another name": ("deduction", "def g(n): return n\nf(1)", "raised"),
    "an error": ("deduction", "def f(n): return 1 / n\nf(0)", "raised"),
    "never ends": ("deduction", "def f(n):\n    while n: pass\nf(1)", "stopped"),
    "prints without end": ("deduction", "def f(n):\n    while n: print('lots of text' * 99)\nf(1)", "stopped"),
    "takes all memory": ("deduction", "def f(n): return [0] * n ** 12\nf(9)", "raised"),
    "returns what is huge": ("deduction", "def f(n): return [0] * n\nf(100000)", "too_long"),
    "returns no plain value": ("deduction", "def f(n): return lambda: n\nf(1)", "not_plain"),
    "returns no number": ("deduction", "def f(n): return float('nan')\nf(1)", "not_plain"),
    "depends on addresses": ("deduction", "def f(n): return id([])\nf(1)", "not_deterministic"),
    "depends on earlier calls": (
        "induction",
        "def f(n, seen=[]):\n    seen.append(n)\n    return len(seen)\nf(1)\nf(2)\nf(3)\nf(4)",
        "not_deterministic",
    ),
    "needs no input": ("induction", "def f(n): return 7\nf(1)\nf(2)\nf(3)\nf(4)", "constant"),
}  # fmt: skip
"""Name -> kind, proposal, and why it is refused."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_task_is_refused_for_a_reason(name: str) -> None:
    kind, text, why = REFUSED[name]
    environment = ProgramIO(ProgramIOConfig(sandbox=FAST))
    with pytest.raises(NoTaskError, match=f"^{why}$"):
        blocking(environment.proposed(text, like(kind), Random(0)))


def test_a_program_is_known_by_what_it_does_under_any_name() -> None:
    texts = [
        DOUBLE,
        "# twice\ndef f(x, k=2):\n    result = []\n    for n in x:\n        result += [n * k]\n    return result",
        "def f(values):\n    return [2 * value for value in values][:3]",
    ]
    tasks = [proposed("deduction", f"{text}\nf([1, 2])") for text in texts]
    first, renamed, other = map(ENV.goal, tasks)
    assert first == renamed != other
    assert first == known_by([ascii([2 * value for value in probe]) for probe in PROBES])
    words = [proposed("deduction", f"def f(t):\n    return t.{name}()\nf('a')") for name in ("upper", "title")]
    assert ENV.goal(words[0]) != ENV.goal(words[1]), "no probe fits: then the text decides"


def test_no_program_is_in_two_splits_whatever_is_drawn() -> None:
    drawn: dict[str, set[str]] = {split: set() for split in EIGHTHS}
    for settings_of, seed in (("", 0), ('{"kinds": ["induction"]}', 1), ('{"levels": [1]}', 2)):
        splits = load_environment(f"program_io{settings_of}").tasks({"train": 60, "dev": 20, "heldout": 40}, seed)
        for split, tasks in splits.items():
            drawn[split] |= set(map(ENV.goal, tasks))
        every = [task for tasks in splits.values() for task in tasks]
        assert len({task.task_id for task in every}) == len({task.prompt for task in every}) == 120
    assert not drawn["train"] & drawn["heldout"]
    assert not drawn["dev"] & (drawn["train"] | drawn["heldout"])
    assert min(map(len, drawn.values())) > 10
    assert ENV.tasks({"train": 9}, 4) == ENV.tasks({"train": 9}, 4)
    others = [ENV.tasks({"train": 9}, 5)["train"], ENV.tasks({"train": 10}, 4)["train"]]
    assert not {task.task_id for task in ENV.tasks({"train": 9}, 4)["train"]} & {t.task_id for o in others for t in o}
    with pytest.raises(ValueError, match="has no split 'compositional'; it has train, dev, heldout"):
        ENV.tasks({"compositional": 1}, 0)
    with pytest.raises(ValueError, match="program_io has no level 9; it has 1 to 5"):
        load_environment('program_io{"levels": [1, 9]}')


def test_held_out_programs_are_refused_under_another_name() -> None:
    held = next(task for task in ENV.tasks({"heldout": 20}, 0)["heldout"] if task.level == 1)
    program = json.loads(held.metadata)["program"]
    text = (
        program.replace("values", "numbers").replace("    return", "    # the same\n    return")
        + "\nf({'a': 1, 'b': 2, 'c': 3, 'd': 4, 'e': 5})"
    )
    measured = MeasuredTasks({"program_io": ENV}, [held])
    assert measured.why(proposed("deduction", text)) == "heldout_goal"
    assert measured.why(proposed("deduction", f"{DOUBLE}\nf([1, 2])")) is None


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32), level=st.sampled_from(list(LEVELS)))
def test_the_own_answer_of_a_task_is_right_and_a_wrong_one_is_not(seed: int, level: int) -> None:
    for task in ProgramIO(ProgramIOConfig(levels=[level])).tasks({"heldout": 2}, seed)["heldout"]:
        about = json.loads(task.metadata)
        assert (task.level, task.split) == (level, "heldout")
        assert fares(task, json.loads(task.ground_truth)) == "right"
        wrong = {"deduction": repr([*literal(about["outputs"][0]), 0]), "abduction": "[]"}
        answer = wrong.get(about["kind"], "def f(values):\n    return [*list(values)[1:], 10 ** 7]")
        assert fares(task, answer) in ("wrong", "raised")


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_executor_says_of_a_drawn_program_what_its_task_says(seed: int) -> None:
    for task in ENV.tasks({"train": 2}, seed)["train"]:
        about = json.loads(task.metadata)
        outcome = blocking(execute(HERE, Proposal(about["program"], about["inputs"])))
        assert outcome == (about["outputs"], about["known_by"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=5) | st.floats(-9, 9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=40)
@given(st.lists(VALUES, max_size=3), st.text(alphabet="abc é", max_size=9))
def test_values_and_proposals_are_read_as_they_were_written(values: list[Any], message: str) -> None:
    text = ", ".join(map(repr, values))
    if len(text) < 490:
        assert arguments(text) == values
    calls = [f"{text}, {number}".removeprefix(", ") for number in range(4)]
    proposal = Proposal(DOUBLE, calls, message.strip())
    if len(text) < 480:
        assert read(proposal.text, several=True) == proposal
        assert read(f"```python\n{proposal.text}\n```", several=True) == proposal


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for reading in (literal, arguments):
        try:
            reading(text)
        except ValueError as error:
            assert "is no literal of Python" in str(error)  # noqa: PT017
    assert unfenced(f"```\n{text}\n```").strip() == text.strip() or "`" in text


def test_the_expert_solves_all_and_with_noise_it_takes_programs_for_nothing() -> None:
    tasks = ENV.tasks({"train": 8}, 3)["train"]
    assert {json.loads(task.metadata)["kind"] for task in tasks} == {"deduction", "abduction", "induction"}
    assert all(demonstrate(ENV, task, 0.0, 0, "t").success for task in tasks)
    rows = [demonstrate(ENV, task, 1.0, 0, "t") for task in tasks]
    assert sum(row.success for row in rows) < 4, "only where the output is an input that gives itself"
    assert {component.name for row in rows for component in row.reward_components} == {
        "deduction",
        "abduction",
        "induction",
    }

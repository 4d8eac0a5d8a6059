"""The tool ``python``: what it prints, that it is in a sandbox, and the family ``math`` with it."""

import json

import pytest

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.interpreter import LIMITS, LONGEST, executed
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.sandbox import Bubblewrap
from agentrl.schemas.trajectory import Message, Role, ToolCall

HERE = Bubblewrap(limits=LIMITS.model_copy(update={"cpu_s": 1, "wall_s": 120.0}))


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        ("1 + 1", "2", False),
        ("print(3)\nx = 4\nx * 2", "3\n8", False),
        ("from math import comb\ndef f(n):\n    return comb(n, 2)\nf(5)", "10", False),
        ("x = 1", "no output; print what you want to see", False),
        ("", "no output; print what you want to see", False),
        ("y = 1\n1 / 0", "ZeroDivisionError: division by zero (line 2)", True),
        ("def (", "SyntaxError: invalid syntax (code.py, line 1)", True),
        ("import os; os._exit(7)", "ended with exit code 7", True),
        ("while True: pass", "stopped: too much cpu time", True),
        ("held = []\nwhile True: held.append(bytearray(1 << 20))", "stopped: too much memory", True),
    ],
)
def test_programs_say_what_they_print_and_how_they_fail(code: str, message: str, error: bool) -> None:
    seen = blocking(executed(HERE, code))
    assert seen.content == message or (message.endswith("memory") and "MemoryError" in seen.content)
    assert seen.error == error


def test_long_output_is_cut() -> None:
    seen = blocking(executed(HERE, "print('x' * 10_000)"))
    assert len(seen.content) <= LONGEST
    assert "10000 characters" in seen.content


def test_math_is_solved_with_programs() -> None:
    environment = load_environment('math{"tool": "python"}')
    tasks = environment.tasks({"train": 6}, 0)["train"]
    assert [tool["function"]["name"] for tool in json.loads(tasks[0].tools)] == ["python"]
    for task in tasks:
        row = demonstrate(environment, task, 0.0, 0, "t")
        assert row.success, task.prompt
        assert sum(message.reward or 0 for message in row.messages) == pytest.approx(1.0), (
            "each calculation is rewarded"
        )


def test_a_failed_program_is_counted_and_the_episode_goes_on() -> None:
    environment = load_environment('math{"tool": "python"}')
    task = environment.tasks({"train": 1}, 0)["train"][0]

    async def go() -> tuple[int, int]:
        episode = await environment.reset(task)
        call = ToolCall(id="c", name="python", arguments=json.dumps({"code": "1 / 0"}))
        step = await episode.step(Message(role=Role.ASSISTANT, tool_calls=[call]))
        await episode.step(Message(role=Role.ASSISTANT, content=json.loads(task.ground_truth)))
        return step.info["tool_errors"], (await episode.score()).success

    assert blocking(go()) == (1, True)

"""``code``: what programs are worth by how they fared, and how alike syntax is."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.engines.blocking import blocking
from agentrl.environments.code.checks import syntax_match
from agentrl.environments.code.environment import Code, CodeConfig
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

TASK: Task = Code(CodeConfig(levels=[1])).tasks({"train": 1}, 0)["train"][0]
NAME = next(iter(json.loads(TASK.metadata)["calls"].values()))[1]
RIGHT: str = json.loads(TASK.ground_truth)["main.py"]


def call(tool: str, **arguments: Any) -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=[ToolCall(id="c", name=tool, arguments=json.dumps(arguments))])


def scored(source: str, config: CodeConfig) -> tuple[Any, float | None]:
    """The score of a program, and the reward of the step that ran its tests."""

    async def go() -> tuple[Any, float | None]:
        episode = await Code(config).reset(TASK)
        await episode.step(call("edit", path="main.py", old="", new=source))
        step = await episode.step(call("run_tests"))
        return await episode.score(), step.reward

    return blocking(go())


@pytest.mark.parametrize(
    ("source", "fared", "reward"),
    [
        (RIGHT, "passed", 1.0),
        (f"def {NAME}(values):\n    return None", "failed", -0.3),
        (f"def {NAME}(values):\n    return 1 / 0", "error", -0.6),
        (f"import os\ndef {NAME}(values):\n    os._exit(0)", "error", -0.6),
        (f"def {NAME}(values) return None", "uncompiled", -1.0),
        (f"def {NAME}(values):\n    raise SyntaxError", "error", -0.6),
    ],
)
def test_a_program_is_worth_what_coderl_says(source: str, fared: str, reward: float) -> None:
    score, _ = scored(source, CodeConfig(levels=[1], outcomes={}))
    assert (score.state["execution"], score.components[0].value, score.success) == (fared, reward, fared == "passed")


def test_code_that_does_not_compile_costs_its_step() -> None:
    config = CodeConfig(levels=[1], invalid=0.2)
    assert scored(f"def {NAME}(values) return None", config)[1] == -0.2
    assert scored(f"def {NAME}(values):\n    return None", config)[1] == 0
    assert scored(RIGHT, config)[1] == 0, "visible tests that pass earn nothing"
    assert scored(RIGHT, CodeConfig(levels=[1]))[1] == 1


def test_syntax_is_the_share_of_the_right_subtrees() -> None:
    """`a = b + 1` has five: the assignment, its target, the sum, `b` and 1. `a = b + 2` lacks three of them."""
    sandbox = Code().config.sandbox

    def match(ours: str, right: str) -> float:
        return blocking(syntax_match(sandbox, {"main.py": ours, "same.py": "x"}, {"main.py": right, "same.py": "x"}))

    assert match("a = b + 1", "a = b + 1  # the same") == 1
    assert match("a = b + 2", "a = b + 1") == pytest.approx(2 / 5)
    assert match("a = ", "a = b + 1") == 0
    assert match("(" * 5000, "a = b + 1") == 0
    score, _ = scored(f"def {NAME}(values):\n    return None", CodeConfig(levels=[1], syntax=0.5))
    assert [part.name for part in score.components] == ["tests", "syntax"]
    assert 0 <= score.components[1].value < 1
    assert score.components[1].weight == 0.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"outcomes": {}, "reward": "share"}, "takes the place of reward: share"),
        ({"outcomes": {"passed": -0.5}}, "passed -0.5 must be above"),
        ({"similarity": 0.6, "syntax": 0.6}, "together are above 1"),
    ],
)
def test_rewards_that_disagree_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CodeConfig.model_validate(config)

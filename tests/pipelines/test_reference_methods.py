"""Methods of named systems: calls that tasks are given, rows that are mixed by a share, hints that show errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.environments import load_environment
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agenttuning.mix import mix
from agentrl.pipelines.methods.star.rationalize import RationalizeConfig, rationalize
from agentrl.pipelines.methods.toolrl.reference import with_calls
from agentrl.pipelines.stages.train import sft
from agentrl.rewards.behaviour import Form, ToolMatch
from agentrl.rewards.component import Grade, check_shares
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.trajectory import Role, Trajectory

LOOKUP = load_environment("lookup")
TASKS = LOOKUP.tasks({"train": 12}, 0)["train"]
SHOWN = [demonstrate(LOOKUP, task, 0.0, 1, f"d-{number:02d}") for number, task in enumerate(TASKS)]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def failed(row: Trajectory, name: str, seen: str) -> Trajectory:
    """A failure at the same task, whose last observation is ``seen``."""
    messages = [m.model_copy(update={"content": seen}) if m.role is Role.TOOL else m for m in row.messages]
    update = {"trajectory_id": name, "episode_id": name, "success": False, "reward": 0.0, "messages": messages}
    return row.model_copy(update=update)


def test_tasks_have_the_calls_of_their_shortest_success(harness: Harness) -> None:
    longer = SHOWN[0].model_copy(
        update={
            "trajectory_id": "l",
            "episode_id": "l",
            "messages": SHOWN[0].messages[:-1] * 2 + SHOWN[0].messages[-1:],
        }
    )
    given = harness.trajectories([longer, *SHOWN[:3], failed(SHOWN[3], "f", "unknown")])
    made = harness.run(with_calls, tasks=harness.tasks(TASKS), trajectories=[given])
    tasks = made["tasks"].read()
    assert made.metrics["with_calls"] == 3
    assert made.metrics["unsolved"] == 9
    for task, row in zip(tasks, SHOWN, strict=False):
        calls = [call for message in row.messages for call in message.tool_calls]
        named = json.loads(task.metadata)["calls"]
        assert named == [{"name": call.name, "arguments": call.parsed()} for call in calls]
        assert ToolMatch().value(row, task) == 1
    with pytest.raises(ValueError, match="none of the 12 tasks has a success"):
        harness.run(
            with_calls, tasks=harness.tasks(TASKS), trajectories=[harness.trajectories([failed(SHOWN[3], "g", "")])]
        )
    held = [task.model_copy(update={"split": "heldout"}) for task in TASKS]
    with pytest.raises(ValueError, match="train split"):
        harness.run(with_calls, tasks=harness.tasks(held), trajectories=[given])


def test_the_match_may_be_the_outcome() -> None:
    rewards = [ToolMatch(weight=3.0, outcome=True), Form(weight=1.0)]
    check_shares(rewards)
    with pytest.raises(ValueError, match="the outcome carries at least half"):
        check_shares([ToolMatch(weight=3.0), Form(weight=1.0)])


def test_the_form_of_a_right_answer_is_worth_nothing_more() -> None:
    form = Form(unrewarded=True)
    values = [form.value(row, TASKS[0]) for row in (SHOWN[0], failed(SHOWN[0], "f", "unknown"))]
    assert [grade.value for grade in values if isinstance(grade, Grade)] == [0.0, 1.0]


def test_sides_have_their_shares_of_the_weight(harness: Harness) -> None:
    agent, general = harness.trajectories(SHOWN[:3]), harness.trajectories(SHOWN[3:])
    made = harness.run(mix, {"share": 0.2}, agent=[agent], general=[general])
    selection = made["trajectories"].selection()
    weights = dict(zip(selection["trajectory_id"].to_pylist(), selection["weight"].to_pylist(), strict=True))
    assert sum(weights.values()) == pytest.approx(12)
    assert [weights[row.trajectory_id] for row in SHOWN[:3]] == pytest.approx([0.2 * 12 / 3] * 3)
    assert [weights[row.trajectory_id] for row in SHOWN[3:]] == pytest.approx([0.8 * 12 / 9] * 9)
    assert made.metrics["effective"] == pytest.approx(144 / (3 * 0.8**2 + 9 * (9.6 / 9) ** 2) / 12)
    with pytest.raises(ValueError, match="rows are on both sides"):
        harness.run(mix, agent=[agent], general=[agent])


def test_a_hint_shows_the_error_of_a_failed_attempt(harness: Harness) -> None:
    model = {"init": "tiny", "size": {"context": 512, "layers": 1}}
    warm = harness.run(sft, {"model": model, "steps": 2, "batch": 4}, trajectories=[harness.trajectories(SHOWN)])
    solved = SHOWN[1].model_copy(update={"trajectory_id": "s", "episode_id": "s"})
    failures = [failed(SHOWN[0], "a", "first"), failed(SHOWN[0], "b", "x" * 350 + "{oops}"), solved]
    config = {"hint": "ended with: {error}", "samples": 1, "sampling": {"max_turn_tokens": 8}}
    made = harness.run(
        rationalize,
        config,
        model=warm["model"],
        tasks=harness.tasks(TASKS[:3]),
        trajectories=[harness.trajectories(failures)],
    )
    assert (made.metrics["without_error"], made.metrics["errors_cut"], made.metrics["unsolved"]) == (1, 1, 1)
    retried = harness.buffer.sql("select trajectory_id from trajectories where source = 'hinted'")
    [row] = harness.buffer.get_many(retried["trajectory_id"].to_list())
    opening = row.messages[0].content
    assert opening.endswith(f"ended with: {'x' * 294}{{oops}}")


@pytest.mark.parametrize(("hint", "message"), [("{eror}", "stands for nothing"), ("{", "is no template")])
def test_a_hint_that_is_no_template_is_refused(hint: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RationalizeConfig.model_validate({"hint": hint})


def of_file(name: str) -> dict[str, Any]:
    from agentrl.pipelines.file.load import load

    return {key: node.config for key, node in load(f"methods/{name}").nodes.items()}


def test_files_have_the_published_numbers() -> None:
    rlef, coderl, reft = of_file("rlef"), of_file("coderl"), of_file("reft")
    assert '"invalid": 0.2' in str(rlef["tasks"].env)
    assert rlef["rlef"].algorithm.kl.coef == 0.05
    assert rlef["rlef"].algorithm.level == "turn"
    outcomes = load_environment(str(coderl["tasks"].env)).config.outcomes
    assert list(outcomes.model_dump().values()) == [1.0, -0.3, -0.6, -1.0]
    assert [reft["reft"].algorithm.gamma, reft["reft"].algorithm.lam] == [1.0, 0.95]
    assert of_file("agenttuning")["mixed"].share == 0.2
    assert [(part.type, part.weight) for part in of_file("toolrl")["toolrl"].rewards] == [
        ("tool_match", 3),
        ("format", 1),
    ]

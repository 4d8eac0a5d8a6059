"""``trajectories.fork`` in environments with files and a sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest
from faulty_shop import task
from json_server import serving
from test_engine_openai import Endpoint

from agentrl.environments.code.environment import Code
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.schemas.trajectory import Role, Trajectory

SHORT = {"sampling": {"max_turn_tokens": 4, "max_tokens": 2000}}


@pytest.fixture
def made(tmp_path: Path) -> tuple[Harness, Any, Any]:
    """A harness, rows of the expert of ``code``, and a policy with their words."""
    harness = Harness(tmp_path)
    tasks = harness.run(generate, {"env": "code", "train": 2, "dev": 0, "heldout": 0})["train"]
    rows = harness.run(synthesize, tasks=tasks)["trajectories"]
    policy = tiny_policy([row.messages for row in rows.read()], 0, TinySize(context=2000))
    return harness, rows, harness.model(policy.save)


def continued(made: tuple[Harness, Any, Any], **config: Any) -> tuple[list[Trajectory], dict[str, Any]]:
    harness, rows, model = made
    result = harness.run(fork, {"k": 1, **SHORT, **config}, trajectories=[rows], model=model)
    return result["trajectories"].read(), result.metrics


def test_rows_of_code_go_on_with_the_files_as_they_were(made: tuple[Harness, Any, Any]) -> None:
    """Before its last turn, the expert has edited the files and run the tests: what is scored then is solved."""
    parents = {row.trajectory_id: row for row in made[1].read()}
    rows, metrics = continued(made, at=[-1])
    assert len(rows) == 2
    assert metrics.get("diverged", 0) == 0
    for row in rows:
        parent = parents[row.parent_id or ""]
        own = next(n for n, message in enumerate(row.messages) if message.token_start == row.fork_at)
        assert [m.content for m in row.messages[:own]] == [m.content for m in parent.messages[:own]]
        assert sum(message.role is Role.TOOL for message in row.messages[:own]) == parent.n_tool_calls
        assert row.success == parent.success is True
        assert json.loads(row.final_state)["patch"] == json.loads(parent.final_state)["patch"]


def test_answers_of_a_sandbox_that_differ_are_dropped_or_go_on(
    made: tuple[Harness, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def otherwise(self: Any) -> str:
        return "the tests were not found"

    monkeypatch.setattr(Code.episode, "report", otherwise)
    rows, metrics = continued(made, at=[-1])
    assert (rows, metrics["diverged"]) == ([], 2)
    rows, metrics = continued(made, at=[-1], differing="go_on")
    assert [row.success for row in rows] == [True, True], "the files are those of the row"
    assert metrics["replay_differs"] == sum(row.tags[0] == "replay_differs:1" for row in rows) == 2
    assert all("and is now" in row.tags[1] and "were not found" in row.tags[1] for row in rows)


def test_an_endpoint_goes_on_from_the_text_of_a_row(made: tuple[Harness, Any, Any], tmp_path: Path) -> None:
    """It is sent the conversation up to the turn, and rows with tokens of another policy lose them."""
    harness, server = made[0], Endpoint()
    engine = {"type": "openai", "model": "teacher", "base_url": server.url, "api_key": None}
    common = {"engine": engine, "sampling": {"max_turn_tokens": 50}}
    with serving(server):
        tasks = harness.tasks([task("2 figs?", "faulty_shop:Shop", number) for number in range(2)])
        rows = harness.run(sample, {"samples": 1, **common}, tasks=tasks)["trajectories"]
        server.requests.clear()
        config = {"at": [1], "k": 2, **common}
        once = harness.run(fork, config, trajectories=[rows], tasks=[tasks])
        again = harness.run(fork, {**config, "at": [-1]}, trajectories=[once["trajectories"]], tasks=[tasks])
    parents = {row.trajectory_id: row for row in rows.read()}
    continued_rows = once["trajectories"].read()
    assert len(continued_rows) == 4
    for row in continued_rows:
        parent = parents[row.parent_id or ""]
        assert (row.success, row.n_steps, row.n_tool_calls, row.input_ids) == (True, 1, 0, [])
        assert row.messages[:3] == parent.messages[:3]
    assert [message["role"] for message in server.requests[0]["messages"]] == ["user", "assistant", "tool"]
    assert {row.parent_id for row in again["trajectories"].read()} <= {row.trajectory_id for row in continued_rows}
    with pytest.raises(ValueError, match="at: uncertain needs token ids, which engine openai does not give"):
        harness.run(fork, {**config, "at": "uncertain"}, trajectories=[rows], tasks=[tasks])
    with pytest.raises(ValueError, match=r"wire inputs\.model"):
        harness.run(fork, {"at": [1]}, trajectories=[rows], tasks=[tasks])

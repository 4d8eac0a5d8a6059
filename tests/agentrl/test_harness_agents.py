"""Claude Code, Codex and OpenCode themselves, unmodified, as an environment: demonstrated to, sampled, and stopped."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from recording import ScriptedTokens, check, policy_for_tests

import agentrl
from agentrl.engines.base import Sampling
from agentrl.environments.harness.environment import HarnessConfig, HarnessEnvironment
from agentrl.environments.harness.profiles import PROFILES
from agentrl.models.policy import Policy
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

AGENTS = Path(os.environ.get("AGENTS", "build/agents")).absolute()
ABOUT = {"tests": {"right.sh": '[ "$(cat out.txt)" = hi ]'}, "solution": ["ls", "echo hi > out.txt"]}
TASK = Task(
    task_id="t", env="harness", split="train", prompt="Write hi into out.txt.", verifier="tests",
    metadata=json.dumps(ABOUT),
)  # fmt: skip

pytestmark = pytest.mark.harness


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


@pytest.fixture(params=["claude-code --bare", "claude-code", "codex", "opencode"])
def agent(request: pytest.FixtureRequest) -> HarnessEnvironment:
    name, *arguments = request.param.split()
    if not list(AGENTS.glob(PROFILES[name].program)):
        pytest.skip(f"`make agents` installs {name}")
    assert shutil.which("bwrap")
    given = {"agent": name, "arguments": arguments, "agents": str(AGENTS), "turns": 5, "timeout": 120}
    return HarnessEnvironment(HarnessConfig.model_validate(given))


def says(environment: HarnessEnvironment, last: int = 1) -> Any:
    """Writes the file in each of the first ``last`` turns, and then ends."""
    assert environment.profile.shell is not None
    tool, argument = environment.profile.shell
    call = ToolCall(id="c", name=tool, arguments=json.dumps({argument: "echo hi > out.txt"}))

    def turn(text: str) -> Message | str:
        own = text.count("<|im_start|>assistant") <= last
        return Message(role=Role.ASSISTANT, tool_calls=[call]) if own else "Done."

    return turn


def sampled(policy: Policy, environment: HarnessEnvironment, words: Any, number: int = 2) -> list[Trajectory]:
    before = set(psutil.Process().children(recursive=True))
    sampling = Sampling(max_tokens=400_000, max_turn_tokens=400)
    with RolloutRunner(policy, ScriptedTokens(policy, words), environment, sampling) as runner:
        rows = runner.run([Attempt(TASK, n) for n in range(number)], 0, [f"r{n}" for n in range(number)])
    assert set(psutil.Process().children(recursive=True)) <= before
    return rows


def test_it_is_demonstrated_to_and_sampled(policy: Policy, agent: HarnessEnvironment) -> None:
    shown = demonstrate(agent, TASK, 0.0, 0, "shown")
    assert (shown.reward, shown.n_steps, shown.n_tool_calls, shown.input_ids) == (1.0, 3, 2, []), shown.tags
    assert agent.profile.shell is not None
    assert agent.profile.shell[0] in {tool["function"]["name"] for tool in json.loads(shown.tools)}
    rows = sampled(policy, agent, says(agent))
    for row in rows:
        check(policy, row)
        assert (row.agent, row.reward, row.termination, row.n_steps) == ("main", 1.0, Termination.ANSWERED, 2)
        assert not [tag for tag in row.tags if tag.startswith(("written_turns", "kind:", "undelivered"))]
    assert len(rows) == 2


def test_fifteen_turns_are_one_row(policy: Policy, agent: HarnessEnvironment) -> None:
    config = agent.config.model_copy(update={"turns": 20, "timeout": 400})
    [row] = sampled(policy, HarnessEnvironment(config), says(agent, last=15), 1)
    check(policy, row)
    assert (row.agent, row.reward, row.termination, row.n_steps) == ("main", 1.0, Termination.ANSWERED, 16), row.tags
    assert not [tag for tag in row.tags if tag.startswith(("written_turns", "kind:", "undelivered"))]


def test_its_turns_are_limited(policy: Policy, agent: HarnessEnvironment) -> None:
    [row] = sampled(policy, agent, says(agent, last=99), 1)
    assert (row.termination, row.n_steps, row.reward) == (Termination.MAX_STEPS, 5, 1.0), row.tags


def test_the_pipeline_file_is_recorded_curated_trained_and_evaluated(tmp_path: Path) -> None:
    """Two iterations of GRPO with Claude Code in between. The model is too green to succeed, so nothing is imitated."""
    if not list(AGENTS.glob(PROFILES["claude-code"].program)):
        pytest.skip("`make agents` installs claude-code")
    pipeline = agentrl.load(
        "harness/claude_code",
        store=tmp_path / "store",
        set={
            "stages.tasks.with": {"train": 6, "heldout": 2, "env": {"agents": str(AGENTS)}},
            "stages.warm.with.steps": 20,
            "stages.grpo.with": {"tasks": 2, "samples": 2},
        },
    )
    run = pipeline.run(until=["reject", "eval_warm", "eval_grpo"])
    assert run.stage("expert").summary["success"] > 0
    assert run.stage("sample").frame().height >= 6
    assert run.stage("grpo").metrics.height == 2
    assert run.stage("eval_grpo").summary["n_tasks"] == 2
    trained = agentrl.Store(tmp_path / "store").sql("select n_action_tokens from trajectories where stage = 'grpo'")
    assert trained["n_action_tokens"].to_list() != []
    assert all(tokens > 0 for tokens in trained["n_action_tokens"])

"""Stored rows of agent programs with a workspace of files, continued from one of their turns: the program is started
afresh, is given the stored turns, makes its calls again, and then the policy goes on."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
from recording import ScriptedTokens, policy_for_tests
from test_harness_environment import harness, played, says
from test_harness_environment import task as about

from agentrl.advantages.turns import turn_spans
from agentrl.engines.base import Sampling
from agentrl.environments.agent import AgentEnvironment, Endpoint
from agentrl.environments.base import Score
from agentrl.models.policy import Policy
from agentrl.rollouts.attempts import Attempt
from agentrl.rollouts.continuations import check_continuation, node
from agentrl.rollouts.episodes import DIVERGED
from agentrl.rollouts.runner import RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Termination, ToolCall, Trajectory

TASK = Task(task_id="t", env="coder", split="train", prompt="append a, b and c", verifier="", ground_truth="null")
SHELL = {
    "type": "function",
    "function": {"name": "shell", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


class Coder(AgentEnvironment):
    """An agent whose calls are run by a shell in a folder of its own. It succeeds if the file has all three lines."""

    name, version, replayable = "coder", "1", True
    folders: ClassVar[list[str]] = []

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return {split: [TASK] * size for split, size in sizes.items()}

    def run(self, task: Task, endpoint: Endpoint) -> Score:
        with tempfile.TemporaryDirectory() as folder:
            self.folders.append(folder)
            client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
            messages: list[Any] = [{"role": "user", "content": task.prompt}]
            while True:
                asked = client.chat.completions.create(model=endpoint.model, messages=messages, tools=[SHELL])  # type: ignore[list-item]
                reply = asked.choices[0].message
                if not reply.tool_calls:
                    lines = (Path(folder) / "out").read_text().split() if (Path(folder) / "out").exists() else []
                    return Score(
                        lines == ["a", "b", "c"], (RewardComponent(name="lines", value=len(lines) / 3),), lines
                    )
                messages.append(reply)
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": self._shell(call.function.arguments, folder)}  # type: ignore[union-attr]
                    for call in reply.tool_calls
                ]

    @staticmethod
    def _shell(arguments: str, folder: str) -> str:
        command = ["sh", "-c", json.loads(arguments)["command"]]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20).stdout


def shell(command: str) -> Message:
    call = ToolCall(id="call_0", name="shell", arguments=json.dumps({"command": command}))
    return Message(role=Role.ASSISTANT, tool_calls=[call])


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def play(
    policy: Policy, attempts: list[Attempt], *turns: Message | str, first: int = 0, environment: Any = None
) -> list[Trajectory]:
    """What becomes of attempts if the policy says ``turns``, of which a continuation begins with number ``first``."""

    def says(text: str) -> Message | str:
        return turns[text.count("</tool_response>") - first]

    runner = RolloutRunner(
        policy, ScriptedTokens(policy, says), environment or Coder(), Sampling(max_turn_tokens=200, max_tokens=4000)
    )
    with runner:
        return runner.run(attempts, 0, [f"r-{number}" for number in range(len(attempts))])


ADD = "echo {0} >> out; cat out"


def test_a_program_goes_on_from_any_turn_with_the_files_of_a_fresh_workspace(policy: Policy) -> None:
    turns = [shell(ADD.format("a")), shell(ADD.format("x")), "done"]
    [row] = play(policy, [Attempt(TASK)], *turns)
    assert (row.success, json.loads(row.final_state), row.n_steps) == (False, ["a", "x"], 3)
    state = node(row, 1, TASK)
    better = [shell(ADD.format("b")), shell(ADD.format("c")), "done"]
    attempts = [Attempt(TASK, n, group=state.name, prefix=state.prefix) for n in range(2)]
    for continued in play(policy, attempts, *better, first=1):
        check_continuation(continued, state.prefix)
        assert (continued.success, json.loads(continued.final_state)) == (True, ["a", "b", "c"])
        answers = [message.content for message in continued.messages if message.role is Role.TOOL]
        assert answers == ["a\n", "a\nb\n", "a\nb\nc\n"]
        assert continued.input_ids[: continued.fork_at] == row.input_ids[: continued.fork_at]
        assert not any(continued.action_mask[: continued.fork_at])
        assert continued.tags == []
    assert len(set(Coder.folders)) == len(Coder.folders), "each has a workspace of its own"
    assert not any(Path(folder).exists() for folder in Coder.folders)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_replay_that_is_answered_otherwise_is_dropped_or_says_so(policy: Policy, goes_on: bool) -> None:
    turns = [shell(ADD.format("a") + "; pwd"), shell(ADD.format("b")), "done"]
    [row] = play(policy, [Attempt(TASK)], *turns)
    state = node(row, 1, TASK)
    attempt = Attempt(TASK, 0, prefix=state.prefix, goes_on=goes_on)
    [continued] = play(policy, [attempt], shell("echo b >> out; echo c >> out"), "done", first=1)
    if not goes_on:
        assert (continued.termination, continued.success) == (Termination.ENV_ERROR, None)
        assert DIVERGED in continued.tags
        return
    assert (continued.success, json.loads(continued.final_state)) == (True, ["a", "b", "c"])
    assert continued.tags[0] == "replay_differs:1"
    assert continued.tags[1] == "replay_differs: what the program sent before turn 1 is not what the row has"
    answers = [message.content for message in continued.messages if message.role is Role.TOOL]
    assert answers[0] != row.messages[2].content, "the policy reads what the program says now"
    assert answers[0].split()[0] == "a"
    assert continued.parent_id == row.trajectory_id
    assert continued.input_ids[: continued.fork_at] == row.input_ids[: continued.fork_at]
    assert continued.fork_at < len(state.prefix.ids)
    assert continued.n_action_tokens == sum(continued.action_mask)
    assert not any(continued.action_mask[: continued.messages[2].token_end]), "the row's turns are not trained on again"


class Early(Coder):
    """Ends after its first turn."""

    def run(self, task: Task, endpoint: Endpoint) -> Score:
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        client.chat.completions.create(model=endpoint.model, messages=messages, tools=[SHELL])  # type: ignore[list-item]
        return Score(True)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_replay_that_ends_early_is_dropped_even_if_it_may_differ(policy: Policy, goes_on: bool) -> None:
    [row] = play(policy, [Attempt(TASK)], shell(ADD.format("a")), shell(ADD.format("b")), "done")
    attempt = Attempt(TASK, 0, prefix=node(row, 2, TASK).prefix, goes_on=goes_on)
    [continued] = play(policy, [attempt], "done", first=2, environment=Early())
    assert (continued.termination, continued.success) == (Termination.ENV_ERROR, None)
    assert DIVERGED in continued.tags
    assert f"the program did not ask for turn 1 of {row.trajectory_id}" in continued.tags[-1]


def test_a_coding_agent_goes_on_in_a_fresh_sandbox(policy: Policy) -> None:
    """The scripted agent of the harness, with a title beside its work: only its own conversation is replayed."""
    work = about("title: write hi", files={"a/b.txt": "old\n"})
    [row, _] = played(policy, harness(), [work], says("echo wrong > out.txt; echo kept > kept.txt"))["title"]
    assert (row.success, row.agent) == (False, "main")
    state = node(row, 1, work)
    attempt = Attempt(work, 0, group=state.name, prefix=state.prefix)
    words = ["run: echo hi > out.txt", "Sunny."]

    def go_on(text: str) -> str:
        return words[text.count("<|im_start|>assistant") - 2] if "kept.txt" in text else "A title"

    runner = RolloutRunner(
        policy, ScriptedTokens(policy, go_on), harness(), Sampling(max_turn_tokens=400, max_tokens=4000)
    )
    with runner:
        main, title = runner.run([attempt], 0, ["f"])
    check_continuation(main, state.prefix)
    assert (main.success, main.n_steps, main.tags) == (True, 2, [])
    assert "kept" in json.loads(main.final_state)["diff"], "the call of the row was made again"
    assert (title.agent, title.parent_id, title.fork_at, title.reward) == ("side", None, 0, None)
    [(start, _)] = [span for span in turn_spans(main.messages, main.action_mask) if span[0] == main.fork_at]
    assert start == main.fork_at

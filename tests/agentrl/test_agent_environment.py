"""Agent programs as environments: they ask an endpoint, and the policy of a rollout answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from recording import TOOLS, ScriptedTokens, check, policy_for_tests

from agentrl.engines.base import Sampling
from agentrl.environments.agent import AgentEnvironment, Endpoint
from agentrl.environments.base import Score
from agentrl.models.policy import Policy
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Termination, ToolCall, Trajectory

TASK = Task(task_id="t", env="program", split="train", prompt="weather?", verifier="", ground_truth="null")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


class ProgramInTests(AgentEnvironment):
    name, version = "program", "1"
    ended: list[Any]

    def __init__(self) -> None:
        self.ended = []

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return {split: [TASK] * size for split, size in sizes.items()}


class Coroutine(ProgramInTests):
    """Asks until it is answered without a call, and for another temperature than the stage's."""

    stream = False

    async def run(self, task: Task, endpoint: Endpoint) -> Any:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        while True:
            asked = await client.chat.completions.create(  # type: ignore[call-overload]
                model=endpoint.model, messages=messages, tools=TOOLS, temperature=0.3
            )
            reply = asked.choices[0].message
            if not reply.tool_calls:
                return Score(
                    reply.content == "Sunny.", (RewardComponent(name="right", value=0.7),), {"said": reply.content}
                )
            messages.append(reply)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"} for call in reply.tool_calls
            ]


class InThread(ProgramInTests):
    """The same without a loop, by Responses that are named."""

    def run(self, task: Task, endpoint: Endpoint) -> float:
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        tools: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
        given: dict[str, Any] = {"input": task.prompt}
        while True:
            with client.responses.stream(
                model=endpoint.model, tools=tools, instructions="Be brief.", **given
            ) as events:
                response = events.get_final_response()
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return float(response.output_text == "Sunny.")
            results = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"} for call in calls
            ]
            given = {"input": results, "previous_response_id": response.id}


class Rewriting(ProgramInTests):
    """Begins two conversations."""

    async def run(self, task: Task, endpoint: Endpoint) -> float:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        for text in ("a", "another"):
            messages: Any = [{"role": "user", "content": text}]
            await client.chat.completions.create(model=endpoint.model, messages=messages)
        return 1.0


class Raising(ProgramInTests):
    async def run(self, task: Task, endpoint: Endpoint) -> float:
        raise KeyError("facts")


class Endless(Coroutine):
    """Returns a reward even if it is told that the episode is over."""

    partial: float | None = None

    async def run(self, task: Task, endpoint: Endpoint) -> Any:
        try:
            return await super().run(task, endpoint)
        except openai.BadRequestError as error:
            self.ended.append(error.code)
            if self.partial is None:
                raise
            return self.partial


def agent(text: str) -> Message | str:
    call = ToolCall(id="call_0", name="weather", arguments='{"city": "Rome"}')
    answered = text.count("</tool_response>") == 2
    return "Sunny." if answered else Message(role=Role.ASSISTANT, tool_calls=[call])


def played(
    policy: Policy, environment: Any, says: Any = agent, number: int = 3, limits: Limits | None = None, room: int = 4000
) -> list[Trajectory]:
    engine = ScriptedTokens(policy, says, delay=0.001)
    sampling = Sampling(max_tokens=room, max_turn_tokens=100)
    with RolloutRunner(policy, engine, environment, sampling, limits=limits or Limits()) as runner:
        rows = runner.run([Attempt(TASK, n) for n in range(number)], 0, [f"r{n}" for n in range(number)])
    assert engine.open_sessions == 0
    assert {sampling.temperature for sampling in engine.asked} <= {1.0}
    return rows


@pytest.mark.parametrize("kind", [Coroutine, InThread])
def test_an_agent_program_is_an_environment(kind: type[ProgramInTests], policy: Policy) -> None:
    rows = played(policy, kind(), number=6)
    for row in rows:
        assert json.loads(row.sampling)["temperature"] == 1.0
        assert not [tag for tag in row.tags if tag.startswith("sampling_changed")]
        roles = [message.role for message in row.messages if message.role is not Role.SYSTEM]
        assert roles == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
        assert row.termination is Termination.ANSWERED
        assert row.messages[-2].tool_call_id == "call_0"
        assert row.messages[-2].name == "weather"
        assert row.n_action_tokens == sum(row.action_mask) > 0
        assert json.loads(row.tools)[0]["function"]["name"] == "weather"
    if kind is Coroutine:
        assert {(row.reward, row.success, row.final_state) for row in rows} == {(0.7, True, '{"said": "Sunny."}')}
    else:
        assert {(row.reward, row.success) for row in rows} == {(1.0, True)}
        assert {row.messages[0].content for row in rows} == {"Be brief."}


def test_what_goes_wrong_in_a_program_is_said_in_its_row(policy: Policy) -> None:
    [row] = played(policy, Raising(), number=1)
    assert row.termination is Termination.ENV_ERROR
    assert "KeyError: 'facts'" in row.tags[0]
    assert row.reward is None


def test_each_conversation_of_a_program_is_a_row_of_its_episode(policy: Policy) -> None:
    rows = played(policy, Rewriting(), lambda _: "ok", 2)
    assert [(row.trajectory_id, row.episode_id, row.segment) for row in rows] == [
        ("r0", "r0", 0), ("r0.1", "r0", 1), ("r1", "r1", 0), ("r1.1", "r1", 1),
    ]  # fmt: skip
    assert {(row.reward, row.success, row.termination) for row in rows} == {(1.0, True, Termination.ANSWERED)}
    assert [row.prompt for row in rows] == ["weather?"] * 4
    assert [row.messages[0].content for row in rows[:2]] == ["a", "another"]
    for row in rows:
        check(policy, row)


def test_a_program_that_a_limit_ends_is_told_so(policy: Policy) -> None:
    never = lambda _: agent("")  # noqa: E731
    environment = Endless()
    [row] = played(policy, environment, never, 1, Limits(max_steps=3))
    assert (row.termination, row.n_steps, row.reward, row.success) == (Termination.MAX_STEPS, 3, 0.0, False)
    assert [component.name for component in row.reward_components] == ["unfinished"]
    assert environment.ended == ["episode_over"]
    environment.partial = 0.25
    [row] = played(policy, environment, never, 1, room=150)
    assert (row.termination, row.reward) == (Termination.MAX_TOKENS, 0.25)


def test_a_key_is_of_one_episode_and_ends_with_it(policy: Policy) -> None:
    seen: list[Endpoint] = []

    class Once(ProgramInTests):
        async def run(self, task: Task, endpoint: Endpoint) -> float:
            seen.append(endpoint)
            client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
            if len(seen) > 1:
                old = client.with_options(api_key=seen[0].api_key)
                with pytest.raises(openai.AuthenticationError):
                    await old.models.list()
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
            return 1.0

    rows = played(policy, Once(), lambda _: "ok", 1)
    environment = Once()
    engine = ScriptedTokens(policy, lambda _: "ok")
    with RolloutRunner(policy, engine, environment, Sampling(max_tokens=4000, max_turn_tokens=100)) as runner:
        for number in range(2):
            rows += runner.run([Attempt(TASK)], 0, [f"again{number}"])
    assert [row.reward for row in rows] == [1.0, 1.0, 1.0], [row.tags for row in rows]
    assert len({entry.api_key for entry in seen}) == 3


def test_an_environment_travels_without_its_endpoint(policy: Policy, tmp_path: Path) -> None:
    import pickle

    environment = Coroutine()
    [row] = played(policy, environment, number=1)
    assert row.reward == 0.7
    assert pickle.loads(pickle.dumps(environment)).ended == []
    asyncio.run(environment.close())

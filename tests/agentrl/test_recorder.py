"""The recorder, asked by OpenAI's own client: what agents do becomes rows with exactly the tokens that were sampled."""

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from recording import (
    TOOLS,
    agent,
    calls,
    chat,
    check,
    numbered,
    open_episode,
    policy_for_tests,
    rewarded,
    sampled,
    served,
)

from agentrl.models.policy import Policy
from agentrl.schemas.trajectory import Message, Role, Termination


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def weather_by_chat(client: openai.OpenAI, stream: bool) -> str:
    """An agent's loop by chat completions, which hands back what it got without reasoning."""
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    while True:
        if stream:
            content, tool_calls = "", []
            for chunk in client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, stream=True):
                delta = chunk.choices[0].delta
                content += delta.content or ""
                tool_calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or []]
        else:
            reply = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
            content, tool_calls = reply.content or "", [call.model_dump() for call in reply.tool_calls or []]
        if not tool_calls:
            return content
        messages.append({"role": "assistant", "content": content or None, "tool_calls": tool_calls})
        for call in tool_calls:
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "when": "now"}
            says = {"is_error": True} if stream else {}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "20 degrees", **says})


RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": None, **TOOLS[0]["function"]}]  # type: ignore[dict-item]


def weather_by_responses(client: openai.OpenAI, stream: bool, previous: bool = False) -> str:
    """The same by Responses, with the whole input or with the id of the response before."""
    items: list[Any] = [{"role": "user", "content": "weather?"}]
    last = openai.omit
    while True:
        ask: dict[str, Any] = {"model": "tiny", "input": items, "tools": RESPONSE_TOOLS}
        ask["previous_response_id"] = last
        if stream:
            *events, done = client.responses.create(**ask, stream=True)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            response = done.response
            assert response.output_text == text
        else:
            response = client.responses.create(**ask)
        asked = [item for item in response.output if item.type == "function_call"]
        if not asked:
            return response.output_text
        says = {"type": "function_call_output", "output": "20 degrees"} | ({"is_error": True} if stream else {})
        results = [{"call_id": request.call_id, **says} for request in asked]
        if previous:
            last, items = response.id, results
        else:
            items += [item.model_dump(exclude_none=True) for item in response.output] + results


AGENTS: dict[str, Callable[[openai.OpenAI], str]] = {
    "chat": lambda client: weather_by_chat(client, False),
    "chat, streamed": lambda client: weather_by_chat(client, True),
    "responses": lambda client: weather_by_responses(client, False),
    "responses, streamed": lambda client: weather_by_responses(client, True),
    "responses, by id": lambda client: weather_by_responses(client, False, previous=True),
    "responses, by id, streamed": lambda client: weather_by_responses(client, True, previous=True),
}


@pytest.mark.parametrize("how", AGENTS)
def test_a_conversation_is_one_row_however_it_is_asked(how: str, policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, agent) as server:
        opened = httpx.post(f"{server.url}/episodes", json={"task_id": "t1", "group_id": "g", "tags": ["a"]}).json()
        client = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0)
        assert AGENTS[how](client) == "Sunny."
        rewarded = client.post(f"{server.url}/episodes/{opened['id']}/reward", body={"reward": 0.5}, cast_to=object)
        assert rewarded == {"id": opened["id"], "rows": [opened["id"]], "reward": 0.5}
        [row] = server.flush()
    check(policy, row)
    assert sampled(policy, row)[1] == "Sunny.<|im_end|>"
    assert sampled(policy, row)[0].startswith("<think>hm</think>\n<tool_call>{"), "reasoning stays as it was sampled"
    assert [message.role for message in row.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert row.messages[2].tool_call_id == row.messages[1].tool_calls[0].id == "call_0", "the policy's own id"
    assert row.messages[2].name == "weather"
    errors = (row.messages[2].error, row.n_tool_errors)
    assert errors == ((True, 1) if "streamed" in how else (None, 0)), "as the client says"
    assert json.loads(row.tools)[0]["function"]["name"] == "weather"
    assert (row.task_id, row.group_id, row.reward, row.success, row.tags) == ("t1", "g", 0.5, True, ["a"])
    assert (row.termination, row.n_steps, row.n_tool_calls, row.policy) == (Termination.ANSWERED, 2, 1, "tiny")
    assert row.spans[0].end == row.n_tokens
    assert [seconds is not None and 0 < seconds < 30 for seconds in row.message_seconds or []] == [False, True] * 2
    assert list(tmp_path.iterdir()) == [tmp_path / "starting.lock"], "nothing is left when all is stored"


def test_text_is_streamed_while_it_is_sampled(policy: Policy, tmp_path: Path) -> None:
    text = " ".join(["The city of Ann is Rome."] * 12)
    with served(tmp_path, policy, lambda _: text, delay=0.02) as server:
        client = server.client()
        chunks = [
            (time.monotonic(), chunk)
            for chunk in client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "?"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    reply = [(when, chunk.choices[0].delta.content) for when, chunk in chunks if chunk.choices]
    assert "".join(item or "" for _, item in reply) == text
    assert sum(bool(item) for _, item in reply) > 5
    assert reply[-1][0] - reply[1][0] > 0.1, "the first words come long before the last"
    usage = chunks[-1][1].usage
    assert usage is not None
    assert usage.completion_tokens == len(server.engine.asked) * 8 - (-usage.completion_tokens % 8)


def test_what_a_client_drops_or_rewrites_does_not_break_a_row(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, agent) as server:
        client = server.client()
        first = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": " weather? "}], tools=TOOLS
        )
        call = first.choices[0].message.tool_calls[0]  # type: ignore[index]
        arguments = json.dumps(dict(reversed(json.loads(call.function.arguments).items())), indent=1)  # type: ignore[union-attr]
        other = {"id": "x1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
                {"role": "assistant", "content": "", "tool_calls": [other], "refusal": None},
                {"role": "tool", "tool_call_id": "x1", "content": "20 degrees"},
            ],  # type: ignore[list-item]
            tools=TOOLS,
        )
        episodes = server.recorder.episodes
        server.on_loop(lambda: [episodes.close(episode, None, "test") for episode in list(episodes.opened.values())])
        [row] = server.flush()
    check(policy, row)
    assert row.n_steps == 2
    assert row.tags == ["unscored", "closed: test"]
    assert row.reward is None


def test_a_branch_is_a_row_that_shares_what_came_before(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        assert chat(client, "a") == "answer 0"
        assert chat(client, "a", "answer 0", "b") == "answer 1"
        assert chat(client, "a", "answer 0", "c") == "answer 2"
        first, second = rewarded(server, client, name)
    for row in (first, second):
        check(policy, row)
    assert sampled(policy, first) == ["answer 0<|im_end|>", "answer 1<|im_end|>"]
    assert sampled(policy, second) == ["answer 2<|im_end|>"], "a shared turn is trained on once"
    assert (second.parent_id, second.segment, second.trajectory_id) == (first.trajectory_id, 1, f"{name}-1")
    assert second.input_ids[: second.fork_at] == first.input_ids[: second.fork_at]
    assert policy.tokenizer.decode(second.input_ids[: second.fork_at]).endswith("answer 0<|im_end|>")


def test_an_edited_answer_is_context_and_is_counted(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        chat(client, "a")
        chat(client, "a", "answer 0", "b")
        chat(client, "a", "answer 0", "b", "I never said this", "c")
        chat(client, "a", "nor this", "b")
        first, second, third = rewarded(server, client, name)
    assert [sampled(policy, row) for row in (first, second, third)] == [
        ["answer 0<|im_end|>", "answer 1<|im_end|>"],
        ["answer 2<|im_end|>"],
        ["answer 3<|im_end|>"],
    ]
    assert "written_turns:1" in second.tags
    assert "written_turns:1" in third.tags
    assert not any(tag.startswith("written_turns") for tag in first.tags)
    assert second.parent_id == first.trajectory_id
    assert policy.tokenizer.decode(second.input_ids).count("I never said this<|im_end|>") == 1


def test_agents_of_one_episode_have_rows_of_their_own(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        chat(client, "a", system="You lead.")
        chat(client, "sub", system="You search.")
        chat(client, "a", "answer 0", "b", system="You lead.")
        chat(client, "sub", "answer 1", "more", system="You search.")
        chat(client, "title?")
        chat(client, "what was said before, in short", system="You lead.")
        rows = rewarded(server, client, name)
    for row in rows:
        check(policy, row)
    assert [(row.agent, row.segment, row.n_steps) for row in rows] == [
        ("main", 0, 2),
        ("agent-2", 1, 2),
        ("agent-3", 2, 1),
        ("main", 3, 1),
    ]
    assert {row.episode_id for row in rows} == {name}
    assert {row.reward for row in rows} == {1.0}
    assert len({row.group_id for row in rows}) == 1


def test_conversations_without_an_episode_are_told_apart(policy: Policy, tmp_path: Path) -> None:
    """All begin alike and are answered alike, at the same time; calls have ids, and nothing is mixed up."""
    numbers = itertools.count()

    def says(text: str) -> Message | str:
        return calls("Rome") if text.count("<|im_start|>assistant") < 3 else f"end {next(numbers)}"

    def talk(number: int) -> str:
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        while True:
            reply = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
            if not reply.tool_calls:
                return reply.content or ""
            messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": f"{number}"}]

    with served(tmp_path, policy, says, delay=0.01) as server:
        client = server.client()
        with ThreadPoolExecutor(24) as threads:
            ends = list(threads.map(talk, range(24)))
        assert len(server.recorder.episodes.opened) == 24
        server.on_loop(lambda: server.recorder.episodes.close_idle(-1, set()))
        rows = server.flush()
    assert len(rows) == 24
    told = {row.messages[-1].content: {m.content for m in row.messages if m.role is Role.TOOL} for row in rows}
    assert told == {end: {str(number)} for number, end in enumerate(ends)}
    assert {row.n_steps for row in rows} == {3}
    assert len({row.task_id for row in rows}) == 1, "episodes that begin alike are of one task"


def test_the_engine_reads_only_what_is_new(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        texts = ["a"]
        for _ in range(6):
            texts += [chat(client, *texts), "go on"]
        [row] = rewarded(server, client, name)
        assert server.engine.computed == row.n_tokens - row.n_action_tokens
        assert server.engine.open_sessions == 0


def test_a_turn_that_a_limit_ended_goes_on_in_its_row(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, lambda text: "Sunny, and 20 degrees.", room=80) as server:
        client, name = open_episode(server)
        first = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], max_completion_tokens=3
        )
        assert first.choices[0].finish_reason == "length"
        text = first.choices[0].message.content or ""
        assert chat(client, "a", text, "b") == "Sunny, and 20 degrees."
        with pytest.raises(openai.BadRequestError, match="the context of tiny is 80") as refused:
            chat(client, "a", text, "b", "Sunny, and 20 degrees.", "The city of Ann is Rome. " * 20)
        assert refused.value.code == "context_length_exceeded"
        [row] = rewarded(server, client, name)
    check(policy, row)
    assert sampled(policy, row)[0] == text
    assert f"{text}<|im_end|>\n<|im_start|>user\nb<|im_end|>" in policy.tokenizer.decode(row.input_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_turn_before_it(stream: bool, policy: Policy, tmp_path: Path) -> None:
    words = "The city of Ann is Rome. What is the weather? Sunny, and 20 degrees."
    with served(tmp_path, policy, lambda _: words) as server:
        client, name = open_episode(server)
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stop": ["weather"]}
        if stream:
            parts = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
            text, finish = "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason
        else:
            [choice] = client.chat.completions.create(**asked).choices
            text, finish = choice.message.content, choice.finish_reason
        assert (text, finish) == ("The city of Ann is Rome. What is the", "stop")
        assert chat(client, "a", text or "", "b") == words
        rows = rewarded(server, client, name)
    assert len(rows) == 1
    check(policy, rows[0])
    assert sampled(policy, rows[0])[0].rstrip() == text


def test_what_a_client_wished_and_did_not_get_is_counted(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, lambda _: "<tool_call>{nonsense", fixed_temperature=1.0) as server:
        client, name = open_episode(server)
        for choice in ("required", "none", {"type": "function", "function": {"name": "weather"}}):
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"{choice}"}],
                tools=TOOLS,
                tool_choice=choice,  # type: ignore[arg-type]
                temperature=0.2,
                top_p=0.9,
            )
        assert {request.temperature for request in server.engine.asked} == {1.0}, "the server's temperature wins"
        assert {request.top_p for request in server.engine.asked} == {0.9}
        rows = rewarded(server, client, name)
    assert {"tool_choice_unmet:2", "format_errors:3"} <= set(rows[0].tags)
    assert json.loads(rows[0].sampling)["top_p"] == 0.9

"""The recorder, asked by OpenAI's own client: what agents do becomes rows with exactly the tokens that were sampled."""

import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from recording import TOOLS, RowsInMemory, Served, policy_for_tests, served

from agentrl.engines.base import EngineError
from agentrl.models.policy import Policy
from agentrl.recorder import app, recorder
from schemas.arrow import to_table
from schemas.trajectory import TRAJECTORY_SCHEMA, Message, Role, Termination, ToolCall, Trajectory


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def calls(city: str, reasoning: str | None = None) -> Message:
    call = ToolCall(id="call_0", name="weather", arguments=json.dumps({"city": city, "when": "now"}))
    return Message(role=Role.ASSISTANT, reasoning=reasoning, tool_calls=[call])


def agent(said: str) -> Message | str:
    """Looks the weather up, and answers."""
    return (
        "Sunny." if said.rstrip().endswith("</tool_response><|im_end|>\n<|im_start|>assistant") else calls("Rome", "hm")
    )


def sampled(policy: Policy, row: Trajectory) -> list[str]:
    """The text of each run of sampled tokens."""
    ids = zip(row.input_ids, row.action_mask, strict=True)
    return [
        policy.tokenizer.decode([token for token, _ in run])
        for own, run in itertools.groupby(ids, key=lambda one: one[1])
        if own
    ]


def check(policy: Policy, row: Trajectory) -> None:
    """What every row keeps to."""
    table = to_table([row], TRAJECTORY_SCHEMA)
    assert table.num_rows == 1
    assert len(row.input_ids) == len(row.action_mask) == len(row.logprobs) == row.n_tokens
    assert all(math.isnan(one) != own for one, own in zip(row.logprobs, row.action_mask, strict=True))
    assert row.messages[-1].token_end == row.n_tokens
    for message in row.messages:
        assert message.token_start is not None
        if message.role is Role.ASSISTANT and all(row.action_mask[message.token_start : message.token_end]):
            read = policy.codec.parse(row.input_ids[message.token_start : message.token_end]).message
            assert (read.content, read.tool_calls) == (message.content, message.tool_calls)


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
            said = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
            content, tool_calls = said.content or "", [call.model_dump() for call in said.tool_calls or []]
        if not tool_calls:
            return content
        messages.append({"role": "assistant", "content": content or None, "tool_calls": tool_calls})
        for call in tool_calls:
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "when": "now"}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "20 degrees"})


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
        results = [{"type": "function_call_output", "call_id": one.call_id, "output": "20 degrees"} for one in asked]
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
    assert [one.role for one in row.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert row.messages[2].tool_call_id == row.messages[1].tool_calls[0].id == "call_0", "the policy's own id"
    assert row.messages[2].name == "weather"
    assert json.loads(row.tools)[0]["function"]["name"] == "weather"
    assert (row.task_id, row.group_id, row.reward, row.success, row.tags) == ("t1", "g", 0.5, True, ["a"])
    assert (row.termination, row.n_steps, row.n_tool_calls, row.policy) == (Termination.ANSWERED, 2, 1, "tiny")
    assert row.spans[0].end == row.n_tokens
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
    said = [(when, chunk.choices[0].delta.content) for when, chunk in chunks if chunk.choices]
    assert "".join(one or "" for _, one in said) == text
    assert sum(bool(one) for _, one in said) > 5
    assert said[-1][0] - said[1][0] > 0.1, "the first words come long before the last"
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
        server.on_loop(lambda: [episodes.close(one, None, "test") for one in list(episodes.opened.values())])
        [row] = server.flush()
    check(policy, row)
    assert row.n_steps == 2
    assert row.tags == ["unscored", "closed: test"]
    assert row.reward is None


def chat(client: openai.OpenAI, *said: str, system: str | None = None) -> str:
    """The answer to a conversation whose turns alternate."""
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[n % 2], "content": one} for n, one in enumerate(said)]
    return client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content or ""


def numbered() -> Callable[[str], str]:
    numbers = itertools.count()
    return lambda _: f"answer {next(numbers)}"


def open_episode(server: Served, **about: Any) -> tuple[openai.OpenAI, str]:
    opened = httpx.post(f"{server.url}/episodes", json=about).json()
    return openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0), opened["id"]


def rewarded(server: Served, client: openai.OpenAI, name: str, reward: float = 1.0) -> list[Trajectory]:
    answer = httpx.post(
        f"{server.url}/episodes/{name}/reward",
        json={"reward": reward},
        headers={"authorization": f"Bearer {client.api_key}"},
    )
    assert answer.status_code == 200, answer.text
    rows = server.flush()
    return [row for row in rows if row.episode_id == name]


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

    def says(said: str) -> Message | str:
        return calls("Rome") if said.count("<|im_start|>assistant") < 3 else f"end {next(numbers)}"

    def talk(number: int) -> str:
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        while True:
            said = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
            if not said.tool_calls:
                return said.content or ""
            messages += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": f"{number}"}]

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
        said = ["a"]
        for _ in range(6):
            said += [chat(client, *said), "go on"]
        [row] = rewarded(server, client, name)
        assert server.engine.computed == row.n_tokens - row.n_action_tokens
        assert server.engine.open_sessions == 0


def test_a_request_that_is_sent_again_joins_the_turn(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered(), delay=0.5) as server:
        opened = httpx.post(f"{server.url}/episodes", json={}).json()
        client = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=3, timeout=0.3)
        assert chat(client, "a") == "answer 0"
        assert len(server.engine.asked) == 1
        server.engine.delay = 0.0
        assert chat(client.with_options(timeout=5), "a") == "answer 1", "without the header it is another turn"
        rows = rewarded(server, client, opened["id"])
    assert [sampled(policy, row) for row in rows] == [["answer 0<|im_end|>"], ["answer 1<|im_end|>"]]


def test_a_client_that_leaves_ends_its_turn(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "GRACE_S", 0.1)
    with served(tmp_path, policy, numbered(), delay=5.0) as server:
        client, name = open_episode(server)
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.2), "a")
        ends = time.monotonic() + 5
        while not server.engine.cancelled and time.monotonic() < ends:
            time.sleep(0.02)
        assert (server.engine.cancelled, server.engine.under_way, server.engine.open_sessions) == (1, 0, 0)
        server.engine.delay = 0.0
        assert chat(client, "a") == "answer 0"
        [row] = rewarded(server, client, name)
    assert "abandoned:1" in row.tags


def test_an_answer_that_nobody_received_is_in_no_row(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        assert chat(client, "a") == "answer 0"
        server.engine.delay = 0.3
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.1), "a", "answer 0", "b")
        time.sleep(0.4)
        server.engine.delay = 0.0
        assert chat(client, "a", "answer 0", "c") == "answer 2"
        [row] = rewarded(server, client, name)
    assert sampled(policy, row) == ["answer 0<|im_end|>", "answer 2<|im_end|>"]
    assert "undelivered:1" in row.tags


def test_a_killed_server_loses_no_turn_and_the_next_one_goes_on(policy: Policy, tmp_path: Path) -> None:
    store = RowsInMemory()
    with served(tmp_path, policy, lambda _: "answer 0", store) as server:
        client, name = open_episode(server, task_id="t")
        chat(client, "a")
        other, finished = open_episode(server)
        chat(other, "x")
        server.store.fails = [OSError("no space left")] * 100
        url = f"{server.url}/episodes/{finished}/reward"
        assert httpx.post(url, json={"reward": 1}, headers={"authorization": f"Bearer {other.api_key}"}).is_success
        server.killed = True
    [path] = tmp_path.glob("*/000000.jsonl")
    with path.open("ab") as file:
        file.write(b'{"turn": {"number": 1, "par')  # the line that was written when it was killed
    store.fails = []
    with served(tmp_path, policy, lambda _: "answer 1", store) as server:
        assert server.said == [f"recording {path.parent.name}: 1 episodes go on"]
        client.base_url = f"{server.url}/episodes/{name}/v1"
        assert chat(client, "a", "answer 0", "b") == "answer 1"
        [row] = rewarded(server, client, name)
    check(policy, row)
    assert sampled(policy, row) == ["answer 0<|im_end|>", "answer 1<|im_end|>"]
    assert (row.task_id, row.episode_id) == ("t", name)
    assert sorted(one.episode_id for one in store.all()) == sorted([name, finished])
    with served(tmp_path, policy, lambda _: "", store) as server:
        assert server.said == []
    assert len(store.all()) == 2, "what is stored is not stored again"


def test_rows_that_a_killed_server_had_stored_are_not_stored_twice(policy: Policy, tmp_path: Path) -> None:
    store = RowsInMemory()
    with served(tmp_path, policy, numbered(), store) as server:
        client, name = open_episode(server)
        chat(client, "a")
        [path] = tmp_path.glob("*/000000.jsonl")
        kept = path.read_bytes()
        rewarded(server, client, name)
        outcome = {"reward": 1.0, "success": None, "components": {}}
        closed = json.dumps({"closed": "rewarded", "outcome": outcome, "counts": {}}).encode() + b"\n"
        path.write_bytes(kept + closed)  # killed between the append and the removal of the file
        server.killed = True
    with served(tmp_path, policy, numbered(), store) as server:
        assert server.flush() == store.all()
    assert [row.episode_id for row in store.all()] == [name]
    assert not path.exists()


def test_a_store_that_fails_for_a_while_gets_the_rows_later(policy: Policy, tmp_path: Path) -> None:
    store = RowsInMemory(fails=[OSError("no space left")])
    with served(tmp_path, policy, numbered(), store) as server:
        client, name = open_episode(server)
        chat(client, "a")
        with pytest.warns(UserWarning, match="no space left"):
            assert rewarded(server, client, name) == []
        state = httpx.get(f"{server.url}/episodes/{name}", headers={"authorization": f"Bearer {client.api_key}"})
        assert state.json() == {"id": name, "state": "closed"}
        assert len(server.flush()) == 1
        state = httpx.get(f"{server.url}/episodes/{name}", headers={"authorization": f"Bearer {client.api_key}"})
        assert state.json() == {"id": name, "state": "stored"}


def test_a_turn_that_a_limit_ended_goes_on_in_its_row(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, lambda said: "Sunny, and 20 degrees.", room=80) as server:
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
    said = "The city of Ann is Rome. What is the weather? Sunny, and 20 degrees."
    with served(tmp_path, policy, lambda _: said) as server:
        client, name = open_episode(server)
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stop": ["weather"]}
        if stream:
            parts = [one.choices[0] for one in client.chat.completions.create(**asked, stream=True)]
            text, finish = "".join(one.delta.content or "" for one in parts), parts[-1].finish_reason
        else:
            [choice] = client.chat.completions.create(**asked).choices
            text, finish = choice.message.content, choice.finish_reason
        assert (text, finish) == ("The city of Ann is Rome. What is the", "stop")
        assert chat(client, "a", text or "", "b") == said
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
        assert {one.temperature for one in server.engine.asked} == {1.0}, "the server's temperature wins"
        assert {one.top_p for one in server.engine.asked} == {0.9}
        rows = rewarded(server, client, name)
    assert {"tool_choice_unmet:2", "format_errors:3"} <= set(rows[0].tags)
    assert json.loads(rows[0].sampling)["top_p"] == 0.9


def test_keys(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered(), api_key="secret") as server:
        assert httpx.post(f"{server.url}/episodes", json={}).status_code == 401
        head = {"authorization": "Bearer secret"}
        opened = httpx.post(f"{server.url}/episodes", json={}, headers=head).json()
        other = httpx.post(f"{server.url}/episodes", json={}, headers=head).json()
        for key, path in (("wrong", "/v1"), ("secrets", "/v1"), ("ep-guessed", "/v1"), ("", "/v1")):
            with pytest.raises(openai.AuthenticationError) as refused:
                chat(server.client(key or "none", path), "a")
            assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            chat(server.client(other["api_key"], f"/episodes/{opened['id']}/v1"), "a")
        with pytest.raises(openai.PermissionDeniedError):
            server.client(opened["api_key"]).post(f"{server.url}/episodes", body={}, cast_to=object)
        assert chat(server.client(opened["api_key"]), "a") == "answer 0", "the key alone names the episode"
        assert chat(server.client("secret"), "a") == "answer 1"
        assert chat(server.client("secret", default_headers={"x-agentrl-episode": other["id"]}), "a") == "answer 2"
        assert server.client("secret").models.list().data[0].id == "tiny"


def test_an_episode_is_rewarded_once(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        chat(client, "a")
        url, head = f"{server.url}/episodes/{name}/reward", {"authorization": f"Bearer {client.api_key}"}
        for body in ("{}", '{"reward": NaN}', '{"reward": "a lot"}', '{"reward": 1, "succes": true}', "[]", "{"):
            answer = httpx.post(url, content=body, headers={**head, "content-type": "application/json"})
            assert answer.status_code == 400, body
            assert answer.json()["error"]["message"]
        given = {"reward": -1, "success": True, "components": {"right": 1.0, "slow": -2.0}}
        assert httpx.post(url, json=given, headers=head).is_success
        again = httpx.post(url, json=given, headers=head)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "episode_closed")
        with pytest.raises(openai.ConflictError, match="is closed: rewarded"):
            chat(client, "a", "answer 0", "b")
        assert httpx.post(f"{server.url}/episodes/nothing/reward", json=given).status_code == 404
        [row] = server.flush()
    assert (row.reward, row.success) == (-1, True)
    assert [(one.name, one.value) for one in row.reward_components] == [("right", 1.0), ("slow", -2.0)]


def test_what_cannot_be_served_is_refused_with_its_reason(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = [{"role": "user", "content": "a"}]
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("chat/completions", {"messages": user, "n": 2}, "n: "),
        ("chat/completions", {"messages": user, "logit_bias": {"1": 5}}, "logit_bias: is not supported here"),
        ("chat/completions", {"messages": user, "response_format": {"type": "json_object"}}, "response_format.type: "),
        ("chat/completions", {"messages": []}, "messages: "),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}, "the last message must be one"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ("chat/completions", {"messages": user, "temperature": -1}, "temperature: "),
        ("responses", {"input": "a", "reasoning": {"effort": "high"}}, "reasoning.effort: "),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools.0"),
        ("responses", {"input": "a", "previous_response_id": "resp_nothing-1"}, "there is no response"),
    ]
    with served(tmp_path, policy, numbered()) as server:
        for path, body, reason in bad:
            answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body})
            assert answer.status_code in (400, 404), (path, body)
            assert reason in answer.json()["error"]["message"], answer.text
        both = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny", "messages": user, "n": 2, "x": 1})
        assert "n: " in both.json()["error"]["message"]
        assert "x: " in both.json()["error"]["message"]
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here; it is 'tiny'"):
            server.client().chat.completions.create(model="gpt-9", messages=user)  # type: ignore[arg-type]
        assert httpx.get(f"{server.url}/v1/embeddings").json()["error"]["message"].startswith("there is no GET")
        assert httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert httpx.post(f"{server.url}/v1/responses", content="{}").status_code == 415
        monkeypatch.setattr(app, "LARGEST_BODY", 1000)
        with pytest.raises(openai.APIStatusError) as refused:
            chat(server.client(), "a" * 2000)
        assert refused.value.status_code == 413
        assert server.recorder.episodes.opened == {}, "what is refused opens no episode"
        assert chat(server.client(), "a") == "answer 0"


def test_an_engine_that_fails_is_an_error_of_one_request(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        server.engine.fails = [EngineError("out of memory")]
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            chat(client, "a")
        server.engine.fails = [EngineError("out of memory")]
        with pytest.raises(openai.APIError, match="out of memory"):
            list(client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], stream=True))
        assert chat(client, "a") == "answer 0"
        [row] = rewarded(server, client, name)
        assert server.engine.open_sessions == 0
    assert "failed_turns:2" in row.tags


def test_episodes_without_requests_are_stored_unscored(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered(), idle_s=0.2) as server:
        chat(server.client(), "a")
        ends = time.monotonic() + 10
        while not (rows := server.store.all()) and time.monotonic() < ends:
            time.sleep(0.05)
    [row] = rows
    assert (row.reward, row.success) == (None, None)
    assert row.tags == ["unscored", "closed: no request for 0.2 s"]


def test_a_reward_ends_turns_under_way(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        chat(client, "a")
        server.engine.delay = 5.0
        found: list[BaseException] = []

        def ask() -> None:
            try:
                chat(client, "a", "answer 0", "b")
            except openai.APIError as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not server.engine.under_way:
            time.sleep(0.01)
        [row] = rewarded(server, client, name)
        thread.join(5)
    assert isinstance(found[0], openai.ConflictError)
    assert sampled(policy, row) == ["answer 0<|im_end|>"]

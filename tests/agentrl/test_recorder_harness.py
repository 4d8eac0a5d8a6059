"""What coding agents send, as it was recorded of Claude Code 2.1.197, Codex 0.169.0 and OpenCode 1.18.33, against the
recorder: the policy says what the scripted model said to them."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded_client import Client, tags
from recording import check, policy_for_tests, sampled, served

from agentrl.engines.base import EngineError
from agentrl.models.policy import Policy
from agentrl.recorder.reminders import reminder, takes_system_inside, with_reminders
from agentrl.recorder.wire import Caller, caller_of
from agentrl.schemas.trajectory import Message, Role


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


@pytest.mark.parametrize(
    ("name", "turns", "errors"),
    [
        ("claude_code_par", 2, 1),
        ("claude_code_think", 2, 0),
        ("codex_par", 2, 0),
        ("codex_think", 2, 0),
        ("codex_bad", 3, 0),
        ("opencode_think", 2, 0),
    ],
)
def test_a_run_is_one_row(policy: Policy, tmp_path: Path, name: str, turns: int, errors: int) -> None:
    with served(tmp_path, policy, str, turn_tokens=1000, room=8000) as server:
        client = Client(server, name)
        client.send_all()
        [row] = client.rows()
    check(policy, row)
    assert (row.n_steps, row.n_tool_errors, row.agent, row.reward) == (turns, errors, "main", 1.0)
    assert not tags(row, "written_turns")
    assert not tags(row, "kind:")
    assert len(sampled(policy, row)) == turns


def test_thinking_comes_back_by_its_signature(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str) as server:
        client = Client(server, "claude_code_think")
        client.send_all()
        [row] = client.rows()
    assert client.ids["sig-3"].startswith(f"{client.opened['id']}-"), "a signature is the name of its turn"
    first = next(message for message in row.messages if message.role is Role.ASSISTANT)
    assert first.reasoning.strip() == "I should list the files."
    assert {"ignored_thinking:2", "ignored_effort:2"} <= set(row.tags)


def test_sub_agents_have_the_row_that_called_them_as_parent(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str, turn_tokens=1000, room=8000) as server:
        client = Client(server, "claude_code_agent")
        client.send_all()
        rows = client.rows(0.5)
    main, *others = rows
    assert (main.agent, main.trajectory_id, main.n_steps) == ("main", client.opened["id"], 2)
    assert [row.agent for row in others] == ["agent-2", "agent-3"]
    assert [(row.parent_id, row.fork_at, row.n_steps) for row in others] == [(main.trajectory_id, 0, 2)] * 2
    assert [row.reward for row in rows] == [0.5] * 3
    assert [tags(row, "kind:") for row in others] == [["kind:subagent"]] * 2


@pytest.mark.parametrize(("name", "turns"), [("claude_code_title", 2), ("opencode_ls", 2)])
def test_a_title_is_no_part_of_the_work(policy: Policy, tmp_path: Path, name: str, turns: int) -> None:
    with served(tmp_path, policy, str, turn_tokens=1000, room=8000) as server:
        client = Client(server, name)
        client.send_all()
        main, title = client.rows()
    assert (title.agent, title.reward, title.success) == ("side", None, None)
    assert {"kind:side", "not-trained"} <= set(title.tags)
    assert (main.agent, main.reward, main.n_steps) == ("main", 1.0, turns)
    assert not tags(main, "kind:")


def test_a_summary_that_is_used_belongs_to_the_work(policy: Policy, tmp_path: Path) -> None:
    """After a bad summary the client asks again, and goes on with the second one."""
    asks = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
    begun = [user("count"), ("assistant", "one"), user("go on")]
    with served(tmp_path, policy, str) as server:
        client = Client(server, "claude_code_par")
        for words, conversation in (
            ("one", begun[:1]),
            ("two", begun),
            ("no text", [*begun, ("assistant", "two"), user(f"more\n{asks}")]),
            ("<summary>They counted to two.</summary>", [*begun, ("assistant", "two"), user(f"more\n{asks} Again.")]),
            ("three", [user("This session continues: They counted to two. Go on.")]),
        ):
            client.next_said = words
            messages = [{"role": role, "content": text} for role, text in conversation]
            body = {**client.requests[0]["body"], "messages": messages, "stream": False}
            head = {"x-api-key": client.opened["api_key"]}
            httpx.post(f"{client.opened['anthropic_base_url']}/v1/messages", json=body, headers=head).raise_for_status()
        work, unused, after = client.rows()
    assert [text.removesuffix("<|im_end|>") for text in sampled(policy, work)] == [
        "one",
        "two",
        "<summary>They counted to two.</summary>",
    ]
    assert (work.agent, after.agent) == ("main", "main")
    assert (work.reward, after.reward, unused.reward) == (1.0, 1.0, None)
    assert {"kind:compaction", "not-trained"} <= set(unused.tags)
    assert sampled(policy, unused) == ["no text<|im_end|>"]
    assert unused.parent_id == work.trajectory_id


def user(text: str) -> tuple[str, str]:
    return "user", text


@pytest.mark.parametrize(
    ("sent", "came"),
    [
        (20000.0, 20000),
        (1e3, 1000),
        (2**60 + 1, float(2**60)),
        (-0.0, 0),
        ({"b": 1, "a": ["Gruß", 2.0]}, {"a": ["Gruß", 2], "b": 1.0}),
    ],
)
def test_the_form_of_numbers_splits_no_row(policy: Policy, tmp_path: Path, sent: Any, came: Any) -> None:
    with served(tmp_path, policy, str, turn_tokens=1000) as server:
        client = Client(server, "claude_code_par")
        use, result = (client.requests[1]["body"]["messages"][number]["content"] for number in (2, 3))
        use[:], result[:] = use[:1], [item for item in result if item["tool_use_id"] == use[0]["id"]]
        use[0]["input"] = {"x": sent}
        assert client.send(0).is_success
        use[0]["input"] = {"x": came}
        assert client.send(1).is_success
        [row] = client.rows()
    assert not tags(row, "written_turns")
    assert row.n_steps == 2


def test_a_request_that_was_not_answered_is_answered_once(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str, delay=0.3, turn_tokens=1000) as server:
        client = Client(server, "claude_code_cut")
        with pytest.raises(httpx.ReadTimeout):
            client.send(0, timeout=0.25)
        again = client.send(0, stream=False)
        assert again.json()["type"] == "message"
        assert client.turns == 1
        server.engine.delay = 0.0
        client.send(0)
        assert client.turns == 2, "an answer that was received is another sample"
        assert len(client.rows()) == 2


def test_parallel_requests_of_one_prompt_are_two_samples(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str, delay=0.3) as server:
        client = Client(server, "claude_code_par")
        plain = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "a"}]}
        head = {"x-api-key": client.opened["api_key"]}
        url = f"{client.opened['anthropic_base_url']}/v1/messages"
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda _: httpx.post(url, json=plain, headers=head), range(2)))
        assert all(answer.is_success for answer in answers)
        assert client.turns == 2


def test_errors_have_the_form_that_clients_know(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str, room=60) as server:
        client = Client(server, "claude_code_think")
        long = client.send(0)
        assert (long.status_code, long.json()["error"]["type"]) == (400, "invalid_request_error")
        assert long.json()["error"]["message"].startswith("prompt is too long: ")
    with served(tmp_path / "2", policy, str) as server:
        client = Client(server, "claude_code_think")
        server.engine.fails = [EngineError("down")]
        client.requests[0]["body"]["stream"] = False
        busy = client.send(0)
        assert (busy.status_code, busy.json()["error"]["type"]) == (529, "overloaded_error")
        result = {"type": "tool_result", "tool_use_id": "a"}
        for change, reason in (
            ({"logit_bias": {"1": 2}}, "logit_bias: is not supported here"),
            ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management.edits.0.type"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content"),
            (
                {"messages": [{"role": "assistant", "content": [result]}]},
                "is a tool_result, which no assistant says",
            ),
            ({"max_token": 5}, "did you mean 'max_tokens'"),
        ):
            refused = client.send(0, **change)
            assert refused.status_code == 400, change
            assert reason in refused.json()["error"]["message"]
        unknown = httpx.post(f"{server.url}/v1/messages", json={}, headers={"x-api-key": "ep-none"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
        assert client.send(0, speed="fast").is_success
        [row] = client.rows()
        assert "ignored_speed:1" in row.tags


def test_what_a_client_asks_beside_turns(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str) as server:
        client = Client(server, "claude_code_think")
        assert httpx.head(server.url).status_code == 200
        assert httpx.head(client.opened["anthropic_base_url"]).status_code == 200
        head = {"x-api-key": client.opened["api_key"], "anthropic-version": "2023-06-01"}
        listed = httpx.get(f"{client.opened['anthropic_base_url']}/v1/models", headers=head).json()
        assert [model["id"] for model in listed["data"]] == ["tiny"]
        body = {name: value for name, value in client.requests[0]["body"].items() if name != "max_tokens"}
        url = f"{client.opened['anthropic_base_url']}/v1/messages/count_tokens"
        counted = httpx.post(url, json=body, headers=head).json()["input_tokens"]
        usage = client.send(0, stream=False).json()["usage"]
        assert usage["input_tokens"] == counted
        assert usage["output_tokens"] > 0


def test_the_smaller_limit_of_a_turn_counts(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str) as server:
        client = Client(server, "claude_code_think")
        assert client.requests[0]["body"]["max_tokens"] == 32000
        client.send(0, stream=False)
        assert server.engine.asked[-1].max_turn_tokens == 200


def test_a_model_of_another_name_is_refused_unless_any_is_accepted(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str) as server:
        assert Client(server, "claude_code_think").send(0, model="claude-haiku").status_code == 404
    with served(tmp_path / "2", policy, str, any_model=True) as server:
        client = Client(server, "claude_code_think")
        assert client.send(0, model="claude-haiku").is_success
        [row] = client.rows()
    assert "other_model:1" in row.tags


def test_system_messages_inside_become_reminders() -> None:
    system, words, tool = Role.SYSTEM, Role.USER, Role.TOOL

    def written(first: bool, *pairs: tuple[Role, str]) -> list[tuple[Role, str]]:
        messages = with_reminders([Message(role=role, content=text) for role, text in pairs], first)
        return [(message.role, message.content) for message in messages]

    assert written(True, (system, "a"), (system, "b"), (words, "c")) == [(system, "a\n\nb"), (words, "c")]
    assert written(True, (words, "a"), (system, "b")) == [(words, f"a\n\n{reminder('b')}")]
    assert written(False, (system, "b"), (words, "a")) == [(words, f"{reminder('b')}\n\na")]
    assert written(True, (tool, "a"), (system, "b")) == [(tool, "a"), (words, reminder("b"))]
    assert written(True, (words, "a"), (words, "b")) == [(words, "a"), (words, "b")], "what users say stays apart"


def test_a_template_is_asked_whether_it_takes_system_messages_inside(policy: Policy) -> None:
    assert takes_system_inside(policy.codec)
    template = policy.codec.template
    strict = copy.copy(policy.codec)
    strict.template = copy.copy(template)

    def raises(messages: list[Message], generate: bool = False, tools: str = "[]") -> str:
        if any(message.role is Role.SYSTEM for message in messages[1:]):
            raise ValueError("System message must be at the beginning.")
        return template.render(messages, generate, tools)

    strict.template.render = raises  # type: ignore[method-assign]
    assert not takes_system_inside(strict)


@pytest.mark.parametrize(
    ("headers", "caller"),
    [
        ({}, Caller()),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a1"}, Caller("s", "a1")),
        (
            {"session-id": "t", "x-codex-turn-metadata": '{"request_kind": "compaction", "agent_name": "/root"}'},
            Caller("t", "", "compaction"),
        ),
        (
            {"x-codex-turn-metadata": '{"request_kind": "prewarm", "agent_name": "/root/b"}'},
            Caller("", "/root/b", "side"),
        ),
        ({"x-session-id": "o", "x-codex-turn-metadata": "[not JSON"}, Caller("o")),
    ],
)
def test_headers_say_who_asks(headers: dict[str, str], caller: Caller) -> None:
    assert caller_of(headers) == caller

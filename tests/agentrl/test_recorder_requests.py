"""What the recorder refuses, with which reason, and clients that leave, come back or reward twice."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from recording import chat, numbered, open_episode, policy_for_tests, rewarded, sampled, served

from agentrl.engines.base import EngineError
from agentrl.models.policy import Policy
from agentrl.recorder import app, recorder
from agentrl.recorder.listening import bound


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def test_a_request_that_is_sent_again_joins_the_turn(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered(), delay=0.5) as server:
        opened = httpx.post(f"{server.url}/episodes", json={}).json()
        client = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=6, timeout=0.3)
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
        while server.engine.under_way:
            time.sleep(0.01)
        server.engine.delay = 0.0
        assert chat(client, "a", "answer 0", "c") == "answer 2"
        [row] = rewarded(server, client, name)
    assert sampled(policy, row) == ["answer 0<|im_end|>", "answer 2<|im_end|>"]
    assert "undelivered:1" in row.tags


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
    assert [(component.name, component.value) for component in row.reward_components] == [
        ("right", 1.0),
        ("slow", -2.0),
    ]


def test_what_cannot_be_served_is_refused_with_its_reason(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = [{"role": "user", "content": "a"}]
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("chat/completions", {"messages": user, "n": 2}, "n: "),
        ("chat/completions", {"messages": user, "logit_bias": {"1": 5}}, "logit_bias: is not supported here"),
        (
            "chat/completions",
            {"messages": user, "temprature": 0.5},
            "temprature: is not known here; did you mean",
        ),
        ("chat/completions", {"messages": user, "response_format": {"type": "grammar"}}, "response_format.type: "),
        ("chat/completions", {"messages": []}, "messages: "),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}, "the last message must be one"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ("chat/completions", {"messages": user, "temperature": -1}, "temperature: "),
        ("responses", {"input": "a", "tools": [{"type": "no_such_tool"}]}, "tools.0"),
        ("responses", {"input": "a", "previous_response_id": "resp_nothing-1"}, "there is no response"),
    ]
    with served(tmp_path, policy, numbered()) as server:
        for path, body, reason in bad:
            answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body})
            assert answer.status_code in (400, 404), (path, body)
            assert reason in answer.json()["error"]["message"], answer.text
        both = httpx.post(
            f"{server.url}/v1/chat/completions", json={"model": "tiny", "messages": user, "n": 2, "seed": "x"}
        )
        assert "n: " in both.json()["error"]["message"]
        assert "seed: " in both.json()["error"]["message"]
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here; this server serves 'tiny'"):
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


def test_a_reward_ends_turns_under_way(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered()) as server:
        client, name = open_episode(server)
        chat(client, "a")
        server.engine.delay = 5.0
        matches: list[BaseException] = []

        def ask() -> None:
            try:
                chat(client, "a", "answer 0", "b")
            except openai.APIError as error:
                matches.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not server.engine.under_way:
            time.sleep(0.01)
        [row] = rewarded(server, client, name)
        thread.join(5)
    assert isinstance(matches[0], openai.ConflictError)
    assert sampled(policy, row) == ["answer 0<|im_end|>"]


def test_the_body_of_an_answer_does_not_wait_for_a_receipt() -> None:
    with bound("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

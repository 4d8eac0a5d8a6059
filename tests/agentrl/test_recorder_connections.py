"""Requests that never arrive, answers that nobody reads, and bodies that no column can hold end, or are refused."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from recording import Served, chat, numbered, policy_for_tests, served

from agentrl.models.policy import Policy
from agentrl.recorder import app, connections
from agentrl.recorder.episode import LONGEST_NAME


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((connections, "HEAD_S"), (app, "BODY_S"), (connections, "STALLED_S")):
        monkeypatch.setattr(module, name, 0.3)


def told(server: Served, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the server says until it closes the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        text = b""
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            while new := client.recv(2**16):
                text += new
        except ConnectionError:
            pass
    return text


POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
HALF = b"%scontent-length: 1000\r\n\r\n{" % POST


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([], b""),
        ([b"POST /v1/chat"], b"408 "),
        ([POST], b"408 "),
        ([POST, *[b"x-slow: 1\r\n"] * 8], b""),  # the answer is lost if the client still sends
        ([b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", POST], b"408 "),
        ([HALF], b"408 "),
        ([HALF, *[b" "] * 8], b""),
        ([b"%stransfer-encoding: chunked\r\n\r\n5\r\n" % POST], b"408 "),
        ([POST + b"x-long: " + b"x" * 2**17], b"431 "),
        ([POST.replace(b": 127.0.0.1", b": [::1") + b"content-length: 2\r\n\r\n{}", b"GET"], b"400 "),
        ([b"GET /v1/%ED%A0%80 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"GET"], b"404 "),
        ([b"\x16\x03\x01 no http\r\n\r\n"], b"400 "),
    ],
)
def test_a_request_that_does_not_arrive_is_given_up(
    parts: list[bytes], status: bytes, policy: Policy, tmp_path: Path, soon: None
) -> None:
    with served(tmp_path, policy, numbered()) as server:
        start = time.monotonic()
        text = told(server, *parts, pause=0.05)
        assert time.monotonic() - start < 4
        assert status in text
        assert len(server._server.server_state.connections) == 0
        assert chat(server.client(), "a") == "answer 0", "others are answered"


def test_an_answer_that_nobody_reads_is_given_up(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.3)
    with served(tmp_path, policy, lambda _: "a") as server:
        opened = httpx.post(f"{server.url}/episodes", json={}).json()
        body = json.dumps({"model": "tiny", "input": "a", "metadata": {"echo": "x" * 2**23}}).encode()
        head = POST.replace(b"/v1/chat/completions", f"/episodes/{opened['id']}/v1/responses".encode())
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
            client.recv(10)  # the answer has begun
            ends = time.monotonic() + 5
            connections_now = server._server.server_state.connections
            while connections_now and time.monotonic() < ends:
                time.sleep(0.05)
            assert not connections_now
        [episode] = server.recorder.episodes.opened.values()
        assert [turn.delivered for turn in episode.tree.turns] == [False], "nobody has all of it"


HALF_A_PAIR = "\ud800"
TALK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/episodes", {"sample_index": 2**31}, "sample_index"),
        ("/episodes", {"sample_index": 1795475399000}, "sample_index"),
        ("/episodes", {"level": 10**30}, "level"),
        ("/episodes", {"prompt": HALF_A_PAIR}, "prompt"),
        ("/episodes", {"tags": ["a", f"b{HALF_A_PAIR}"]}, "tags.1"),
        ("/episodes", {"task_id": "x" * (LONGEST_NAME + 1)}, "task_id"),
        ("/episodes", {"tags": ["x"] * 10_000}, "tags"),
        ("/reward", {"reward": 1, "components": {HALF_A_PAIR: 1}}, r"components.\ud800"),
        ("/reward", {"reward": 1, "components": {"x" * (LONGEST_NAME + 1): 1}}, "components"),
        ("/reward", {"reward": 10**400}, "reward"),
        ("/v1/chat/completions", TALK | {"messages": [{"role": "user", "content": HALF_A_PAIR}]}, "messages.0.content"),
        ("/v1/chat/completions", TALK | {HALF_A_PAIR: 1}, r"\ud800"),
        ("/v1/chat/completions", TALK | {"metadata": {"a": float("nan")}}, "metadata.a"),
        ("/v1/chat/completions", TALK | {"top_k": 10**30}, "top_k"),
        ("/v1/chat/completions", TALK | {"max_tokens": 10**30}, "max_tokens"),
        ("/v1/chat/completions", TALK | {"seed": 10**30}, "seed"),
        ("/v1/chat/completions", TALK | {"tool_choice": {"function": "weather"}}, "tool_choice"),
        ("/v1/chat/completions", TALK | {"tool_choice": {"name": ["weather"]}}, "tool_choice"),
        ("/v1/responses", {"model": "tiny", "input": "a", "instructions": HALF_A_PAIR}, "instructions"),
        ("/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 2**31}, "max_output_tokens"),
    ],
)
def test_what_no_column_can_hold_is_refused_with_its_field(
    path: str, body: dict[str, Any], field: str, policy: Policy, tmp_path: Path
) -> None:
    with served(tmp_path, policy, numbered()) as server:
        opened = httpx.post(f"{server.url}/episodes", json={}).json()
        head = {"authorization": f"Bearer {opened['api_key']}"} if path == "/reward" else {}
        url = f"{server.url}/episodes/{opened['id']}{path}" if path == "/reward" else server.url + path
        content = json.dumps(body)  # as Python's clients write it, halves of pairs as escapes and NaN included
        answer = httpx.post(url, content=content, headers={"content-type": "application/json", **head})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(field), answer.text
        assert field in answer.json()["error"]["message"]
        assert len(server.recorder.episodes.opened) == 1, "what is refused opens no episode"


def test_a_bug_of_ours_is_an_answer_too(policy: Policy, tmp_path: Path) -> None:
    def says(_: str) -> str:
        raise ZeroDivisionError("of the engine")

    with served(tmp_path, policy, says) as server:
        for stream in (False, True):
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=TALK | {"stream": stream})
            assert "ZeroDivisionError: of the engine" in answer.text
            assert '"code":"internal_error"' in answer.text.replace('": ', '":')

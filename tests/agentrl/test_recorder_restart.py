"""Recorders that are killed, stores that fail, and episodes that nobody ends: no finished turn is lost."""

import json
import time
from pathlib import Path

import httpx
import pytest
from recording import RowsInMemory, chat, check, numbered, open_episode, policy_for_tests, rewarded, sampled, served

from agentrl.models.policy import Policy


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


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
    assert sorted(manifest.episode_id for manifest in store.all()) == sorted([name, finished])
    with served(tmp_path, policy, lambda _: "", store) as server:
        assert server.said == []
    assert len(store.all()) == 2, "what is stored is not stored again"


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_turn_is_trained_on_only_if_it_was_received(
    goes_on: bool, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed between the line of the last turn and its answer; tests that kill it really are slow."""
    store = RowsInMemory()
    with served(tmp_path, policy, lambda text: "again" if "go on" in text else "answer", store) as server:
        client, name = open_episode(server)
        chat(client, "a")
        server.on_loop(lambda: None)  # this thread has the answer a moment before the server knows
        monkeypatch.setattr(server.recorder, "received", lambda reply: None)
        chat(client, "a", "answer", "go on")
        server.killed = True
    with served(tmp_path, policy, lambda _: "last", store) as server:
        client.base_url = f"{server.url}/episodes/{name}/v1"
        if goes_on:  # it had received the answer after all: its next request says so
            assert chat(client, "a", "answer", "go on", "again", "go on") == "last"
        [row] = rewarded(server, client, name)
    texts = ["answer<|im_end|>"] + ["again<|im_end|>", "last<|im_end|>"] * goes_on
    assert sampled(policy, row) == texts
    assert ("undelivered:1" in row.tags) is not goes_on


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
    store = RowsInMemory(fails=[OSError("no space left")] * 1000)
    with served(tmp_path, policy, numbered(), store) as server:
        client, name = open_episode(server)
        chat(client, "a")
        with pytest.warns(UserWarning, match="no space left"):
            assert rewarded(server, client, name) == []
        state = httpx.get(f"{server.url}/episodes/{name}", headers={"authorization": f"Bearer {client.api_key}"})
        assert state.json() == {"id": name, "state": "closed"}
        store.fails = []
        assert len(server.flush()) == 1
        state = httpx.get(f"{server.url}/episodes/{name}", headers={"authorization": f"Bearer {client.api_key}"})
        assert state.json() == {"id": name, "state": "stored"}


def test_episodes_without_requests_are_stored_unscored(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, numbered(), idle_s=0.2) as server:
        chat(server.client(), "a")
        ends = time.monotonic() + 10
        while not (rows := server.store.all()) and time.monotonic() < ends:
            time.sleep(0.05)
    [row] = rows
    assert (row.reward, row.success) == (None, None)
    assert row.tags == ["unscored", "closed: no request for 0.2 s"]

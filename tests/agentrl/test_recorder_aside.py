"""Episodes that cannot be read or stored are set aside alone, are said, and can be looked at and released."""

import json
from pathlib import Path

import httpx
import pytest
from recording import RowsInMemory, Served, chat, numbered, open_episode, policy_for_tests, rewarded, sampled, served

from agentrl.models.policy import Policy
from agentrl.recorder.aside import UnstorableError, listed, readable, release
from agentrl.recorder.episode import DamagedRecordingError
from agentrl.schemas.trajectory import Trajectory


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def refuses(error: Exception) -> RowsInMemory:
    return RowsInMemory(refuses=lambda row: error if row.task_id == "bad" else None)


def recorded(server: Served, task: str) -> str:
    client, name = open_episode(server, task_id=task)
    chat(client, task)
    url, key = f"{server.url}/episodes/{name}", {"authorization": f"Bearer {client.api_key}"}
    assert httpx.post(f"{url}/reward", json={"reward": 1}, headers=key).is_success
    server.flush()
    return name


@pytest.mark.parametrize("error", [UnstorableError("level of x is 1e30"), RuntimeError("overflow")])
def test_an_episode_that_cannot_be_stored_is_set_aside_alone(error: Exception, policy: Policy, tmp_path: Path) -> None:
    store = refuses(error)
    with served(tmp_path, policy, numbered(), store) as server:
        before = recorded(server, "good")
        server.hold()
        client, bad = open_episode(server, task_id="bad")
        chat(client, "x")
        other, good = open_episode(server, task_id="good")
        chat(other, "y")
        for entry, name in ((client, bad), (other, good)):
            key = {"authorization": f"Bearer {entry.api_key}"}
            assert httpx.post(f"{server.url}/episodes/{name}/reward", json={"reward": 1}, headers=key).is_success
        with pytest.warns(UserWarning, match=f"{bad} is set aside: .*{error}") as warned:
            server.let_go()
        assert len(warned) == 1
        state = httpx.get(f"{server.url}/episodes/{bad}", headers={"authorization": f"Bearer {client.api_key}"}).json()
        assert state["state"] == "set_aside"
        assert str(error) in state["reason"]
        after = recorded(server, "good")
    assert [row.episode_id for row in store.all()] == [before, good, after], "it keeps no other one waiting"
    [entry] = listed(tmp_path)
    assert (entry.name, str(error) in entry.reason) == (bad, True)
    with served(tmp_path, policy, numbered(), store) as server:
        where = f"recording {entry.recording}: 1 episodes were set aside before; see `agentrl recordings list`"
        assert server.said == [where]
        recorded(server, "good")

    with pytest.raises(type(error)):
        release(entry, store)
    assert entry.path.exists(), "what is refused again stays"
    store.refuses = lambda _: None
    assert release(entry, store) == ([bad], 0)
    assert bad in store.stored(entry.recording)
    assert list(listed(tmp_path)) == []


def test_a_store_that_takes_nothing_sets_nothing_aside(policy: Policy, tmp_path: Path) -> None:
    store = RowsInMemory(refuses=lambda _: RuntimeError("no such bucket"))
    with served(tmp_path, policy, numbered(), store) as server:
        with pytest.warns(UserWarning, match="3 recorded episodes cannot be stored yet: no such bucket"):
            names = [recorded(server, "good") for _ in range(3)]
        store.refuses = lambda _: None
        server.flush()
    assert [row.episode_id for row in store.all()] == names
    assert list(listed(tmp_path)) == []


def test_rows_that_an_append_stored_before_it_failed_are_not_stored_twice(policy: Policy, tmp_path: Path) -> None:
    class Doubtful(RowsInMemory):
        def keep(self, recording: str, rows: list[Trajectory]) -> None:
            super().keep(recording, rows)
            if len(self.all()) == 1:
                raise TimeoutError("no answer")

    store = Doubtful()
    with served(tmp_path, policy, numbered(), store) as server:
        with pytest.warns(UserWarning, match="no answer"):
            first = recorded(server, "a")
        second = recorded(server, "b")
    assert [row.episode_id for row in store.all()] == [first, second]


def left_open(server: Served, turns: int) -> tuple[str, str]:
    client, name = open_episode(server, task_id="t")
    texts = ["a"]
    for _ in range(turns):
        texts += [chat(client, *texts), "go on"]
    return name, client.api_key


def test_a_damaged_file_does_not_keep_a_server_from_starting(
    policy: Policy, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    store = RowsInMemory()
    with served(tmp_path, policy, numbered(), store) as server:
        (damaged, _), (headless, _), (swapped, _) = (left_open(server, 3) for _ in range(3))
        whole, key = left_open(server, 1)
        server.killed = True
    paths = {name: next(tmp_path.glob(f"*/{name.rpartition('-')[2]}.jsonl")) for name in (damaged, headless, swapped)}
    lines = paths[damaged].read_bytes().splitlines()
    turn = max(number for number, line in enumerate(lines) if b'"turn"' in line)
    lines[turn] = lines[turn][:40] + bytes(len(lines[turn]) - 40)  # as a power loss may leave it
    paths[damaged].write_bytes(b"\n".join(lines) + b"\n")
    paths[headless].write_bytes(bytes(paths[headless].stat().st_size - 1) + b"\n")
    paths[swapped].write_bytes(paths[damaged].read_bytes())
    with served(tmp_path, policy, numbered(), store) as server:
        recording = paths[damaged].parent.name
        assert server.said == [
            f"recording {recording}: 1 episodes go on",
            f"recording {recording}: 3 episodes are set aside, since their files cannot be read; "
            "see `agentrl recordings list`",
        ]
        [row] = rewarded(server, server.client(key), whole)
        assert len(sampled(policy, row)) == 1
    text = f"{damaged} is set aside: line {turn + 1} of {len(lines)} cannot be read"
    assert [True for warning in recwarn if text in str(warning.message)] == [True]
    by_name = {entry.name: entry for entry in listed(tmp_path)}
    assert set(by_name) == {damaged, headless, swapped}
    told = readable(by_name[damaged])
    assert [message["content"] for message in told["messages"]] == ["a", "answer 0", "go on", "answer 1"]  # type: ignore[attr-defined]
    assert told["lost_lines"] == len(lines) - turn
    assert release(by_name[damaged], store) == ([damaged], len(lines) - turn)
    row = store.all()[-1]
    assert sampled(policy, row) == ["answer 0<|im_end|>", "answer 1<|im_end|>"]
    assert {"unscored", "closed: released", f"lost_lines:{len(lines) - turn}"} <= set(row.tags)
    assert "readable" in readable(by_name[headless])
    with pytest.raises(DamagedRecordingError, match="line 1 of 1"):
        release(by_name[headless], store)
    with pytest.raises(DamagedRecordingError, match="in the file of another"):
        release(by_name[swapped], store)


def test_a_file_of_before_the_bounds_is_set_aside_corrected_and_released(policy: Policy, tmp_path: Path) -> None:
    store = RowsInMemory()
    with served(tmp_path, policy, numbered(), store) as server:
        name, _ = left_open(server, 1)
        server.killed = True
    [path] = tmp_path.glob("*/*.jsonl")
    head, _, rest = path.read_bytes().partition(b"\n")
    about = json.loads(head)
    about["episode"]["about"]["sample_index"] = 2**31
    path.write_bytes(json.dumps(about).encode() + b"\n" + rest)
    with pytest.warns(UserWarning, match="sample_index is '2147483648'"), served(tmp_path, policy, numbered(), store):
        pass
    [entry] = listed(tmp_path)
    with pytest.raises(DamagedRecordingError, match="sample_index"):
        release(entry, store)
    entry.path.write_bytes(head + b"\n" + rest)
    assert release(entry, store) == ([name], 0)

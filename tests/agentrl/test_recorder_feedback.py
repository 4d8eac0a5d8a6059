"""Thumbs, stars, corrections and comments of an agent's users: kept before they are acknowledged, and annotations of
the episode's rows in the end."""

import json
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest
from recording import RowsInMemory, Served, policy_for_tests, served

from agentrl.models.policy import Policy
from agentrl.recorder.feedback import Place, PostedFeedback, of_rows


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def post(server: Served, path: str, key: str, body: Any, status: int = 200) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == status, answer.text
    return answer.json()


def opened(server: Served, turns: int = 2) -> tuple[str, str]:
    """Name and key of an episode that has had so many turns."""
    episode = post(server, "/episodes", "none", {}, 201)
    client = server.client(episode["api_key"], f"/episodes/{episode['id']}/v1")
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    for _ in range(turns):
        answer = client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "again"}]
    return episode["id"], episode["api_key"]


def tell(server: Served, name: str, key: str, body: Any, status: int = 200) -> Any:
    return post(server, f"/episodes/{name}/feedback", key, body, status)


def test_feedback_of_open_and_closed_episodes_reaches_the_rows(tmp_path: Path, policy: Policy) -> None:
    with served(tmp_path, policy, lambda _: "hello again") as server:
        name, key = opened(server)
        assert (
            tell(server, name, key, {"thumbs": "up", "stars": 4, "turn": 0, "id": "one", "author": "ann"})["kept"] == 2
        )
        tell(server, name, key, {"thumbs": "up", "stars": 4, "turn": 0, "id": "one", "author": "ann"})  # sent again
        tell(server, name, key, {"correction": "Sunny.", "turn": 1})
        assert server.store.annotations == {}  # the row is not there yet
        post(server, f"/episodes/{name}/reward", key, {"reward": 1})
        server.flush()
        tell(server, name, key, {"comment": "later", "turn": 1})
        tell(server, name, "none", {"thumbs": "down"})  # by the server's own key
        told = [
            (a.name, a.turn, a.value or a.comment or a.correction, a.author) for a in server.store.annotations.values()
        ]
    assert {a.trajectory_id for a in server.store.annotations.values()} == {name}
    assert told[:2] == [("thumbs", 0, "up", "ann"), ("stars", 0, "4", "ann")]
    assert (told[2][:2], json.loads(told[2][2] or "")["content"]) == (("correction", 1), "Sunny.")
    assert told[3:] == [("comment", 1, "later", "user"), ("thumbs", None, "down", "user")]


def test_what_is_wrong_is_said_and_keys_are_checked(tmp_path: Path, policy: Policy) -> None:
    with served(tmp_path, policy, lambda _: "hello", api_key="secret") as server:
        episode = post(server, "/episodes", "secret", {}, 201)
        name, key = episode["id"], episode["api_key"]
        other = post(server, "/episodes", "secret", {}, 201)
        assert tell(server, name, key, {"thumbs": "up"}, 409)["error"]["code"] == "no_turn"
        tell(server, name, other["api_key"], {"thumbs": "up"}, 401)
        tell(server, name, "wrong", {"thumbs": "up"}, 401)
        tell(server, "recorded-00000000-000000", key, {"thumbs": "up"}, 401)
        tell(server, "recorded-00000000-000000", "secret", {"thumbs": "up"}, 404)
        client = server.client(key, f"/episodes/{name}/v1")
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        for body in ({}, {"thumbs": "sideways"}, {"stars": 6}, {"correction": " "}, {"thumb": "up"}):
            tell(server, name, key, body, 400)
        refused = tell(server, name, key, {"thumbs": "up", "turn": 7}, 404)["error"]
        assert "has no turn 7; its turns are 0" in refused["message"]


def test_feedback_that_was_acknowledged_outlives_a_server_that_is_killed(tmp_path: Path, policy: Policy) -> None:
    store = RowsInMemory()
    with served(tmp_path, policy, lambda _: "hello", store) as server:
        name, key = opened(server)
        tell(server, name, key, {"thumbs": "down", "turn": 1})
        server.killed = True
    with served(tmp_path, policy, lambda _: "hello", store) as server:
        tell(server, name, key, {"comment": "and more"})
        post(server, f"/episodes/{name}/reward", key, {"reward": 0})
        server.flush()
        assert [(a.name, a.turn) for a in store.annotations.values()] == [("thumbs", 1), ("comment", None)]
    with served(tmp_path, policy, lambda _: "hello", store) as server:  # knows the episode by its row alone
        tell(server, name, "none", {"stars": 2})
        assert "leave turn out" in tell(server, name, "none", {"stars": 2, "turn": 0}, 404)["error"]["message"]
    assert len(store.annotations) == 3


def test_they_are_annotations_of_a_real_buffer(tmp_path: Path, policy: Policy) -> None:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.flows.api.store import Store
    from agentrl.pipelines.serve import BufferRows

    rows: Any = BufferRows(TrajectoryBuffer(tmp_path / "store"))
    with served(tmp_path / "recordings", policy, lambda _: "hello", rows) as server:
        name, key = opened(server, 1)
        tell(server, name, key, {"thumbs": "up", "turn": 0})
        post(server, f"/episodes/{name}/reward", key, {"reward": 1})
        server.on_loop(server.recorder.episodes.flush)
        tell(server, name, key, {"stars": 5})
    store = Store(tmp_path / "store")
    assert store.annotations.select("trajectory_id", "name", "turn").rows() == [
        (name, "thumbs", 0),
        (name, "stars", None),
    ]
    joined = store.sql("select reward from trajectories join annotations using (trajectory_id) where name = 'stars'")
    assert joined["reward"].to_list() == [1.0]
    assert store.annotations.filter(pl.col("source") == "recorder").height == 2


def test_a_correction_of_an_episode_is_of_its_last_answer_and_not_of_a_side_call() -> None:
    turns = {0: Place(0, 0), 1: Place(0, 1), 2: Place(1, 2), 3: Place(2, 0, trained=False)}
    posted = PostedFeedback(thumbs="down", correction="Sunny.")
    annotations = [(a.name, a.trajectory_id, a.turn) for a in of_rows([posted], ["a", "b", "title"], turns)]
    assert annotations == [("thumbs", "a", None), ("correction", "b", 2)]
    assert [a.turn for a in of_rows([posted], ["a"], {})] == [None, None]

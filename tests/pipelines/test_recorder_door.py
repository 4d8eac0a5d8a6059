"""Whatever JSON the recorder's door accepts can be stored: rows of any accepted episode reach a real buffer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording import Served, calls, policy_for_tests, served

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.table.ingest import as_table
from agentrl.datastore.table.validation import validate
from agentrl.flows import cli
from agentrl.models.policy import Policy
from agentrl.pipelines.serve import FOLDER, BufferRows
from agentrl.recorder.aside import UnstorableError, listed
from agentrl.recorder.episode import About, PostedReward, RecordedEpisode
from agentrl.recorder.wire import ApiError, read
from agentrl.schemas.trajectory import Message, Role, Trajectory

ANY_TEXT = st.one_of(
    st.text(st.characters(codec=None), max_size=20),  # halves of surrogate pairs too
    st.sampled_from(["", "\x00", "\ud800", "x" * 1001, "x" * 100_000, "\u2028", "NaN", "{}", '"\\ud800"', "1" * 5000]),
)
ANY_NUMBER = st.one_of(
    st.builds(
        lambda bits, more: 2**bits + more, st.sampled_from([8, 31, 32, 53, 63, 64, 1000, 2000]), st.integers(-1, 1)
    ),
    st.sampled_from([-1, 10**30, 1795475399000]),
    st.floats(),
)
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), ANY_NUMBER, ANY_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ANY_TEXT, inner, max_size=3)),
    max_leaves=5,
)


@st.composite
def odd(draw: st.DrawFn, usual: dict[str, Any], strange: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    """What the door takes, with at most two fields that are strange, as a client's mistake would be."""
    names = draw(st.lists(st.sampled_from(sorted(strange)), max_size=2, unique=True))
    return usual | {name: draw(st.one_of(strange[name], strange[name], ANY)) for name in names}


ABOUT = odd(
    {"task_id": "t"},
    dict.fromkeys(("task_id", "group_id", "env", "split", "prompt"), ANY_TEXT)
    | {"sample_index": ANY_NUMBER, "level": ANY_NUMBER, "tags": st.lists(ANY_TEXT, max_size=3)},
)
REWARD = odd(
    {"reward": 1},
    {
        "reward": ANY_NUMBER,
        "success": st.booleans(),
        "components": st.dictionaries(ANY_TEXT, ANY_NUMBER, max_size=3),
    },
)
CALL = odd({"id": "c", "function": {"name": "a"}}, {"id": ANY_TEXT}) | st.builds(
    lambda function: {"id": "c", "function": function},
    odd({"name": "a", "arguments": "{}"}, {"name": ANY_TEXT, "arguments": ANY_TEXT}),
)
USER = odd({"role": "user", "content": "a"}, {"content": ANY_TEXT, "name": ANY_TEXT})
MESSAGE = st.one_of(
    USER,
    odd(
        {"role": "assistant", "content": "b"},
        {"content": ANY_TEXT, "tool_calls": st.lists(CALL, max_size=2), "reasoning": ANY_TEXT},
    ),
    odd({"role": "tool", "content": "c", "tool_call_id": "c"}, {"content": ANY_TEXT, "tool_call_id": ANY_TEXT}),
)
TOOL = st.builds(
    lambda function: {"type": "function", "function": function},
    odd({"name": "a"}, {"name": ANY_TEXT, "description": ANY_TEXT, "parameters": st.dictionaries(ANY_TEXT, ANY)}),
)
CHAT = odd(
    {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
    {
        "messages": st.builds(lambda some, last: [*some, last], st.lists(MESSAGE, max_size=3), USER),
        "tools": st.lists(TOOL, max_size=2),
        "tool_choice": ANY,
        "metadata": ANY,
        "stop": st.lists(ANY_TEXT, max_size=2),
        "stream": st.just(True),
    }
    | dict.fromkeys(("temperature", "top_p", "top_k", "seed", "max_tokens"), ANY_NUMBER),
)


def says(asked: str) -> Message | str:
    """A policy that calls tools with arguments that are no Unicode, too."""
    return '<tool_call>{"name": "a", "arguments": {"b": "\\ud800"}}</tool_call>' if len(asked) % 2 else calls("Rome")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


@pytest.fixture(scope="module")
def server(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("door")
    rows: Any = BufferRows(TrajectoryBuffer(folder / "store"))
    with served(folder / FOLDER, policy, says, rows, room=400_000) as item:
        yield item


CLIENT = httpx.Client(timeout=60)


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    with CLIENT:
        yield


def post(url: str, body: Any, key: str = "none") -> httpx.Response:
    content = json.dumps(body).encode()
    head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    answer = CLIENT.post(url, content=content, headers=head)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert answer.status_code < 500, answer.text
        assert error["message"]
    return answer


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(about=ABOUT, chats=st.lists(CHAT, min_size=1, max_size=2), reward=REWARD)
def test_what_the_door_accepts_can_be_stored(
    about: dict[str, Any], chats: list[dict[str, Any]], reward: dict[str, Any], server: Served
) -> None:
    answer = post(f"{server.url}/episodes", about)
    opened = (answer if answer.is_success else post(f"{server.url}/episodes", {})).json()
    plain = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    for body in (*chats, plain):
        post(f"{opened['base_url']}/chat/completions", body, opened["api_key"])
    url = f"{server.url}/episodes/{opened['id']}/reward"
    ids = next(
        answer.json()["rows"]
        for body in (reward, {"reward": 1})
        if (answer := post(url, body, opened["api_key"])).is_success
    )
    assert ids, "at least the plain turn was received"
    server.on_loop(server.recorder.episodes.flush)
    episodes = server.recorder.episodes
    assert episodes.aside == {}
    assert episodes.state(opened["id"]) == {"state": "stored"}
    assert set(ids) <= episodes.store.stored(episodes.recording)


@pytest.fixture(scope="module")
def recorded(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> RecordedEpisode:
    with served(tmp_path_factory.mktemp("recorded"), policy, lambda _: "b") as server:
        opened = post(f"{server.url}/episodes", {}).json()
        plain = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        post(f"{opened['base_url']}/chat/completions", plain, opened["api_key"])
        [episode] = server.recorder.episodes.opened.values()
    return episode


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(about=ABOUT, reward=REWARD)
def test_what_is_accepted_of_an_episode_fits_the_columns(
    about: dict[str, Any], reward: dict[str, Any], recorded: RecordedEpisode
) -> None:
    try:
        recorded.about = read(About, json.dumps(about).encode())
        recorded.outcome = read(PostedReward, json.dumps(reward).encode())
    except ApiError:
        return
    assert validate(as_table(recorded.rows())) == []


def test_an_episode_that_was_set_aside_is_looked_at_and_released_by_command(
    policy: Policy, tmp_path: Path, capsys: Any
) -> None:
    class Picky(BufferRows):
        def keep(self, recording: str, rows: list[Trajectory]) -> None:
            if any(row.level == 7 for row in rows):
                raise UnstorableError("level of it is 7")
            super().keep(recording, rows)

    buffer = TrajectoryBuffer(tmp_path)
    rows: Any = Picky(buffer)
    names = []
    with served(tmp_path / FOLDER, policy, says, rows) as server:
        server.hold()
        for level in (7, 1):
            opened = post(f"{server.url}/episodes", {"level": level}).json()
            plain = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            post(f"{opened['base_url']}/chat/completions", plain, opened["api_key"])
            post(f"{server.url}/episodes/{opened['id']}/reward", {"reward": 0.5}, opened["api_key"])
            names.append(opened["id"])
        with pytest.warns(UserWarning, match=f"{names[0]} is set aside"):
            server.let_go()
    bad, good = names
    store = ["--store", str(tmp_path)]
    assert cli.call(["recordings", "list", "--json", *store]) == 0
    [told] = json.loads(capsys.readouterr().out)
    assert (told["id"], told["reason"]) == (bad, "level of it is 7")
    assert cli.call(["recordings", "show", bad, *store]) == 0
    printed = capsys.readouterr().out
    assert "reason: level of it is 7" in printed
    assert "user: hello" in printed
    assert "'level': 7" in printed
    assert cli.call(["recordings", "show", good, *store]) == 2
    assert "is set aside" in capsys.readouterr().err
    assert cli.call(["recordings", "release", bad, *store]) == 0
    assert f"{bad}: 1 rows stored" in capsys.readouterr().out
    assert {row.level for row in buffer.get_many(names)} == {1, 7}
    assert list(listed(tmp_path / FOLDER)) == []
    assert cli.call(["recordings", "list", *store]) == 0
    assert "no recorded episode is set aside" in capsys.readouterr().out


def test_the_buffer_says_which_row_it_cannot_hold(tmp_path: Path) -> None:
    row = Trajectory(
        trajectory_id="recorded-0-000000", episode_id="recorded-0-000000", task_id="t", source="recorded", env="e",
        split="train", prompt="p", reward=1.0, success=True, termination="answered", level=10**30,
        messages=[Message(role=Role.USER, content="a")], stage="recorded",
    )  # fmt: skip
    rows = BufferRows(TrajectoryBuffer(tmp_path))
    with pytest.raises(UnstorableError, match="level of recorded-0-000000 is 10"):
        rows.keep("0", [row])
    assert rows.stored("0") == set(), "all or none"

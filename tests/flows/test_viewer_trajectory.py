"""The trajectory's page: messages, lineage, the proof of the mask, and rows of any size."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
from viewer_store import (
    DPO,
    FIRST,
    GRPO,
    ONCE,
    PAIRS,
    TOKENIZER,
    WARM,
    Browser,
    keep_tokenizer,
    make_store,
    publish,
    row,
    training_row,
)

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.pages import trajectory
from agentrl.flows.viewer.query.artifacts import Artifacts
from agentrl.schemas.arrow import to_table
from agentrl.schemas.manifest import Kind
from agentrl.schemas.training import TRAINING_SCHEMA
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Message, Span


def test_a_row_with_all_that_leads_to_it_and_from_it(browser: Browser) -> None:
    answer = browser.json(f"/api/rows/{FIRST}")
    assert answer["version"] == 3
    assert answer["row"]["env"] == "sums"
    assert answer["row"]["created_at"].startswith("2026-01-01T12:00:00")
    assert [message["role"] for message in answer["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [message["error"] for message in answer["messages"]] == [False, False, True, False]
    assert answer["messages"][1]["tool_calls"] == [{"id": "c1", "name": "add", "arguments": '{"x": 1}'}]
    assert answer["tags"] == ["sampled"]
    assert answer["spans"][0]["version"] == 0
    made = answer["lineage"]
    assert made["made_by"] == {
        "pipeline": "sums",
        "stage": "grpo",
        "fingerprint": GRPO,
        "run_id": "20260101-120000-abcd",
        "uses": "train.grpo",
        "inputs": [f"warm/{WARM[:8]}"],
    }
    assert made["policy"] == {
        "name": f"warm/{WARM[:8]}",
        "version": 0,
        "stage": "warm",
        "fingerprint": WARM,
        "learned_from": [],
    }
    assert made["learned_by"] == [{"stage": "grpo", "fingerprint": GRPO, "steps": [0], "models": []}]
    assert (answer["proof"], answer["breaches"]) == ([], 0)


def test_neighbours_are_of_the_same_stage_run_and_attempts_of_the_same_task(browser: Browser) -> None:
    between = browser.json("/api/rows/grpo-aaaaaaaa-000002")["neighbours"]
    assert (between["previous"], between["next"]) == ("grpo-aaaaaaaa-000001", "grpo-aaaaaaaa-000003")
    assert sorted(between["attempts"]) == [
        *(f"eval-cccccccc-{number:06d}" for number in range(4)),
        *(f"grpo-aaaaaaaa-{number:06d}" for number in range(4)),
    ]
    assert browser.json(f"/api/rows/{FIRST}")["neighbours"]["previous"] is None
    assert browser.json("/api/rows/eval-cccccccc-000003")["neighbours"]["next"] is None


def test_failed_answers_are_all_if_all_failed_and_else_those_that_say_so() -> None:
    texts = ["Error: no such file", "unknown", "an error is not meant here"]
    answers = [{"role": "user", "content": "Error"}, *({"role": "tool", "content": text} for text in texts)]
    result = {n_errors: trajectory.failed(answers, n_errors) for n_errors in range(5)}
    assert result == {0: set(), 1: {1}, 2: {1}, 3: {1, 2, 3}, 4: {1}}
    assert trajectory.failed(answers[:1], 0) == set()
    known = [answer | {"error": error} for answer, error in zip(answers, (None, False, True, None), strict=True)]
    assert [trajectory.failed(known, n_errors) for n_errors in (0, 1, 3)] == [{2}] * 3


def test_long_tools_are_cut_and_said_to_be(tmp_path: Path) -> None:
    name = make_store(tmp_path, rows=1)
    tools = json.dumps([{"name": "find", "description": "x" * 250_000}])
    long = row(1, name).model_copy(update={"trajectory_id": "long", "tools": tools})
    TrajectoryBuffer(tmp_path).append([long], stage="other", fingerprint="5" * 32)
    answer = Browser(tmp_path).json("/api/rows/long")
    assert (len(answer["tools"]), answer["tools_characters"]) == (200_000, len(tools))
    assert answer["final_state_characters"] == len(answer["final_state"])


@pytest.mark.parametrize(
    "name",
    [
        *("grpo-aaaaaaaa-000099", "..%2f..%2fetc%2fpasswd", "%00", "'; drop table x; --", "x" * 3000, "✨", "null"),
        *("<script>alert(1)</script>", "%2e%2e", "grpo-aaaaaaaa-00000", "*", "read_csv('/etc/passwd')"),
    ],
)
def test_ids_are_looked_up_and_never_paths(browser: Browser, name: str) -> None:
    for path in ("/api/rows/{}", "/api/tokens/{}", "/api/rows/{}/messages/0"):
        status, headers, body = browser.raw(path.format(name).encode())
        assert status == 404, (path, body)
        assert headers["content-type"] == "application/json"
        assert b"root:" not in body
    near = browser.json("/api/rows/grpo-aaaaaaaa-00001", 404)
    assert near["field"] == "id"
    assert "did you mean grpo-aaaaaaaa-00001" in near["error"]


def test_ids_of_others_may_hold_anything(tmp_path: Path) -> None:
    names = ["django/django-1#2", "a/../b", "x?at=1", "100 %", "é/messages", "a/text"]
    rows = [row(number, TOKENIZER, trajectory_id=name) for number, name in enumerate(names)]
    TrajectoryBuffer(tmp_path).append(rows, stage="import", fingerprint=GRPO)
    keep_tokenizer(tmp_path)
    browser = Browser(tmp_path)
    for name in names:
        path = quote(name, safe="")
        for question in (f"/api/rows/{path}", f"/api/rows/{path}/messages/0", f"/api/tokens/{path}"):
            status, _, body = browser.raw(question.encode())
            assert status == 200, (question, body)
        assert browser.raw(f"/api/rows/{path}".encode())[2].startswith(b'{"version":1,"row":{"trajectory_id"')


def test_many_long_messages_are_one_short_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory, "WHOLE", 10_000)
    bare = [Message(role="user", content="x" * 4000) for _ in range(50)]  # type: ignore[arg-type]
    nothing: dict[str, Any] = {"input_ids": [], "action_mask": [], "logprobs": [], "spans": [], "n_tokens": 0}
    entry = row(0, **nothing, n_action_tokens=0, messages=bare)
    TrajectoryBuffer(tmp_path).append([entry], stage="grpo", fingerprint=GRPO)
    browser = Browser(tmp_path)
    answer = browser.json(f"/api/rows/{FIRST}")["messages"]
    assert [len(message["content"]) for message in answer] == [4000] * 3 + [trajectory.CUT_MORE] * 47
    assert [item["cut"] for item in answer] == [False] * 3 + [True] * 47
    assert len(browser.json(f"/api/rows/{FIRST}/messages/49")["content"]) == 4000


@pytest.mark.slow
@pytest.mark.ci
def test_a_message_of_50_mb_is_cut_until_it_is_asked_for(tmp_path: Path) -> None:
    entry = row(0)
    long = "x" * (50 * 2**20)
    messages = [*entry.messages[:3], Message(role="assistant", content=long)]  # type: ignore[arg-type]
    nothing: dict[str, Any] = {"input_ids": [], "action_mask": [], "logprobs": [], "spans": [], "n_tokens": 0}
    bare = [message.model_copy(update={"token_start": None, "token_end": None}) for message in messages]
    big = row(0, **nothing, n_action_tokens=0, messages=bare, prompt="z" * 10**7, final_state=json.dumps("y" * 10**6))
    TrajectoryBuffer(tmp_path).append([big], stage="grpo", fingerprint=GRPO)
    browser = Browser(tmp_path)
    answer = browser.ask(f"/api/rows/{FIRST}")
    assert answer.status_code == 200
    assert len(answer.content) < 10**6
    assert answer.json()["row"]["prompt"].endswith(" … (the first 20,000 of 10,000,000 characters)")
    last = answer.json()["messages"][3]
    assert (last["characters"], last["cut"], len(last["content"])) == (len(long), True, trajectory.CUT)
    assert not answer.json()["messages"][0]["cut"]
    whole = browser.json(f"/api/rows/{FIRST}/messages/3")
    assert whole["content"] == long
    assert not whole["cut"]
    part = browser.json(f"/api/rows/{FIRST}/messages/3", start=3, most=2)
    assert (part["content"], part["cut"]) == (whole["content"][3:5], True)
    rest = browser.json(f"/api/rows/{FIRST}/messages/3", start=len(long) - 5, most=10**6)
    assert (rest["content"], rest["cut"]) == (whole["content"][-5:], False)
    assert browser.json(f"/api/rows/{FIRST}/messages/3", 400, start=-1)["field"] == "start"
    assert browser.json(f"/api/rows/{FIRST}/messages/4", 404)["allowed"] == ["0 to 3"]


# the proof


def broken(tmp_path: Path, **fields: Any) -> Any:
    """The page of a row that breaks a rule. The buffer refuses such rows, so it is written as other tools would."""
    entry = row(1).model_copy(update=fields)
    table = to_table([entry], TRAJECTORY_SCHEMA)
    sampled = np.array(entry.action_mask)
    result = trajectory.breaches(table, table["messages"][0].as_py(), Artifacts(Catalog(tmp_path)), sampled)
    return [(token, rule) for token, rule in result]


def test_every_token_that_no_policy_sampled_is_found(tmp_path: Path) -> None:
    entry = row(1)
    assert broken(tmp_path) == []
    first = entry.action_mask.index(True)
    tool = entry.messages[2].token_start
    assert tool is not None
    inside = [value or position == tool for position, value in enumerate(entry.action_mask)]
    assert broken(tmp_path, action_mask=inside)[0] == (tool, trajectory.NOT_ASSISTANT)
    unspanned = [*entry.messages[:3], entry.messages[3].model_copy(update={"token_start": None, "token_end": None})]
    last = entry.messages[3].token_start
    assert last is not None
    assert broken(tmp_path, messages=unspanned)[0] == (last, trajectory.OUTSIDE)
    unknown = [float("nan") if position == first else value for position, value in enumerate(entry.logprobs)]
    assert broken(tmp_path, logprobs=unknown) == [(first, trajectory.NO_LOGPROB)]
    assert broken(tmp_path, logprobs=[float("nan")] * len(entry.logprobs)) == [], "an import that knows none"
    assert broken(tmp_path, fork_at=first + 2) == [(first, trajectory.SHARED), (first + 1, trajectory.SHARED)]
    short = [entry.spans[0].model_copy(update={"start": first + 1})]
    assert broken(tmp_path, spans=short) == [(first, trajectory.NO_VERSION)]


def test_training_on_a_tool_s_answer_is_found(tmp_path: Path) -> None:
    name = make_store(tmp_path, rows=4)
    entry = row(0, name)
    tool = entry.messages[2]
    assert tool.token_start is not None
    wrong = [value or position == tool.token_start for position, value in enumerate(entry.action_mask)]
    table = pa.Table.from_pylist([training_row(entry, mask=wrong)], schema=TRAINING_SCHEMA)
    publish(Catalog(tmp_path), "sft", "8" * 32, "train.sft", {"rows": (Kind.TABLE, table)}, minutes=9, config=ONCE)
    answer = Browser(tmp_path).json(f"/api/rows/{FIRST}")
    rule = "sft/88888888 trained on it, and no policy sampled it"
    assert answer["proof"] == [{"token": tool.token_start, "rule": rule}]
    assert answer["breaches"] == 1
    learned = answer["lineage"]["learned_by"]
    assert learned[0] == {"stage": "sft", "fingerprint": "8" * 32, "steps": [0, 1], "models": []}, "newest first"


def test_what_the_parents_of_a_continuation_sampled_may_be_trained_on(tmp_path: Path) -> None:
    name = make_store(tmp_path, rows=4)
    parent = row(0, name)
    begin = parent.messages[3].token_start
    assert begin is not None
    own = [value and position >= begin for position, value in enumerate(parent.action_mask)]
    known = [value if position >= begin else float("nan") for position, value in enumerate(parent.logprobs)]
    changes = {"action_mask": own, "logprobs": known, "fork_at": begin, "n_action_tokens": sum(own), "n_steps": 1}
    changes |= {"n_tool_calls": 0, "spans": [Span(version=0, start=begin, end=len(own))], "episode_id": "next"}
    forked = parent.model_copy(update={**changes, "trajectory_id": "next-1", "parent_id": parent.trajectory_id})
    orphan = forked.model_copy(update={"trajectory_id": "next-2", "parent_id": "gone", "episode_id": "other"})
    TrajectoryBuffer(tmp_path).append([forked, orphan], stage="more", fingerprint="6" * 32)
    rows = [training_row(item, mask=parent.action_mask) for item in (forked, orphan)]
    table = pa.Table.from_pylist(rows, schema=TRAINING_SCHEMA)
    publish(Catalog(tmp_path), "sft", "8" * 32, "train.sft", {"rows": (Kind.TABLE, table)}, minutes=9, config=ONCE)
    browser = Browser(tmp_path)
    assert browser.json("/api/rows/next-1")["proof"] == []
    assert browser.json("/api/rows/next-2")["breaches"] == sum(parent.action_mask[:begin]) > 0


def test_training_on_pairs_is_found_from_both_sides(tmp_path: Path) -> None:
    name = make_store(tmp_path, rows=4)
    chosen, rejected = row(0, name), row(1, name)
    pairs = pa.table({"pair_id": ["p"], "chosen_id": [chosen.trajectory_id], "rejected_id": [rejected.trajectory_id]})
    catalog = Catalog(tmp_path)
    publish(catalog, "pairs", PAIRS, "pairs.build", {"pairs": (Kind.PAIRS, pairs)}, minutes=3)
    rows = [
        training_row(entry, row_id="p", label=sign, weights=[float(sign)] * len(entry.input_ids))
        for entry, sign in ((chosen, 1), (rejected, -1))
    ]
    table = pa.Table.from_pylist(rows, schema=TRAINING_SCHEMA)
    inputs = {"pairs": [("pairs", "pairs", PAIRS)]}
    publish(catalog, "dpo", DPO, "train.dpo", {"rows": (Kind.TABLE, table)}, inputs, 4, ONCE)
    browser = Browser(tmp_path)
    for entry, sign in ((chosen, 1.0), (rejected, -1.0)):
        answer = browser.json(f"/api/rows/{entry.trajectory_id}")["lineage"]["learned_by"]
        assert answer[0]["stage"] == "dpo"
        weights = browser.arrow(f"/api/tokens/{entry.trajectory_id}")["weight"].drop_null().unique().to_pylist()
        assert weights == [sign]
    assert browser.json("/api/rows/grpo-aaaaaaaa-000003")["lineage"]["learned_by"] == []


def test_a_row_whose_makers_are_gone(tmp_path: Path) -> None:
    TrajectoryBuffer(tmp_path).append([row(0, policy="gone/12345678")], stage="more", fingerprint="6" * 32)
    answer = Browser(tmp_path).json(f"/api/rows/{FIRST}")["lineage"]
    assert answer["policy"] == {
        "name": "gone/12345678",
        "version": 0,
        "stage": None,
        "fingerprint": None,
        "learned_from": [],
    }
    assert answer["made_by"]["uses"] == ""
    assert answer["made_by"]["inputs"] == []


def test_the_last_words_of_rows_are_asked_by_their_ids(browser: Browser) -> None:
    ids = browser.arrow("/api/rows", limit=3, columns="trajectory_id")["trajectory_id"].to_pylist()
    answers = browser.json("/api/answers", id=ids)["answers"]
    assert list(answers) == ids
    for name in ids:
        messages = browser.json(f"/api/rows/{name}")["messages"]
        spoken = [turn for turn in messages if turn["role"] == "assistant" and (turn["content"] or turn["tool_calls"])]
        assert answers[name] == (spoken[-1]["content"] or answers[name])[:300]
    assert browser.json("/api/answers", 404, id="nobody")["field"] == "id"
    assert browser.json("/api/answers", 400)["field"] == "id"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], ""),
        ([{"role": "user", "content": "hi", "tool_calls": []}], ""),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}], "f({})"),
        ([{"role": "assistant", "content": "yes", "tool_calls": [{"name": "f", "arguments": "{}"}]}], "yes"),
        ([{"role": "assistant", "content": "a", "tool_calls": []}, {"role": "tool", "content": "b"}], "a"),
    ],
)
def test_last_words_are_content_or_a_call(messages: list[dict[str, Any]], text: str) -> None:
    assert trajectory.last_words(messages) == text

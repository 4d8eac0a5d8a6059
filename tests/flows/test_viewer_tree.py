"""Attempts as a tree of shared tokens, and what curation dropped."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_store import Browser, make_store, publish, row

from datastore.buffer import TrajectoryBuffer
from datastore.catalog import Catalog
from flows.viewer.tree import prefix_tree, rows_of_drawing
from pipelines.stages.curate import DROPPED_SCHEMA, FUNNEL_SCHEMA
from schemas.manifest import Kind

CURATED = "4" * 32
RULE = "reward at least 0.5"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "store"
    make_store(folder)
    ids = [f"grpo-aaaaaaaa-{number:06d}" for number in (1, 3, 5, 6)]  # the last one has no outcome
    dropped = pa.Table.from_pylist([{"trajectory_id": one, "rule": RULE} for one in ids], schema=DROPPED_SCHEMA)
    levels = [
        {"rule": RULE, "before": 20, "after": 16, "dropped_examples": ids[:3]},
        {"rule": "unique", "before": 16, "after": 16, "dropped_examples": []},
    ]
    funnel = pa.Table.from_pylist(levels, schema=FUNNEL_SCHEMA)
    outputs = {"funnel": (Kind.TABLE, funnel), "dropped": (Kind.TABLE, dropped)}
    publish(Catalog(folder), "curated", CURATED, "trajectories.curate", outputs, minutes=7)
    publish(Catalog(folder), "older", "5" * 32, "trajectories.curate", {"funnel": (Kind.TABLE, funnel)}, minutes=6)
    return folder


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12))
def test_a_tree_holds_each_sequence_once_and_shares_what_can_be_shared(sequences: list[list[int]]) -> None:
    arrays = [np.array(one, dtype=np.int32) for one in sequences]
    branches = prefix_tree(arrays)
    for number, one in enumerate(branches):
        assert one.parent is None or one.parent < number
        assert one.end > one.start
        texts = {tuple(sequences[member][one.start : one.end]) for member in one.members}
        assert len(texts) == 1, "a branch is shared by all of its members"
        assert one.start == (branches[one.parent].end if one.parent is not None else 0)
        beside = [branches[child] for child in one.children]
        starts = [sequences[child.members[0]][child.start] for child in beside]
        assert len(set(starts)) == len(starts), "branches part at their first token"
        assert sorted([*one.ends, *(member for child in beside for member in child.members)]) == sorted(one.members)
        assert len(beside) + bool(one.ends) != 1 or not beside, "no branch could be longer"
    ended = sorted(member for one in branches for member in one.ends)
    assert ended == [number for number, one in enumerate(sequences) if one]
    places = rows_of_drawing(branches)
    leaves = sorted(places[number] for number, one in enumerate(branches) if not one.children)
    assert leaves == [float(number) for number in range(len(leaves))]


def test_the_attempts_at_a_task_are_a_tree(browser: Browser) -> None:
    found = browser.json("/api/task/tree", env="sums", task_id="sums-0")
    assert (found["rows"], found["left_out"]) == (4, 4)
    root, *children = found["branches"]
    assert (root["parent"], root["start"], root["end"], root["rows"]) == (None, 0, len("What is "), 4)
    assert root["text"] == "What is "
    assert root["success"] == 0.5
    assert root["reward"] == pytest.approx(0.15)
    assert [one["parent"] for one in children] == [0, 0, 0, 0]
    assert [one["ends"] for one in children] == [[f"grpo-aaaaaaaa-{number:06d}"] for number in range(4)]
    assert [one["success"] for one in children] == [0.0, 1.0, 0.0, 1.0]
    assert children[2]["text"].startswith("2 + 1? 🙂<|im_end|>")
    assert [one["y"] for one in children] == [0.0, 1.0, 2.0, 3.0]
    assert root["y"] == 1.5
    assert browser.json("/api/task/tree", 404, env="sums", task_id="none")["field"] == "task_id"


def test_a_task_without_tokens_has_no_branch(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"input_ids": [], "action_mask": [], "logprobs": [], "spans": [], "n_tokens": 0}
    bare = [one.model_copy(update={"token_start": None, "token_end": None}) for one in row(0).messages]
    rows = [row(number, task_id="t", messages=bare, n_action_tokens=0, **nothing) for number in range(2)]
    TrajectoryBuffer(tmp_path).append(rows, stage="grpo", fingerprint="a" * 32)
    found = Browser(tmp_path).json("/api/task/tree", env="sums", task_id="t")
    assert (found["rows"], found["left_out"], found["branches"]) == (0, 2, [])


def test_funnels_say_what_rules_dropped_and_warn_of_successes(browser: Browser) -> None:
    newest, older = browser.json("/api/curation")["funnels"]
    assert (newest["artifact"], newest["recorded"], older["recorded"]) == ("curated/44444444", True, False)
    first, second = newest["levels"]
    assert (first["rule"], first["before"], first["after"]) == (RULE, 20, 16)
    assert (first["successes"], first["n"], first["mostly_successes"]) == (3, 3, True)
    assert (second["successes"], second["n"], second["mostly_successes"]) == (0, 0, False)
    assert older["levels"][0]["n"] == 0


def test_the_rows_that_a_rule_dropped(browser: Browser) -> None:
    where = {"artifact": "curated/44444444", "rule": RULE}
    answer = browser.ask("/api/curation/rows", limit=2, offset=1, **where)
    assert answer.headers["x-total"] == "4"
    rows = browser.arrow("/api/curation/rows", **where)
    assert sorted(rows["trajectory_id"].to_pylist()) == [f"grpo-aaaaaaaa-{number:06d}" for number in (1, 3, 5, 6)]
    assert browser.ask("/api/curation/rows", at=1, **where).headers["x-total"] == "4"
    unknown = browser.json("/api/curation/rows", 404, artifact="curated/44444444", rule="none")
    assert unknown["allowed"] == [RULE]
    assert browser.json("/api/curation/rows", 404, artifact="older/55555555", rule=RULE)["field"] == "artifact"


def test_an_empty_store_has_no_funnel(tmp_path: Path) -> None:
    assert Browser(tmp_path).json("/api/curation") == {"funnels": []}

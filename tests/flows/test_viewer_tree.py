"""Attempts as a tree of shared tokens, and what curation dropped."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_store import Browser, make_store, publish, row

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.pages.task import prefix_tree
from agentrl.pipelines.handles import SELECTION_SCHEMA
from agentrl.pipelines.stages.curate import DROPPED_SCHEMA, FUNNEL_SCHEMA
from agentrl.schemas.manifest import Kind

CURATED = "4" * 32
RULE = "reward at least 0.5"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "store"
    make_store(folder)
    ids = [f"grpo-aaaaaaaa-{number:06d}" for number in (1, 3, 5, 6)]  # the last one has no outcome
    dropped = pa.Table.from_pylist([{"trajectory_id": token, "rule": RULE} for token in ids], schema=DROPPED_SCHEMA)
    levels = [
        {"rule": RULE, "before": 20, "after": 16, "dropped_examples": ids[:3]},
        {"rule": "unique", "before": 16, "after": 16, "dropped_examples": []},
    ]
    funnel = pa.Table.from_pylist(levels, schema=FUNNEL_SCHEMA)
    kept = [{"trajectory_id": f"grpo-aaaaaaaa-{number:06d}", "weight": 1.0} for number in (0, 12)]
    selection = pa.Table.from_pylist(kept, schema=SELECTION_SCHEMA)
    outputs = {"funnel": (Kind.TABLE, funnel), "dropped": (Kind.TABLE, dropped)}
    outputs["trajectories"] = (Kind.TRAJECTORIES, selection)
    publish(Catalog(folder), "curated", CURATED, "trajectories.curate", outputs, minutes=7)
    publish(Catalog(folder), "older", "5" * 32, "trajectories.curate", {"funnel": (Kind.TABLE, funnel)}, minutes=6)
    return folder


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12))
def test_a_tree_holds_each_sequence_once_and_shares_what_can_be_shared(sequences: list[list[int]]) -> None:
    arrays = [np.array(sequence, dtype=np.int32) for sequence in sequences]
    branches = prefix_tree(arrays)
    for number, branch in enumerate(branches):
        assert branch.parent is None or branch.parent < number
        assert branch.end > branch.start
        texts = {tuple(sequences[member][branch.start : branch.end]) for member in branch.members}
        assert len(texts) == 1, "a branch is shared by all of its members"
        assert branch.start == (branches[branch.parent].end if branch.parent is not None else 0)
        beside = [other for other in branches if other.parent == number]
        starts = [sequences[child.members[0]][child.start] for child in beside]
        assert len(set(starts)) == len(starts), "branches part at their first token"
        assert sorted([*branch.ends, *(member for child in beside for member in child.members)]) == sorted(
            branch.members
        )
        assert len(beside) + bool(branch.ends) != 1 or not beside, "no branch could be longer"
    ended = sorted(member for branch in branches for member in branch.ends)
    assert ended == [number for number, sequence in enumerate(sequences) if sequence]
    above: list[int] = []
    for number, branch in enumerate(branches):
        while above and above[-1] != branch.parent:
            above.pop()
        assert bool(above) == (branch.parent is not None), "what goes on from a branch follows it"
        above.append(number)


def test_the_attempts_at_a_task_are_a_tree(browser: Browser) -> None:
    answer = browser.json("/api/task/tree", env="sums", task_id="sums-0")
    assert (answer["rows"], answer["left_out"]) == (4, 4)
    root, *children = answer["branches"]
    assert (root["parent"], root["start"], root["end"], root["rows"]) == (None, 0, len("What is "), 4)
    assert root["text"] == "What is "
    assert root["success"] == 0.5
    assert (root["reward"], root["rewarded"]) == (pytest.approx(0.15), 4)
    assert 0 < root["low"] < 0.15 < root["high"] < 0.7
    assert [child["parent"] for child in children] == [0, 0, 0, 0]
    assert [child["ends"] for child in children] == [[f"grpo-aaaaaaaa-{number:06d}"] for number in range(4)]
    assert [child["success"] for child in children] == [0.0, 1.0, 0.0, 1.0]
    assert children[2]["text"].startswith("2 + 1? 🙂<|im_end|>")
    assert browser.json("/api/task/tree", 404, env="sums", task_id="none")["field"] == "task_id"


def test_a_task_without_tokens_has_no_branch(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"input_ids": [], "action_mask": [], "logprobs": [], "spans": [], "n_tokens": 0}
    bare = [message.model_copy(update={"token_start": None, "token_end": None}) for message in row(0).messages]
    rows = [row(number, task_id="t", messages=bare, n_action_tokens=0, **nothing) for number in range(2)]
    TrajectoryBuffer(tmp_path).append(rows, stage="grpo", fingerprint="a" * 32)
    answer = Browser(tmp_path).json("/api/task/tree", env="sums", task_id="t")
    assert (answer["rows"], answer["left_out"], answer["branches"]) == (0, 2, [])


def test_funnels_say_what_rules_dropped_and_warn_of_successes(browser: Browser) -> None:
    answer = browser.json("/api/curation")
    assert (answer["version"], answer["more"]) == (3, 0)
    newest, older = answer["funnels"]
    assert (newest["artifact"], newest["recorded"], older["recorded"]) == ("curated/44444444", True, False)
    first, second = newest["levels"]
    assert (first["rule"], first["before"], first["after"]) == (RULE, 20, 16)
    assert (first["successes"], first["n"], first["worry"]) == (3, 3, False)
    assert 0.43 < first["low"] < 0.45
    assert first["high"] == 1
    assert (second["low"], second["high"]) == (None, None)
    assert (second["successes"], second["n"], second["worry"]) == (0, 0, False)
    assert older["levels"][0]["n"] == 0


def test_the_rows_that_a_rule_dropped_are_a_part_of_the_buffer(browser: Browser) -> None:
    where: dict[str, Any] = {"among": "curated/44444444", "rule": RULE}
    rows = browser.arrow("/api/rows", **where)
    assert sorted(rows["trajectory_id"].to_pylist()) == [f"grpo-aaaaaaaa-{number:06d}" for number in (1, 3, 5, 6)]
    page = browser.ask("/api/rows", limit=2, offset=1, filter="success", **where)
    assert (page.headers["x-total"], page.headers["x-absent"]) == ("3", "0")
    assert browser.ask("/api/rows", at=1, **where).headers["x-total"] == "4"
    facets = browser.json("/api/facets", filter="success is null", **where)
    assert (facets["total"], facets["filtered"]) == (24, 1)
    success = next(facet for facet in facets["facets"] if facet["column"] == "success")
    assert sum(bin_["all"] for bin_ in success["bins"]) == 24


def test_the_rows_that_an_artifact_chose_are_a_part_of_the_buffer(browser: Browser) -> None:
    rows = browser.arrow("/api/rows", among="curated/44444444")
    assert sorted(rows["trajectory_id"].to_pylist()) == ["grpo-aaaaaaaa-000000", "grpo-aaaaaaaa-000012"]
    older = browser.ask("/api/rows", at=1, among="curated/44444444")
    assert (older.headers["x-total"], older.headers["x-absent"]) == ("1", "1")


@pytest.mark.parametrize(
    ("query", "field", "message"),
    [
        ({"among": "curated/44444444", "rule": "none"}, "rule", "no rule 'none' dropped a row"),
        ({"among": "older/55555555", "rule": RULE}, "among", "did not record which rows it dropped"),
        ({"among": "older/55555555"}, "among", "chose no rows"),
        ({"among": "../../etc/passwd"}, "among", "there is no artifact"),
        ({"among": "curated/44"}, "among", "there is no artifact"),
        ({"rule": RULE}, "among", "a rule needs the artifact that has it"),
    ],
)
def test_what_is_no_part_of_the_buffer_is_said(
    browser: Browser, query: dict[str, Any], field: str, message: str
) -> None:
    for path in ("/api/rows", "/api/facets"):
        answer = browser.ask(path, **query)
        assert answer.status_code in (400, 404)
        assert answer.json()["field"] == field
        assert message in answer.json()["error"]


def test_an_empty_store_has_no_funnel(tmp_path: Path) -> None:
    assert Browser(tmp_path).json("/api/curation") == {"version": None, "more": 0, "funnels": []}

"""Pages that compare: evaluations, the attempts at one task, two rows side by side, and preference pairs."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_store import (
    DPO,
    EVAL,
    GRPO,
    IM_END,
    PAIRS,
    TOKENIZER,
    WARM,
    Browser,
    make_store,
    publish,
    row,
    training_row,
)

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.pages.compare import newest_two
from agentrl.flows.viewer.pages.task import common
from agentrl.flows.viewer.query.artifacts import Artifacts
from agentrl.pipelines.handles import SELECTION_SCHEMA
from agentrl.pipelines.results.compare import _measured
from agentrl.schemas.manifest import Kind
from agentrl.schemas.pair import PAIR_SCHEMA
from agentrl.schemas.training import TRAINING_SCHEMA

OTHER = "f" * 32


def evaluate(store: Path, stage: str, fingerprint: str, solved: set[int]) -> None:
    """An evaluation of 12 tasks, one attempt each, of which these are solved."""
    rows = [
        row(
            number,
            trajectory_id=f"{stage}-{fingerprint[:8]}-{number:06d}",
            task_id=f"sums-{number}",
            success=number in solved,
            stage=stage,
            fingerprint=fingerprint,
            tags=["sampled"],
        )
        for number in range(12)
    ]
    TrajectoryBuffer(store).append(rows, stage=stage, fingerprint=fingerprint)
    chosen = [{"trajectory_id": entry.trajectory_id, "weight": 1.0} for entry in rows]
    outputs = {"trajectories": (Kind.TRAJECTORIES, pa.Table.from_pylist(chosen, schema=SELECTION_SCHEMA))}
    publish(Catalog(store), stage, fingerprint, "evaluate.policy", outputs, minutes=5, config={"samples": len(solved)})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "store"
    make_store(folder)
    evaluate(folder, "before", OTHER, {0, 1, 2})
    evaluate(folder, "after", "1" * 32, {1, 2, 3, 4, 5, 6, 7, 8, 9})
    return folder


def test_evaluations_are_listed_with_their_levels(browser: Browser) -> None:
    [evaluation] = browser.json("/api/evaluations")["evaluations"]
    assert (evaluation["artifact"], evaluation["policy"], evaluation["split"]) == (
        f"eval/{EVAL[:8]}",
        "grpo",
        "heldout",
    )
    levels = [(result["level"], result["greedy"], result["success"], result["n"]) for result in evaluation["results"]]
    assert levels == [(-1, False, 0.6, 20), (-1, True, 0.7, 20), (1, False, 0.1, 20)]


def test_two_evaluations_differ_by_the_tasks_of_both(browser: Browser) -> None:
    answer = browser.json("/api/compare", than="before", arm="after")
    assert answer["mean"] == pytest.approx(0.5)
    assert answer["low"] < 0.5 < answer["high"]
    assert (answer["tasks"], answer["tasks_gained"], answer["tasks_lost"], answer["unshared"]) == (12, 7, 1, 0)
    assert [entry["task_id"] for entry in answer["lost"]] == ["sums-0"]
    assert answer["lost"][0] == {
        "env": "sums",
        "task_id": "sums-0",
        "prompt": "What is 0 + 1? 🙂",
        "before": 1.0,
        "after": 0.0,
    }
    assert answer["p"] == pytest.approx(0.0703, abs=1e-3)
    assert "no difference shown" in answer["verdict"], "McNemar's test does not reject what the interval leaves out"
    assert answer["verdict"].endswith("; 8 tasks that changed are too few to say")
    assert answer["than"]["success"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ({"than": "befor", "arm": "after"}, 404, "there is no artifact or tag 'befor'; did you mean 'before'?"),
        ({"than": "../before", "arm": "after"}, 400, "cannot name a folder"),
        ({"than": "before", "arm": "warm"}, 404, "was not measured"),
        ({"than": "before", "arm": "before"}, 400, "are one arm"),
        ({"than": "before", "arm": "after", "greedy": "true"}, 404, "has no greedy rows"),
        ({"than": "before"}, 400, "arm"),
    ],
)
def test_what_cannot_be_compared_is_said(browser: Browser, query: dict[str, Any], status: int, message: str) -> None:
    assert message in browser.json("/api/compare", status, **query)["error"]


def test_the_attempts_at_a_task_are_strips_by_policy_and_version(browser: Browser) -> None:
    answer = browser.json("/api/task", env="sums", task_id="sums-0")
    assert answer["rows"] == 4 + 4 + 2
    strips = {(strip["stage"], strip["policy_version"]): strip for strip in answer["strips"]}
    assert set(strips) == {("grpo", 0), ("eval", 0), ("before", 0), ("after", 0)}
    grpo = strips["grpo", 0]
    assert [attempt["success"] for attempt in grpo["attempts"]] == [False, True, False, True]
    assert (grpo["n"], grpo["success"]) == (4, 0.5)
    assert 0 < grpo["low"] < 0.5 < grpo["high"] < 1
    assert len(answer["prompts"]) == 4
    assert browser.json("/api/task", env="sums", task_id="sums-0", at=1)["rows"] == 4
    assert browser.json("/api/task", 404, env="sums", task_id="nothing")["field"] == "task_id"
    assert browser.json("/api/task", 400, env="sums")["field"] == "task_id"


def test_an_episode_of_several_segments_is_one_attempt_and_greedy_ones_are_a_strip_of_their_own(tmp_path: Path) -> None:
    parts = [
        row(number, task_id="t", episode_id="long", segment=number, success=True, reward=1.0) for number in range(3)
    ]
    others = [
        row(3, task_id="t", success=False, reward=0.0),
        row(4, task_id="t", success=True, reward=1.0, sampling='{"temperature":0.0}'),
    ]
    TrajectoryBuffer(tmp_path).append([*parts, *others], stage="grpo", fingerprint=GRPO)
    answer = Browser(tmp_path).json("/api/task", env="sums", task_id="t")
    strips = {strip["greedy"]: strip for strip in answer["strips"]}
    assert answer["rows"] == 3
    assert (strips[False]["rows"], strips[False]["n"], strips[False]["success"]) == (2, 2, 0.5)
    assert (strips[True]["rows"], strips[True]["n"], strips[True]["success"]) == (1, 1, 1.0)


def test_a_task_that_nobody_scored_has_no_interval(tmp_path: Path) -> None:
    rows = [row(number, task_id="t", success=None, reward=None) for number in range(3)]
    TrajectoryBuffer(tmp_path).append(rows, stage="grpo", fingerprint=GRPO)
    [strip] = Browser(tmp_path).json("/api/task", env="sums", task_id="t")["strips"]
    assert (strip["n"], strip["success"], strip["low"], strip["high"]) == (0, None, None, None)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_beginnings(a: list[int], b: list[int]) -> None:
    result = common(np.array(a, dtype=int), np.array(b, dtype=int))
    assert a[:result] == b[:result]
    assert result == min(len(a), len(b)) or a[result] != b[result]


def pair_store(store: Path) -> None:
    make_store(store, rows=4)
    chosen, rejected = row(1, TOKENIZER), row(0, TOKENIZER)
    shared = common(np.array(chosen.input_ids), np.array(rejected.input_ids))
    pair = {
        "pair_id": "p0",
        "task_id": "sums-0",
        "kind": "step",
        "chosen_id": chosen.trajectory_id,
        "rejected_id": rejected.trajectory_id,
        "method": "agentq",
        "chosen_reward": 1.0,
        "rejected_reward": 0.0,
        "shared_prefix": shared,
        "tokenizer": TOKENIZER,
        "weight": 1.0,
        "chosen_ids": chosen.input_ids,
        "chosen_mask": chosen.action_mask,
        "rejected_ids": rejected.input_ids,
        "rejected_mask": rejected.action_mask,
    }
    catalog = Catalog(store)
    table = pa.Table.from_pylist([pair | {"pair_id": f"p{number}"} for number in range(6)], schema=PAIR_SCHEMA)
    publish(catalog, "pairs", PAIRS, "pairs.build", {"pairs": (Kind.PAIRS, table)}, minutes=3)
    rows = [
        training_row(entry, row_id="p0", label=sign, ref_logprobs=[-0.5 * (2 - sign)] * len(entry.input_ids))
        for entry, sign in ((chosen, 1), (rejected, -1))
    ]
    inputs = {"pairs": [("pairs", "pairs", PAIRS)]}
    trained = {"rows": (Kind.TABLE, pa.Table.from_pylist(rows, schema=TRAINING_SCHEMA))}
    publish(catalog, "dpo", DPO, "train.dpo", trained, inputs, 4, {"batch": 1, "steps": 1})


def test_a_pair_shows_what_it_shares_and_what_the_loss_covers(tmp_path: Path) -> None:
    pair_store(tmp_path)
    browser = Browser(tmp_path)
    lines = browser.json("/api/pairs", offset=1, limit=2)
    assert (lines["artifact"], lines["total"]) == (f"pairs/{PAIRS[:8]}", 6)
    assert [pair["pair_id"] for pair in lines["pairs"]] == ["p1", "p2"]
    where = {"artifact": lines["artifact"], "pair_id": "p0"}
    answer = browser.json("/api/pair", **where)
    chosen = row(1)
    covered = sum(chosen.action_mask)
    assert answer["chosen"]["covered"] == covered
    assert answer["chosen"]["covered_in_prefix"] == 0
    assert answer["chosen"]["ref_logprob"] == pytest.approx(-0.5 * covered)
    assert answer["rejected"]["ref_logprob"] == pytest.approx(-1.5 * sum(row(0).action_mask))
    assert answer["margin"] == pytest.approx(answer["chosen"]["ref_logprob"] - answer["rejected"]["ref_logprob"])
    assert answer["trained_by"] == [f"dpo/{DPO[:8]}"]
    assert (answer["previous"], answer["next"]) == (None, "p1")
    last = browser.json("/api/pair", artifact=lines["artifact"], pair_id="p5")
    assert (last["previous"], last["next"]) == ("p4", None)
    assert browser.json("/api/pair", artifact=lines["artifact"], pair_id="p1")["margin"] is None
    tokens = browser.arrow("/api/pair/tokens", side="chosen", **where)
    assert tokens.schema.names == ["text", "joined", "id", "mask"]
    assert tokens["mask"].to_pylist() == chosen.action_mask
    text = b"".join(browser.arrow("/api/pair/tokens", side="rejected", **where)["text"].to_pylist())
    assert text.count(b"<|im_end|>") == row(0).input_ids.count(IM_END)


@pytest.mark.parametrize(
    ("path", "query", "status", "field"),
    [
        ("/api/pairs", {"artifact": "grpo/aaaaaaaa"}, 404, "artifact"),
        ("/api/pairs", {"artifact": "../../etc"}, 404, "artifact"),
        ("/api/pair", {"artifact": f"pairs/{PAIRS[:8]}", "pair_id": "none"}, 404, "pair_id"),
        ("/api/pair", {"pair_id": "p0"}, 400, "artifact"),
        ("/api/pair/tokens", {"artifact": f"pairs/{PAIRS[:8]}", "pair_id": "p0", "side": "both"}, 400, "side"),
    ],
)
def test_what_is_no_pair_is_said(tmp_path: Path, path: str, query: dict[str, Any], status: int, field: str) -> None:
    pair_store(tmp_path)
    assert Browser(tmp_path).json(path, status, **query)["field"] == field


def test_a_store_without_pairs(browser: Browser) -> None:
    assert browser.json("/api/pairs") == {"artifacts": [], "artifact": None, "total": 0, "pairs": []}


def test_a_model_stands_for_the_newest_evaluation_that_read_it(tmp_path: Path) -> None:
    make_store(tmp_path)
    catalog = Catalog(tmp_path)
    with pytest.raises(LookupError, match="was not measured"):
        _measured(catalog, "warm")
    row_of = {"trajectory_id": f"grpo-{GRPO[:8]}-000000", "weight": 1.0}
    chosen = {"trajectories": (Kind.TRAJECTORIES, pa.Table.from_pylist([row_of], schema=SELECTION_SCHEMA))}
    for stage, fingerprint, minutes in (("older", "1" * 32, 7), ("newer", OTHER, 9)):
        publish(catalog, stage, fingerprint, "evaluate.policy", chosen, {"model": [("warm", "model", WARM)]}, minutes)
    manifests, _ = _measured(catalog, f"warm/{WARM[:8]}")
    assert [manifest.ingredients.stage for manifest in manifests] == ["newer"]


def test_the_newest_policy_is_compared_where_the_control_of_its_predecessor_was_measured(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    models = {"warm": "1" * 32, "star": "2" * 32, "grpo": "3" * 32}
    for (model, fingerprint), start in zip(models.items(), (None, "warm", "star"), strict=True):
        inputs = {"model": [(start, "model", models[start])]} if start else {}
        publish(catalog, model, fingerprint, "train.grpo", {"model": (Kind.MODEL, Path.mkdir)}, inputs)
    measured = {name: (Kind.TABLE, pa.table({"x": [1]})) for name in ("results", "trajectories")}
    evaluations = [("star", "heldout", "4"), ("grpo", "heldout", "5"), ("warm", "long", "6"), ("grpo", "long", "7")]
    for minute, (model, split, digit) in enumerate(evaluations):
        inputs = {"model": [(model, "model", models[model])], "tasks": [("tasks", split, "8" * 32)]}
        inputs |= {"dev": [("tasks", "dev", "8" * 32)]} if split == "heldout" else {}
        publish(catalog, f"{model}_{split}", digit * 32, "evaluate.policy", measured, inputs, minute)
    assert newest_two(catalog, Artifacts(catalog)) == ("star_heldout/44444444", "grpo_heldout/55555555")

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import TypeAdapter, ValidationError
from store_rows import build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.curation import curate as module
from agentrl.datastore.curation.curate import Curated, curate
from agentrl.datastore.curation.diversity import cluster_balanced, k_center
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.read.sampling import (
    COLUMNS,
    SAMPLERS,
    curriculum,
    diversity,
    prioritized,
    recency,
    success_first,
    uniform,
)
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory


def row(number: int, task: str, reward: float = 1.0, say: str = "", call: str = "find", **fields: Any) -> Trajectory:
    messages = [
        Message(role=Role.USER, content="q"),
        Message(
            role=Role.ASSISTANT,
            content=say or f"answer {number}",
            tool_calls=[ToolCall(id="1", name=call, arguments=json.dumps({"b": 1, "a": 2}))],
        ),
    ]
    values = {"task_id": task, "reward": reward, "success": reward > 0.5, "prompt": f"prompt of {task}"} | fields
    return build(number, messages=messages, input_ids=[], action_mask=[], logprobs=[], n_tokens=10 + number, **values)


def apply(folder: Path, rows: list[Trajectory], *rules: dict[str, Any], **options: Any) -> tuple[list[int], Curated]:
    buffer = TrajectoryBuffer(folder)
    buffer.append(rows, stage="rollout", fingerprint="f")
    result = curate(buffer, Rules.model_validate({"rules": list(rules)}).rules, **options)
    return [int(name[-6:]) for name in result.ids.to_pylist()], result


def test_filter_and_funnel(tmp_path: Path) -> None:
    rows = [row(i, f"t{i}", reward=i / 4) for i in range(5)]
    kept, result = apply(
        tmp_path, rows, {"rule": "filter", "where": "success and n_steps <= 4"}, {"rule": "cap", "n": 1}
    )
    assert len(kept) == 1
    first, second = result.funnel
    assert (first.rule, first.before, first.after) == ("filter where=success and n_steps <= 4", 5, 2)
    assert [example[-1] for example in first.examples] == ["0", "1", "2"]
    assert (second.before, second.after) == (2, 1)


def test_group_expressions_see_the_tasks_trajectories(tmp_path: Path) -> None:
    rows = [row(i, f"t{i // 4}", reward=float(i % 4 < i // 4)) for i in range(20)]  # pass rates 0, 1/4 ... 1
    kept, _ = apply(tmp_path, rows, {"rule": "group", "where": "pass_rate between 0.2 and 0.8 and n = 4"})
    assert kept == list(range(4, 16))


KEPT = [
    ("best", 1, [2, 5]),
    ("best", 2, [1, 2, 4, 5]),
    ("correct", 2, [1, 2]),
    ("shortest", 1, [1]),
    ("first", 1, [0, 4]),
]


@pytest.mark.parametrize(("what", "n", "expected"), KEPT)
def test_keep_per_task(tmp_path: Path, what: str, n: int, expected: list[int]) -> None:
    rows = [
        row(0, "a", 0.0),
        row(1, "a", 0.9, n_steps=1),
        row(2, "a", 1.0, n_steps=3),
        row(3, "a", 0.2),
        row(4, "b", 0.1, n_steps=2),
        row(5, "b", 0.1, n_steps=1),
    ]
    assert apply(tmp_path, rows, {"rule": "keep", "what": what, "n": n})[0] == expected


def test_duplicates(tmp_path: Path) -> None:
    long = "first look at the list of orders then open the one with the wrong price and send it back to the store"
    rows = [
        row(0, "a", 0.5, say=long),
        row(1, "a", 1.0, say=long),  # the better of two equal ones stays
        row(2, "a", 1.0, say=long + " now"),
        row(3, "a", 1.0, say="something else entirely"),
        row(4, "b", 1.0, say=long),
    ]
    exact, near = {"rule": "exact_duplicates"}, {"rule": "near_duplicates", "threshold": 0.7}
    everywhere = {"scope": "all", "compare": ["actions"]}
    assert apply(tmp_path / "1", rows, exact)[0] == [1, 2, 3, 4]
    assert apply(tmp_path / "2", rows, exact | everywhere)[0] == [1, 2, 3]
    assert apply(tmp_path / "3", rows, near)[0] == [1, 3, 4]
    assert apply(tmp_path / "4", rows, near | everywhere)[0] == [1, 3]


@pytest.mark.parametrize(
    "rule",
    [
        {"rule": "exact_duplicates", "scope": "all", "compare": ["actions"]},
        {"rule": "near_duplicates", "scope": "all", "compare": ["actions"]},
        {"rule": "diverse", "n": 2, "over": "tools"},
    ],
    ids=lambda rule: rule["rule"],
)
def test_texts_are_not_held(tmp_path: Path, rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 32)
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append(
        (row(i, f"t{i}", say="x" * 20_000 + str(i % 300)) for i in range(400)), stage="rollout", fingerprint="f"
    )
    rules = Rules.model_validate({"rules": [rule]}).rules
    curate(buffer, rules)  # imports what it needs
    tracemalloc.start()
    try:
        kept = curate(buffer, rules).ids
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(kept) == (2 if rule["rule"] == "diverse" else 300)
    assert peak < 4_000_000  # all of them take 8 MB


def test_decontamination(tmp_path: Path) -> None:
    held = "please cancel the second order of the customer called ann because the price was wrong"
    rows = [
        row(0, "a", prompt=held.upper() + "!"),
        row(1, "b", prompt="book a flight to the city of the boss for tomorrow with one bag and a seat"),
        row(2, "c", prompt="the price was wrong because the customer called ann please cancel the second order"),
        row(3, "d", prompt=held, split="heldout"),
    ]
    rule = {"rule": "decontaminate"}
    assert apply(tmp_path / "1", rows, rule)[0] == [1, 2]
    assert apply(tmp_path / "2", rows, rule | {"cosine": 0.7})[0] == [1]
    assert apply(tmp_path / "3", rows[:3], rule, heldout=[held])[0] == [1, 2]
    with pytest.raises(StoreError, match="nothing to compare with"):
        apply(tmp_path / "4", rows[:3], rule)


def test_diversity_over_prompts_and_tools(tmp_path: Path) -> None:
    topics = ["cancel order refund price"] * 6 + ["book flight seat city"] + ["fix test error line"]
    rows = [row(i, f"t{i}", prompt=topic, call="find" if i else "buy") for i, topic in enumerate(topics)]
    for number, method in enumerate(("k_center", "core_sets", "clusters")):
        rule = {"rule": "diverse", "n": 3, "method": method, "clusters": 3}
        kept, _ = apply(tmp_path / str(number), rows, rule)
        assert {6, 7} <= set(kept)
        assert len(kept) == 3
    kept, _ = apply(tmp_path / "tools", rows, {"rule": "diverse", "n": 2, "over": "tools"})
    assert 0 in kept


def test_balance_and_cap(tmp_path: Path) -> None:
    rows = [row(i, f"t{i}", env="x" if i < 7 else "y", level=i % 2) for i in range(10)]
    kept, _ = apply(tmp_path / "1", rows, {"rule": "balance", "by": "env"})
    assert sum(i < 7 for i in kept) == sum(i >= 7 for i in kept) == 3
    assert apply(tmp_path / "2", rows, {"rule": "balance", "by": "env"})[0] == kept  # seeded
    assert len(apply(tmp_path / "3", rows, {"rule": "cap", "n": 2, "per": "level"})[0]) == 4
    with pytest.raises(ValidationError, match="did you mean 'env'"):
        apply(tmp_path / "4", rows, {"rule": "balance", "by": "envs"})


def test_bad_rules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="did you mean 'reward'"):
        apply(tmp_path, [row(0, "a")], {"rule": "filter", "where": "rewardd > 1"})
    for rule in ({"rule": "fliter"}, {"rule": "filter"}, {"rule": "keep", "k": 2}, {"rule": "cap", "n": 0}):
        with pytest.raises(ValidationError):
            TypeAdapter(Rules).validate_python({"rules": [rule]})


def test_ids_restrict_what_is_curated(tmp_path: Path) -> None:
    rows = [row(i, "a") for i in range(6)]
    ids = [row.trajectory_id for row in rows[2:5]]
    assert apply(tmp_path, rows, {"rule": "filter", "where": "success"}, ids=ids)[0] == [2, 3, 4]


def test_k_center_covers() -> None:
    points = np.array([[0.0, 0], [0.1, 0], [5, 0], [5, 5], [5, 5.1]], dtype=np.float32)
    assert k_center(points, 3) in ([0, 4, 2], [0, 3, 2])
    assert k_center(np.zeros((4, 2), np.float32), 4) == [0], "the others are equal to it"
    assert len(set(cluster_balanced(points, 4, 3, 0))) == 4


def test_equal_prompts_are_taken_last_and_the_best_rows_first(tmp_path: Path) -> None:
    rows = [row(number, "t", reward=float(number), prompt=f"topic{number % 3} word{number % 3}") for number in range(9)]
    for method in ("k_center", "core_sets"):
        for n, expected in ((3, [6, 7, 8]), (5, [4, 5, 6, 7, 8])):
            folder = tmp_path / f"{method}-{n}"
            assert apply(folder, rows, {"rule": "diverse", "n": n, "method": method})[0] == expected


# sampling

ROWS = pl.DataFrame(
    {
        "trajectory_id": [f"r{i:04d}" for i in range(1000)],
        "task_id": [f"t{min(i // 10, 50)}" for i in range(1000)],
        "group_id": [f"t{min(i // 10, 50)}" for i in range(1000)],
        "reward": [float(i % 5) for i in range(1000)],
        "success": [i % 5 == 4 for i in range(1000)],
        "level": [i % 4 for i in range(1000)],
        "policy_version": [i // 100 for i in range(1000)],
    }
)


def drawn(ids: list[str]) -> pl.DataFrame:
    return pl.DataFrame({"trajectory_id": ids}).join(ROWS, on="trajectory_id", how="left", maintain_order="left")


@pytest.mark.parametrize("sampler", [uniform, success_first, prioritized, recency, diversity, curriculum])
def test_samplers_are_seeded_and_blind_to_row_order(sampler: Any) -> None:
    row = sampler(ROWS, 50, 1)
    assert row == sampler(ROWS.reverse(), 50, 1)
    assert row != sampler(ROWS, 50, 2)
    assert len(row.ids) == len(row.weights) == 50


def test_success_first() -> None:
    assert drawn(success_first(ROWS, 200).ids)["success"].all()
    assert drawn(success_first(ROWS, 250).ids)["success"].sum() == 200


def test_prioritized_weights_undo_the_bias() -> None:
    sample = prioritized(ROWS, 1000, 3, alpha=1.0, beta=1.0, priority="reward")
    # P is proportional to the reward, so 4 is drawn four times as often as 1 and weighs a quarter
    values = drawn(sample.ids)["reward"].to_numpy()
    share = {value: float((values == value).mean()) for value in (1.0, 4.0)}
    assert share[4.0] / share[1.0] == pytest.approx(4, rel=0.35)
    weights = np.array(sample.weights)
    assert weights[values == 1].max() / weights[values == 4].max() == pytest.approx(4, rel=1e-4)
    assert np.allclose(prioritized(ROWS, 50, alpha=0.0).weights, 1)
    positive = ROWS.filter(pl.col("reward") > 0)
    many = [prioritized(positive, 800, seed, alpha=1.0, beta=1.0) for seed in range(20)]
    means = [np.average(drawn(row.ids)["reward"].to_numpy(), weights=row.weights) for row in many]
    assert np.mean(means) == pytest.approx(positive["reward"].mean(), rel=0.02)
    with pytest.raises(StoreError, match="no column 'td'"):
        prioritized(ROWS, 5, priority="td")


def test_a_surprise_is_a_reward_far_from_those_of_its_group() -> None:
    rows = pl.DataFrame(
        {
            "trajectory_id": ["a", "b", "c", "d", "e", "f"],
            "task_id": ["t"] * 4 + ["u"] * 2,
            "group_id": ["g"] * 4 + [None] * 2,
            "reward": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0],
        }
    )
    samples = [prioritized(rows, 6, seed, priority="surprise", alpha=1.0, beta=1.0) for seed in range(500, 1500)]
    ids = [name for sample in samples for name in sample.ids]
    share = {name: ids.count(name) / len(ids) for name in "abcdef"}
    # |reward - mean of its group| is 3/4 for the one success, 1/4 for the failures, and 0 where all are alike
    assert [share[name] for name in "abcd"] == pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6], abs=0.03)
    assert share["e"] == share["f"] == 0
    both = next(sample for sample in samples if {"a", "b"} <= set(sample.ids))
    weights = dict(zip(both.ids, both.weights, strict=True))
    assert weights["b"] / weights["a"] == pytest.approx(3, rel=1e-4)
    assert max(both.weights) == 1, "rows that cannot be drawn make no weight small"


def test_whole_groups_are_drawn_by_the_mean_of_their_rows() -> None:
    rows = pl.DataFrame(
        {
            "trajectory_id": ["e", "a", "b", "c", "d", "f"],
            "task_id": ["t"] * 4 + ["u"] * 2,
            "group_id": ["g", "g", "h", "h"] + [None] * 2,
            "reward": [1.0, 1.0, 0.5, -0.5, 0.0, 0.0],
        }
    )
    samples = [prioritized(rows, 3, seed, alpha=1.0, beta=1.0, of="groups") for seed in range(500)]
    whole = [tuple(sample.ids[position : position + 2]) for sample in samples for position in (0, 2, 4)]
    assert set(whole) == {("a", "e"), ("b", "c")}
    assert whole.count(("a", "e")) / len(whole) == pytest.approx(2 / 3, abs=0.04)
    both = next(
        dict(zip(sample.ids, sample.weights, strict=True)) for sample in samples if {"a", "b"} <= set(sample.ids)
    )
    assert both == pytest.approx({"a": 0.5, "e": 0.5, "b": 1.0, "c": 1.0}, rel=1e-4)
    with pytest.raises(StoreError, match="n 4 is not between 1 and 3, the number of groups to draw from"):
        prioritized(rows, 4, of="groups")


def test_recency_prefers_new_policies() -> None:
    counts = drawn(recency(ROWS, 100, half_life=1.0).ids)["policy_version"].value_counts()
    share = dict(counts.iter_rows())
    assert share[9] > share.get(8, 0) > share.get(5, 0)


def test_diversity_flattens_tasks() -> None:
    assert drawn(diversity(ROWS, 51).ids)["task_id"].n_unique() == 51


def test_curriculum_opens_levels_by_success() -> None:
    rows = ROWS.with_columns(success=pl.col("level") < 1)
    assert set(drawn(curriculum(rows, 200).ids)["level"]) == {0, 1}  # level 1 is open, and not passed
    assert set(drawn(curriculum(rows.with_columns(success=True), 400).ids)["level"]) == {0, 1, 2, 3}
    # only the newest policy counts: it has forgotten level 0
    forgot = rows.with_columns(success=(pl.col("level") < 1) & (pl.col("policy_version") < 9))
    assert set(drawn(curriculum(forgot, 200).ids)["level"]) == {0}
    easiest = ROWS.filter(pl.col("level") == 0).height
    with pytest.warns(
        UserWarning, match=rf"curriculum draws {easiest} rows, not 900: .* open at gate 0\.6, 0, have no"
    ):
        assert len(curriculum(forgot, 900).ids) == easiest


def test_a_sample_larger_than_the_rows_is_refused() -> None:
    with pytest.raises(StoreError, match="not between 1 and 1000"):
        uniform(ROWS, 1001)


@pytest.mark.parametrize("strategy", SAMPLERS)
def test_a_sampler_reads_no_more_than_its_columns(strategy: str) -> None:
    few = ROWS.select("trajectory_id", *COLUMNS[strategy])
    assert SAMPLERS[strategy](few, 10, 3) == SAMPLERS[strategy](ROWS, 10, 3)


def test_rules_read_the_columns_that_they_look_at_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[set[str]] = []

    def spy(rows: pl.DataFrame, rule: Any, work: Any) -> pl.DataFrame:
        read.append(set(rows.columns))
        return rows

    monkeypatch.setattr(module, "_APPLY", dict.fromkeys(module._APPLY, spy))
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([row(0, "t")], stage="rollout", fingerprint="f")
    for rule in (
        {"rule": "keep"},
        {"rule": "decontaminate"},
        {"rule": "filter", "where": "segment = 0 and agent <> ''"},
        {"rule": "cap", "n": 1, "per": "split"},
    ):
        curate(buffer, Rules.model_validate({"rules": [rule]}).rules)
    basis, *more = read
    assert not basis & {"prompt", "sampling"}
    assert [item - basis for item in more] == [{"split"}, {"segment", "agent"}, {"split"}]

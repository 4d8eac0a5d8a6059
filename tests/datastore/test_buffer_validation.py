"""What append refuses: every rule of the contract, on whole columns, with the table unchanged."""

import math
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from store_rows import Make, build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.errors import InvalidRowsError
from agentrl.datastore.table.validation import LENIENT_SCHEMA, validate
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Span, Trajectory

NAN = math.nan
Folders = pytest.TempPathFactory
CALL = {"id": "1", "name": "f", "arguments": "{'a'"}


def message(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": []} | fields


def span(start: int, end: int, version: int = 1) -> dict[str, int]:
    return {"version": version, "start": start, "end": end}


BROKEN = [
    ({"trajectory_id": ""}, "trajectory_id", "is empty"),
    ({"env": None}, "env", "is null"),
    ({"reward": math.inf}, "reward", "is not a finite number"),
    ({"reward": NAN}, "reward", "is not a finite number"),
    ({"termination": "bored"}, "termination", "is not one of answered"),
    ({"reward_components": [{"name": "a", "value": NAN, "weight": 1.0}]}, "reward_components.value", "finite"),
    ({"sampling": "{"}, "sampling", "is not JSON"),
    ({"messages": [message(role="robot")]}, "messages.role", "is not one of system"),
    ({"messages": [message(tool_calls=[CALL])]}, "messages.tool_calls.arguments", "JSON"),
    ({"messages": [message(reward=math.inf)]}, "messages.reward", "finite"),
    ({"messages": [message(token_start=0, token_end=13)]}, "messages.token_end", "outside input_ids"),
    ({"messages": [message(token_start=5, token_end=4)]}, "messages.token_end", "outside input_ids"),
    ({"messages": [message(token_start=5)]}, "messages.token_end", "without token_start"),
    (
        {"messages": [message(token_start=0, token_end=8), message(token_start=7, token_end=12)]},
        "messages.token_start",
        "overlaps",
    ),
    ({"messages": [message(token_start=0, token_end=5)]}, "action_mask", "outside the assistant messages"),
    ({"action_mask": [True] * 11}, "action_mask", "as long as input_ids"),
    ({"logprobs": [-1.0]}, "logprobs", "as long as input_ids"),
    ({"message_seconds": [None, -1.0, None, None]}, "message_seconds", "is negative or not finite"),
    ({"message_seconds": [None, math.inf, None, None]}, "message_seconds", "is negative or not finite"),
    ({"logprobs": []}, "logprobs", "as long as input_ids"),
    ({"logprobs": [-1.0] * 12}, "logprobs", "not NaN where action_mask is false"),
    ({"logprobs": [NAN] * 4 + [-math.inf] + [NAN] * 7}, "logprobs", "is infinite"),
    ({"logprobs": [NAN] * 4 + [1.0] + [NAN] * 7}, "logprobs", "is positive"),
    ({"input_ids": [-1] * 12}, "input_ids", "negative"),
    ({"spans": [span(4, 9)]}, "spans", "leaves out an action token"),
    ({"spans": [span(4, 8), span(7, 12)]}, "spans", "overlaps"),
    ({"spans": [span(4, 13)]}, "spans", "outside input_ids"),
    ({"spans": [span(4, 4), span(4, 12)]}, "spans", "is empty"),
    ({"spans": [span(4, 12, version=-1)]}, "spans.version", "is negative"),
    ({"fork_at": 13, "parent_id": "p"}, "fork_at", "beyond input_ids"),
    ({"fork_at": 4}, "fork_at", "without parent_id"),
    ({"fork_at": 5, "parent_id": "p"}, "action_mask", "is true before fork_at"),
    ({"input_ids": [None] * 12}, "input_ids", "is null"),
    ({"n_tokens": 11}, "n_tokens", "length of input_ids"),
    ({"n_action_tokens": 3}, "n_action_tokens", "number of true"),
]  # fmt: skip


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([build(i).model_dump() | row for i, row in enumerate(rows)], schema=LENIENT_SCHEMA)


@pytest.mark.parametrize(("change", "field", "reason"), BROKEN)
def test_each_rule_names_row_field_and_reason(tmp_path: Path, change: dict[str, Any], field: str, reason: str) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([build(99)], stage="s", fingerprint="a")
    before = buffer.version
    with pytest.raises(InvalidRowsError) as caught:
        buffer.append(table({}, {}, change, {}), stage="s", fingerprint="b")
    assert {row for row, *_ in caught.value.problems} == {2}
    assert any(f == field and reason in r for _, _, f, r in caught.value.problems), caught.value.problems
    assert field in str(caught.value)
    assert buffer.version == before
    assert not buffer.has("b")


def test_good_rows_pass_in_any_slice() -> None:
    empty: dict[str, Any] = {"input_ids": [], "action_mask": [], "logprobs": [], "messages": []}
    forked = {"spans": [span(4, 8), span(8, 12, 2)], "fork_at": 4, "parent_id": "p"}
    rows = table(*[{}] * 50, empty, forked, {}, forked)
    assert validate(rows) == []
    assert validate(rows.slice(7, 20)) == []
    assert validate(rows.slice(49, 4)) == []


def test_the_row_number_counts_over_batches(tmp_path: Path, make: Make) -> None:
    def rows():  # type: ignore[no-untyped-def]
        for i in range(3000):
            yield make(i) if i != 2500 else make(i).model_copy(update={"reward": NAN})

    with pytest.raises(InvalidRowsError, match=r"row 2500 \(rollout-01234567-002500\): reward"):
        TrajectoryBuffer(tmp_path).append(rows(), stage="s", fingerprint="f")


def test_a_doubled_id_is_found_across_batches(tmp_path: Path, make: Make) -> None:
    with pytest.raises(InvalidRowsError, match=r"row 2000 .*is in this append already"):
        TrajectoryBuffer(tmp_path).append((make(i % 2000) for i in range(2001)), stage="s", fingerprint="f")


def test_values_that_no_column_holds_are_named(tmp_path: Path, make: Make) -> None:
    rows = [make(0), make(1).model_copy(update={"level": 2**40})]
    with pytest.raises(InvalidRowsError, match=r"row 1 .*level"):
        TrajectoryBuffer(tmp_path).append(rows, stage="s", fingerprint="f")
    with pytest.raises(StoreError, match="row 0 is a dict"):
        TrajectoryBuffer(tmp_path).append([{"a": 1}], stage="s", fingerprint="f")  # type: ignore[list-item]


def test_quarantine_sets_bad_rows_aside(store: str) -> None:
    buffer = TrajectoryBuffer(store)
    source = table({}, {"reward": NAN, "sampling": "{"}, {}, {"env": ""}, {})
    result = buffer.append(source, stage="import", fingerprint="abcdef0123", shard=3, on_error="quarantine")
    assert (result.rows, result.quarantined) == (3, 2)
    assert len(buffer.ids("0123456789abcdef")) + len(buffer.ids("abcdef0123")) == 3
    aside = buffer.quarantined()
    assert aside["row"].to_list() == [1, 3]
    assert aside["problems"].to_list() == [
        ["reward: is not a finite number", "sampling: is not JSON"],
        ["env: is empty"],
    ]
    assert aside["messages"].list.len().to_list() == [4, 4]  # the rows are there in full


UNFIT: list[dict[str, Any]] = [
    {"sample_index": 2**31},
    {"level": 10**30},
    {"prompt": "a\ud800"},
    {"tags": ["\udc00"]},
    {"trajectory_id": "x\ud800"},
    {"policy_version": "three"},
]


@pytest.mark.parametrize("fields", UNFIT)
def test_quarantine_takes_rows_whose_values_fit_no_column(fields: dict[str, Any], make: Make, tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    rows = [make(trajectory_id="a"), make(trajectory_id="b").model_copy(update=fields), make(trajectory_id="c")]
    [(name, value)] = fields.items()
    with pytest.raises(InvalidRowsError, match=f"{name}: is "):
        buffer.append(rows, stage="s", fingerprint="f")
    result = buffer.append(rows, stage="s", fingerprint="f", on_error="quarantine")
    assert (result.rows, result.quarantined) == (2, 1)
    assert sorted(buffer.ids("f")) == ["a", "c"]
    [[problem]] = buffer.quarantined()["problems"].to_list()
    assert problem.startswith(f"{name}: is "), value


# hypothesis: any content survives; any nonsense is refused

texts = st.text(max_size=20)


def one_span(version: int, mask: list[bool]) -> list[Span]:
    """The spans of a row that weights of one version sampled; empty if it has no action token."""
    if True not in mask:
        return []
    return [Span(version=version, start=mask.index(True), end=len(mask) - mask[::-1].index(True))]


TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans(), st.floats(-50, 0, width=32)), max_size=20)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    tokens = draw(TOKENS)
    mask = [action for _, action, _ in tokens]
    values: dict[str, Any] = {
        "prompt": draw(texts),
        "tags": draw(st.lists(texts, max_size=3)),
        "reward": draw(st.floats(allow_nan=False, allow_infinity=False)),
        "final_state": draw(st.sampled_from(["null", '{"a": [1, null]}', '"é\\u0000"'])),
        "messages": [
            {
                "role": draw(st.sampled_from(["user", "tool", "assistant"])),
                "content": draw(texts),
                "reasoning": draw(st.none() | texts),
                "tool_calls": draw(st.just([]) | st.just([{"id": "", "name": "f", "arguments": "{}"}])),
            }
        ],
        "input_ids": [token for token, _, _ in tokens],
        "action_mask": mask,
        "logprobs": [logprob if action else NAN for _, action, logprob in tokens],
        "n_tokens": len(tokens),
        "n_action_tokens": sum(mask),
        "pipeline": draw(st.none() | texts),
        "spans": one_span(draw(st.integers(0, 9)), mask),
    }
    return build(0, **values)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(trajectories(), min_size=1, max_size=3))
def test_any_trajectory_survives_the_round_trip(tmp_path_factory: Folders, rows: list[Trajectory]) -> None:
    rows = [row.model_copy(update={"trajectory_id": f"r-{i}"}) for i, row in enumerate(rows)]
    buffer = TrajectoryBuffer(tmp_path_factory.mktemp("store"))
    buffer.append(rows, stage="s", fingerprint="f")
    back = buffer.get_many([row.trajectory_id for row in rows])
    for first, two in zip(back, rows, strict=True):
        expected = two.model_copy(update={"stage": "s", "fingerprint": "f"})
        assert first.model_dump_json() == expected.model_dump_json()
        assert [math.isnan(x) for x in first.logprobs] == [math.isnan(x) for x in expected.logprobs]


nonsense = st.one_of(
    st.none(), st.integers(), st.floats(), texts, st.lists(st.none() | st.integers(), max_size=3), st.booleans()
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(TRAJECTORY_SCHEMA.names), nonsense, min_size=1, max_size=3))
@example(changes={"trajectory_id": "\U00020000"})
def test_nonsense_is_refused_or_stored_exactly(tmp_path_factory: Folders, changes: dict[str, Any]) -> None:
    buffer = TrajectoryBuffer(tmp_path_factory.mktemp("store"))
    buffer.append([build(7)], stage="s", fingerprint="first")
    row = build(0).model_copy(update=changes)
    refusal = ""
    try:
        buffer.append([row], stage="s", fingerprint="f")
    except StoreError as error:
        refusal = str(error)
    if refusal:
        assert any(name in refusal for name in changes) or "input_ids" in refusal
        assert buffer.version == 1
        assert buffer.scan().select(pl.len()).collect().item() == 1
    else:
        assert buffer.scan().select(pl.len()).collect().item() == 2
        assert buffer.get(str(row.trajectory_id))

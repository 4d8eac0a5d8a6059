"""What an import takes from a file beside the trajectories, what counts as a success, and what it sets aside."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats.imported import Imported
from agentrl.datastore.formats.imports import import_paths
from agentrl.datastore.formats.labels import Labels
from agentrl.datastore.upkeep import forget
from agentrl.flows.cli import app
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.imports import import_

USER, SAID = {"role": "user", "content": "where is Ann?"}, {"role": "assistant", "content": "in Rome"}
SIDE = [
    {
        "key": "a",
        "reward": 1.0,
        "success": True,
        "split": "dev",
        "tags": ["clean", "short"],
        "quality": 0.5,
        "by": "Eve",
    },
    {"key": "b", "reward": 0.0, "success": False, "split": "train", "tags": [], "quality": 0.25, "by": "Eve"},
    {"key": "x", "reward": 0.5, "success": True, "split": "train", "tags": [], "quality": 1.0, "by": "Eve"},
]


def chats(path: Path, **fields: list[Any]) -> Path:
    """A chat for each of the values of the fields."""
    records = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    path.write_text("".join(json.dumps({"messages": [USER, SAID], **record}) + "\n" for record in records))
    return path


def written(folder: Path, suffix: str) -> Path:
    path, frame = folder / f"side{suffix}", pl.DataFrame(SIDE)
    if suffix == ".csv":
        frame.with_columns(pl.col("tags").list.join(",")).write_csv(path)
    elif suffix == ".parquet":
        frame.write_parquet(path)
    elif suffix == ".json":
        path.write_text(json.dumps(SIDE))
    else:
        frame.write_ndjson(path)
    return path


def taken(folder: Path, path: Path, labels: Labels, **options: Any) -> tuple[Imported, list[dict[str, Any]]]:
    buffer = TrajectoryBuffer(folder / "store")
    result = import_paths(buffer, [path], labels=labels, **options)
    rows = buffer.sql("select * from trajectories order by trajectory_id")
    return result, rows.select("source_id", "reward", "success", "split", "tags", "reward_components").to_dicts()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json", ".parquet"])
def test_a_file_beside_gives_rewards_verdicts_splits_and_tags(suffix: str, tmp_path: Path) -> None:
    path, side = chats(tmp_path / "a.jsonl", id=["a", "b", "c"]), written(tmp_path, suffix)
    result, rows = taken(tmp_path, path, Labels(join=str(side), on="source_id=key"))
    assert [(row["reward"], row["success"], row["split"]) for row in rows] == [
        (1.0, True, "dev"),
        (0.0, False, "train"),
        (None, None, "train"),
    ]
    assert [row["tags"] for row in rows] == [["clean", "short"], [], []]
    assert rows[0]["reward_components"] == [{"name": "quality", "value": 0.5, "weight": 0.0}]
    assert result.remarks == {f"rows without a partner in {side}": 1, f"keys of {side} without a row": 1}
    assert result.ignored == {f"{side}: by": 2}


def test_a_key_may_stand_anywhere_in_the_record(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", meta=[{"issue": 7}, {"issue": 8}])
    side = tmp_path / "side.csv"
    side.write_text("number,resolved,label\n7,true,hard\n8,false,\n")
    labels = Labels(join=str(side), on="meta.issue=number", success="resolved = 1", reward="resolved")
    _, rows = taken(tmp_path, path, labels)
    assert [(row["reward"], row["success"], row["tags"]) for row in rows] == [(1.0, True, ["hard"]), (0.0, False, [])]


def test_the_file_beside_is_part_of_what_was_imported(tmp_path: Path) -> None:
    path, side = chats(tmp_path / "a.jsonl", id=["a"]), tmp_path / "side.jsonl"
    side.write_text('{"id": "a", "reward": 1}\n')
    labels = Labels(join=str(side), on="id")
    assert taken(tmp_path, path, labels)[0].rows == 1
    assert taken(tmp_path, path, labels)[0].known == [str(path)]
    side.write_text('{"id": "a", "reward": 0}\n')
    assert taken(tmp_path, path, labels)[0].repeats == [str(path)]


@pytest.mark.parametrize(
    ("side", "on", "why"),
    [
        ('{"id": "z", "reward": 1}', "id", "no row has a partner in .*: none has one of its 1 keys 'id', such as 'z'"),
        ('{"id": "a", "reward": 1}\n{"id": "a", "reward": 0}', "id", ":2: id 'a' occurs twice with different values"),
        ('{"name": "a"}', "id", ":1: has no key 'id'"),
        ('{"id": "a"}', "=", "--on '=' names no key"),
        ("not JSON", "id", "is not JSON"),
        ("", "id", "holds no records|has no record"),
    ],
)
def test_a_file_beside_that_does_not_fit_is_refused_by_name(side: str, on: str, why: str, tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", id=["a"])
    (tmp_path / "side.jsonl").write_text(side)
    with pytest.raises(StoreError, match=why):
        taken(tmp_path, path, Labels(join=str(tmp_path / "side.jsonl"), on=on))
    assert not list((tmp_path / "store").rglob("*.parquet"))


def test_a_success_may_name_a_field_that_no_column_carries(tmp_path: Path) -> None:
    path = chats(
        tmp_path / "a.jsonl",
        resolved=[True, False, None, "odd", 10**400],
        stats=[{"final": 1}, {"final": 2}, {"final": 3}, {"final": 4}, {}],
    )
    result, rows = taken(tmp_path, path, Labels(success='resolved and "stats.final" < 2', reward="stats.final"))
    assert [row["success"] for row in rows[:2]] == [True, False]
    assert [row["reward"] for row in rows] == [1.0, 2.0, 3.0, 4.0, None]
    assert sum(count for text, count in result.remarks.items() if "success unknown" in text) == 2


@pytest.mark.parametrize("expression", ["resolved", "resolved = 1", "resolved = true", "not (resolved = false)"])
def test_truth_values_may_be_asked_for_in_any_way(expression: str, tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", resolved=[True, False])
    assert [row["success"] for row in taken(tmp_path, path, Labels(success=expression))[1]] == [True, False]


@pytest.mark.parametrize("labels", [Labels(success="resolvd = 1"), Labels(success="resolvd"), Labels(reward="resolvd")])
def test_a_name_that_no_record_has_is_refused(labels: Labels, tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", resolved=[True])
    with pytest.raises(StoreError, match="names resolvd, which no record has"):
        taken(tmp_path, path, labels)


def test_a_component_that_only_some_records_have_is_null_in_others(tmp_path: Path) -> None:
    lines = [{"prompt": [USER], "completion": [SAID], "reward": 1.0, "example_id": n} for n in range(3)]
    lines[2]["metrics"] = {"exact": 1.0}
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, rows = taken(tmp_path, path, Labels(success="exact = 1"))
    assert [row["success"] for row in rows] == [None, None, True]


@settings(max_examples=20, deadline=None)
@given(rewards=st.lists(st.sampled_from(["NaN", "Infinity", "1e400", "1" + "0" * 400, '"x"', "[]", "0.5"]), min_size=1))
def test_a_reward_that_is_no_finite_number_refuses_no_other(
    rewards: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rewards")
    item = json.dumps({"prompt": [USER], "completion": [SAID], "metrics": {}, "reward": 0})
    good = [item.replace('"reward": 0', f'"reward": {reward}') for reward in ["1.0", *rewards, "1.0"]]
    (folder / "results.jsonl").write_text("\n".join(good))
    result, rows = taken(folder, folder / "results.jsonl", Labels(), on_error="quarantine")
    finite = [float(reward) if reward == "0.5" else None for reward in rewards]
    assert [row["reward"] for row in rows] == [1.0, *finite, 1.0]
    assert result.remarks.get("reward is no finite number: unscored", 0) == finite.count(None)


def test_an_empty_simulation_refuses_no_other(tmp_path: Path) -> None:
    whole = {"id": "s", "task_id": "1", "termination_reason": "user_stop", "messages": [USER, SAID]}
    simulations = [whole, {}, {**whole, "messages": []}, {**whole, "id": "t", "reward_info": {"reward": float("nan")}}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"info": {}, "tasks": [], "simulations": simulations}, indent=1))
    result, rows = taken(tmp_path, path, Labels(), on_error="quarantine")
    assert [row["source_id"] for row in rows] == ["s", "t"]
    assert [record["place"] for record in result.unreadable] == [f"{path}[1]", f"{path}[2]"]
    assert result.remarks["reward_info.reward is no finite number: unscored"] == 1


def ask(*words: str) -> str:
    done = CliRunner().invoke(app, ["buffer", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_was_forgotten_is_not_listed_as_set_aside(tmp_path: Path) -> None:
    store, paths = ["--store", str(tmp_path / "store")], []
    for name in "ab":
        paths.append(chats(tmp_path / f"{name}.jsonl", id=[name]))
        paths[-1].write_text(paths[-1].read_text() + "broken\n" + '{"messages": []}\n')
    dry = ask("import", *map(str, paths), "--quarantine", "--dry-run", *store)
    assert "4 records cannot be read and would be set aside\n" in dry
    text = ask("import", *map(str, paths), "--quarantine", *store)
    assert "4 records cannot be read and are set aside; `agentrl buffer quarantine` lists them" in text
    listed = ask("quarantine", *store)
    assert "no rows" not in listed
    assert listed.count("broken") == 0
    assert len(TrajectoryBuffer(tmp_path / "store").unreadable()) == 4
    buffer = TrajectoryBuffer(tmp_path / "store")
    fingerprints = dict(buffer.sql("select source_id, fingerprint from trajectories").rows())
    forget(buffer, fingerprints["a"])  # one file of the import
    assert {record["place"].rpartition(":")[0] for record in buffer.unreadable()} == {str(paths[1])}
    forget(buffer, fingerprints["b"])
    assert buffer.unreadable() == []
    ask("import", *map(str, paths), "--quarantine", *store)
    assert len(buffer.unreadable()) == 4
    assert "no rows" in ask("quarantine", "--store", str(tmp_path / "another"))


def test_the_stage_joins_too(tmp_path: Path) -> None:
    path, side = chats(tmp_path / "a.jsonl", id=["a", "b"]), written(tmp_path, ".csv")
    harness = Harness(tmp_path / "store")
    config = {"paths": [str(path)], "join": str(side), "on": "source_id=key", "max_record_mb": 1}
    made = harness.run(import_, config)
    rows = harness.buffer.get_many(made["trajectories"].ids())
    assert [(row.source_id, row.reward, row.success) for row in rows] == [("a", 1.0, True), ("b", 0.0, False)]
    assert "keys of" in made.metrics["remarks"]

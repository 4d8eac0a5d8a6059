"""What people and judges said of rows goes with the cut that is made of them, and comes back with it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from store_rows import build
from test_cuts import harness, made, rows, summed  # noqa: F401  (a fixture)

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.cuts.export import export_cut
from agentrl.datastore.cuts.verify import verify_export
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.annotations import annotate
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.cut import import_cut
from agentrl.pipelines.stages.feedback import pairs_from_preferences
from agentrl.schemas.arrow import to_table
from agentrl.schemas.manifest import Ingredients, Kind, Manifest, OutputRecord
from agentrl.schemas.pair import PAIR_SCHEMA, Pair


def say(harness: Harness, *given: dict[str, Any]) -> None:  # noqa: F811
    fields = [("said", {"author": "ann", **each}) for each in given]
    annotate(harness.buffer, fields, source="python", strict=True)


def log(harness: Harness) -> list[tuple[Any, ...]]:  # noqa: F811
    columns = ("trajectory_id", "turn", "name", "value", "comment", "correction", "author", "author_kind", "created_at")
    return sorted(
        (tuple(row[name] for name in columns) for row in harness.buffer.annotations.rows().to_pylist()), key=str
    )


@pytest.mark.parametrize("format", ["parquet", "openai-chat"])
def test_annotations_lie_beside_the_rows(harness: Harness, tmp_path: Path, format: str) -> None:  # noqa: F811
    from datasets import load_dataset
    from huggingface_hub import DatasetCard

    ids, other = made(harness).ids().to_pylist(), build(0).trajectory_id
    say(
        harness,
        {"trajectory_id": ids[0], "name": "thumbs", "value": "up", "created_at": "2026-01-01"},
        {"trajectory_id": ids[0], "name": "thumbs", "value": "down", "created_at": "2026-01-02"},
        {"trajectory_id": ids[1], "name": "thumbs", "value": True, "author": "gpt", "author_kind": "judge"},
        {"trajectory_id": ids[1], "name": "correction", "turn": 0, "correction": "Bob", "comment": "he leads her"},
        {"trajectory_id": other, "name": "thumbs", "value": "up"},
    )
    path = tmp_path / "gold"
    done = export_cut(harness.buffer, made(harness), "gold", path, format)
    assert (done.annotations, done.annotations_left_out) == (4, {})
    file = "annotations.parquet" if format == "parquet" else "annotations.jsonl"
    read = DatasetCard.load(path / "README.md")
    assert "| thumbs | person | 2 | 1 |" in read.text
    assert read.data.to_dict()["configs"][1] == {"config_name": "annotations", "data_files": file}
    loaded = load_dataset(str(path), "annotations", split="train", cache_dir=str(tmp_path / "cache"))
    assert list(loaded["comment"]) == ["", "", "", "he leads her"]
    assert list(loaded["value"]) == ["up", "down", "true", None]
    assert len(load_dataset(str(path), split="train", cache_dir=str(tmp_path / "cache"))) == 10
    assert verify_export(path).ok
    without = export_cut(harness.buffer, made(harness), "gold", tmp_path / "bare", format, annotations=False)
    assert without.annotations == 0
    assert not (tmp_path / "bare" / file).exists()


def test_annotations_come_into_another_store(harness: Harness, tmp_path: Path) -> None:  # noqa: F811
    ids, path = made(harness).ids().to_pylist(), tmp_path / "gold"
    say(
        harness,
        {"trajectory_id": ids[0], "name": "stars", "value": 4, "token_start": 2, "token_end": 5},
        {"trajectory_id": ids[1], "name": "correction", "turn": 0, "correction": "Bob"},
    )
    export_cut(harness.buffer, made(harness), "gold", path)
    other = Harness(tmp_path / "other")
    assert other.run(import_cut, {"path": str(path)}).metrics["annotations"] == 2
    assert log(other) == log(harness)
    say(harness, {"trajectory_id": ids[0], "name": "stars", "value": 1})
    export_cut(harness.buffer, made(harness), "gold", path, force=True)
    done = other.run(import_cut, {"path": str(path)})
    assert (done.metrics["appended"], done.metrics["annotations"]) == (0, 1)
    assert log(other) == log(harness)


def test_what_is_said_of_other_rows_is_not_taken(harness: Harness, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "gold"
    say(harness, {"trajectory_id": made(harness).ids()[0].as_py(), "name": "thumbs", "value": "up"})
    export_cut(harness.buffer, made(harness), "gold", path)
    table = pq.read_table(path / "annotations.parquet")
    named = table.set_column(
        table.schema.get_field_index("trajectory_id"), table.schema.field("trajectory_id"), [["x"]]
    )
    pq.write_table(named, path / "annotations.parquet")
    assert verify_export(path).files == ["annotations.parquet"]
    summed(path)
    assert verify_export(path).beyond == ["annotations.parquet: x"]
    with pytest.raises(StoreError, match="beyond the cut"):
        Harness(tmp_path / "other").run(import_cut, {"path": str(path)})


def test_annotations_with_secrets_are_left_out(harness: Harness, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("detect_secrets")
    harness.trajectories([build(101, tags=["redacted"]), build(103)])
    cleaned, open_row = build(101).trajectory_id, build(103).trajectory_id
    mail = {"name": "comment", "comment": "mail jane.roe@northwind.io"}
    thumb = {"name": "thumbs", "value": "up"}
    say(harness, *({"trajectory_id": name, **what} for name in (cleaned, open_row) for what in (mail, thumb)))
    for secrets, kept, left_out in ((None, 3, 1), ("report", 2, 2)):
        path = tmp_path / f"gold-{secrets}"
        done = export_cut(harness.buffer, made(harness, {"rules": [], "secrets": secrets}), "gold", path)
        assert (done.annotations, done.annotations_left_out) == (kept, {"since they hold secrets": left_out})
        assert f"{left_out} annotations were left out, since they hold secrets." in (path / "README.md").read_text()


def preferred(better: str, worse: str) -> Pair:
    """A pair of two rows."""
    same = {"task_id": "task", "kind": "trajectory", "method": "reward", "shared_prefix": 1, "tokenizer": "t"}
    sides = {f"{side}_{name}": value for side in ("chosen", "rejected") for name, value in TOKENS.items()}
    named = {"pair_id": f"{better} over {worse}", "chosen_id": better, "rejected_id": worse}
    return Pair.model_validate(same | sides | named)


TOKENS: dict[str, Any] = {"reward": 1.0, "ids": [1, 2], "mask": [False, True]}


def store_pairs(harness: Harness, *pairs: Pair) -> None:  # noqa: F811
    """The pairs as the artifact of a stage, as a run leaves them."""
    catalog = Catalog(harness.buffer.store)
    folder = catalog.staging("pairs", "k1")
    pq.write_table(to_table(pairs, PAIR_SCHEMA), folder / "pairs.parquet")
    made: dict[str, Any] = {"uses": "x", "uses_version": "1", "config": {}, "seed": 0, "inputs": {}, "code": {}}
    output = OutputRecord(kind=Kind.PAIRS, path="pairs.parquet", digest="d", rows=len(pairs))
    about: dict[str, Any] = {"run_id": "r", "created_at": datetime.now(UTC), "duration_s": 0}
    ingredients = Ingredients(scheme=1, stage="pairs", **made)
    catalog.publish(Manifest(fingerprint="k1", ingredients=ingredients, outputs={"pairs": output}, **about), folder)


def prefer(pair: Pair, value: str) -> dict[str, Any]:
    return {"trajectory_id": pair.chosen_id, "pair_id": pair.pair_id, "name": "preference", "value": value}


@pytest.mark.parametrize("format", ["parquet", "openai-chat"])
def test_annotations_of_pairs_go_with_pairs_that_are_whole(harness: Harness, tmp_path: Path, format: str) -> None:  # noqa: F811
    from datasets import load_dataset
    from huggingface_hub import DatasetCard

    ids, beyond = made(harness).ids().to_pylist(), build(0).trajectory_id
    whole, half, unjudged = preferred(ids[0], ids[1]), preferred(ids[2], beyond), preferred(ids[3], ids[4])
    store_pairs(harness, whole, half, unjudged)
    say(harness, prefer(whole, "rejected"), prefer(half, "chosen"))
    path = tmp_path / "gold"
    done = export_cut(harness.buffer, made(harness), "gold", path, format)
    assert done.annotations == 1
    assert done.annotations_left_out == {"since the cut has one side of their pair alone": 1}
    suffix = "parquet" if format == "parquet" else "jsonl"
    read = DatasetCard.load(path / "README.md")
    assert "| preference | person | 1 | 1 |" in read.text
    assert "1 annotations were left out, since the cut has one side of their pair alone." in read.text
    assert read.data.to_dict()["configs"][2] == {"config_name": "pairs", "data_files": f"pairs.{suffix}"}
    pairs = load_dataset(str(path), "pairs", split="train", cache_dir=str(tmp_path / "cache"))
    assert pairs.to_list() == [{"pair_id": whole.pair_id, "chosen_id": ids[0], "rejected_id": ids[1]}]
    assert verify_export(path).ok


def test_annotations_of_pairs_count_in_another_store_that_makes_the_pairs(harness: Harness, tmp_path: Path) -> None:  # noqa: F811
    ids, path = made(harness).ids().to_pylist(), tmp_path / "gold"
    pair = preferred(ids[0], ids[1])
    store_pairs(harness, pair)
    say(harness, prefer(pair, "rejected"))
    export_cut(harness.buffer, made(harness), "gold", path)
    other = Harness(tmp_path / "other")
    assert other.run(import_cut, {"path": str(path)}).metrics["annotations"] == 1
    assert log(other) == log(harness)
    again = other.run(pairs_from_preferences, {"annotations": 1}, pairs=[other.pairs([pair])])
    assert [made.chosen_id for made in again["pairs"].read()] == [ids[1]]
    table = pq.read_table(path / "pairs.parquet")
    pq.write_table(table.set_column(2, table.schema.field(2), [["x"]]), path / "pairs.parquet")
    summed(path)
    assert verify_export(path).beyond == ["pairs.parquet: x"]


def test_what_is_said_of_a_pair_with_a_redacted_side_is_searched_for_secrets(harness: Harness, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("detect_secrets")
    harness.trajectories([build(101, tags=["redacted"]), build(103)])
    pair = preferred(build(103).trajectory_id, build(101).trajectory_id)
    store_pairs(harness, pair)
    say(harness, prefer(pair, "chosen") | {"comment": "mail jane.roe@northwind.io"})
    done = export_cut(harness.buffer, made(harness, {"rules": []}), "gold", tmp_path / "gold")
    assert (done.annotations, done.annotations_left_out) == (0, {"since they hold secrets": 1})
    assert not (tmp_path / "gold" / "pairs.parquet").exists()

"""What people and judges said of rows goes with the cut that is made of them, and comes back with it."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from store_rows import build
from test_cuts import harness, made, rows, summed  # noqa: F401  (a fixture)

from agentrl.datastore.cuts.export import export_cut
from agentrl.datastore.cuts.verify import verify_export
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.annotations import annotate
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.cut import import_cut


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
    assert (done.annotations, done.annotations_left_out) == (4, 0)
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
        assert (done.annotations, done.annotations_left_out) == (kept, left_out)
        assert f"{left_out} annotations were left out" in (path / "README.md").read_text()

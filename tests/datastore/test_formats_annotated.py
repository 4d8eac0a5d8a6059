"""What people and judges said of rows goes through files of other formats, where these have room for it."""

import json
from pathlib import Path
from typing import Any

import pytest
from store_rows import build

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.annotated import CARRIED, carried_by
from agentrl.datastore.formats.exports import export_rows
from agentrl.datastore.formats.imports import import_paths
from agentrl.flows.api.store import Store
from agentrl.flows.cli import call

WRITTEN = [name for name, format in FORMATS.items() if format.write]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    rows = [build(number, task_id="t", group_id="t") for number in range(4)]
    TrajectoryBuffer(tmp_path / "store").append(rows, stage="rollout", fingerprint="a" * 32)
    own, ids = Store(tmp_path / "store"), [row.trajectory_id for row in rows]
    own.annotate(trajectory_id=ids[0], name="thumbs", value="up", author="ann")
    own.annotate(trajectory_id=ids[0], name="thumbs", value="down", author="ann")
    own.annotate(trajectory_id=ids[0], name="stars", value=2, author="gpt", author_kind="judge", turn=0)
    own.annotate(trajectory_id=ids[1], name="correction", correction="Bob", author="ann", turn=1, comment="he leads")
    return own


def spoken(store: Store) -> list[tuple[Any, ...]]:
    return sorted(store.annotations.select(*CARRIED, "created_at").rows(), key=str)


@pytest.mark.parametrize("format", WRITTEN)
def test_annotations_go_through_every_format(store: Store, tmp_path: Path, format: str) -> None:
    ids = store.rows.select("trajectory_id").collect()["trajectory_id"].sort().to_list()[:2]  # a failure, a success
    path = tmp_path / f"rows{FORMATS[format].suffix}"
    done = export_rows(store.buffer, ids, path, format, annotations=True)
    assert done.annotations == 3
    other = Store(tmp_path / "other")
    result = import_paths(other.buffer, [path], format)
    assert [key for key in result.ignored if "annotations" in key] == []
    assert spoken(other) == spoken(store)
    assert result.annotations == 3
    assert set(other.annotations["trajectory_id"]) <= set(other.rows.select("trajectory_id").collect()["trajectory_id"])
    assert other.annotations["trajectory_id"].n_unique() == 2
    again = import_paths(other.buffer, [path], format)
    assert (again.annotations, again.rows) == (0, 0)
    plain = tmp_path / f"plain{FORMATS[format].suffix}"
    export_rows(store.buffer, ids, plain, format)
    import_paths(Store(tmp_path / "plain-store").buffer, [plain], format)
    assert Store(tmp_path / "plain-store").annotations.is_empty()


def test_an_import_that_was_killed_before_its_commit_says_nothing_twice(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "rows.jsonl", Store(tmp_path / "other")
    store.export(path, "openai-chat", annotations=True)
    with monkeypatch.context() as patched:
        patched.setattr(TrajectoryBuffer, "append", _failing(TrajectoryBuffer.append))
        with pytest.raises(KeyboardInterrupt):
            import_paths(other.buffer, [path])
    assert other.annotation_log().height == 3
    done = import_paths(other.buffer, [path])
    assert (done.rows, done.annotations) == (4, 3)
    assert other.annotation_log().height == 3
    assert spoken(other) == spoken(store)


def _failing(append: Any) -> Any:
    def failing(self: TrajectoryBuffer, rows: Any, **options: Any) -> Any:
        list(rows)
        raise KeyboardInterrupt

    return failing


def test_what_does_not_fit_its_row_is_set_aside(tmp_path: Path) -> None:
    own = Store(tmp_path / "store")
    chat = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Rome."}]
    fitting = {"name": "thumbs", "value": "up", "author": "ann"}
    lines = [
        {"messages": chat, "annotations": [fitting, {**fitting, "turn": 3}]},
        {"messages": chat, "annotations": ["a label of somebody else"]},
        {"messages": chat, "annotations": json.dumps([{**fitting, "created_at": "2026-01-02"}])},
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert own.import_(tmp_path / "chats.jsonl", progress=False, dry_run=True).annotations == 2
    assert own.annotation_log().is_empty()
    done = own.import_(tmp_path / "chats.jsonl", progress=False)
    assert (done.rows, done.annotations, done.ignored) == (3, 2, {"annotations": 1})
    assert done.remarks == {"annotations that do not fit their row and are set aside in quarantine": 1}
    assert own.annotations["turn"].to_list() == [None, None]
    assert carried_by({"annotations": "[{"}) == []
    assert carried_by({"info": "text", "traces": []}) == []


def test_secrets_in_what_is_said_are_replaced_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("detect_secrets")
    store, line = Store(tmp_path / "store"), {"role": "assistant", "content": "Rome."}
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [line]}))
    store.import_(tmp_path / "chats.jsonl", progress=False)
    [row] = store.rows.select("trajectory_id").collect()["trajectory_id"]
    store.annotate(trajectory_id=row, name="comment", comment="mail jane.roe@northwind.io", author="ann")
    with pytest.raises(StoreError, match=f"1 rows hold secrets .ANNOTATION 1.: {row}"):
        store.export(tmp_path / "rows.jsonl", "openai-chat", annotations=True, secrets="refuse")
    store.export(tmp_path / "bare.jsonl", "openai-chat", secrets="refuse")
    store.export(tmp_path / "rows.jsonl", "openai-chat", annotations=True, secrets="redact")
    text = (tmp_path / "rows.jsonl").read_text()
    assert "northwind" not in text
    assert "mail <EMAIL_1>" in text


def test_commands_say_how_many(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "rows.jsonl")
    assert (
        call(["buffer", "export", path, "--format", "openai-chat", "--with-annotations", "--store", str(store.path)])
        == 0
    )
    assert f"4 records of 4 rows written to {path} with 3 annotations" in capsys.readouterr().out
    assert call(["buffer", "import", path, "--store", str(tmp_path / "other")]) == 0
    assert "3 annotations of rows added" in capsys.readouterr().out

"""``agentrl buffer import``, ``export`` and ``forget``."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from store_rows import build
from typer.testing import CliRunner

from agentrl.datastore import Catalog, StoreError, TrajectoryBuffer
from agentrl.datastore.formats.imports import import_paths
from agentrl.datastore.upkeep import check, compact, forget
from agentrl.flows.cli import app
from agentrl.schemas.manifest import Ingredients, Kind, Manifest, OutputRecord

runner = CliRunner()


def ask(*arguments: str) -> str:
    result = runner.invoke(app, ["buffer", *arguments], env={"COLUMNS": "160"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def chats(path: Path, *texts: str, **more: Any) -> Path:
    answer = {"role": "assistant", "content": "ho"}
    records = [{"messages": [{"role": "user", "content": text}, answer], **more} for text in texts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_import_says_what_came_in_and_what_did_not(tmp_path: Path) -> None:
    store, path = str(tmp_path / "store"), chats(tmp_path / "a.jsonl", "x", "y", images=["z"])
    dry = ask("import", str(path), "--store", store, "--dry-run")
    assert "2 rows would be appended: 4 messages, 0 calls, 0 tokens, 0 successes, 2 unscored" in dry
    assert not (tmp_path / "store" / "trajectories").exists()
    text = ask("import", str(path), "--store", store)
    assert "2 rows appended; version" in text
    assert "read as openai-chat from 1 files" in text
    assert "ignored: images 2" in text
    assert f"in the buffer already: {path}" in ask("import", str(path), "--store", store)
    printed = json.loads(ask("import", str(path), "--store", store, "--env", "shop", "--json"))
    assert (printed["rows"], printed["ignored"], printed["repeats"]) == (2, {"images": 2}, [str(path)])


def test_import_fails_with_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(StoreError, match="fits no format"):
        ask("import", str(tmp_path / "a.json"), "--store", str(tmp_path / "store"))


def test_quarantine_lists_records_with_their_place(tmp_path: Path) -> None:
    store, path = str(tmp_path / "store"), chats(tmp_path / "a.jsonl", "x")
    path.write_text(path.read_text() + '{"messages": [\n')
    text = ask("import", str(path), "--store", store, "--quarantine")
    assert "1 records cannot be read and are set aside" in text
    assert "is not JSON" in ask("quarantine", "--store", store)
    assert json.loads(ask("quarantine", "--store", store, "--json"))["records"][0]["place"] == f"{path}:2"


def test_export_says_what_is_lost_before_it_writes(tmp_path: Path) -> None:
    store = tmp_path / "store"
    TrajectoryBuffer(store).append([build(0), build(1)], stage="s", fingerprint="f")
    path = tmp_path / "out.jsonl"
    dry = ask("export", str(path), "-f", "openai-chat", "--store", str(store), "--dry-run")
    assert "openai-chat cannot hold, of 2 rows:" in dry
    assert "log-probs 2" in dry
    assert not path.exists()
    assert "2 records of 2 rows written" in ask("export", str(path), "-f", "openai-chat", "--store", str(store))
    with pytest.raises(StoreError, match="--force replaces it"):
        ask("export", str(path), "-f", "openai-chat", "--store", str(store))
    printed = json.loads(ask("export", str(path), "-f", "openai-chat", "--store", str(store), "--force", "--json"))
    assert (printed["records"], printed["loses"]["token ids"]) == (2, 2)


def count(buffer: TrajectoryBuffer) -> int:
    return int(buffer.sql("select count(*) from trajectories").item())


def test_forget_undoes_exactly_one_import(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    buffer.append([build(i) for i in range(4)], stage="s", fingerprint="f")
    first = import_paths(buffer, [chats(tmp_path / "a.jsonl", "x", "y"), chats(tmp_path / "b.jsonl", "z")])
    second = import_paths(buffer, [chats(tmp_path / "c.jsonl", "w")])
    compact(buffer)
    assert count(buffer) == 8
    store = str(tmp_path / "store")
    assert "3 rows of import" in ask("forget", first.fingerprint[:10], "--store", store, "--dry-run")
    assert count(buffer) == 8
    ask("forget", first.fingerprint[:10], "--store", store)
    prompts = buffer.sql("select prompt from trajectories where stage = 'import'")["prompt"].to_list()
    assert (count(buffer), prompts) == (5, ["w"])
    assert check(buffer) == []
    assert import_paths(buffer, [tmp_path / "a.jsonl"]).rows == 2
    assert forget(buffer, second.files[0]["fingerprint"]).rows == 1  # of a file
    assert count(buffer) == 6
    with pytest.raises(StoreError, match="no import has the fingerprint"):
        forget(buffer, second.fingerprint)
    with pytest.raises(StoreError, match="no import has the fingerprint"):
        forget(buffer, "fffffff")
    with pytest.raises(StoreError, match="too short"):
        forget(buffer, "f")


def test_forget_keeps_what_an_artifact_reads(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    report = import_paths(buffer, [chats(tmp_path / "a.jsonl", "x", "y")])
    row = buffer.sql("select trajectory_id from trajectories")["trajectory_id"][0]
    catalog = Catalog(tmp_path / "store")
    folder = catalog.staging("chosen", "k1")
    pl.DataFrame({"trajectory_id": [row], "weight": [1.0]}).write_parquet(folder / "t.parquet")
    made: dict[str, Any] = {"uses": "x", "uses_version": "1", "config": {}, "seed": 0, "inputs": {}, "code": {}}
    manifest = Manifest(
        fingerprint="k1",
        ingredients=Ingredients(scheme=1, stage="chosen", **made),
        outputs={"trajectories": OutputRecord(kind=Kind.TRAJECTORIES, path="t.parquet", digest="d", rows=1)},
        run_id="r",
        created_at=datetime.now(UTC),
        duration_s=0,
    )
    catalog.publish(manifest, folder)
    with pytest.raises(StoreError, match="1 artifacts read rows of this import: chosen/"):
        forget(buffer, report.fingerprint)
    assert count(buffer) == 2


def test_tokens_are_checked_against_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    from agentrl.models.policy import tokenizer_fingerprint
    from agentrl.models.tiny import train_tokenizer

    tokenizer = train_tokenizer(["where is Ann", "she is in Rome"], 300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    asked, words = (tokenizer.encode(text, add_special_tokens=False) for text in ("where is Ann", "she is in Rome"))

    def document(name: str, answer: str) -> Path:
        metrics = {"prompt_token_ids": asked, "completion_token_ids": words}
        steps = [
            {"step_id": 1, "source": "user", "message": "where is Ann"},
            {"step_id": 2, "source": "agent", "message": answer, "metrics": metrics},
        ]
        path = tmp_path / name
        path.write_text(json.dumps({"schema_version": "ATIF-v1.7", "agent": {"name": "x"}, "steps": steps}))
        return path

    store, folder = str(tmp_path / "store"), str(tmp_path / "tokenizer")
    ask("import", str(document("a.json", "she is in Rome")), "--store", store, "--tokenizer", folder)
    rows = TrajectoryBuffer(store).sql("select tokenizer, n_action_tokens from trajectories").rows()
    assert rows == [(tokenizer_fingerprint(tokenizer), len(words))]
    with pytest.raises(StoreError, match="says 'nobody knows', and its tokens decode to"):
        ask("import", str(document("b.json", "nobody knows")), "--store", store, "--tokenizer", folder)

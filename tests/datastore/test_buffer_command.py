import json
import os
import re
from pathlib import Path

import polars as pl
import pytest
from store_rows import FP, Make, build
from typer.testing import CliRunner

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.datastore.read.describe import VIEWS
from agentrl.datastore.upkeep import compact, vacuum
from agentrl.flows.cli import app

runner = CliRunner()


@pytest.fixture
def filled(tmp_path: Path, make: Make) -> str:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(i) for i in range(8)], stage="rollout", fingerprint=FP, run_id="r1")
    buffer.append(
        [make(i, "expert", "fedcba9876543210") for i in range(4)], stage="expert", fingerprint="fedcba9876543210"
    )
    return str(tmp_path)


def ask(*arguments: str) -> str:
    result = runner.invoke(app, ["buffer", *arguments], env={"COLUMNS": "120"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_query(filled: str) -> None:
    sql = "select stage, count(*) as n, avg(success) as rate from trajectories group by stage order by n"
    text = ask("query", sql, "--store", filled)
    assert [line.split() for line in text.splitlines()] == [
        ["stage", "n", "rate"],
        ["expert", "4", "0.5"],
        ["rollout", "8", "0.5"],
    ]
    assert json.loads(ask("query", sql, "--store", filled, "--json"))[1] == {"stage": "rollout", "n": 8, "rate": 0.5}
    assert json.loads(ask("query", sql, "--store", filled, "--at", "1", "--json")) == [
        {"stage": "rollout", "n": 8, "rate": 0.5}
    ]
    assert "6 more rows" in ask("query", "select * from trajectories", "--store", filled, "--limit", "6")


def test_show(filled: str) -> None:
    text = ask("show", "rollout-01234567-000003", "--store", filled, "--tokens")
    for part in (
        "boss of Ann 3?",
        "find(",
        'who="Ann"',
        "look it up",
        "trained on 4 of 4",
        "6 of 12 trained on",
        "✓ success",
    ):
        assert part in text
    assert "trained on 0 of 2" in text  # the observation
    row = json.loads(ask("show", "rollout-01234567-000003", "--store", filled, "--json"))
    assert row["input_ids"][0] == 3
    with pytest.raises(StoreError, match="did you mean rollout-01234567-000"):
        ask("show", "rollout-01234567-00099", "--store", filled)


def test_stats_and_history(filled: str) -> None:
    printed = json.loads(ask("stats", "--store", filled, "--json"))
    assert {row["stage"]: row["rows"] for row in printed["stages"]} == {"rollout": 8, "expert": 4}
    assert (printed["rows"], printed["tokens"], printed["files"]) == (12, 144, 2)
    assert "rollout" in ask("stats", "--store", filled)
    commits = json.loads(ask("history", "--store", filled, "--json"))
    assert [(commit["version"], commit["stage"], commit["rows"]) for commit in commits] == [
        (2, "expert", 4),
        (1, "rollout", 8),
        (0, None, None),
    ]
    assert "expert" in ask("history", "--store", filled)


def test_an_absent_store_is_an_error_and_stays_absent(tmp_path: Path) -> None:
    for command in (["stats"], ["history"], ["query", "select 1 from trajectories"], ["show", "x"]):
        with pytest.raises(StoreError, match="no trajectory buffer"):
            ask(*command, "--store", str(tmp_path / "none"))
    assert not os.path.exists(tmp_path / "none")


RULES = """
- {rule: filter, where: "stage = 'rollout'"}
- {rule: keep, what: correct, n: 1}
"""


def test_curate_export_and_import(filled: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    text = ask("curate", str(rules), "--store", filled, "--dry-run")
    assert "keep dropped rollout-01234567-000000" in text
    assert "2 rows; a dry run" in text
    assert not (Path(filled) / "artifacts").exists()
    made = json.loads(ask("curate", str(rules), "--store", filled, "--json"))
    assert [(level["before"], level["after"]) for level in made["funnel"]] == [(12, 8), (8, 2)]
    assert (
        f"10 dropped rows, each with its rule: output `dropped` of agentrl show curated/{made['fingerprint'][:8]}"
        in ask("curate", str(rules), "--store", filled)
    )
    out = tmp_path / "out.jsonl"
    assert "2 records" in ask("export", str(out), "-f", "verifiers", "--selection", "curated", "--store", filled)
    other = str(tmp_path / "other")
    assert "2 rows appended" in ask("import", str(out), "-f", "verifiers", "--store", other)
    assert "already" in ask("import", str(out), "-f", "verifiers", "--store", other)
    with pytest.raises(StoreError, match="no artifact or tag 'nope'"):
        ask("export", str(out), "-f", "verifiers", "--selection", "nope", "--store", filled)


def test_rows_of_other_splits_are_left_out_of_training_sets_and_counted(filled: str, tmp_path: Path) -> None:
    held = [build(i, stage="eval", split="heldout", success=True, reward=1.0) for i in range(20, 23)]
    TrajectoryBuffer(filled).append(held, stage="eval", fingerprint="e")
    out, rules = tmp_path / "out.jsonl", tmp_path / "rules.yaml"
    rules.write_text("[{rule: keep, what: all}]")
    words = "3 rows of other splits"

    chat = ("export", str(out), "-f", "openai-chat", "--force", "--store", filled)
    text = ask(*chat)
    assert f"{words} than train are left out; --split all takes them" in text
    assert "12 records of 12 rows" in text
    assert json.loads(ask(*chat, "--json"))["other_splits"] == 3
    assert "15 records of 15 rows" in (text := ask(*chat, "--split", "all"))
    assert words not in text
    assert "3 records of 3 rows" in ask(*chat, "--split", "heldout")
    whole = ask("export", str(out), "-f", "verifiers", "--force", "--store", filled)
    assert "15 records of 15 rows" in whole  # no training set
    assert words not in whole

    for more in (["--dry-run"], []):
        text = ask("curate", str(rules), "--store", filled, *more)
        assert f"{words} are left out; --split all takes them" in text
        assert "12 rows; " in text
        funnel = json.loads(ask("curate", str(rules), "--store", filled, *more, "--json"))["funnel"]
        assert (funnel[0]["rule"], funnel[0]["before"], funnel[0]["after"]) == ("split train", 15, 12)
    assert "15 rows; " in ask("curate", str(rules), "--store", filled, "--split", "all")

    rules.write_text("[{rule: keep}]")
    ask("curate", str(rules), "--store", filled, "--name", "good")
    levels = json.loads(ask("curate", str(rules), "--store", filled, "--name", "good", "--json"))["funnel"]
    shown = runner.invoke(app, ["show", "good", "--store", filled]).output
    assert "funnel: what each rule left" in shown
    assert re.search(r"^split train +15 +12 +3 ", shown, re.MULTILINE)
    assert re.search(rf"^keep\S* +12 +{levels[-1]['after']} ", shown, re.MULTILINE)
    printed = runner.invoke(app, ["show", "good", "--store", filled, "--json"]).output
    assert json.loads(printed)["funnel"] == levels

    with pytest.raises(StoreError, match=r"n 13 is not between 1 and 12, .*; 3 rows of other splits are left out"):
        ask("sample", "13", "--store", filled)
    text = ask("sample", "12", "--store", filled)
    assert words in text
    assert "12 rows; " in text
    assert "15 rows; " in ask("sample", "15", "--store", filled, "--split", "all")
    assert "3 rows; " in ask("sample", "3", "--store", filled, "--split", "heldout")


@pytest.mark.parametrize("text", ["- {rule: fliter}", "rules: 3", "- {rule: cap, n: 0}", "a: ["])
def test_bad_rules_files_are_named(filled: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(StoreError, match=r"rules\.yaml"):
        ask("curate", str(tmp_path / "rules.yaml"), "--store", filled)


def test_search_index_experience_and_sample(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.datastore.search.embedding.is_installed", lambda: False)
    hits = json.loads(
        ask("search", "boss of Ann 5", "-k", "2", "--where", "stage = 'rollout'", "--store", filled, "--json")
    )
    assert hits[0]["trajectory_id"] == "rollout-01234567-000005"
    assert "boss of Ann" in ask("search", "boss of Ann 5", "--store", filled)
    for method in ("dense", "lexical", "hybrid"):
        assert "nothing matched 'zzz qqq'" in ask("search", "zzz qqq", "--method", method, "--store", filled)
        assert json.loads(ask("search", "zzz qqq", "--method", method, "--store", filled, "--json")) == []
        assert len(json.loads(ask("search", "zzz boss", "--method", method, "--store", filled, "--json"))) == 5
    [index] = json.loads(ask("index", "--store", filled, "--json"))
    assert index.pop("embedder").startswith("embedded-")
    assert index == {"table_version": 2, "texts": 8, "stale": 0, "cut": 0}
    assert "Call: find" in ask("experience", "boss of Bob?", "--store", filled)
    drawn = json.loads(ask("sample", "3", "--strategy", "success_first", "--store", filled, "--json"))
    assert len(drawn["ids"]) == 3
    assert "3 rows" in ask("sample", "3", "--selection", "sampled", "--store", filled)


def test_upkeep(filled: str) -> None:
    assert json.loads(ask("compact", "--store", filled, "--json"))[0]["files_before"] == 2
    assert "0 files can go" in ask("vacuum", "--store", filled)
    assert "2 files removed" in ask("vacuum", "--store", filled, "--retention-hours", "0", "--yes")
    assert "sound" in ask("check", "--store", filled)
    assert json.loads(ask("diff", "0", "--store", filled, "--json"))[0]["added"] == 4
    assert json.loads(ask("migrate", "--store", filled, "--json"))[0]["rows"] == 0
    for file in (Path(filled) / "trajectories").glob("*.parquet"):
        file.unlink()
    result = runner.invoke(app, ["buffer", "check", "--store", filled])
    assert result.exit_code == 1
    assert "missing" in result.output
    assert "0 findings" not in result.output
    dropped = runner.invoke(app, ["buffer", "check", "--drop", "--store", filled])
    assert dropped.exit_code == 1
    assert "1 files dropped, 12 rows LOST" in dropped.output
    assert "sound" not in dropped.output
    again = runner.invoke(app, ["buffer", "check", "--store", filled])
    assert again.exit_code == 1
    assert "lost: 12 rows dropped" in again.output
    accepted = ask("check", "--accept-losses", "--store", filled)
    assert "lost, and accepted: 12 rows" in accepted
    assert "sound" not in accepted


def test_quarantine(filled: str) -> None:
    assert "no rows" in ask("quarantine", "--store", filled)


def test_a_published_selection_is_a_stage_run(filled: str, tmp_path: Path) -> None:
    """Same version, config and seed: the same artifact. Everything that a stage run has, it has."""
    arguments = ("sample", "3", "--where", "success", "--seed", "4", "--store", filled, "--json")
    first, again = json.loads(ask(*arguments)), json.loads(ask(*arguments))
    assert first == again
    assert len(first["ids"]) == 3
    [manifest] = Catalog(filled).manifests("sampled")
    ingredients = manifest.ingredients
    assert (ingredients.uses, ingredients.seed) == ("trajectories.select", 4)
    assert ingredients.config["where"] == "success"
    assert ingredients.config["version"] == manifest.buffer_version
    assert any("sampling" in name for name in ingredients.code)
    narrowed = json.loads(ask("sample", "2", "--selection", "sampled", "--name", "fewer", "--store", filled, "--json"))
    assert set(narrowed["ids"]) < set(first["ids"])
    [below] = Catalog(filled).manifests("fewer")
    assert below.ingredients.inputs["trajectories"][0].fingerprint == manifest.fingerprint
    with pytest.raises(StoreError, match="reads files"):
        ask("sample", "1", "--where", "reward in (select a from read_csv('x'))", "--store", filled)
    with pytest.raises(StoreError, match="--name"):
        ask("sample", "1", "--name", "../up", "--store", filled)


def test_rows_are_saved_by_a_name(filled: str, tmp_path: Path) -> None:
    """Nothing that was saved before is replaced, and no name of something else is taken."""
    ids = tmp_path / "ids.txt"
    names = TrajectoryBuffer(filled).sql("select trajectory_id from trajectories limit 3")["trajectory_id"].to_list()
    ids.write_text("\n".join([*names, names[0], ""]))
    store = ("--split", "all", "--store", filled)
    first = json.loads(ask("select", "mine", "--ids", str(ids), *store, "--json"))
    assert (first["rows"], first["again"], first["before"]) == (3, False, [])
    second = json.loads(ask("select", "mine", "--where", "success", "--at", "1", *store, "--json"))
    assert (second["version"], second["before"]) == (1, [f"mine/{first['fingerprint'][:8]}"])
    text = ask("select", "mine", "--where", "success", "--at", "1", *store)
    assert "was there already" in text
    assert "1 saved before stay" in text
    assert len(Catalog(filled).manifests("mine")) == 2
    narrowed = json.loads(ask("sample", "1", "--selection", f"mine/{first['fingerprint'][:8]}", *store, "--json"))
    assert set(narrowed["ids"]) < set(names)
    ids.write_text("nobody")
    with pytest.raises(StoreError, match="lacks 1 of 1 rows: nobody"):
        ask("select", "mine", "--ids", str(ids), *store)
    with pytest.raises(StoreError, match=r"NAME '\.\./up'"):
        ask("select", "../up", *store)
    empty = runner.invoke(app, ["buffer", "select", "empty", "--where", "reward > 5", *store])
    assert (empty.exit_code, "nothing was saved" in empty.stderr) == (2, True)
    Catalog(filled).tag("kept", "mine", first["fingerprint"])
    with pytest.raises(StoreError, match="is a tag"):
        ask("select", "kept", *store)


def test_schema_describes_every_column_of_every_view(filled: str) -> None:
    rows = json.loads(ask("schema", "--json"))
    for view in ("trajectories", "steps", "tool_calls"):
        columns = TrajectoryBuffer(filled).sql(f"select * from {view} limit 1").columns
        assert [row["column"] for row in rows if row["view"] == view] == columns
        assert set(columns) == set(VIEWS[view])  # none without a meaning, no meaning without a column
    text = ask("schema", "tool_calls")
    assert "…" not in (whole := ask("schema", "trajectories"))
    meaning = " ".join(VIEWS["trajectories"]["pipeline"].split()[-4:])
    assert meaning in " ".join(whole.split())
    assert "JSON: arguments of the call" in text
    assert "input_ids" not in text


@pytest.mark.parametrize(
    "command", [["select", "mine"], ["sample", "3"], ["curate", "rules.yaml"], ["curate", "rules.yaml", "--dry-run"]]
)
def test_what_selects_goes_on_when_a_vacuum_takes_its_files(
    filled: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.yaml").write_text("[{rule: filter, where: success}]")
    monkeypatch.chdir(tmp_path)
    scan, taken = TrajectoryBuffer.scan, []

    def late(self: TrajectoryBuffer, version: int | None = None) -> pl.LazyFrame:
        if not taken:  # after the look at the table, before the look at its files
            taken.append(compact(TrajectoryBuffer(filled)))
            assert len(vacuum(TrajectoryBuffer(filled), retention_hours=0, dry_run=False)) == 2
        return scan(self, version)

    monkeypatch.setattr(TrajectoryBuffer, "scan", late)
    rows = {"select": 12, "sample": 3, "curate": 6}[command[0]]
    assert f"{rows} rows" in ask(*command, "--store", filled)
    assert taken
    if command[0] == "select":
        with pytest.raises(StoreError, match="version 2 of the buffer cannot be read any more: a vacuum removed"):
            ask(*command, "--store", filled, "--at", "2")

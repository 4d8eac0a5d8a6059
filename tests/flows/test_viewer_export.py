"""`agentrl view export`: what one file holds, and what is refused."""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from viewer_store import FIRST, GRPO, Browser, row

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import StoreError
from agentrl.flows import cli
from agentrl.flows.viewer.offline import bundle
from agentrl.flows.viewer.offline.export import ExportedFile, TooLargeError, choose, export
from agentrl.flows.viewer.reader import StoreReader


def written(store: Path | str, selection: str = "true", **options: Any) -> ExportedFile:
    reader = StoreReader(str(store))
    snapshot = reader.tables.at(None)
    return export(reader, choose(reader, selection, snapshot), snapshot, **options)


def unpacked(file: str) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """What a file says of itself, and its tables by name."""
    about = json.loads(re.search(r'id="contents">(.*?)</script>', file, re.DOTALL)[1])  # type: ignore[index]
    blocks = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', file)
    tables = {name: pa.ipc.open_stream(gzip.decompress(base64.b64decode(text))).read_all() for name, text in blocks}
    return about, tables


def rows_of(tables: dict[str, pa.Table]) -> list[dict[str, Any]]:
    """Each row: its answer, its tokens as a table, their text."""
    parts = [entry for name, table in tables.items() if name.startswith("part-") for entry in table.to_pylist()]
    return [
        {**part, "answer": json.loads(part["answer"]), "tokens": pa.ipc.open_stream(part["tokens"]).read_all()}
        for part in parts
    ]


def test_a_file_holds_what_the_server_answers(store: Path, browser: Browser) -> None:
    about, tables = unpacked(written(store).text)
    assert (about["rows"], about["selected"], about["version"]) == (24, 24, 3)
    assert len(about["columns"]) == len(tables["rows"].column_names) - len(about["facets"])
    result = {entry["answer"]["row"]["trajectory_id"]: entry for entry in rows_of(tables)}
    assert len(result) == about["rows"] == sum(about["parts"])
    asked = browser.json(f"/api/rows/{FIRST}")
    assert result[FIRST]["answer"] == asked
    assert result[FIRST]["tokens"].equals(browser.arrow(f"/api/tokens/{FIRST}"))
    facets = browser.json("/api/facets")["facets"]
    assert about["facets"] == facets


def test_equal_rows_make_equal_files(store: Path) -> None:
    assert written(store, "success").text == written(store, "success").text


@pytest.mark.parametrize(
    ("selection", "rows", "by"),
    [
        (FIRST, 1, "rows named by their ids"),
        (f"{FIRST}, grpo-aaaaaaaa-000001", 2, "rows named by their ids"),
        ("grpo", 20, "grpo/aaaaaaaa"),
        ("grpo/aaaa", 20, "grpo/aaaaaaaa"),
        ("level = 0 and stage = 'eval'", 2, "filter: level = 0 and stage = 'eval'"),
    ],
)
def test_rows_are_chosen_by_id_artifact_or_filter(store: Path, selection: str, rows: int, by: str) -> None:
    reader = StoreReader(str(store))
    result = choose(reader, selection, reader.tables.at(None))
    assert (len(result.ids), result.by) == (rows, by)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("grpoo", "neither the id of a row, nor an artifact (there is no artifact or tag 'grpoo'; did you mean"),
        ("level in (select x from read_csv('/etc/passwd'))", "nor a filter"),
        ("level = 77", "no row of version 3 fits"),
        ("warm", "warm has no row"),
    ],
)
def test_what_chooses_no_row_is_refused(store: Path, selection: str, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        written(store, selection)


def test_neighbours_and_attempts_are_rows_of_the_file(store: Path) -> None:
    _, tables = unpacked(written(store, "grpo-aaaaaaaa-000004,grpo-aaaaaaaa-000006").text)
    first, last = (entry["answer"]["neighbours"] for entry in rows_of(tables))
    assert first == {
        "previous": None,
        "next": "grpo-aaaaaaaa-000006",
        "attempts": ["grpo-aaaaaaaa-000004", "grpo-aaaaaaaa-000006"],
        "all_attempts": 2,
    }
    assert last["previous"] == "grpo-aaaaaaaa-000004"
    [task] = tables["tasks"].to_pylist()
    assert json.loads(task["answer"])["rows"] == 2


def test_a_file_that_is_too_large_says_how_many_rows_fit(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.flows.viewer.offline.export.PART", 20_000)
    whole = written(store)
    assert len(whole.contents.parts) > 2
    cap = len(whole.text) - 100
    with pytest.raises(TooLargeError, match=r"24 rows do not fit a file of .* MB; add --rows") as refused:
        written(store, cap=cap)
    fitting = refused.value.fitting
    assert 0 < fitting < 24
    cut = written(store, rows=fitting, cap=cap)
    assert (cut.contents.rows, cut.contents.selected) == (fitting, 24)
    assert len(cut.text) <= cap
    with pytest.raises(TooLargeError, match="the first row alone is too large"):
        written(store, cap=1000)


def test_the_policy_allows_one_script_and_one_style_by_their_hashes(store: Path) -> None:
    file = written(store, FIRST).text
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', file)[1]  # type: ignore[index]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for kind, pattern in (
        ("script-src", r'<script type="module">(.*?)</script>'),
        ("style-src", r"<style>(.*?)</style>"),
    ):
        [text] = re.findall(pattern, file, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert file.index("Content-Security-Policy") < file.index("<style>")


def test_the_loader_has_each_module_that_the_entry_reaches() -> None:
    result = bundle.modules("contents.js")
    assert {"contents.js", "exported.js", "answers.js", "trajectory.js", "vendor/preact.js"} <= set(result)
    assert "served.js" not in result, "which asks a server"
    for name, pieces in result.items():
        assert all(loaded in result for loaded in pieces[1::2]), name
        rest = re.sub(r"/\*.*?\*/|//[^\n]*", "", "".join(pieces[::2]), flags=re.DOTALL)
        assert '"./' not in rest, name


def test_what_stands_in_place_of_a_module_has_all_of_its_names() -> None:
    names = re.compile(r"^export (?:async )?(?:const|function|class) (\w+)", re.MULTILINE)
    for served, exported in bundle.PLACES.items():
        both = [set(names.findall((bundle.STATIC / name).read_text())) for name in (served, exported)]
        assert both[0] == both[1]
        assert len(both[0]) > 5


def test_markup_in_rows_ends_no_script(tmp_path: Path) -> None:
    payload = "</script><script>window.pwned=1</script><!--<script>"
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([row(1, env=payload, task_id=payload, prompt=payload, agent=payload)], stage="s", fingerprint=GRPO)
    file = written(tmp_path, "true")
    assert file.contents.facets[1].bins[0].label == payload
    assert "pwned" not in re.sub(r"\\u003c/script>\\u003cscript>window.pwned", "", file.text)
    assert file.text.count("<script") == file.text.count("</script>") == 5


def test_a_page_gets_the_file_of_the_rows_that_it_shows(
    store: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = browser.ask("/api/export", filter="stage = 'eval'")
    assert answer.headers["content-disposition"] == 'attachment; filename="agentrl-4-rows.html"'
    about, tables = unpacked(answer.text)
    assert (about["rows"], about["selection"]) == (4, "filter: stage = 'eval'")
    assert set(tables["rows"]["stage"].to_pylist()) == {"eval"}
    assert "no row fits" in browser.json("/api/export", 400, filter="level = 77")["error"]
    monkeypatch.setattr("agentrl.flows.viewer.offline.export.CAP", 1000)
    monkeypatch.setattr(export, "__defaults__", (None, 1000))
    refused = browser.json("/api/export", 413)
    assert "24 rows do not fit" in refused["error"]
    assert "agentrl view export" in refused["next"]


# the command


def test_the_command_writes_a_file_and_says_what_it_holds(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.html"
    options = ["--store", str(store)]
    assert cli.call(["view", "export", "stage = 'grpo'", str(file), "--rows", "3", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{file}: 3 of 20 rows with 39 columns and ")
    assert "version 3 of the buffer, 0.3 MB" in printed
    assert cli.call(["view", "export", "grpo", str(file), *options]) == 2
    assert "is there already; --force replaces it" in capsys.readouterr().err
    assert cli.call(["view", "export", "grpo", str(file), "--force", "--json", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["bytes"]) == (20, file.stat().st_size)
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_secrets_are_refused_by_row_and_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("detect_secrets")
    buffer = TrajectoryBuffer(tmp_path / "store")
    buffer.append([row(1), row(2, prompt="write to ann.berg@example.com")], stage="s", fingerprint=GRPO)
    file = tmp_path / "rows.html"
    command = ["view", "export", "true", str(file), "--store", str(tmp_path / "store"), "--secrets", "refuse"]
    assert cli.call(command) == 2
    error = capsys.readouterr().err
    assert "1 rows hold secrets (EMAIL 1)" in error
    assert "ann.berg" not in error
    assert not file.exists()
    assert cli.call([*command[:-1], "redact"]) == 2
    assert "--secrets redact: allowed is refuse" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0", "export", "true", "x.html"], "--host stands before export; put it behind"),
        (["export", "true", "no/where/x.html"], "there is no folder no/where"),
        (["export", "true", "x.html", "--store", "none"], "there is no store at none"),
        (["export", "true", "x.html", "--store", ".", "--at", "never"], "--at: 'never' is neither"),
        (["export", "true", "x.html", "--store", "."], "there is no trajectory buffer"),
    ],
)
def test_what_cannot_be_exported_is_said(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.call(["view", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

"""What others wrote is shown, never sent: terminal, Markdown and HTML."""

import io
import re
import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table as RichTable
from rich.text import Text
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.flows import cli
from agentrl.flows.commands import _render
from agentrl.flows.display import Live
from agentrl.flows.show import print_diff, print_run, print_runs
from agentrl.flows.showing import display_for
from agentrl.flows.terminal import SafeConsole, console, say
from agentrl.pipelines.handles import Table, Trajectories
from agentrl.pipelines.printable import markdown, markdown_code, printable
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.report import ReportConfig, training_report

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x1b]8;;http://x\x1b\\\x9b2J\x9d\r\b\x7f\u202eevil\u2066\u2069\u200f\ufeff\u2028\U000e0041\ud800"
MARKUP = "[bold red]x[/] [link=http://evil]y[/link] :smile: [@click=app.bell]z[/]"
OWN = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
"""Colours, and on a terminal the cursor's moves: what rich itself sends."""

anything = st.text(st.one_of(st.sampled_from(HOSTILE + "[]:/"), st.characters(codec=None)), max_size=60)


def steers(text: str) -> list[str]:
    """Characters that a terminal or a reader's eye follows."""
    kinds = ("Cc", "Cs", "Zl", "Zp")
    marks = "\u202e\u2066\u200f\ufeff\U000e0041"
    return [
        character
        for character in text
        if character not in "\n\t" and (unicodedata.category(character) in kinds or character in marks)
    ]


@given(anything)
def test_printable_text_steers_nothing_and_stays_what_it_is(text: str) -> None:
    shown = printable(text)
    assert not steers(shown)
    assert printable(shown) == shown
    if not steers(text) and text.isascii():
        assert shown == text


@settings(max_examples=60, deadline=None)
@given(anything)
def test_nothing_that_is_printed_steers_the_terminal(text: str) -> None:
    """Every way to print: text, tables, panels, styles; on a terminal with colours."""
    out = io.StringIO()
    screen = SafeConsole(file=out, force_terminal=True, color_system="truecolor", width=60, markup=False, emoji=False)
    table = RichTable(title=text)
    table.add_column(text)
    table.add_row(text)
    for item in (text, Text(text, style="bold"), table):
        screen.print(item)
    _render.print_rows(screen, [{"trajectory_id": text, "prompt": text, "n": 1}])
    row = build(1).model_copy(update=dict.fromkeys(("trajectory_id", "task_id", "env", "policy", "stage"), text))
    row.messages[0].content = row.messages[-1].content = text
    row.tags = [text]
    _render.print_trajectory(screen, row, tokens=True)
    stage = {"status": "failed", "reasons": [text], "cause": text, "log": text, "fingerprint": "f"}
    run: dict[str, Any] = {"run_id": text, "pipeline": text, "state": "failed", "command": text, "duration_s": 1.0}
    run |= {"started_at": str(datetime.now(UTC)), "stages": {"a": stage | {"metrics": {"a": text}}}}
    print_run(screen, run)
    print_runs(screen, [run])
    print_diff(screen, run, run, {text: {"ingredients": [text], "metrics": {"m": [text, 1]}}})
    live = display_for(screen, quiet=False)
    assert isinstance(live, Live)
    live.start({"a": None}, 0, text)
    live.stage_started("a")
    live.progress("a", 1, 2, {"note": text})
    live.note(text)
    live.stage_ended("a", text, ok=False)
    live.stop()
    assert not steers(OWN.sub("", out.getvalue()).replace("\r", ""))


def test_a_trajectory_says_how_long_its_turns_and_calls_took(capsys: pytest.CaptureFixture[str]) -> None:
    _render.print_trajectory(console(), build(1, message_seconds=[None, 12.3, 0.4, 0.01]), tokens=False)
    titles = [line.strip("╭─╮\n ") for line in capsys.readouterr().out.splitlines() if line.startswith("╭")]
    assert titles == ["0 user", "1 assistant · 12 s", "2 tool · find · 0.4 s", "3 assistant"]


def test_markup_of_others_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(MARKUP)
    say(MARKUP)
    _render.print_rows(console(), [{"prompt": MARKUP}])
    assert capsys.readouterr().out.count(MARKUP[:40]) >= 3


def test_ids_are_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a-stage-with-a-long-name-0123456789abcdef-" + "x" * 150
    rows = [{"trajectory_id": long, "fingerprint": "f" * 32, "prompt": "p" * 500, "task_id": "t" * 90}]
    _render.print_rows(SafeConsole(width=80, markup=False), rows)
    shown = capsys.readouterr().out
    assert long in shown
    assert "f" * 32 in shown
    assert "t" * 90 in shown
    assert "p" * 61 not in shown


def test_a_row_of_anybody_is_shown_by_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = HOSTILE.replace("\ud800", "")
    row = build(1).model_copy(update={"trajectory_id": f"id{text}", "task_id": f"{text}{MARKUP}", "prompt": text})
    row.messages[0].content = text + MARKUP
    TrajectoryBuffer(tmp_path).append([row], stage="s", fingerprint="f" * 16)
    for command in (
        ["query", "select trajectory_id, task_id, prompt from trajectories"],
        ["query", "select * from steps"],
        ["query", "select trajectory_id, task_id from trajectories", "--json"],
        ["show", f"id{text}"],
        ["show", f"id{text}", "--json"],
        ["show", text],
        ["stats"],
        ["export", str(tmp_path / "out"), "-f", "atif", "--json"],
    ):
        cli.call(["buffer", *command, "--store", str(tmp_path)])
        shown = capsys.readouterr()
        assert not steers(shown.out + shown.err), command


@given(anything)
def test_markdown_holds_no_html_no_code_and_no_lines_of_others(text: str) -> None:
    for shown in (markdown(text), markdown_code(text)):
        assert not steers(shown)
        assert "\n" not in shown
    assert "<" not in markdown(text)
    assert not re.search(r"(?<!\\)(\\\\)*[`|\[\]]", markdown(text))
    fence = re.match("`+", markdown_code(text))
    assert fence
    assert markdown_code(text).endswith(fence[0])
    inside = markdown_code(text)[len(fence[0]) : -len(fence[0])]
    assert fence[0] not in re.findall("`+", inside)


def test_the_report_shows_rows_as_text(tmp_path: Path) -> None:
    text = HOSTILE.replace("\ud800", "") + "`</code><script>alert(1)</script>` | [x](http://evil) \n\n# heading"
    buffer = TrajectoryBuffer(tmp_path / "store")
    row = build(1)
    for message in row.messages:
        message.content = text
    buffer.append([row.model_copy(update={"trajectory_id": f"id{text}"})], stage="s", fingerprint="f" * 16)
    (tmp_path / "out").mkdir()
    context = Context("report", "f" * 32, "r", 0, buffer, tmp_path / "out", tmp_path)
    result = {"tasks": 1, "split": "dev", "low": 0.0, "high": 1.0, "success": 1.0, "tokens": 1.0, "tool_errors": 0.0}
    rows = [
        {**result, "policy": "p|<b>", "decoding": name, "level": level, "format_errors": 0.0}
        for name in ("sampled", "greedy")
        for level in (-1, 1)
    ]
    evaluations = Table(context._write("e", pa.Table.from_pylist(rows)), "e", "t", "f")
    chosen = context.select([f"id{text}"], name="chosen")
    assert isinstance(chosen, Trajectories)
    report = training_report.function(context, ReportConfig(title=text), evaluations=[evaluations], examples=[chosen])
    for name in ("report.md", "report.html"):
        made = (report.path / name).read_text()
        assert not steers(made)
        assert "<script>" not in made.replace("`", "") or name == "report.md"
    lines = (report.path / "report.md").read_text().splitlines()
    assert sum(line.startswith("# ") for line in lines) == 1
    assert not [line for line in lines if "<script>" in line and "`" not in line]

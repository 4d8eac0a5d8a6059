"""What a notebook shows of long work: one output that is updated, in a real kernel; and lines elsewhere."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from toy_project import Project

import agentrl
from agentrl.flows import cell, display, showing

CHAT = {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]}


class Recorded:
    """In place of what IPython displays."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def display(self, shown: Any, display_id: bool) -> "Recorded":
        assert display_id
        self.shown.append(shown)
        return self

    def update(self, shown: Any) -> None:
        self.shown.append(shown)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr("IPython.display.display", made.display)
    monkeypatch.setattr(cell, "EVERY_S", 0.0)
    return made


def test_one_output_shows_what_ended_and_what_goes_on(recorded: Recorded) -> None:
    shown = cell.Cell()
    shown.start({"a": None, "<b>": 3.0}, 1, "here")
    shown.stage_started("a")
    shown.progress("a", 3, 12, {"loss": 0.5})
    assert repr(recorded.shown[-1]).startswith("2 stages to run, 1 cached; here\na  3/12  ")
    assert "loss 0.5" in repr(recorded.shown[-1])
    assert '<progress value="3" max="12"' in recorded.shown[-1]._repr_html_()
    shown.stage_ended("a", "12 rows", True)
    shown.stage_started("<b>")
    shown.progress("<b>", 1, None, {})
    assert "&lt;b&gt;" in recorded.shown[-1]._repr_html_()
    assert "<b>" not in recorded.shown[-1]._repr_html_()
    assert '<progress value="1" max="2"' in recorded.shown[-1]._repr_html_()
    shown.stage_ended("<b>", "no luck", False)
    shown.stop()
    assert repr(recorded.shown[-1]) == "2 stages to run, 1 cached; here\n✓ a  12 rows\n✗ <b>  no luck"
    assert "<progress" not in recorded.shown[-1]._repr_html_()


def test_many_stages_from_many_threads_stay_one_small_output(recorded: Recorded) -> None:
    shown = cell.Cell()

    def work(number: int) -> None:
        for stage in range(10):
            shown.stage_started(f"{number}-{stage}")
            shown.progress(f"{number}-{stage}", 1, 2, {})
            shown.stage_ended(f"{number}-{stage}", "done", True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown.stop()
    lines = repr(recorded.shown[-1]).splitlines()
    assert lines[0] == "100 lines before"
    assert len(lines) == cell.ENDED + 1


def test_what_is_done_at_once_shows_nothing(recorded: Recorded) -> None:
    with showing.shown("search index", cell.Cell()):
        pass
    assert recorded.shown == []
    with pytest.raises(ValueError), showing.shown("import", cell.Cell()) as told:  # noqa: PT012
        told(1, 3, rows=7)
        raise ValueError("bad file\nmore")
    assert repr(recorded.shown[-1]) == "✗ import  stopped: bad file"


def test_lines_of_work_that_is_no_run_come_if_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    with showing.shown("import", display.Lines(texts.append)) as told:
        told(1, 3, rows=7)
    assert texts == []
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    with showing.shown("import", display.Lines(texts.append)) as told:
        told(1, 3, rows=7)
    assert texts[0] == "import: 1/3  rows 7"
    assert texts[1].startswith("import: done in ")
    assert not showing.in_notebook()


@pytest.fixture
def executed(project: Project, tmp_path: Path) -> Callable[[str], list[Any]]:
    """Runs the code as the cell of a notebook, in a kernel of its own, and returns the outputs of the cell."""

    def execute(code: str) -> list[Any]:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        client = NotebookClient(
            notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
        )
        client.execute()
        return list(notebook.cells[0].outputs)

    return execute


@pytest.mark.slow
def test_a_kernel_shows_one_output_of_a_run_an_import_and_a_curation(
    project: Project, executed: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    file = project.write(
        """
        name: toy
        stages:
          a: {uses: "toy:numbers", with: {n: 3}}
          b: {uses: "toy:add", inputs: {tables: a}}
        """
    )
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(CHAT | {"id": str(n)}) + "\n" for n in range(3)))
    outputs = executed(
        "import sys, agentrl\n"
        f"sys.path.insert(0, {str(project.folder)!r})\n"
        f"pipeline = agentrl.load({str(file)!r}, store={str(tmp_path / 'store')!r})\n"
        "run = pipeline.run()\n"
        "store = pipeline.store\n"
        f"done = store.import_({str(tmp_path / 'chats.jsonl')!r})\n"
        "kept = store.curate([{'rule': 'exact_duplicates'}])\n"
        "index = store.index('embedded')\n"
    )
    assert [output.output_type for output in outputs] == ["display_data"] * 4, outputs
    texts = [output.data["text/plain"] for output in outputs]
    assert texts[0].splitlines()[0].startswith("2 stages to run, 0 cached")
    assert [line.split("  ")[0] for line in texts[0].splitlines()[1:3]] == ["✓ a", "✓ b"]
    assert [text.partition("  ")[0] for text in texts[1:]] == ["✓ import", "✓ curated", "✓ search index"]
    for output in outputs:
        assert output.data["text/html"].startswith("<div")
        assert "<script" not in output.data["text/html"]


def test_a_script_gets_plain_lines(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    stages = {"a": {"uses": f"{project.package}.stages:numbers"}}
    pipeline = agentrl.Pipeline.of(
        {"name": "toy", "stages": stages}, folder=project.folder, store=project.folder / "store"
    )
    pipeline.run()
    lines = capsys.readouterr().out.splitlines()
    assert any("[1/1] a: started" in line for line in lines)
    assert not any("\x1b" in line or "<div" in line for line in lines)

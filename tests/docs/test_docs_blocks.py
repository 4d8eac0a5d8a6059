"""Every console block and every Python block of the pages runs, in order and in one folder for each page, and what is
printed is what the page shows."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from console_run import Shell, commands, difference
from page_blocks import CODE, NOTES, ROOT, Block, all_blocks, blocks, page_files, page_notes

LEFT_OUT = 30
"""Blocks that cannot run where tests run: each names its reason in the page. Keep them few."""


def run_here(block: Block) -> bool:
    """Whether the block runs in the page's folder; the others are checked in ``test_docs_fragments``."""
    return not block.reason and (
        block.language == "console"
        or bool(block.says("output of "))
        or (block.language == "python" and not block.file and not block.says("interface "))
    )


RUN = [path for path in page_files() if any(run_here(block) for block in blocks(path))]


def with_ids(text: str, folder: Path) -> str:
    """The text with the fingerprints of this store in ids of rows, as in ``expert-51826613-000135``."""

    def newest(match: re.Match[str]) -> str:
        made = sorted((folder / "store/artifacts" / match[1]).glob("*"), key=lambda path: path.stat().st_mtime)
        return f"{match[1]}-{made[-1].name[:8] if made else match[2]}-{match[3]}"

    return re.sub(r"\b([a-z_]+)-([0-9a-f]{8})-(\d{6})\b", newest, text)


def other_length(shown: list[str], printed: list[str]) -> str:
    """For a block whose words differ from run to run. Empty lines, as between two commands, do not count."""
    shown, printed = ([line for line in lines if line.strip()] for lines in (shown, printed))
    return "" if len(shown) == len(printed) else f"{len(shown)} lines are shown, and {len(printed)} printed: {printed}"


def marks(path: Path) -> list[pytest.MarkDecorator]:
    known = {"slow": pytest.mark.slow, "ci": pytest.mark.ci}
    return [known[note] for note in page_notes(path) if note in known]


class Page:
    """The folder of one page, its shell and its Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shell = Shell(folder)
        self.python: subprocess.Popen[str] | None = None

    def prepare(self, notes: tuple[str, ...], quickstart: Callable[[], Path] | None = None) -> None:
        for note in notes:
            if note.startswith("after "):
                printed = self.shell.run(note.removeprefix("after "), [])
                assert self.shell.status == 0, f"{note}: {printed[-20:]}"
            if note == "needs quickstart" and quickstart:
                shutil.copytree(quickstart(), self.folder, dirs_exist_ok=True)

    def show(self, block: Block) -> list[str]:
        """Run one block. What is wrong with it, by command."""
        self.prepare(block.notes)
        figures = not block.says("figures differ")
        words = not block.says("words differ")
        if command := block.says("output of "):
            printed = self.shell.run(with_ids(command, self.folder), [])
            return self._wrong(difference(block.text.split("\n"), printed, figures), block, command)
        if block.language == "console":
            matches: list[str] = []
            for command, shown in commands(block.text):
                assert command, f"{block.place} does not begin with a command"
                printed = self.shell.run(with_ids(command, self.folder), shown)
                if not shown:  # what it prints is left out
                    text = "" if self.shell.status == 0 else "\n".join(printed[-20:])
                else:
                    text = difference(shown, printed, figures) if words else other_length(shown, printed)
                matches += self._wrong(text, block, command)
            return matches
        if block.file:
            return self._file(block)
        return self._wrong(
            self.execute(with_ids("\n".join([*block.all("given "), block.text]), self.folder)), block, ""
        )

    def _wrong(self, text: str, block: Block, command: str) -> list[str]:
        return [f"{block.place} {command}\n{text}"] if text else []

    def _file(self, block: Block) -> list[str]:
        path = self.folder / block.file
        if path.exists() and block.text.strip() in path.read_text():
            return []  # a part of a file of an example, which test_docs_fragments compares
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        return []

    def execute(self, code: str) -> str:
        if not self.python:
            command = [sys.executable, str(Path(__file__).parent / "run_blocks.py")]
            self.python = subprocess.Popen(
                command, cwd=self.folder, env=self.shell.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.python.stdin
        assert self.python.stdout
        self.python.stdin.write(json.dumps(code) + "\n")
        self.python.stdin.flush()
        return str(json.loads(self.python.stdout.readline()))

    def close(self) -> None:
        self.shell.close()
        if self.python:
            self.python.kill()
            self.python.wait()


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A folder with the store of the quickstart, and what the run printed in ``quickstart.txt``; made once."""

    @cache
    def made() -> Path:
        folder = tmp_path_factory.mktemp("quickstart")
        shell = Shell(folder)
        shell.run("agentrl run quickstart --jobs 2 > quickstart.txt 2>&1", [], limit=1800)
        shell.close()
        return folder

    return made


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    folder = tmp_path / "project"
    folder.mkdir()
    opened = Page(folder)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=marks(path), id=str(path.relative_to(ROOT))) for path in RUN]
)
def test_blocks_run_and_print_what_is_shown(path: Path, page: Page, quickstart: Callable[[], Path]) -> None:
    page.prepare(page_notes(path), quickstart)
    wrong = []
    for block in blocks(path):
        if run_here(block) or (block.file and not block.reason):
            wrong += page.show(block)
    assert not wrong, "\n\n".join(wrong)


def test_blocks_that_are_left_out_are_few_and_say_why() -> None:
    result = all_blocks()
    left_out = [block for block in result if block.reason]
    print(Counter(block.page for block in result))
    print("\n".join(f"{block.place}: {block.reason}" for block in left_out))
    assert len(left_out) <= LEFT_OUT
    for block in result:
        assert all(note.startswith(NOTES) for note in block.notes), block.place
        assert not block.notes or block.language in CODE or block.says("output of ") or block.reason, block.place


def test_no_page_has_code_of_which_nothing_is_tested() -> None:
    untested = set()
    for path in page_files():
        code = [block for block in blocks(path) if block.language in CODE]
        if code and all(block.reason for block in code):
            untested.add(str(path.relative_to(ROOT)))
    assert untested == {"docs/explanations/dialects.md"}  # which shows tokenizers of the hub

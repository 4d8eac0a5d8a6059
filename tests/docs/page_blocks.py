"""The fenced blocks of the pages, and what comments in a page say of how they are tested.

At the top of a page, and before a block; several notes are separated by ``; ``:

    <!-- page: slow; after cp -r $HOUSE/examples/own_stage/. . -->    or `ci`, `needs quickstart` (its store)
    <!-- block: not run, needs a GPU -->        left out, with the reason
    <!-- block: after COMMAND -->               runs before the block, in the shell of the page
    <!-- block: given CODE -->                  Python that runs before the block
    <!-- block: file first.yaml -->             the file that the block shows
    <!-- block: part of train.online -->        keys of ``with`` of this stage
    <!-- block: interface agentrl.x:Class -->   methods and attributes that the class has
    <!-- block: figures differ -->              numbers are compared in shape, since training decides them
    <!-- block: words differ -->                the number of lines is compared
    <!-- block: output of agentrl show x -->    what this command prints
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
COMMENT = re.compile(r"<!-- block: ((?:(?!-->).)*) -->\s*$", re.S)
PAGE = re.compile(r"<!-- page: (.*?) -->", re.S)
NOTES = (
    "not run, ",
    "after ",
    "given ",
    "file ",
    "part of ",
    "interface ",
    "figures differ",
    "words differ",
    "output of ",
)
CODE = ("console", "python", "yaml", "json", "jsonl")


@dataclass(frozen=True)
class Block:
    """One fenced block. ``notes`` are what the comment before it says."""

    page: str
    line: int
    language: str
    text: str
    notes: tuple[str, ...]
    before: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def says(self, kind: str) -> str:
        """What follows ``kind`` in the comment; empty if no note is of that kind."""
        return next((note.removeprefix(kind) or kind for note in self.notes if note.startswith(kind)), "")

    def all(self, kind: str) -> list[str]:
        return [note.removeprefix(kind) for note in self.notes if note.startswith(kind)]

    @property
    def reason(self) -> str:
        """Why the block is not run; empty if it is."""
        return self.says("not run, ")

    @property
    def file(self) -> str:
        """The file that the block shows: by its comment, or by the words that end before it, as `my_shop/shop.py`:"""
        named = re.search(r"(?:^|Save this as |\s)`([\w/.-]+\.(?:py|yaml|jsonl|csv))`(?::|\. [^`]*)$", self.before)
        return self.says("file ") or (named[1] if named else "")


def page_files() -> list[Path]:
    """Every page whose blocks are tested."""
    below = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return [ROOT / "README.md", *sorted(below), *sorted((ROOT / "pipelines/methods").glob("*/README.md"))]


def blocks(path: Path) -> Iterator[Block]:
    """The blocks of a page in order. Without a language it is of a console if it begins with a command."""
    text = path.read_text()
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip()
        comment = COMMENT.search(before)
        body = re.sub(f"^{match[1]}", "", match[3], flags=re.M)
        yield Block(
            page=str(path.relative_to(ROOT)),
            line=text[: match.start()].count("\n") + 1,
            language=match[2] or ("console" if body.startswith("$ ") else "text"),
            text=body,
            notes=tuple(" ".join(comment[1].split()).split("; ")) if comment else (),
            before=(before[: comment.start()].rstrip() if comment else before)[-300:],
        )


def all_blocks() -> list[Block]:
    return [block for path in page_files() for block in blocks(path) if block.language in CODE or block.notes]


def page_notes(path: Path) -> tuple[str, ...]:
    text = PAGE.search(path.read_text())
    return tuple(" ".join(text[1].split()).split("; ")) if text else ()

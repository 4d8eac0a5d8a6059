"""Writing files: whole or not at all, never over an existing one unless forced, compressed if the extension says so."""

import gzip
import json
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from agentrl.datastore.errors import StoreError


@contextmanager
def replaced(path: Path, force: bool = False) -> Iterator[Path]:
    """A temporary path to write to. At the end of the block it is renamed to ``path``; if the block fails, it is
    removed.

    Raises StoreError if ``path`` is there already; with ``force`` the old file or folder is replaced as a whole.
    """
    if path.exists() and not force:
        raise StoreError(f"{path} is there already; --force replaces it")
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{uuid.uuid4().hex}-{path.name}")
    try:
        yield working
        if path.is_dir() and working.exists():
            shutil.rmtree(path)
        working.replace(path)
    finally:
        if working.is_dir():
            shutil.rmtree(working, ignore_errors=True)
        else:
            working.unlink(missing_ok=True)


@contextmanager
def text_file(path: Path) -> Iterator[IO[str]]:
    """A text file to write, compressed if its name ends in ``.gz``."""
    if path.suffix == ".gz":
        # no time and no name inside: the same rows give the same bytes
        with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
            import io

            with io.TextIOWrapper(packed, encoding="utf-8") as file:
                yield file
        return
    with path.open("w", encoding="utf-8") as file:
        yield file


def line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    """JSON Lines. Returns how many."""
    count = 0
    with text_file(path) as file:
        for record in lines:
            file.write(line(record) + "\n")
            count += 1
    return count


def write_list(file: IO[str], elements: Iterable[Any]) -> int:
    """A JSON array, one element at a time."""
    count = 0
    file.write("[")
    for element in elements:
        file.write((",\n" if count else "\n") + line(element))
        count += 1
    file.write("\n]" if count else "]")
    return count


def is_lines(path: Path) -> bool:
    """Whether the name asks for JSON Lines."""
    return bool({".jsonl", ".ndjson"} & set(path.suffixes))


def file_name(number: int, name: str, suffix: str) -> str:
    """A file name for a row. The number makes it unique, and no character of the id can lead out of the folder."""
    return f"{number:06d}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:100]}{suffix}"

"""Files that an import reads: those of folders, those that are read with another one, and their content."""

import hashlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import detect, named
from agentrl.datastore.formats.own import OwnFormat
from agentrl.datastore.formats.source import Source


def companions(source: Source, format: str | OwnFormat) -> list[Path]:
    """Files that are read with a file, such as those of the sub-agents of a session."""
    find = named(format).companions
    return find(source.path) if find else []


def content(source: Source, format: str | OwnFormat) -> str:
    """Digest of a file, and of the files that are read with it."""
    own = [source.digest(), *(Source(path).digest() for path in companions(source, format))]
    return own[0] if len(own) == 1 else hashlib.blake2b("".join(own).encode(), digest_size=16).hexdigest()


def expand(paths: Sequence[str | Path], folder: Path) -> Iterator[tuple[Path, str, bool]]:
    """Files and folders that are a unit, their names, and whether each was named itself."""
    if not paths:
        raise StoreError("give at least one file or folder to import, or - for standard input")
    for given in map(str, paths):
        path = Path(given)
        if given == "-":
            yield _copied(sys.stdin.buffer, folder / "stdin"), "standard input", True
            continue
        if not path.exists():
            raise StoreError(f"there is nothing to import at {path}")
        if not path.is_file() and not path.is_dir():  # a pipe, as in `<(zstdcat logs.zst)`: it can be read once
            with path.open("rb") as pipe:
                yield _copied(pipe, folder / path.name), given, True
            continue
        if path.is_file() or detect(Source(path)):
            yield path, given, True
            continue
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path).parts
            if file.is_file() and not any(part.startswith(".") for part in inside):
                yield file, str(file), False


def _copied(stream: IO[bytes], path: Path) -> Path:
    with path.open("wb") as target:
        shutil.copyfileobj(stream, target)
    return path

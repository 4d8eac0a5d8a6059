"""Files with Python in them, and what was read in them, which is kept between runs.

Reading the sources that one pipeline reaches takes longer than all the rest of planning. What :class:`ModuleSource`
holds of a file is therefore kept in ``$XDG_CACHE_HOME/agentrl/sources``, one entry for each file, and read anew if the
file's content is another or if Python or :mod:`agentrl.pipelines.plan.source` changed. Like ``__pycache__``, the folder
may be deleted.
"""

import hashlib
import os
import pickle
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import agentrl.pipelines.plan.source
from agentrl.pipelines.plan.source import ModuleSource, Statement, class_without


@dataclass(frozen=True)
class SourceFile:
    """One module's file. ``stamp``: its time of change and size before it was read."""

    name: str
    file: Path
    root: Path
    stamp: tuple[int, int]
    content: ModuleSource

    @classmethod
    def read(cls, name: str, file: Path, root: Path) -> "SourceFile":
        """Raises LookupError with a message for the user if the file is not Python."""
        return cls(name, file, root, stamp_of(file), _remembered(file, _package(name, file)))

    @property
    def label(self) -> str:
        return self.file.relative_to(self.root).as_posix()

    def statement(self, number: int, without: Collection[str] = frozenset()) -> Statement:
        """One statement; a class ``without`` some of its annotated fields."""
        gone = self.content.annotated.get(number, frozenset()).intersection(without)
        if not gone:
            return self.content.statements[number]
        fields, bare = self.content.bare[number]
        if gone == fields:
            return bare
        return class_without(self.file.read_bytes(), _package(self.name, self.file), number, gone)


def stamp_of(file: Path) -> tuple[int, int]:
    """Time of change and size of a file; two zeros if there is none."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _package(name: str, file: Path) -> str:
    return name if file.name == "__init__.py" else name.rpartition(".")[0]


def _remembered(file: Path, package: str) -> ModuleSource:
    code = file.read_bytes()
    digest = _digest(_reader() + code)
    memory = _folder() / _digest(f"{file}\n{package}".encode()).hex()
    with suppress(OSError):
        kept = memory.read_bytes()
        if kept[:16] == digest and kept[16:32] == _digest(kept[32:]):
            module: ModuleSource = pickle.loads(kept[32:])
            return module
    try:
        source = ModuleSource.read(code, package)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise LookupError(f"{file}{line} is not Python: {getattr(error, 'msg', error)}") from None
    with suppress(OSError):  # without a folder to write to, each run reads the file anew
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_name(f"{memory.name}.{os.getpid()}")
        content = pickle.dumps(source, pickle.HIGHEST_PROTOCOL)
        partial.write_bytes(digest + _digest(content) + content)
        partial.replace(memory)
    return source


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl" / "sources"


@cache
def _reader() -> bytes:
    """A digest of what reads: another version of it may see other things in the same file."""
    reader = agentrl.pipelines.plan.source
    return _digest(f"{sys.version}{reader.__name__}".encode() + Path(reader.__file__).read_bytes())


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()

"""The bytes of a file as they were before they were compressed, and never more of a record than one may take."""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

BUFFER = 2**18
MAX_RECORD = 2**26
"""Bytes (of text: characters) that one record may take, unless an import says otherwise. Read as Python objects it may
take some ten times as much memory."""
BROKEN_BYTES = (OSError, EOFError, zlib.error)
"""What is raised if bytes cannot be read, or their compression is broken."""

_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


class TooLongError(ValueError):
    """A record takes more than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"takes more than {limit / 2**20:.4g} MB, the most that one record may take; --max-record-mb (in a stage "
            "max_record_mb) sets it"
        )


def compression(path: Path) -> str | None:
    """``gzip``, ``zstd``, or None."""
    with path.open("rb") as file:
        start = file.read(4)
    return "gzip" if start[:2] == _GZIP else "zstd" if start == _ZSTANDARD else None


def open_bytes(path: Path) -> IO[bytes]:
    """A file to read from its beginning, decompressed."""
    match compression(path):
        case "gzip":
            return gzip.GzipFile(fileobj=path.open("rb", buffering=BUFFER))  # type: ignore[return-value]
        case "zstd":
            return io.BufferedReader(_Zstandard(path), BUFFER)
    return path.open("rb", buffering=BUFFER)


class _Zstandard(io.RawIOBase):
    """What Zstandard compressed. Python's own library reads it from version 3.14 on."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        super().__init__()
        self._file = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        data: bytes = self._file.read(len(target))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class Stretched(io.RawIOBase):
    """The bytes of a file from ``start`` to ``stop``."""

    def __init__(self, path: Path, start: int, stop: int) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=BUFFER)
        self._left = stop - self._file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        data = self._file.read(min(len(target), self._left))
        target[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def bounded_lines(file: IO[bytes], limit: int, stop: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Lines and their lengths, up to the place ``stop``. A line that is longer than ``limit`` comes cut, and the rest
    of it is read and thrown away."""
    left = None if stop is None else stop - file.tell()
    while (left is None or left > 0) and (line := file.readline(limit + 1)):
        size = len(line)
        if size > limit and not line.endswith(b"\n"):
            while more := file.readline(BUFFER):
                size += len(more)
                if more.endswith(b"\n"):
                    break
        if left is not None:
            left -= size
        yield line, size

"""Copies of scalar columns on this machine: what one process has read from Parquet, the next one maps into memory.

To read one column of a table, all footers are parsed and thousands of small pages are decoded, which takes longer than
most queries. A copy is an Arrow file with one column of one data file. Data files never change, so neither does a copy.
It ends with a digest of its bytes, so it need not be synced: what a power loss left torn is read from Parquet again.
Copies are no part of the table, and can be deleted at any time.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
from xxhash import xxh3_128_digest

from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.storage.ownership import mark

FOLDER = "scalars"
_DIGEST_BYTES = 16


class ScalarCopies:
    """The copies that this machine has of one table: in the store's folder, or for S3 in the cache folder."""

    def __init__(self, storage: LocalStorage | S3Storage) -> None:
        self._working = storage.working_folder()
        self.folder = self._working / FOLDER

    def lacking(self, file: str, names: Iterable[str]) -> list[str]:
        """Those of a data file's columns that have no copy; all of them if the data file itself is gone."""
        gone = "://" not in file and not os.path.exists(file)
        return [name for name in names if gone or not self._path(file, name).exists()]

    def read(self, file: str, name: str) -> pl.Series | None:
        """A column of a data file, mapped into memory; None if no copy can be read, or it is not whole."""
        return _column(self._path(file, name))

    def keep(self, file: str, columns: Mapping[str, pl.Series]) -> bool:
        """Copy columns of a data file. Returns whether the store, and its disk, took them all."""
        try:
            for name, column in columns.items():
                path = self._path(file, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.parent / f".{path.name}.{mark(self._working)}.tmp"
                try:
                    temporary.write_bytes(_bytes(column))
                    os.replace(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def of_others(self, names: Collection[str]) -> list[Path]:
        """Folders of copies of other data files than these."""
        return sorted(path for path in self.folder.glob("*") if path.name not in names)

    def _path(self, file: str, name: str) -> Path:
        return self.folder / _name(file) / f"{name}.arrow"


def _name(file: str) -> str:
    """The name of a data file, from its path or URI."""
    name = file.rpartition("/")[2]
    return unquote(name) if "://" in file else name


def _bytes(column: pl.Series) -> bytes:
    sink = pa.BufferOutputStream()
    array = column.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    table = pa.table({"": array})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue()
    return b"".join((data, xxh3_128_digest(data)))


def _column(path: Path) -> pl.Series | None:
    try:
        with pa.memory_map(str(path)) as file:
            data = file.read_buffer()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    size = len(data) - _DIGEST_BYTES
    if size <= 0 or xxh3_128_digest(data[:size]) != data[size:].to_pybytes():
        return None
    column = pl.from_arrow(pa.ipc.open_file(pa.BufferReader(data[:size])).read_all()[""])
    assert isinstance(column, pl.Series)
    return column

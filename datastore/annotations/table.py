"""The table of annotations: a log of numbered Parquet files beside the buffer, which only grows.

``annotations/parts/<number>.parquet`` holds what one call appended. A part is created under the next free number, whole
and durable, or not at all (a hard link locally, ``If-None-Match`` on S3), so that no two writers take one number and
nothing that was acknowledged is lost. Parts are never changed or deleted: version ``n`` of the table is its first ``n``
parts. ``annotations/merged/<n>.parquet`` is a copy of all of them, so that a reader opens few files.
"""

import re
import threading
import uuid
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import CorruptError, StoreError, one_line
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.schemas.annotation import ANNOTATION_SCHEMA, Annotation
from agentrl.schemas.arrow import to_table

if TYPE_CHECKING:
    import polars as pl

PARTS, MERGED = "annotations/parts", "annotations/merged"
VERSION = "version"
"""Column that says with which version of the table a row came."""
MERGE_PARTS = 64
"""Parts after the last merged copy that make a new one due, if they hold an eighth as many rows as it."""
MOST_PARTS = 512
"""Parts that make it due however few rows they hold."""
_REQUESTS = 16  # at once, on S3

STORED = ANNOTATION_SCHEMA.append(pa.field(VERSION, pa.int64(), nullable=False))


@dataclass(frozen=True)
class Annotated:
    """``version`` of the table after an append; ``rows`` that it added; ``already`` there were the others."""

    version: int
    rows: int
    already: int


class AnnotationTable:
    """The annotations of one store. What was read stays in memory, so that the next reader fetches only what is new."""

    def __init__(self, storage: LocalStorage | S3Storage) -> None:
        self.storage = storage
        self._lock = threading.Lock()
        self._rows = STORED.empty_table()
        self._ids: set[str] = set()
        self._version = 0
        self._merged = 0
        """Version of the newest merged copy that is known."""
        self._opened = False

    @property
    def version(self) -> int:
        """Number of appends so far; 0 if there was none."""
        with self._lock:
            self._follow()
            return self._version

    def append(self, annotations: Sequence[Annotation]) -> Annotated:
        """Append annotations, durably, all or none. Those whose ``annotation_id`` is there already are left out, so
        that a call that is made again adds nothing. Raises StoreError if the store fails; then it is not known whether
        they were added, and the call may be made again."""
        with self._lock:
            self._follow()
            while True:
                named = {each.annotation_id: each for each in annotations}
                new = [each for name, each in named.items() if name not in self._ids]
                if not new:
                    return Annotated(self._version, 0, len(annotations))
                table = to_table(new, ANNOTATION_SCHEMA)
                if self._created(self._version + 1, table):
                    break
                self._follow()
            self._take(table, self._version + 1)
            self._merge_if_due()
            return Annotated(self._version, len(new), len(annotations) - len(new))

    def rows(self, version: int | None = None) -> pa.Table:
        """All annotations, oldest append first, with the column ``version``; those of the first ``version`` appends if
        it is given. Raises StoreError if there were fewer."""
        with self._lock:
            self._follow()
            rows, newest = self._rows, self._version
        if version is None or version == newest:
            return rows
        if not 0 <= version < newest:
            raise StoreError(f"there is no version {version} of the annotations; the newest is {newest}, the first 0")
        return rows.filter(pc.less_equal(rows[VERSION], version))

    def frame(self, version: int | None = None) -> "pl.DataFrame":
        """The same for polars."""
        import polars as pl

        return pl.DataFrame(self.rows(version))

    # -- the log

    def _created(self, version: int, table: pa.Table) -> bool:
        """Create a part. False if another writer took its number."""
        # the mark makes two writers' files differ: after a lost answer only what is stored tells whose it is
        marked = table.replace_schema_metadata({**(table.schema.metadata or {}), b"writer": uuid.uuid4().hex.encode()})
        try:
            return self.storage.put_if(_key(PARTS, version), _parquet(marked), None) is not None
        except Exception as error:
            raise StoreError(
                f"it is not known whether {self.storage.uri}/{_key(PARTS, version)} was written: {one_line(error)}; "
                "do it again: what is there already is not added twice"
            ) from error

    def _follow(self) -> None:
        """Read what was appended since the last time. Numbers have no gap, so after the first time the next one is just
        asked for."""
        if not self._opened:
            self._open()
        while (data := self.storage.read(_key(PARTS, self._version + 1))) is not None:
            self._take(_read(data, _key(PARTS, self._version + 1)), self._version + 1)

    def _open(self) -> None:
        merged = max(_numbers(self.storage, MERGED), default=0)
        if merged and (data := self.storage.read(_key(MERGED, merged))) is not None:
            try:
                self._rows = _read(data, _key(MERGED, merged)).cast(STORED)
                self._version = self._merged = merged
            except (CorruptError, pa.ArrowException, ValueError) as error:  # it is a copy: the parts say the same
                warnings.warn(f"{one_line(error)}; the parts are read instead", stacklevel=3)
        missing = [number for number in sorted(_numbers(self.storage, PARTS)) if number > self._version]
        if missing != list(range(self._version + 1, self._version + 1 + len(missing))):
            gap = next(number for number in range(self._version + 1, max(missing)) if number not in missing)
            raise CorruptError(f"{self.storage.uri}/{_key(PARTS, gap)}", "the file is not there, and later ones are")
        self._ids = set(self._rows["annotation_id"].to_pylist())
        with ThreadPoolExecutor(1 if isinstance(self.storage, LocalStorage) else _REQUESTS) as pool:
            parts = list(pool.map(lambda number: self.storage.read(_key(PARTS, number)) or b"", missing))
        for number, data in zip(missing, parts, strict=True):
            self._take(_read(data, _key(PARTS, number)), number)
        self._opened = True

    def _take(self, table: pa.Table, version: int) -> None:
        numbered = table.append_column(STORED.field(VERSION), pa.array([version] * len(table), pa.int64()))
        self._rows = pa.concat_tables([self._rows, numbered.cast(STORED)])
        if self._rows["version"].num_chunks > MERGE_PARTS:
            self._rows = self._rows.combine_chunks()
        self._ids.update(table["annotation_id"].to_pylist())
        self._version = version

    def _merge_if_due(self) -> None:
        """Write a merged copy if there are many parts after the last one. All works without it, but slower."""
        fresh = self._version - self._merged
        since = pc.sum(pc.greater(self._rows[VERSION], self._merged)).as_py() or 0
        if fresh < MERGE_PARTS or (fresh < MOST_PARTS and since * 8 < len(self._rows) - since):
            return
        self._rows = self._rows.combine_chunks()
        try:
            self.storage.put_if(_key(MERGED, self._version), _parquet(self._rows), None)
            for number in sorted(_numbers(self.storage, MERGED))[:-2]:  # a reader may have chosen the one before
                self.storage.delete(_key(MERGED, number))
            self._merged = self._version
        except Exception as error:
            warnings.warn(f"no merged copy of the annotations could be written: {one_line(error)}", stacklevel=3)


def _key(folder: str, version: int) -> str:
    return f"{folder}/{version:012d}.parquet"


def _numbers(storage: LocalStorage | S3Storage, folder: str) -> list[int]:
    matches = (re.fullmatch(rf"{folder}/(\d{{12}})\.parquet", key) for key in storage.keys(folder))
    return [int(match[1]) for match in matches if match]


def _parquet(table: pa.Table) -> bytes:
    sink = BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _read(data: bytes, key: str) -> pa.Table:
    try:
        return pq.read_table(BytesIO(data)).replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(key, str(error)) from None

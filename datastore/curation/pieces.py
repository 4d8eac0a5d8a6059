"""Pieces of data files, and what rules make of their rows: one file of evidence for each piece and rule.

Data files never change, so evidence of all rows of a piece is kept below the store's working folder, and a later
curation reads it instead of the text. If a rule looks at few rows of a piece, it makes evidence of these alone, which
is not kept. All kept evidence can be deleted at any time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from agentrl.datastore.errors import StoreError
from agentrl.datastore.shards.shard import Shard, finished
from agentrl.datastore.storage.delta_paths import FOLDER
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage, storage_of

if TYPE_CHECKING:
    import polars as pl

PIECE_ROWS = 8192
ROWS_AT_ONCE, BYTES_AT_ONCE = 512, 2**20
"""Rows, and bytes, whose text is read at once; a row group at least."""
SHARE = 0.25
"""Evidence of all rows of a piece is made, and kept, if a rule looks at this share of them at least."""


class Kernel(Protocol):
    """What a rule makes of rows. ``name`` names it, its version and its settings: equal names make equal evidence."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Sequence[str]:
        """The leaves of columns that it reads, as Parquet names them: ``messages.list.element.content``."""

    def sketch(self, rows: pa.Table) -> pa.RecordBatch:
        """The evidence of each of some rows, in their order."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``end`` of a data file, which lies below the table's folder. ``places`` are those that a rule
    looks at, counted from ``start``, uint32, rising; ``numbers`` are the numbers that it gives them, uint32."""

    file: str
    start: int
    end: int
    places: np.ndarray
    numbers: np.ndarray
    keep: bool = True

    @property
    def whole(self) -> bool:
        """Whether evidence is made of all its rows, and kept."""
        return self.keep and len(self.places) >= SHARE * (self.end - self.start)

    @property
    def keys(self) -> np.ndarray:
        """A number for each of its rows that no row of another piece has, but for a chance of 2^-64, uint64."""
        return np.uint64(xxh3_64_intdigest(self.file.encode())) + np.uint64(self.start) + self.places.astype(np.uint64)

    def path(self, kernel: Kernel, kept: Path, work: Path) -> Path:
        """Where its evidence lies: below ``kept`` that of all rows, below ``work`` that of ``places`` alone."""
        where = kept / kernel.name / self.file / f"{self.start}-{self.end}.arrow"
        if self.whole or where.exists():
            return where
        return work / kernel.name / f"{self.file}-{self.start}-{xxh3_128_hexdigest(self.places.tobytes())}.arrow"


def pieces_of(storage: LocalStorage | S3Storage, files: Sequence[str], rows: "pl.DataFrame") -> list[Piece]:
    """The pieces of data files that hold ``rows``, numbered by their order in it. Raises StoreError if one is there
    twice, or not at all."""
    import polars as pl  # which takes a worker longer than most shards of few rows

    from agentrl.datastore.read.scalar_cache import ScalarCopies

    copies, names = ScalarCopies(storage), sorted(files)
    stored = [pl.DataFrame({"trajectory_id": []}, {"trajectory_id": pl.String})]
    for file in names:
        ids = copies.read(file, "trajectory_id")
        stored.append(pl.DataFrame({"trajectory_id": _ids(storage, file) if ids is None else ids}))
    ends = np.cumsum([some.height for some in stored])
    asked = rows.select("trajectory_id").with_row_index("number")
    here = pl.concat(stored).with_row_index("row").join(asked, on="trajectory_id").sort("row")
    if here.height != rows.height:
        raise StoreError(f"of {rows.height} rows the data files hold {here.height}; `agentrl buffer check` says why")
    places, numbers, pieces = here["row"].to_numpy(), here["number"].to_numpy(), list[Piece]()
    for file, first, last in zip(names, ends.tolist(), ends[1:].tolist(), strict=False):
        for start in range(first, last, PIECE_ROWS):
            end = min(start + PIECE_ROWS, last)
            part = slice(*np.searchsorted(places, [start, end]))
            if part.start < part.stop:
                own = places[part] - np.uint32(start)
                pieces.append(Piece(name_of(file), start - first, end - first, own, numbers[part]))
    return pieces


def _ids(storage: LocalStorage | S3Storage, file: str) -> "pl.Series":
    import polars as pl

    source = storage.open(f"{FOLDER}/{name_of(file)}") if isinstance(storage, S3Storage) else file
    ids = pl.from_arrow(pq.read_table(source, columns=["trajectory_id"])["trajectory_id"])
    assert isinstance(ids, pl.Series)
    return ids


def name_of(file: str) -> str:
    """The name of a data file below the table's folder, from its path or URI."""
    name = file.rpartition(f"/{FOLDER}/")[2]
    return unquote(name) if "://" in file else name


def shards_of(kernel: Kernel, pieces: Sequence[Piece], store: str, kept: Path, work: Path, most: int) -> list[Shard]:
    """The shards that make evidence of those pieces that have none, each of ``most`` rows or of one piece."""
    missing = [piece for piece in pieces if not piece.path(kernel, kept, work).exists()]
    shards, group, size = list[Shard](), list[Piece](), 0
    for piece in missing:
        group.append(piece)
        size += piece.end - piece.start
        if size >= most:
            shards.append(_shard(kernel, group, store, kept, work))
            group, size = [], 0
    return [*shards, _shard(kernel, group, store, kept, work)] if group else shards


def _shard(kernel: Kernel, pieces: Sequence[Piece], store: str, kept: Path, work: Path) -> Shard:
    name = f"{kernel.name} of {pieces[0].file} from row {pieces[0].start}"
    name += f" and {len(pieces) - 1} more pieces" if len(pieces) > 1 else ""
    return Shard(name, f"{__name__}:make_evidence", (kernel, tuple(pieces), store, kept, work))


def make_evidence(kernel: Kernel, pieces: Sequence[Piece], store: str, kept: Path, work: Path) -> None:
    """Write the evidence of pieces that have none."""
    storage = storage_of(store)
    for piece in pieces:
        path = piece.path(kernel, kept, work)
        if path.exists():
            continue
        with finished(path) as unfinished:
            rows = read(storage, piece, kernel.columns, None if piece.whole else piece.places)
            rows = rows if piece.whole else together(rows)
            batch = pa.Table.from_batches(map(kernel.sketch, rows)).combine_chunks()
            with pa.ipc.new_file(unfinished, batch.schema) as writer:
                writer.write_table(batch)


def read(
    storage: LocalStorage | S3Storage, piece: Piece, columns: Sequence[str], places: np.ndarray | None
) -> Iterator[pa.Table]:
    """These leaves of columns of a piece's rows, or of those at ``places``, in their order, some at once."""
    key = f"{FOLDER}/{piece.file}"
    source = storage.open(key) if isinstance(storage, S3Storage) else storage.root / key
    wanted = np.arange(piece.end - piece.start) if places is None else places
    wanted = wanted.astype(np.int64) + piece.start
    footer, leaves = _footer(storage, key)
    whole = set(columns) <= leaves
    with pq.ParquetFile(source, metadata=footer, pre_buffer=isinstance(storage, S3Storage)) as file:
        stored = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        sizes = [group.num_rows for group in stored]
        shares = [max(group.num_rows / ROWS_AT_ONCE, group.total_byte_size / BYTES_AT_ONCE) for group in stored]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        groups = np.flatnonzero(np.diff(np.searchsorted(wanted, starts)))
        turn = np.cumsum(np.array(shares)[groups]) // 1
        for number in np.unique(turn).tolist():
            some = groups[turn == number]
            inside = np.concatenate([np.arange(starts[group], starts[group + 1]) for group in some])
            rows = _leaves(file, some.tolist(), columns, whole)
            chosen = np.flatnonzero(np.isin(inside, wanted))
            yield rows if len(chosen) == rows.num_rows else rows.take(chosen)


def together(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in fewer tables. A kernel takes nearly as long for ten rows as for a hundred."""
    held = list[pa.Table]()
    for table in tables:
        held.append(table)
        if sum(some.num_rows for some in held) >= ROWS_AT_ONCE or sum(some.nbytes for some in held) >= BYTES_AT_ONCE:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


@lru_cache(maxsize=1)
def _footer(storage: LocalStorage | S3Storage, key: str) -> tuple[pq.FileMetaData, set[str]]:
    """What a data file says of itself, and the paths of its leaves. All pieces of a file in turn share it."""
    with pq.ParquetFile(storage.open(key) if isinstance(storage, S3Storage) else storage.root / key) as file:
        return file.metadata, {file.schema.column(number).path for number in range(len(file.schema))}


def _leaves(file: pq.ParquetFile, groups: list[int], columns: Sequence[str], whole: bool) -> pa.Table:
    """Leaves of columns of some row groups; of a file of an older schema, which lacks one of them, whole columns."""
    if whole:
        return file.read_row_groups(groups, columns=list(columns), use_threads=False)
    from agentrl.datastore.table.older_schemas import to_read, upgrade

    names = list(dict.fromkeys(column.partition(".")[0] for column in columns))
    rows = file.read_row_groups(groups, columns=to_read(names, file.schema_arrow.names), use_threads=False)
    return upgrade(rows, names)


@dataclass(frozen=True)
class Evidence:
    """Evidence of pieces, mapped into memory."""

    kernel: Kernel
    pieces: Sequence[Piece]
    kept: Path
    work: Path

    def rows(self, number: int) -> tuple[pa.Table, np.ndarray]:
        """Evidence that has that of a piece, and at which places the piece's own are, in their order."""
        piece = self.pieces[number]
        rows = pa.ipc.open_file(pa.memory_map(str(piece.path(self.kernel, self.kept, self.work)))).read_all()
        places = piece.places if rows.num_rows == piece.end - piece.start else np.arange(len(piece.places))
        return rows, places.astype(np.int64)

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of all rows, by their numbers."""
        numbers = np.concatenate([piece.numbers for piece in self.pieces])
        parts = [rows[name].take(places) for rows, places in map(self.rows, range(len(self.pieces)))]
        return pa.chunked_array(chunk for part in parts for chunk in part.chunks).take(np.argsort(numbers))

"""Near duplicates: candidates by sketches in bands (Broder, 1997), each verified by the Jaccard similarity itself.

The rule is three functions. :func:`sketch` files the rows of pieces under a key for each band. :func:`decide` gives the
pairs of a part of the keys. :func:`settle` goes through the verified pairs from the best row to the worst. What each
gives depends on the rows alone, so it does not matter how rows and keys are divided, nor where which part is done."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from agentrl.datastore.curation.candidates import (
    BITS,
    Entries,
    ascending,
    bucket_pairs,
    filed,
    packed,
    shared,
    slice_of,
    unpacked,
    worth_it,
)
from agentrl.datastore.curation.division import Division
from agentrl.datastore.curation.kernels import Sketch
from agentrl.datastore.curation.pieces import Evidence
from agentrl.datastore.curation.sketches import VALUES, band_keys, bands
from agentrl.datastore.curation.text import Part
from agentrl.datastore.curation.verification import possible, similarities
from agentrl.datastore.errors import StoreError
from agentrl.datastore.shards.shard import Shard, digest_of, save_array

if TYPE_CHECKING:
    import polars as pl

KEYS = 2**19
"""Keys of a part, about. Of the rows that share one, a quarter of their sketches is held: 70 MB, if all do."""
BAND_ROWS = 2**17
"""Rows of a shard that makes keys, if no number of shards is asked for. Each part reads of each of them."""
PAIRS_AT_ONCE = 2**20
"""Of all parts, that are sorted together: they fit a cache of the processor."""


def near_duplicates(
    rows: "pl.DataFrame", scopes: Sequence[str], compare: Sequence[Part], threshold: float, divided: Division
) -> np.ndarray:
    """Whether each of ``rows``, which come from best to worst, resembles an earlier one of its scope that resembles
    none itself, bool [rows]: in each compared part the similarity of word 3-grams is at or above the threshold.

    A row takes 512 bytes, and 3 bits for each n-gram or more, which are kept. Rows that may be like another one are
    read once more for their n-grams. Raises StoreError if there are more than 2^28 rows.
    """
    if rows.height > 2**BITS:
        raise StoreError(
            f"near_duplicates compares {2**BITS:,} rows at most at once, and {rows.height:,} are left; narrow them by "
            "a rule before it, or curate them by parts, such as ranges of tasks"
        )
    if not rows.height:
        return np.zeros(0, bool)
    pieces = divided.pieces(rows)
    evidence = divided.evidence(Sketch(tuple(compare)), pieces)
    pairs = candidates(evidence, _hashed(scopes), threshold, divided)
    pairs = pairs[possible(pairs, evidence, threshold, divided)]
    similar = similarities(pairs, pieces, tuple(compare), divided)
    return settle(pairs[similar >= threshold], rows.height)


def settle(pairs: np.ndarray, rows: int) -> np.ndarray:
    """Whether each row is dropped [rows], by ``PAIR`` records of rows that resemble a better one, sorted by row."""
    doubled = np.zeros(rows, bool)
    for row, better in zip(pairs["row"].tolist(), pairs["better"].tolist(), strict=True):
        if not doubled[better]:
            doubled[row] = True
    return doubled


def _hashed(scopes: Sequence[str]) -> np.ndarray:
    """A hash of each scope, uint64 [rows]."""
    import polars as pl

    names = pl.Series("scope", scopes, dtype=pl.String)
    distinct = names.unique()
    hashes = pl.Series([xxh3_64_intdigest(name.encode()) for name in distinct], dtype=pl.UInt64)
    return names.replace_strict(distinct, hashes, return_dtype=pl.UInt64).to_numpy()


def candidates(evidence: Evidence, scopes: np.ndarray, threshold: float, divided: Division) -> np.ndarray:
    """The pairs to compare, ``PAIR`` records sorted by row; the scopes are hashes by row number."""
    shape = bands(threshold)
    parts = divided.shards or max(1, -(-len(scopes) * shape[0] // KEYS))
    size = BAND_ROWS if divided.shards is None else divided.rows_of(len(scopes))
    given = (array for piece in evidence.pieces for array in (piece.file, piece.start, piece.places, piece.numbers))
    folder = divided.work / f"near-{digest_of(evidence.kernel.name, threshold, parts, size, scopes, *given)}"
    groups = _groups([len(piece.places) for piece in evidence.pieces], size)
    keyed = [folder / f"keys-{number}.npy" for number in range(len(groups))]
    divided.run(
        [
            Shard(f"bands of pieces from {group.start}", f"{__name__}:sketch", (some, own, shape, path))
            for group, path in zip(groups, keyed, strict=True)
            for pieces in [evidence.pieces[group]]
            for some, own in [(replace(evidence, pieces=pieces), [scopes[piece.numbers] for piece in pieces])]
            if not path.exists()
        ],
        "bands",
    )
    where = folder / "rows.npy"
    if not where.exists():
        _write_groups(evidence, groups, len(scopes), where)
    decided = [folder / f"pairs-{part}.npy" for part in range(parts)]
    divided.run(
        [
            Shard(f"buckets of part {part}", f"{__name__}:decide", (where, keyed, (part, parts), threshold, path))
            for part, path in enumerate(decided)
            if not path.exists()
        ],
        "buckets",
    )
    return _of_parts(decided, len(scopes), threshold)


def _groups(sizes: Sequence[int], most: int) -> list[slice]:
    """Pieces together, of ``most`` rows or of one piece more."""
    groups, start, rows = list[slice](), 0, 0
    for number, size in enumerate(sizes):
        rows += size
        if rows >= most or number + 1 == len(sizes):
            groups.append(slice(start, number + 1))
            start, rows = number + 1, 0
    return groups


def _of_parts(paths: Sequence[Path], rows: int, threshold: float) -> np.ndarray:
    """The pairs to compare of those of all parts, ``PAIR`` records. Those of some rows are held at once."""
    ranges = max(1, -(-sum(path.stat().st_size for path in paths) // (8 * PAIRS_AT_ONCE)))
    limits = np.arange(1, ranges, dtype=np.uint64) * np.uint64(rows) // np.uint64(ranges)
    limits = packed(limits, np.zeros_like(limits), np.full_like(limits, VALUES))
    begins, edges = list[int](), list[list[int]]()
    for path in paths:
        stored = np.load(path, mmap_mode="r")
        begins.append(stored.offset)
        edges.append([0, *np.searchsorted(stored, limits).tolist(), len(stored)])
    chosen = []
    for number in range(ranges):
        some = [
            np.fromfile(path, np.uint64, edge[number + 1] - edge[number], offset=begin + 8 * edge[number])
            for path, begin, edge in zip(paths, begins, edges, strict=True)
        ]
        chosen.append(unpacked(worth_it(np.concatenate(some), threshold)))
    return np.concatenate(chosen)


def sketch(evidence: Evidence, scopes: Sequence[np.ndarray], shape: tuple[int, int], path: Path) -> None:
    """Write the entries of pieces' rows in buckets, one of each band, sorted, and beside them, row by row, the low
    bytes of sketches and the sizes of sets. A row without words is in one bucket."""
    begin, rows = 0, sum(map(len, scopes))
    entries, marks, empty = np.empty((rows, shape[0]), np.uint64), np.empty((rows, 0), np.uint8), np.zeros(rows, bool)
    for number, scope in enumerate(scopes):
        table, places = evidence.rows(number)
        sketched, sizes = _values(table, "sketch", places), _values(table, "sizes", places)
        marks = marks if begin else np.empty((rows, VALUES + sizes[0].nbytes), np.uint8)
        own = slice(begin, begin := begin + len(places))
        marks[own, :VALUES], marks[own, VALUES:] = sketched, sizes.view(np.uint8)  # of a value its low byte
        entries[own] = filed(band_keys(sketched, scope, *shape), evidence.pieces[number].numbers)
        empty[own] = ~sizes.any(1)
    save_array(_beside(path), marks)
    together = np.concatenate([entries[~empty].ravel(), entries[empty, 0]]) if empty.any() else entries.ravel()
    save_array(path, ascending(together))


def _beside(keyed: Path) -> Path:
    """Where the low bytes of sketches lie whose entries are in a file."""
    return keyed.with_name(keyed.name.replace("keys", "marks"))


def decide(where: Path, keyed: Sequence[Path], part: tuple[int, int], threshold: float, path: Path) -> None:
    """Write the candidates of one part of the keys, packed. ``part``: which one, and of how many."""
    runs = [run[slice_of(run, *part)] for run in (np.load(file, mmap_mode="r") for file in keyed)]
    keys, numbers = shared(np.concatenate(runs))
    pairs = bucket_pairs(Entries(keys, numbers, *_fetched(where, keyed, numbers)), threshold)
    save_array(path, worth_it(np.concatenate([np.empty(0, np.uint64), *pairs]), threshold))


def _write_groups(evidence: Evidence, groups: Sequence[slice], rows: int, path: Path) -> None:
    """Write which group of pieces each row is in, and at which place of it, uint32 [rows, 2]."""
    where = np.empty((rows, 2), np.uint32)
    for number, group in enumerate(groups):
        numbers = np.concatenate([piece.numbers for piece in evidence.pieces[group]])
        where[numbers, 0], where[numbers, 1] = number, np.arange(len(numbers))
    save_array(path, where)


def _fetched(where: Path, keyed: Sequence[Path], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low bytes of sketches, uint8 [rows, VALUES], by which similarities are estimated, and sizes of sets [rows,
    parts], uint32, of rows by their numbers."""
    groups, places = np.load(where, mmap_mode="r").take(rows.astype(np.int64), 0).T
    marks, sizes = np.empty((len(rows), VALUES), np.uint8), None
    order = np.argsort(groups.astype(np.min_scalar_type(len(keyed))), kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=len(keyed)))
    for file, start, end in zip(keyed, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        inside = order[start:end]
        stored = np.load(_beside(file), mmap_mode="r").take(places[inside], 0)
        marks[inside] = stored[:, :VALUES]
        own = np.ascontiguousarray(stored[:, VALUES:]).view(np.uint32)
        sizes = np.empty((len(rows), own.shape[1]), np.uint32) if sizes is None else sizes
        sizes[inside] = own
    assert sizes is not None, "there are rows"
    return marks, sizes


def _values(table: pa.Table, name: str, places: np.ndarray) -> np.ndarray:
    """A column of lists of equal lengths [places, length], of a table of one record batch; without a copy if it is all
    of it."""
    [column] = table[name].chunks
    values = column.values.to_numpy().reshape(len(column), -1)
    return values if len(places) == len(values) else values.take(places, 0)

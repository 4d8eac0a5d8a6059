"""Near duplicates: candidates by sketches in bands (Broder, 1997), each verified by the Jaccard similarity itself.

The rule is three functions. :func:`sketch` files the rows of pieces under a key for each band. :func:`decide` gives the
pairs of a part of the keys. :func:`settle` goes through the verified pairs from the best row to the worst. What each
gives depends on the rows alone, so it does not matter how rows and keys are divided, nor where which part is done."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from agentrl.datastore.curation.candidates import (
    CROWDED,
    bucket_pairs,
    buckets,
    crowd,
    estimated,
    least_equal,
    worth_it,
)
from agentrl.datastore.curation.division import Division
from agentrl.datastore.curation.kernels import Grams, Sketch
from agentrl.datastore.curation.pieces import Evidence, Piece
from agentrl.datastore.curation.sketches import EMPTY, VALUES, band_keys, bands, jaccard
from agentrl.datastore.curation.text import Part
from agentrl.datastore.curation.verified import Verified
from agentrl.datastore.shards.shard import Shard, digest_of, finished, save_array

if TYPE_CHECKING:
    import polars as pl

KEYS = 2**19
"""Keys of a part, about. Of the rows that share one, a quarter of their sketches is held: 70 MB, if all do."""
PAIRS = 2**16
"""Pairs that a shard verifies."""
CROWD_ROWS = 2**15
"""Rows of a crowded bucket whose order is looked at together."""


def near_duplicates(
    rows: "pl.DataFrame", scopes: Sequence[str], compare: Sequence[Part], threshold: float, divided: Division
) -> np.ndarray:
    """Whether each of ``rows``, which come from best to worst, resembles an earlier one of its scope that resembles
    none itself, bool [rows]: in each compared part the similarity of word 3-grams is at or above the threshold.

    A row takes 512 bytes, which are kept. Rows that are compared are read once more for their n-grams.
    """
    if not rows.height:
        return np.zeros(0, bool)
    pieces = divided.pieces(rows)
    evidence = divided.evidence(Sketch(tuple(compare)), pieces)
    pairs = worth_it(_pairs(evidence, _hashed(scopes), threshold, divided), threshold)
    similar = _verified(pairs, pieces, tuple(compare), divided)
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


def _pairs(evidence: Evidence, scopes: np.ndarray, threshold: float, divided: Division) -> np.ndarray:
    """All candidates, ``PAIR`` records; the scopes are hashes by row number."""
    shape = bands(threshold)
    parts = divided.shards or max(1, -(-len(scopes) * shape[0] // KEYS))
    size = divided.rows_of(len(scopes))
    given = (array for piece in evidence.pieces for array in (piece.file, piece.start, piece.places, piece.numbers))
    folder = divided.work / f"near-{digest_of(evidence.kernel.name, threshold, parts, size, scopes, *given)}"
    groups, rows = list[list[int]](), 0
    for number, piece in enumerate(evidence.pieces):
        if not groups or rows >= size:
            groups.append([])
            rows = 0
        groups[-1].append(number)
        rows += len(piece.places)
    keyed = [folder / f"keys-{number}.arrow" for number in range(len(groups))]
    divided.run(
        [
            Shard(f"bands of pieces from {group[0]}", f"{__name__}:sketch", (some, own, shape, parts, path))
            for group, path in zip(groups, keyed, strict=True)
            for pieces in [[evidence.pieces[number] for number in group]]
            for some, own in [(replace(evidence, pieces=pieces), [scopes[piece.numbers] for piece in pieces])]
            if not path.exists()
        ],
        "bands",
    )
    where = folder / "rows.npy"
    if not where.exists():
        _write_places(evidence, len(scopes), where)
    decided = [folder / f"pairs-{part}.npy" for part in range(parts)]
    divided.run(
        [
            Shard(f"buckets of part {part}", f"{__name__}:decide", (evidence, where, keyed, part, threshold, path))
            for part, path in enumerate(decided)
            if not path.exists()
        ],
        "buckets",
    )
    return np.concatenate([np.load(path) for path in decided])


def sketch(evidence: Evidence, scopes: Sequence[np.ndarray], shape: tuple[int, int], parts: int, path: Path) -> None:
    """Write the keys of the bands of pieces' rows with the rows' numbers, one record batch for each part of the keys.
    A row without words has one key."""
    keys, numbers = [], []
    for number, scope in enumerate(scopes):
        table, places = evidence.rows(number)
        sketched = _values(table, "sketch")[places]
        empty = (sketched == EMPTY).all(1)
        of_bands = band_keys(sketched, scope, *shape)
        kept = np.ones(of_bands.shape, bool)
        kept[empty, 1:] = False
        keys.append(of_bands[kept])
        numbers.append(np.repeat(evidence.pieces[number].numbers, kept.sum(1)))
    key, row = np.concatenate(keys), np.concatenate(numbers)
    part = (key >> np.uint64(32)) % np.uint64(parts)
    order = np.argsort(part, kind="stable")
    ends = np.searchsorted(part[order], np.arange(parts + 1))
    table = pa.table({"key": key[order], "row": row[order]})
    with finished(path) as unfinished, pa.ipc.new_file(unfinished, table.schema) as writer:
        for start, end in pairwise(ends.tolist()):
            writer.write_batch(_batch(table.slice(start, end - start)))


def _batch(table: pa.Table) -> pa.RecordBatch:
    columns = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def decide(evidence: Evidence, where: Path, keyed: Sequence[Path], part: int, threshold: float, path: Path) -> None:
    """Write the candidates of one part of the keys."""
    batches = [pa.ipc.open_file(pa.memory_map(str(file))).get_batch(part) for file in keyed]
    keys = np.concatenate([batch["key"].to_numpy() for batch in batches])
    rows = np.concatenate([batch["row"].to_numpy() for batch in batches])
    order = np.argsort(keys)
    keys, rows = keys[order], rows[order]
    first, ends = buckets(keys)
    shared = np.repeat(ends - first > 1, ends - first)
    keys, rows = keys[shared], rows[shared]
    at, own = np.unique(rows, return_inverse=True)  # rows are numbered anew, in the same order
    marks, sizes = _fetched(evidence, where, at)
    pairs = [_near(bucket_pairs(keys, own), marks, sizes, threshold)]
    first, ends = buckets(keys)
    for start, end in zip(first[ends - first > CROWDED].tolist(), ends[ends - first > CROWDED].tolist(), strict=True):
        members = np.sort(own[start:end])
        for some in range(0, len(members), CROWD_ROWS):
            chosen = crowd(members, some, some + CROWD_ROWS, marks[members[some : some + CROWD_ROWS]])
            pairs.append(_near(chosen, marks, sizes, threshold))
    candidates = worth_it(np.concatenate(pairs), threshold)
    candidates["row"], candidates["better"] = at[candidates["row"]], at[candidates["better"]]
    save_array(path, candidates)


def _near(pairs: np.ndarray, marks: np.ndarray, sizes: np.ndarray, threshold: float) -> np.ndarray:
    """``PAIR`` records of those pairs that may resemble each other, by the sizes of their sets and by estimate."""
    row, better = sizes[pairs[:, 0]], sizes[pairs[:, 1]]
    possible = (np.minimum(row, better) >= threshold * np.maximum(row, better)).all(1)
    return estimated(pairs[possible], marks, least_equal(threshold))


def _write_places(evidence: Evidence, rows: int, path: Path) -> None:
    """Write which piece each row is in, and at which place its evidence is, uint32 [rows, 2]."""
    where = np.empty((rows, 2), np.uint32)
    for number, piece in enumerate(evidence.pieces):
        where[piece.numbers, 0] = number
        where[piece.numbers, 1] = evidence.rows(number)[1]
    save_array(path, where)


def _fetched(evidence: Evidence, where: Path, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low bytes of sketches, by which similarities are estimated, and sizes of rows, by the rows' numbers."""
    sketched = np.empty((len(rows), VALUES), np.uint8)
    sizes = np.empty((len(rows), len(evidence.kernel.compare)), np.uint32)  # type: ignore[attr-defined]
    pieces, places = np.load(where, mmap_mode="r")[rows].T
    for number in np.unique(pieces).tolist():
        inside, (table, _) = np.flatnonzero(pieces == number), evidence.rows(number)
        sketched[inside] = _values(table, "sketch")[places[inside]]
        sizes[inside] = _values(table, "sizes")[places[inside]]
    return sketched, sizes


def _values(table: pa.Table, name: str) -> np.ndarray:
    """A column of lists of equal lengths [rows, length]."""
    column = table[name].combine_chunks()
    return column.values.to_numpy().reshape(len(column), -1)


def _verified(pairs: np.ndarray, pieces: Sequence[Piece], compare: tuple[Part, ...], divided: Division) -> np.ndarray:
    """The similarity of each pair, of the part where it is least, float64 [pairs]. Similarities that an earlier
    curation computed are not computed again."""
    count = sum(len(piece.numbers) for piece in pieces)
    keys = np.empty(count, np.uint64)
    for piece in pieces:
        keys[piece.numbers] = piece.keys
    both = keys[pairs["row"]], keys[pairs["better"]]
    first, other = np.minimum(*both), np.maximum(*both)
    known = Verified(divided.kept / Grams(compare).name / "verified")
    similar = known.find(first, other)
    missing = np.flatnonzero(np.isnan(similar))
    if not len(missing):
        return similar
    asked = np.zeros(count, bool)
    asked[pairs["row"][missing]] = asked[pairs["better"][missing]] = True
    some = [
        replace(piece, places=piece.places[chosen], numbers=piece.numbers[chosen], keep=False)
        for piece in pieces
        for chosen in [asked[piece.numbers]]
        if chosen.any()
    ]
    grams = divided.evidence(Grams(compare), some)
    work = pairs[["row", "better"]][missing]
    folder = divided.work / f"verify-{digest_of(grams.kernel.name, *(piece.keys for piece in some), work)}"
    where = folder / "rows.npy"
    if not where.exists():
        _write_places(grams, count, where)
    size = PAIRS if divided.shards is None else -(-len(work) // divided.shards)
    starts = range(0, len(work), size)
    done = [folder / f"{start}-{size}.npy" for start in starts]
    shards = [
        Shard(f"pairs from {start}", f"{__name__}:verify", (grams, where, work[start : start + size], path))
        for start, path in zip(starts, done, strict=True)
        if not path.exists()
    ]
    divided.run(shards, "pairs")
    similar[missing] = np.concatenate([np.load(path) for path in done])
    known.add(first[missing], other[missing], similar[missing])
    return similar


def verify(grams: Evidence, where: Path, pairs: np.ndarray, path: Path) -> None:
    """Write the similarities of pairs, float64 [pairs]."""
    all_places = np.load(where, mmap_mode="r")
    rows = np.unique(np.concatenate([pairs["row"], pairs["better"]]))
    columns = {number: _arrays(grams, number) for number in np.unique(all_places[rows, 0]).tolist()}
    similar = np.empty(len(pairs))
    places = np.column_stack([all_places[pairs["row"]], all_places[pairs["better"]]])
    for number, (piece, row, other_piece, other) in enumerate(places.tolist()):
        parts = zip(columns[piece], columns[other_piece], strict=True)
        similar[number] = min(
            jaccard(values[starts[row] : starts[row + 1]], more[begins[other] : begins[other + 1]])
            for (starts, values), (begins, more) in parts
        )
    save_array(path, similar)


def _arrays(grams: Evidence, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each part where the n-grams of a row begin, and all n-grams."""
    columns = [column.combine_chunks() for column in grams.rows(number)[0].columns]
    return [(column.offsets.to_numpy(), column.values.to_numpy()) for column in columns]

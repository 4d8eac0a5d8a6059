"""The Jaccard similarity of pairs of rows: what rules a pair out, what was computed before, and what is computed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentrl.datastore.curation.division import Division
from agentrl.datastore.curation.kernels import Grams
from agentrl.datastore.curation.odd_sketches import most_similar
from agentrl.datastore.curation.pieces import Evidence, Piece
from agentrl.datastore.curation.sketches import jaccard
from agentrl.datastore.curation.text import Part
from agentrl.datastore.curation.verified import Verified
from agentrl.datastore.shards.shard import Shard, digest_of, save_array

BOUNDED, PAIRS = 2**18, 2**16
"""Pairs whose similarity a shard bounds, and that a shard verifies."""


def possible(pairs: np.ndarray, evidence: Evidence, threshold: float, divided: Division) -> np.ndarray:
    """Whether the similarity of each pair may be at or above the threshold, bool [pairs]. It cannot be for most pairs
    that only look similar, and then no text is read for them. ``evidence`` is that of sketches."""
    given = (array for piece in evidence.pieces for array in (piece.keys, piece.numbers))
    folder = divided.work / f"bound-{digest_of(evidence.kernel.name, threshold, *given, pairs)}"
    return _by_shards("bound", evidence, pairs, BOUNDED, folder, divided, threshold).astype(bool)


def bound(sketched: Evidence, where: Path, pairs: np.ndarray, path: Path, threshold: float) -> None:
    """Write whether the similarities of pairs may be at the threshold, bool [pairs]."""
    rows, places = np.unique(np.concatenate([pairs["row"], pairs["better"]]), return_inverse=True)
    pieces, inside = np.load(where, mmap_mode="r")[rows].T
    order = np.argsort(pieces, kind="stable")
    numbers, firsts = np.unique(pieces[order], return_index=True)
    words, begin, starts, sizes = list[np.ndarray](), 0, np.empty(len(rows), np.int64), list[np.ndarray]()
    for number, own in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
        table = sketched.rows(number)[0].select(["odd", "sizes"]).take(inside[own]).combine_chunks()
        [odd], [size] = table["odd"].chunks, table["sizes"].chunks
        starts[own] = begin + odd.offsets.to_numpy()[:-1]
        begin += len(odd.values)
        words.append(odd.values.to_numpy())
        sizes.append(size.values.to_numpy().reshape(len(own), -1))
    of_rows = np.concatenate(sizes)[np.argsort(order)]
    first, other = places[: len(pairs)], places[len(pairs) :]
    most = most_similar(np.concatenate(words), starts[first], starts[other], of_rows[first], of_rows[other])
    save_array(path, most >= threshold)


def similarities(
    pairs: np.ndarray, pieces: Sequence[Piece], compare: tuple[Part, ...], divided: Division
) -> np.ndarray:
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
    work = pairs[missing]
    folder = divided.work / f"verify-{digest_of(grams.kernel.name, *(piece.keys for piece in some), work)}"
    similar[missing] = _by_shards("verify", grams, work, PAIRS, folder, divided)
    known.add(first[missing], other[missing], similar[missing])
    return similar


def _by_shards(
    function: str, evidence: Evidence, pairs: np.ndarray, most: int, folder: Path, divided: Division, *more: float
) -> np.ndarray:
    """What a function of this module writes of pairs, ``most`` of them at once if no number of shards is asked for."""
    where = folder / "rows.npy"
    if not where.exists():
        _write_places(evidence, where)
    size = most if divided.shards is None else max(1, -(-len(pairs) // divided.shards))
    starts = range(0, len(pairs), size)
    done = [folder / f"{start}-{size}.npy" for start in starts]
    shards = [
        Shard(
            f"{function} pairs from {start}",
            f"{__name__}:{function}",
            (evidence, where, pairs[start : start + size], path, *more),
        )
        for start, path in zip(starts, done, strict=True)
        if not path.exists()
    ]
    divided.run(shards, "pairs")
    return np.concatenate([np.empty(0), *map(np.load, done)])


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
    columns = [chunk for column in grams.rows(number)[0].columns for [chunk] in [column.chunks]]  # mapped, not copied
    return [(column.offsets.to_numpy(), column.values.to_numpy()) for column in columns]


def _write_places(evidence: Evidence, path: Path) -> None:
    """Write which piece each row is in, and at which place its evidence is, uint32 [rows, 2], by the rows' numbers."""
    most = max((int(piece.numbers.max()) for piece in evidence.pieces), default=-1)
    where = np.empty((most + 1, 2), np.uint32)
    for number, piece in enumerate(evidence.pieces):
        where[piece.numbers, 0] = number
        where[piece.numbers, 1] = evidence.rows(number)[1]
    save_array(path, where)

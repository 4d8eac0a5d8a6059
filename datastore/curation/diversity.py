"""Choosing rows that differ. Vectors are float32 [rows, dimensions]; answers are row numbers, in the order taken."""

import warnings
from pathlib import Path

import numpy as np

from agentrl.datastore.curation.division import Division
from agentrl.datastore.optional import optional
from agentrl.datastore.shards.divide import in_groups
from agentrl.datastore.shards.shard import Shard, digest_of, save_array

DISTANCES = 2**24
"""Distances that are computed faster, within some seconds, than other processes start."""
NUMBERS = 2**17
"""Numbers of vectors whose differences are computed at once: they fit a cache of the processor."""


def k_center(vectors: np.ndarray, n: int) -> list[int]:
    """Farthest-first traversal (Gonzalez, 1985): at most twice the best possible covering radius.

    Starts from row 0, so give the best row first; of rows that are as far, the first is taken. Fewer than ``n`` rows
    are taken if all others are equal to rows taken. O(rows x n).
    """
    taken, farthest = list[int](), 0
    distance = np.full(len(vectors), np.inf, np.float32)
    at_once = max(1, NUMBERS // max(1, vectors.shape[1]))
    while True:
        taken.append(farthest)
        for start in range(0, len(vectors), at_once):
            part = slice(start, start + at_once)
            apart = ((vectors[part] - vectors[farthest]) ** 2).sum(1)
            np.minimum(distance[part], apart, out=distance[part])
        farthest = int(distance.argmax())
        if len(taken) >= n or distance[farthest] <= 0:
            return taken


def core_sets(vectors: np.ndarray, keys: np.ndarray, n: int, division: Division) -> list[int]:
    """:func:`k_center` of parts of the rows, and then of all rows that it took there: at most four times the best
    possible covering radius (Malkomes et al., 2015). ``keys`` [rows], uint64, are hashes of what the vectors are of; by
    them rows are divided, so the answer depends on the rows alone. Work of few rows is one part, as by k_center."""
    parts = parts_of(len(vectors), n)
    if parts == 1:
        return k_center(vectors, n)
    folder = division.work / f"centers-{digest_of(n, parts, keys, vectors)}"
    members = [np.flatnonzero(keys % np.uint64(parts) == part) for part in range(parts)]
    paths = [(folder / f"{part}.vectors.npy", folder / f"{part}.npy") for part in range(parts)]
    missing = [part for part, (_, answer) in enumerate(paths) if len(members[part]) and not answer.exists()]
    for part in missing:
        save_array(paths[part][0], vectors[members[part]])
    shards = [
        Shard(f"centers of part {group[0]}", f"{__name__}:centers", ([paths[part] for part in group], n))
        for group in in_groups(missing, division.shards, 1)
    ]
    division.run(shards, "centers")
    taken = [rows[np.load(answer)] for rows, (_, answer) in zip(members, paths, strict=True) if len(rows)]
    together = np.sort(np.concatenate(taken))
    return together[k_center(vectors[together], n)].tolist()


def parts_of(rows: int, n: int) -> int:
    """Into how many parts so many rows are divided, of which ``n`` are taken: as many as make the work of a part equal
    to that of the end, where ``n`` rows of each part are compared."""
    return max(1, round((rows / n) ** 0.5)) if rows * n > DISTANCES else 1


def centers(work: list[tuple[Path, Path]], n: int) -> None:
    """Write the rows that :func:`k_center` takes of each file of vectors."""
    for given, path in work:
        save_array(path, np.array(k_center(np.load(given), n), np.int64))


def warn_of_one_process(rows: int, n: int, division: Division) -> None:
    """Say that an engine does nothing for :func:`k_center`, if it takes long."""
    if division.named and rows * n > DISTANCES:
        warnings.warn(
            f"diverse: method k_center takes each row by its distance from all taken before, which no engine can "
            f"divide: this process computes {rows * n:,} distances alone. Method core_sets divides them, and leaves a "
            "covering radius that was 4 to 10 % larger where both were measured",
            stacklevel=3,
        )


def cluster_balanced(vectors: np.ndarray, n: int, clusters: int, seed: int) -> list[int]:
    """Take rows from k-means clusters in turn, from each in the order given: all rows of small clusters, the first of
    large ones."""
    kmeans = optional("sklearn.cluster", "retrieval").KMeans
    distinct = len(np.unique(vectors, axis=0))
    labels = kmeans(min(clusters, distinct), n_init=1, random_state=seed).fit_predict(vectors)
    members = [list(np.flatnonzero(labels == label)) for label in range(labels.max() + 1)]
    taken: list[int] = []
    for turn in range(max(len(rows) for rows in members)):
        taken += [int(rows[turn]) for rows in members if turn < len(rows)]
    return taken[:n]

"""Semantic duplicates: rows whose texts mean nearly the same, by embeddings, compared within clusters (SemDeDup, Abbas
et al., 2023)."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from xxhash import xxh3_128_digest

from agentrl.datastore.optional import optional
from agentrl.datastore.search.vectors import TEXTS

CLUSTER = 4096
"""Rows of a scope that are all compared with each other. More are divided by k-means into clusters of half as many on
average, and rows of two clusters are not compared."""
BLOCK = 256

Embed = Callable[[Iterable[Sequence[str]]], tuple[np.ndarray, int]]
"""Gives vectors of batches of texts, and how many texts are longer than what is looked at."""


def semantic_duplicates(
    texts: Iterable[Sequence[str]], scopes: Sequence[str], threshold: float, embed: Embed, seed: int
) -> np.ndarray:
    """Whether each row is close to an earlier one of its scope that is close to none itself, bool [rows]: in each of
    its parts the cosine is at or above the threshold. ``texts`` are those of the parts of rows, from best to worst.

    Vectors are held: for each distinct text, float32 [dimensions]. A text is held until it is embedded.
    """
    vectors, numbers = _embedded(texts, embed)
    names, scope = np.unique(np.asarray(scopes, dtype=str), return_inverse=True)
    doubled = np.zeros(len(scope), bool)
    order = np.argsort(scope, kind="stable")
    for rows in np.split(order, np.searchsorted(scope[order], np.arange(1, len(names)))):
        for cluster in _clusters(rows, vectors, numbers, seed):
            doubled[cluster] = _doubled(vectors, numbers[cluster], threshold)
    return doubled


def _embedded(texts: Iterable[Sequence[str]], embed: Embed) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of distinct texts [texts, dimensions], and the numbers of each row's texts [rows, parts]."""
    known: dict[bytes, int] = {}
    numbers = list[list[int]]()
    vectors, cut = embed(_distinct(texts, known, numbers))
    if cut:
        warnings.warn(
            f"semantic_duplicates: {cut} of {len(known)} texts are longer than what the embedder looks at, so they are "
            "compared by their beginnings",
            stacklevel=2,
        )
    return vectors, np.array(numbers, np.int64).reshape(len(numbers), -1)


def _distinct(texts: Iterable[Sequence[str]], known: dict[bytes, int], numbers: list[list[int]]) -> Iterator[list[str]]:
    """Batches of texts, each text once. The number of each is put into ``known``, by its digest, and those of each row
    into ``numbers``."""
    waiting = list[str]()
    for parts in texts:
        own = []
        for text in parts:
            digest = xxh3_128_digest(text.encode())
            if digest not in known:
                known[digest] = len(known)
                waiting.append(text)
                if len(waiting) == TEXTS:
                    yield waiting
                    waiting = []
            own.append(known[digest])
        numbers.append(own)
    if waiting:
        yield waiting


def _clusters(rows: np.ndarray, vectors: np.ndarray, numbers: np.ndarray, seed: int) -> list[np.ndarray]:
    """Rows of a scope divided into clusters, in each in the order given."""
    if len(rows) <= CLUSTER:
        return [rows]
    kmeans = optional("sklearn.cluster", "retrieval").MiniBatchKMeans
    count = -(-2 * len(rows) // CLUSTER)
    model = kmeans(count, n_init=1, random_state=seed, batch_size=CLUSTER)
    parts = range(0, len(rows), CLUSTER)
    for start in parts:
        model.partial_fit(_together(vectors, numbers[rows[start : start + CLUSTER]]))
    labels = [model.predict(_together(vectors, numbers[rows[start : start + CLUSTER]])) for start in parts]
    label = np.concatenate(labels)
    return [rows[label == number] for number in range(count)]


def _together(vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The vectors of all parts of rows, side by side."""
    return vectors[numbers].reshape(len(numbers), -1)


def _doubled(vectors: np.ndarray, numbers: np.ndarray, threshold: float) -> np.ndarray:
    """Whether each row of a cluster [rows, parts] is close to an earlier one that is not dropped, bool [rows]."""
    doubled = np.zeros(len(numbers), bool)
    for start in range(0, len(numbers), BLOCK):
        block = numbers[start : start + BLOCK]
        kept = numbers[:start][~doubled[:start]]
        near = np.zeros(len(block), bool)
        for before in range(0, len(kept), CLUSTER):
            near |= _close(vectors, block, kept[before : before + CLUSTER], threshold).any(1)
        within = _close(vectors, block, block, threshold)
        for row in range(len(block)):
            near[row] |= within[row, :row][~near[:row]].any()
        doubled[start : start + BLOCK] = near
    return doubled


def _close(vectors: np.ndarray, rows: np.ndarray, others: np.ndarray, threshold: float) -> np.ndarray:
    """Whether rows are close to others in each part, bool [rows, others]. Equal texts are, whatever their vectors."""
    close = np.ones((len(rows), len(others)), bool)
    for own, other in zip(rows.T, others.T, strict=True):
        close &= (vectors[own] @ vectors[other].T >= threshold) | (own[:, None] == other)
    return close

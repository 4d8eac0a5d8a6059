"""Exact nearest neighbours among unit vectors: every vector is scored, so nothing can be missed."""

import numpy as np

BLOCK = 256


def top(scores: np.ndarray, k: int, allowed: np.ndarray | None = None) -> np.ndarray:
    """Positions of the ``k`` highest scores, best first; ties by position. ``allowed`` restricts to some positions."""
    if allowed is not None:
        return allowed[top(scores[allowed], k)]
    candidates = np.flatnonzero(scores >= _bound(scores, k))
    return candidates[np.lexsort([candidates, -scores[candidates]])][:k]


def _bound(scores: np.ndarray, k: int) -> float:
    """A score that at least ``k`` positions reach, and few more: the ``k``-th highest among the maxima of blocks. This
    is much faster than partitioning all scores."""
    if k >= len(scores):
        return -np.inf
    blocks = len(scores) // BLOCK
    if blocks >= k:
        scores = scores[: blocks * BLOCK].reshape(blocks, BLOCK).max(1)
    return float(np.partition(scores, len(scores) - k)[len(scores) - k]) if k else np.inf


def nearest(
    vectors: np.ndarray, query: np.ndarray, k: int, allowed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and cosines of the ``k`` nearest of ``vectors`` [n, d] to ``query`` [d], float32 throughout.

    ``allowed`` holds the positions that a filter leaves; only those are scored, so k neighbours are returned
    if the filter leaves k.
    """
    if allowed is None:
        scores = vectors @ query
        best = top(scores, k)
        return best, scores[best]
    scores = vectors[allowed] @ query
    best = top(scores, k)
    return allowed[best], scores[best]


def mmr(vectors: np.ndarray, relevance: np.ndarray, k: int, balance: float) -> list[int]:
    """Maximal marginal relevance (Carbonell and Goldstein, 1998): positions in the order taken, each the largest
    ``balance * relevance - (1 - balance) * max cosine to those taken``."""
    taken: list[int] = []
    likeness = np.full(len(vectors), -1.0, dtype=np.float32)
    left = np.ones(len(vectors), dtype=bool)
    while len(taken) < min(k, len(vectors)):
        gain = balance * relevance - (1 - balance) * (likeness if taken else 0.0)
        choice = int(np.where(left, gain, -np.inf).argmax())
        taken.append(choice)
        left[choice] = False
        likeness = np.maximum(likeness, vectors @ vectors[choice])
    return taken

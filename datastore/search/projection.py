"""Vectors as places on a map, by principal component analysis (Pearson 1901)."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PrincipalPlane:
    """The plane of the greatest variance: its origin [dimensions], and its axes [dimensions, 2 or fewer]."""

    origin: np.ndarray
    axes: np.ndarray

    @classmethod
    def fit(cls, batches: Iterable[np.ndarray], fitted: int) -> "PrincipalPlane":
        """That of the first ``fitted`` vectors, which come in batches [texts, dimensions]: it stays as it is when
        others follow them. All batches are consumed. The component of each axis that is largest by size is positive,
        which makes the answer the same on every machine."""
        origin, squares = _moments(batches, fitted)
        values, axes = np.linalg.eigh(squares)
        axes = axes[:, np.argsort(-values, kind="stable")[:2]]
        largest = np.argmax(np.abs(axes), axis=0)
        return cls(origin, axes * np.sign(axes[largest, np.arange(axes.shape[1])]))

    def places(self, vectors: np.ndarray) -> np.ndarray:
        """Where vectors [texts, dimensions] are, float32 [texts, 2]; with one dimension the second number is 0."""
        places = np.zeros((len(vectors), 2), np.float32)
        places[:, : self.axes.shape[1]] = (vectors - self.origin) @ self.axes
        return places


def _moments(batches: Iterable[np.ndarray], fitted: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean [dimensions] of the first ``fitted`` vectors, and the sum of squares about it [dimensions, dimensions].
    Each batch is joined to those before it (Chan, Golub and LeVeque 1983)."""
    count, mean, squares = 0, np.zeros(1), np.zeros((1, 1))
    for vectors in batches:
        known = vectors[: max(0, fitted - count)].astype(np.float64)
        if not known.size:
            continue
        middle = known.mean(axis=0)
        known -= middle
        total, step = count + len(known), middle - mean
        squares = squares + known.T @ known + np.outer(step, step) * (count * len(known) / total)
        mean, count = mean + step * (len(known) / total), total
    return mean, squares

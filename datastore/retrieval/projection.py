"""Vectors as places on a map, by principal component analysis (Pearson 1901)."""

import numpy as np


def principal_plane(vectors: np.ndarray, fitted: int | None = None) -> np.ndarray:
    """The places of vectors [texts, dimensions] in the plane of the greatest variance, float32 [texts, 2]. Only the
    first ``fitted`` (default: all) decide on the plane, so that it stays as it is when others follow them. The
    component of each axis that is largest by size is positive, which makes the answer the same on every machine."""
    known = vectors[:fitted].astype(np.float64)
    places = np.zeros((len(vectors), 2), np.float32)
    if not known.size:
        return places
    mean = known.mean(axis=0)
    values, axes = np.linalg.eigh(np.atleast_2d((known - mean).T @ (known - mean)))
    for number, column in enumerate(np.argsort(-values, kind="stable")[:2]):
        axis = axes[:, column] * np.sign(axes[np.argmax(np.abs(axes[:, column])), column])
        places[:, number] = (vectors - mean) @ axis
    return places

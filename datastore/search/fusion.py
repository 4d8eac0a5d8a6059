"""One score of two: how near a prompt's vector is to the query's, and which share of the query's words it holds.

Fusion of ranks (Cormack et al., 2009) gives the first of both lists the same worth, though the best of a list by words
may share nothing but "the" with the query, and so it loses what a neural embedder finds. Here both are scores of one
scale: 1 for the query's own text, about 0 for a text that has nothing to do with it. The weights were chosen on one
half of the queries of ``benchmarks/prompts.py``, which measures them on the other.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Weight:
    """Of the share of words against nearness, which weighs 1. ``power`` makes a small share, as of words that every
    prompt holds, count for little."""

    words: float
    power: int


NEURAL = Weight(1.0, 3)
"""The vectors know what words mean; words matter if most of the query is there, as for names, numbers and phrases."""
LATENT = Weight(2.0, 1)
"""The vectors know little more than the words."""


def fused(nearness: np.ndarray, share: np.ndarray, weight: Weight) -> np.ndarray:
    """Scores of texts, at most 1, from :func:`nearness` and the share of words, all [texts]."""
    return (nearness + weight.words * share**weight.power) / (1 + weight.words)


def nearness(cosines: np.ndarray, usual: float) -> np.ndarray:
    """Cosines [texts] as 1 for the same direction and 0 for the ``usual`` cosine of a text, which is 0 for some models
    and .7 for others."""
    return (cosines - usual) / max(1 - usual, 1e-6)

"""What a proposal is worth, by how often its task is solved."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from agentrl.rewards.answers import normalized


class AbsoluteZero(BaseModel):
    """1 - p for a task that is solved at a mean rate p; 0 if it is never or always solved (Zhao et al. 2025, arXiv
    2505.03335, section 3.1)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["absolute_zero"] = "absolute_zero"

    def of(self, rates: Sequence[float], texts: Sequence[str]) -> list[float]:
        """The rewards of proposals, [proposals]."""
        return [1 - rate if 0 < rate < 1 else 0.0 for rate in rates]


class RZero(BaseModel):
    """Uncertainty less repetition, at least 0: ``max(0, 1 - 2 |p - 1/2| - penalty |C| / B)``, with C the proposals of
    one cluster among B (Huang et al. 2025, arXiv 2508.05004, section 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["r_zero"] = "r_zero"
    penalty: float = Field(1.0, ge=0, description="weight of the share of proposals that are like this one; 0: none")
    alike: float = Field(0.5, ge=0, le=1, description="proposals are of one cluster below this distance, 1 - BLEU")

    def of(self, rates: Sequence[float], texts: Sequence[str]) -> list[float]:
        """The rewards of proposals, [proposals], which are one batch."""
        shares = shares_of_clusters(texts, self.alike) if self.penalty else [0.0] * len(texts)
        return [
            max(0.0, 1 - 2 * abs(rate - 0.5) - self.penalty * share) for rate, share in zip(rates, shares, strict=True)
        ]


Difficulty = Annotated[AbsoluteZero | RZero, Field(discriminator="type")]


def distances(texts: Sequence[str], longest: int = 4) -> np.ndarray:
    """How far texts are from each other, [texts, texts]: 1 - BLEU over normalised words, up to ``longest`` of them in a
    row, the mean of both directions (Papineni et al. 2002, section 2.3). A precision of 0 counts as 0.1 of a match
    (smoothing method 1 of Chen and Cherry 2014); without a word in common BLEU is 0."""
    words = [normalized(text).split() for text in texts]
    lengths = np.array([max(1, len(each)) for each in words])
    logs = np.minimum(0.0, 1 - lengths[None] / lengths[:, None]) * longest  # the brevity penalty
    strange = np.zeros(logs.shape, bool)
    for size in range(1, longest + 1):
        grams = [Counter(zip(*(each[start:] for start in range(size)), strict=False)) for each in words]
        known = {gram: number for number, gram in enumerate({gram for each in grams for gram in each})}
        counts = np.zeros((len(texts), len(known)), np.int32)
        for row, each in zip(counts, grams, strict=True):
            row[[known[gram] for gram in each]] = list(each.values())
        shared = np.array([np.minimum(row, counts).sum(1) for row in counts]).reshape(logs.shape)
        logs += np.log(np.maximum(shared, 0.1) / np.maximum(1, lengths - size + 1)[:, None])
        strange |= (shared == 0) & (size == 1)
    bleu = np.where(strange, 0.0, np.exp(logs / longest))
    return 1 - (bleu + bleu.T) / 2


def shares_of_clusters(texts: Sequence[str], alike: float) -> list[float]:
    """The share of all texts that are in the cluster of each, [texts]: clusters are merged by the mean distance between
    their texts, as long as one is below ``alike``. Time and memory grow with the square of the number of different
    texts."""
    counts = Counter(texts)
    far = distances(list(counts))
    np.fill_diagonal(far, np.inf)
    sizes = np.array(list(counts.values()), dtype=float)
    cluster = np.arange(len(counts))
    while len(counts) > 1:
        near, other = np.unravel_index(far.argmin(), far.shape)
        if far[near, other] >= alike:
            break
        merged = (sizes[near] * far[near] + sizes[other] * far[other]) / (sizes[near] + sizes[other])
        far[near], far[:, near] = merged, merged
        far[other], far[:, other], far[near, near] = np.inf, np.inf, np.inf
        sizes[near] += sizes[other]
        cluster[cluster == other] = near
    share = {text: float(sizes[cluster[number]]) / len(texts) for number, text in enumerate(counts)}
    return [share[text] for text in texts]

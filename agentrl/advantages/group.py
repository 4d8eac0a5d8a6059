"""Group-relative advantages."""

from collections.abc import Hashable, Sequence

import numpy as np


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], epsilon: float = 1e-6
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages [rows] and whether each row's group is degenerate [rows].

    ``(reward - mean) / (std + epsilon)`` over the rows of one group, with the population's standard deviation
    (GRPO: Shao et al. 2024, section 4.1.2). In a degenerate group all rewards are equal: its advantages are 0 and it
    teaches nothing.
    """
    values = np.asarray(rewards, dtype=np.float64)
    keys: dict[Hashable, int] = {}
    index = np.array([keys.setdefault(group, len(keys)) for group in groups])
    counts = np.bincount(index)
    mean = np.bincount(index, values) / counts
    centred = values - mean[index]
    std = np.sqrt(np.bincount(index, centred**2) / counts)
    return centred / (std[index] + epsilon), (std < 1e-12)[index]

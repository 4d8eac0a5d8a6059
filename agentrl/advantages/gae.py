"""Generalised advantage estimation, and returns (Schulman et al. 2016)."""

from collections.abc import Sequence

import numpy as np


def gae(
    rewards: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and value targets, both [actions], of one finished episode.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}`` (equations 11 and 16), with value
    0 after the last action; the targets are ``A + V``. An action is a token or a turn.
    """
    value = np.asarray(values, dtype=np.float64)
    following = np.append(value[1:], 0.0)
    deltas = np.asarray(rewards, dtype=np.float64) + gamma * following - value
    advantages = np.zeros(len(value))
    running = 0.0
    for step in range(len(value) - 1, -1, -1):
        running = deltas[step] + gamma * lam * running
        advantages[step] = running
    return advantages, advantages + value


def adaptive_lambda(n_tokens: int, alpha: float) -> float:
    """``1 - 1 / (alpha n)``, not below 0: long answers need a longer trace (VAPO: Yue et al. 2025, equation 9)."""
    return max(0.0, 1 - 1 / (alpha * max(1, n_tokens)))

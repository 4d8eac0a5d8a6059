"""V-trace: advantages and value targets from rollouts of an older policy."""

from collections.abc import Sequence

import numpy as np


def vtrace(
    rewards: Sequence[float],
    values: Sequence[float],
    log_ratio: Sequence[float],
    gamma: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Value targets ``v_t`` and policy-gradient advantages, both [actions], of one finished episode.

    ``v_t = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1})`` with ``delta_t = rho_t (r_t + gamma V_{t+1} - V_t)``;
    weights are truncated at ``rho_bar`` and ``c_bar``; advantages are ``rho_t (r_t + gamma v_{t+1} - V_t)`` (IMPALA:
    Espeholt et al. 2018, equations 1 and 4).
    """
    ratio = np.exp(np.asarray(log_ratio, dtype=np.float64))
    rho, c = np.minimum(ratio, rho_bar), np.minimum(ratio, c_bar)
    value = np.asarray(values, dtype=np.float64)
    reward = np.asarray(rewards, dtype=np.float64)
    following = np.append(value[1:], 0.0)
    delta = rho * (reward + gamma * following - value)
    targets = np.zeros(len(value) + 1)
    for step in range(len(value) - 1, -1, -1):
        after = following[step]
        targets[step] = value[step] + delta[step] + gamma * c[step] * (targets[step + 1] - after)
    return targets[:-1], rho * (reward + gamma * targets[1:] - value)

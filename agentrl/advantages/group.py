"""Advantages of rollouts relative to others: of their group (the rollouts of one task), or of the batch."""

from collections.abc import Hashable, Sequence

import numpy as np

Array = np.ndarray


def _index(keys: Sequence[Hashable]) -> Array:
    """Keys [rows] as numbers [rows], in order of first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def _moments(values: Array, index: Array) -> tuple[Array, Array, Array]:
    """Size, mean and population standard deviation of each row's group, [rows]."""
    counts = np.bincount(index)
    mean = (np.bincount(index, values) / counts)[index]
    std = np.sqrt(np.bincount(index, (values - mean) ** 2) / counts)[index]
    return counts[index], mean, std


def degenerate_groups(rewards: Sequence[float], groups: Sequence[Hashable]) -> Array:
    """Whether all rewards of each row's group are equal, [rows]. The policy learns nothing from such a group."""
    return _moments(np.asarray(rewards, dtype=np.float64), _index(groups))[2] < 1e-12


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], epsilon: float = 1e-6
) -> tuple[Array, Array]:
    """Advantages [rows] and whether each row's group is degenerate [rows].

    ``(reward - mean) / (std + epsilon)`` over the rows of one group, with the population's standard deviation
    (GRPO: Shao et al. 2024, section 4.1.2). In a degenerate group all rewards are equal, so all its
    advantages are 0.
    """
    values = np.asarray(rewards, dtype=np.float64)
    _, mean, std = _moments(values, _index(groups))
    degenerate = std < 1e-12
    return np.where(degenerate, 0.0, (values - mean) / (std + epsilon)), degenerate


def centred_advantages(rewards: Sequence[float], groups: Sequence[Hashable]) -> Array:
    """``reward - mean`` of the group, [rows], not divided by its spread (Dr. GRPO: Liu et al. 2025, equation 3)."""
    values = np.asarray(rewards, dtype=np.float64)
    return values - _moments(values, _index(groups))[1]


def leave_one_out_advantages(rewards: Sequence[float], groups: Sequence[Hashable]) -> Array:
    """``reward - mean of the others`` of the group, [rows] (RLOO: Ahmadian et al. 2024, equation 9); 0 in groups of
    one."""
    values = np.asarray(rewards, dtype=np.float64)
    count, mean, _ = _moments(values, _index(groups))
    return np.where(count > 1, (values - mean) * count / np.maximum(count - 1, 1), 0.0)


def batch_advantages(rewards: Sequence[float], groups: Sequence[Hashable], epsilon: float = 1e-6) -> Array:
    """``reward - mean`` of the group, brought to mean 0 and std 1 over the whole batch, [rows] (REINFORCE++ with a
    baseline: Hu 2025, section 3.2)."""
    centred = centred_advantages(rewards, groups)
    return (centred - centred.mean()) / (centred.std() + epsilon)


def remax_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], greedy_rewards: dict[Hashable, float]
) -> Array:
    """``reward - reward of the group's greedy rollout``, [rows] (ReMax: Li et al. 2023, algorithm 1)."""
    return np.array([reward - greedy_rewards[group] for reward, group in zip(rewards, groups, strict=True)])


def most_uncertain(rewards: Sequence[float], groups: Sequence[Hashable], share: float) -> Array:
    """Whether each row is in one of the ``share`` of groups with the highest spread of rewards, [rows]; ties go to the
    first. At least one group is kept (StarPO-S: Wang et al. 2025, section 3.2)."""
    index = _index(groups)
    std = _moments(np.asarray(rewards, dtype=np.float64), index)[2]
    per_group = np.zeros(index.max() + 1)
    per_group[index] = std
    kept = np.argsort(-per_group, kind="stable")[: max(1, round(share * len(per_group)))]
    return np.isin(index, kept)


def normalise_by_domain(rewards: Sequence[float], domains: Sequence[Hashable], epsilon: float = 1e-6) -> Array:
    """Rewards [rows] at mean 0 and std 1 within each domain, so that domains with different scales have the same
    weight."""
    values = np.asarray(rewards, dtype=np.float64)
    _, mean, std = _moments(values, _index(domains))
    return (values - mean) / (std + epsilon)

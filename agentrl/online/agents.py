"""What an iteration was for each agent of its episodes, if these have several: those of a team, or of an agent program
with sub-agents."""

from collections.abc import Sequence

import numpy as np

from agentrl.schemas.trajectory import Trajectory


def by_agent(rows: Sequence[Trajectory], advantages: Sequence[float]) -> dict[str, float]:
    """Of each agent, by its name: ``credit_``, its share of the sum of absolute advantages over sampled tokens, 0 if
    all are 0; and ``surprise_``, the mean of -log p of its tokens in nats, which estimates the policy's entropy there
    at temperature 1. ``advantages`` [rows] are means over the sampled tokens of a row. Nothing if one agent acted."""
    names = sorted({row.agent for row in rows})
    if len(names) < 2:
        return {}
    weight = np.abs(advantages) * [row.n_action_tokens for row in rows]
    metrics = {}
    for name in names:
        own = np.array([row.agent == name for row in rows])
        taken = [np.array(row.logprobs)[row.action_mask] for row in rows if row.agent == name]
        logprobs = np.concatenate(taken)
        metrics[f"credit_{name}"] = float(weight[own].sum() / (weight.sum() or 1.0))
        metrics[f"surprise_{name}"] = float(-logprobs.mean()) if len(logprobs) else 0.0
    return metrics

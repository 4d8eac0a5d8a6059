"""How far the log-probs of a mixture of experts are, before an update, from those of its rollouts: with its routers'
own choices, and with the routes of the rollouts replayed."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from agentrl.engines.routes import RouteShape
    from agentrl.schemas.trajectory import Trajectory

SAMPLE = 8
"""Rollouts of an iteration that are compared, by a pass with their own routes and one with replayed ones."""

Logprobs = Callable[["Sequence[Trajectory]", Mapping[str, bytes] | None], list[list[float]]]
"""Gives the log-probs of the tokens of rollouts by the policy as it is, with these routes or its own."""


def mismatch(
    shape: "RouteShape", rollouts: "Sequence[Trajectory]", routes: Mapping[str, bytes] | None, logprobs: Logprobs
) -> dict[str, float]:
    """Mean and greatest ``|log p - log b|`` of the action tokens of some rollouts, and if ``routes`` are replayed, the
    same with these and the share of all tokens that have none (``routes_missing``)."""
    sample = rollouts[:: max(1, len(rollouts) // SAMPLE)][:SAMPLE]
    metrics = _distances("own_routes", sample, logprobs(sample, None))
    if routes is None:
        return metrics
    needed = sum(len(row.input_ids) - 1 for row in rollouts)
    known = sum(len(routes.get(row.trajectory_id, b"")) for row in rollouts) / shape.token_bytes
    replayed = _distances("replayed_routes", sample, logprobs(sample, routes))
    return {**metrics, **replayed, "routes_missing": 1 - known / max(1, needed)}


def _distances(name: str, rollouts: "Sequence[Trajectory]", logprobs: list[list[float]]) -> dict[str, float]:
    distances = [
        abs(np.array(own) - np.array(row.logprobs))[1:][np.array(row.action_mask, bool)[1:]]
        for row, own in zip(rollouts, logprobs, strict=True)
    ]
    values = np.concatenate(distances)
    return {f"{name}_dlogp": float(values.mean()), f"{name}_max_dlogp": float(values.max())} if len(values) else {}

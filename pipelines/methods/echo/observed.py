"""The setting ``observe``, and stored rollouts with cross-entropy on their observations."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from agentrl.algorithms.policy_gradient import PolicyGradient
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.parts.training_rows import decode, outcomes, trained_on
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.training import CE_WEIGHTS, TWO_STREAMS

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

Observe = Annotated[
    dict[Literal["tool", "user"], Annotated[float, Field(ge=0, allow_inf_nan=False)]],
    ADDED,
    Field(description="weight of the mean cross-entropy on what tools, or users, answered, as in {tool: 0.1} (ECHO)"),
]


def weighing(observe: Mapping[Literal["tool", "user"], float]) -> dict[str, float]:
    """The roles whose observations are trained on."""
    return {role: weight for role, weight in observe.items() if weight}


def observing(
    report: Callable[[dict[str, int]], None],
    chosen: Selected,
    policy: "Policy",
    observe: Mapping[str, float],
    batches: Iterator[pa.RecordBatch],
    algorithm: PolicyGradient,
) -> Iterator[pa.RecordBatch]:
    """Training rows, with the second stream over their observations, and then the rows of the selection that have only
    that: those that were left out because they have no gradient. Their ``unit`` is the number of their episode, as it
    is in ``batches``. If the ``algorithm`` has a reference, rows have log-probs of one. ``report`` is told at the end
    how many observations have no place in the tokens."""
    from functools import partial

    from agentrl.online.observed import Observed
    from agentrl.training.rows import flat, holds_true, nested

    seen = Observed(observe, partial(decode, lambda: policy))
    names = chosen.scalars["trajectory_id"].to_pylist()
    number_of_name = {name: number for number, name in enumerate(names)}

    def weighed(rows: pa.RecordBatch) -> pa.RecordBatch:
        offsets, _ = flat(rows.column("input_ids"))
        rollouts = chosen.trajectories(rows.column("row_id"))
        counts = (chosen.weights[number_of_name[name]] for name in rows.column("row_id").to_pylist())
        weights = [weight * seen.weights(row) for weight, row in zip(counts, rollouts, strict=True)]
        column = nested(offsets, np.concatenate([np.zeros(0, np.float32), *weights]), CE_WEIGHTS)
        return pa.RecordBatch.from_arrays([*rows.columns, column], schema=TWO_STREAMS)

    given = set()
    for batch in batches:
        given.update(batch.column("row_id").to_pylist())
        yield weighed(batch)
    acting, episodes = (known := outcomes(chosen, algorithm, policy)).positions, known.episodes
    left = [number for number in acting.tolist() if names[number] not in given]
    for part in chosen.tokens(lambda: policy, np.array(left, np.int64), logprobs=True):
        units = episodes[np.searchsorted(acting, part.positions)]
        rows = weighed(_alone(trained_on(part, np.zeros(len(part.positions)), units=units), algorithm.kl is not None))
        offsets, weights = flat(rows.column(CE_WEIGHTS))
        yield rows.filter(pa.array(holds_true(offsets[:-1], offsets[1:], weights != 0)))
    report({"observations_unplaced": seen.unplaced})


def _alone(rows: pa.RecordBatch, reference: bool) -> pa.RecordBatch:
    """Rows without a first stream: no token has a mask."""
    from agentrl.training.rows import flat, nested

    offsets, mask = flat(rows.column("mask"))
    changed = {"mask": nested(offsets, np.zeros(len(mask), bool), "mask")}
    if reference:
        changed["ref_logprobs"] = nested(offsets, np.zeros(len(mask), np.float32), "ref_logprobs")
    columns = [changed.get(name, column) for name, column in zip(rows.schema.names, rows.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)

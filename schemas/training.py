"""A row of a training table: what a trainer needs to know of one sequence. It says nothing of its origin."""

from collections.abc import Collection

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from agentrl.schemas.arrow import VERSION_KEY, Float32, Int32, arrow_schema


class TrainingRow(BaseModel):
    """All token lists align with ``input_ids``; an empty one means that the objective does not need it.

    ``weights`` is the per-token weight of the loss: for supervised training how much a token counts, for policy
    gradients its advantage. Only tokens with ``mask`` true are trained on. Rows of one ``unit`` (the two sides of a
    pair, the segments of an episode) always share a batch; ``label`` is 1 for the preferred side or a success, -1 for
    the other side or a failure, 0 if there is neither.

    ``ce_weights`` are a second stream of the loss, cross-entropy: what ``-log p`` of each token counts, whatever its
    ``mask``. It is divided by the number of its own tokens, those whose weight is not 0, so that neither stream
    dilutes the other. A row with ``ce_weights`` may have no token with ``mask`` true.
    """

    model_config = ConfigDict(extra="forbid")

    row_id: str
    unit: Int32 = 0
    label: Int32 = 0
    input_ids: list[Int32]
    mask: list[bool]
    weights: list[Float32]
    logprobs: list[Float32] = []
    ref_logprobs: list[Float32] = []
    ce_weights: list[Float32] = []


CE_WEIGHTS = "ce_weights"

ROUTES = "routes"

TWO_STREAMS = arrow_schema(TrainingRow, 2)
"""Rows with the second stream."""

TRAINING_SCHEMA = pa.schema(
    [column for column in TWO_STREAMS if column.name != CE_WEIGHTS], metadata={VERSION_KEY: b"1"}
)
"""Rows without it. A table has the column only if the second stream is asked for."""


def training_schema(names: Collection[str]) -> pa.Schema:
    """The schema of training rows that have these columns. Those of a mixture of experts may have ``routes``: the
    experts of its first tokens, in bytes as :class:`agentrl.engines.routes.RouteShape` reads them. The last token has
    none: an engine ends before it computes it."""
    schema = TWO_STREAMS if CE_WEIGHTS in names else TRAINING_SCHEMA
    return schema.append(pa.field(ROUTES, pa.large_binary(), nullable=False)) if ROUTES in names else schema

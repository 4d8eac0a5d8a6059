"""A row of a training table: what a trainer needs to know of one sequence. It says nothing of its origin."""

from pydantic import BaseModel, ConfigDict

from schemas.arrow import Float32, Int32, arrow_schema

TRAINING_VERSION = 1


class TrainingRow(BaseModel):
    """All token lists align with ``input_ids``; an empty one means that the objective does not need it.

    ``weights`` is the per-token weight of the loss: for supervised training how much a token counts, for policy
    gradients its advantage. Only tokens with ``mask`` true are trained on. Rows of one ``unit`` (the two sides of a
    pair) always share a batch; ``label`` is 1 for the preferred side or a success, -1 for the other side or a failure,
    0 if there is neither.
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


TRAINING_SCHEMA = arrow_schema(TrainingRow, TRAINING_VERSION)

"""A preference pair: two continuations of one task, of which one is preferred."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from agentrl.schemas.arrow import Int32, arrow_schema

PAIR_VERSION = 2


class PairKind(StrEnum):
    TRAJECTORY = "trajectory"
    STEP = "step"


class Pair(BaseModel):
    """Both sides' tokens and loss masks. The first ``shared_prefix`` tokens are equal on both sides.

    A mask is true for the action tokens that the loss covers: those of the whole trajectory, or for ``kind == step``
    only those of the first step that differs. Tool output is false on both sides.
    ``weight`` is how much the pair counts in a loss.
    """

    model_config = ConfigDict(extra="forbid")

    pair_id: str
    task_id: str
    kind: PairKind
    chosen_id: str
    rejected_id: str
    method: str
    chosen_reward: float
    rejected_reward: float
    shared_prefix: Int32
    tokenizer: str
    weight: float = 1.0
    chosen_ids: list[Int32]
    chosen_mask: list[bool]
    rejected_ids: list[Int32]
    rejected_mask: list[bool]


PAIR_SCHEMA = arrow_schema(Pair, PAIR_VERSION)

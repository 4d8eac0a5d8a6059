"""What two versions of one training step have in common: their gradients, what they train on, and which rows they push
the other way."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.rows import TrainingRows
    from agentrl.training.step import Trainer

NOTHING = 1e-9
"""An advantage that is no larger is none."""


@dataclass(frozen=True)
class Turned:
    """A rollout whose advantage has another sign: the mean over its action tokens, 0 if it is not trained on."""

    trajectory_id: str
    recorded: float
    replayed: float

    @property
    def signs(self) -> str:
        """Such as ``+ to 0``."""
        return f"{_sign(self.recorded)} to {_sign(self.replayed)}"


def turned(recorded: Iterable[Mapping[str, Any]], replayed: Iterable[Mapping[str, Any]]) -> tuple[Turned, ...]:
    """The rollouts whose advantage has another sign, in the order of ``replayed``. Records say of each rollout:
    ``trajectory_id``, ``advantage``, ``trained``. One that a version has no record of has no advantage in it."""
    before, after = (
        {row["trajectory_id"]: row["advantage"] if row["trained"] else 0.0 for row in rows}
        for rows in (recorded, replayed)
    )
    pairs = [Turned(name, before.get(name, 0.0), after.get(name, 0.0)) for name in {**after, **before}]
    return tuple(row for row in pairs if _sign(row.recorded) != _sign(row.replayed))


def _sign(advantage: float) -> str:
    return "0" if abs(advantage) <= NOTHING else "+" if advantage > 0 else "-"


def trained_on(
    records: Iterable[Mapping[str, Any]], rows: Sequence[Trajectory], group_of: Callable[[Trajectory], str]
) -> dict[str, float]:
    """How many rollouts, groups and action tokens a version trains on, given its records as :func:`turned` takes them,
    and the rollouts."""
    names = {row["trajectory_id"] for row in records if row["trained"]}
    live = [row for row in rows if row.trajectory_id in names]
    return {
        "trained_rows": float(len(live)),
        "trained_groups": float(len({group_of(row) for row in live})),
        "trained_tokens": float(sum(sum(row.action_mask) for row in live)),
    }


def gradient(trainer: "Trainer", batches: "Sequence[TrainingRows]") -> "list[Tensor]":
    """The gradient over all rows of a step at the policy as it is, whatever optimiser steps they are divided into, of
    each parameter that has one. Nothing is changed."""
    from agentrl.training.rows import TrainingRows

    trainer.gradients(TrainingRows.of_table(pa.concat_tables([rows.table() for rows in batches])))
    parts = [
        parameter.grad.detach().double().flatten().clone()
        for parameter in trainer.policy.model.parameters()
        if parameter.grad is not None
    ]
    trainer.backend.discard()
    return parts


def cosine(left: "Sequence[Tensor]", right: "Sequence[Tensor]") -> float:
    """The cosine of the angle between two gradients: 1 if they point the same way, 0 if one of them is zero."""
    product, first, second = (
        sum(float(a @ b) for a, b in zip(*pair, strict=True)) for pair in ((left, right), (left, left), (right, right))
    )
    return product / math.sqrt(first * second) if first and second else 0.0

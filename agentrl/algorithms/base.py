"""What a training step needs of an algorithm.

An algorithm returns a *sum* of losses and the count to divide it by. The training step adds the counts of all its
micro batches before it divides, so one batch of eight rows and eight batches of one row give the same gradient.
"""

from typing import TYPE_CHECKING, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:  # reading and planning a pipeline file needs no torch
    from torch import Tensor

    from agentrl.training.batch import Batch

Sums = dict[str, float]
"""Metrics as sums over rows, tokens or pairs. The training step divides them by the same count as the loss, or by all
trained tokens if the algorithm says ``metrics_by_token``."""


class Objective(Protocol):
    """What a training step minimises. If ``needs_baseline`` is true, the training step first makes one more pass over
    all rows of the step, and gives the mean of ``logratio`` to each call of ``loss`` as ``baseline``. Otherwise
    ``baseline`` is what ``over_step`` makes of the ``step_sums``, added over all batches of a step on all ranks."""

    needs_baseline: ClassVar[bool]
    metrics_by_token: ClassVar[bool]

    def count(self, batch: "Batch") -> float:
        """What the summed losses of this batch are divided by. Counts of several batches are added."""
        ...

    def logratio(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        """Log-ratio of policy to reference of each row, [rows]."""
        ...

    def step_sums(self, batch: "Batch") -> Sums:
        """What ``over_step`` needs of a batch, beside its ``count``."""
        ...

    def over_step(self, sums: Sums) -> float:
        """A number that depends on all batches of a step, from the sums of their ``count`` and ``step_sums``."""
        ...

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        """Sum [] of the losses of a batch, and metrics as sums. ``logprobs`` and ``entropies`` are [rows, tokens]."""
        ...


class Config(BaseModel):
    """A config that refuses unknown keys and does not change after it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Minimised(Config):
    """What most algorithms share of :class:`Objective`."""

    needs_baseline: ClassVar[bool] = False
    metrics_by_token: ClassVar[bool] = False

    def logratio(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        """The sum over a row's trained tokens, or with ``length_normalized`` their mean."""
        total = ((logprobs - batch.ref_logprobs) * batch.mask).sum(-1)
        return total / batch.mask.sum(-1) if getattr(self, "length_normalized", False) else total

    def step_sums(self, batch: "Batch") -> Sums:
        return {}

    def over_step(self, sums: Sums) -> float:
        return 0.0


class AtRest(Minimised):
    """An algorithm that trains on data at rest: it needs no rollouts of the policy that it updates."""

"""Kahneman-Tversky optimisation."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentrl.algorithms.base import AtRest, Sums

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch


class KTO(AtRest):
    """Training on unpaired rows (Ethayarajh et al. 2024). A row's ``label`` is 1 if it is desirable, -1 if not.

    The baseline is the mean log-ratio of the rows of the whole optimiser step, at least 0, without gradient. The paper
    estimates it from mismatched pairs of prompt and answer; here an answer holds tool output, which cannot be moved to
    another task. The loss is the mean over rows by their weights; the baseline is the plain mean."""

    type: Literal["kto"] = "kto"
    needs_baseline: ClassVar[bool] = True
    beta: float = Field(0.1, gt=0)
    desirable: float = Field(1.0, ge=0, description="weight of desirable rows")
    undesirable: float = Field(1.0, ge=0, description="weight of undesirable rows")
    length_normalized: bool = Field(False, description="divide log-ratios, and the baseline's, by trained tokens")

    def count(self, batch: "Batch") -> float:
        return batch.row_weights.sum().item()

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        from agentrl.losses.kto import kto_loss

        logratio = self.logratio(logprobs, batch)
        good = batch.label > 0
        weight = batch.row_weights * (good * self.desirable + ~good * self.undesirable)
        return (weight * kto_loss(logratio, batch.label, max(0.0, baseline), self.beta)).sum(), {
            "desirable_logratio": (batch.row_weights * logratio * good).sum().item(),
            "undesirable_logratio": (batch.row_weights * logratio * ~good).sum().item(),
        }

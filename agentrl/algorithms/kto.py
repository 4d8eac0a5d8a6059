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
    beta: float = Field(0.1, gt=0, description="weight of the log-ratio to the reference model")
    desirable: float = Field(1.0, ge=0, description="weight of desirable rows")
    undesirable: float = Field(1.0, ge=0, description="weight of undesirable rows")
    length_normalized: bool = Field(False, description="divide log-ratios, and the baseline's, by trained tokens")

    def count(self, batch: "Batch") -> float:
        return batch.row_weights.sum().item()

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        logratio = self.logratio(logprobs, batch)
        good = batch.label > 0
        weight = batch.row_weights * (good * self.desirable + ~good * self.undesirable)
        return (weight * kto_loss(logratio, batch.label, max(0.0, baseline), self.beta)).sum(), {
            "desirable_logratio": (batch.row_weights * logratio * good).sum().item(),
            "undesirable_logratio": (batch.row_weights * logratio * ~good).sum().item(),
        }


def kto_loss(logratio: "Tensor", label: "Tensor", baseline: "Tensor | float", beta: float) -> "Tensor":
    """Loss of each row, [rows]: ``1 - sigmoid(beta (logratio - z))`` if ``label`` > 0, else
    ``1 - sigmoid(beta (z - logratio))`` (Ethayarajh et al. 2024, equation 8).

    ``logratio`` [rows] is the sum over a row's trained tokens of ``log policy - log reference``. ``z`` is ``baseline``,
    an estimate of the policy's divergence from the reference, at least 0.
    """
    sign = (label > 0) * 2.0 - 1.0
    return 1 - (beta * sign * (logratio - baseline)).sigmoid()

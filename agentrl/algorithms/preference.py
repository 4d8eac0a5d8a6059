"""What algorithms over preference pairs share."""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from agentrl.algorithms.base import AtRest, Sums

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch


class Preference(AtRest):
    """The mean over pairs of the pair's loss, plus ``nll`` times the mean negative log-likelihood of the chosen side's
    trained tokens (Pang et al. 2024, equation 2), which keeps the chosen side from becoming less likely. Both means
    are over pairs by their weights."""

    nll: float = Field(
        0.0, ge=0, description="weight of the chosen side's negative log-likelihood; 0 is the plain loss"
    )
    length_normalized: bool = Field(False, description="divide each side's log-probability by its trained tokens")
    reference: ClassVar[bool] = True

    type: str

    def count(self, batch: "Batch") -> float:
        return batch.row_weights[0::2].sum().item()

    @abstractmethod
    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        """Loss of each pair, [pairs], from the log-ratios of both sides (from log-probs if there is no reference)."""

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        length = batch.mask.sum(-1)
        score = ((logprobs - batch.ref_logprobs if self.reference else logprobs) * batch.mask).sum(-1)
        if self.length_normalized:
            score = score / length
        chosen, rejected = score[0::2], score[1::2]
        weight = batch.row_weights[0::2]
        loss = (weight * self.pair_loss(chosen, rejected)).sum()
        if self.nll:
            loss = loss + self.nll * (weight * ((-logprobs * batch.mask).sum(-1) / length)[0::2]).sum()
        margin = (chosen - rejected).detach()
        return loss, {
            "margin": (weight * margin).sum().item(),
            "accuracy": (weight * (margin > 0)).sum().item(),
            "chosen_logratio": (weight * chosen.detach()).sum().item(),
            "rejected_logratio": (weight * rejected.detach()).sum().item(),
        }

"""Objectives: what a training step minimises. Each is a config of a union discriminated by ``type``; choosing a type
with no other key is the published algorithm. Those of policy gradients are in :mod:`agentrl.algorithms`.

An objective returns a *sum* and the count to divide it by. The trainer adds the counts over the whole optimiser step
before dividing, so one batch of eight rows and eight batches of one give the same gradient.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from agentrl.algorithms import GRPO, PolicyGradient

if TYPE_CHECKING:  # a pipeline file is read, and planned, without torch
    from torch import Tensor

    from agentrl.batch import Batch

__all__ = ["DPO", "GRPO", "IPO", "KTO", "SFT", "AnyObjective", "Objective", "PolicyGradient", "Preference", "SimPO"]

Sums = dict[str, float]
"""Metrics as sums over rows, tokens or pairs; divided by the same count as the loss."""


class AnyObjective(Protocol):
    """What the trainer needs of an objective. ``needs_baseline`` asks for a pass over the whole step beforehand, which
    gives every batch the same ``baseline``."""

    needs_baseline: ClassVar[bool]

    def count(self, batch: "Batch") -> float:
        """What the summed losses of this batch are to be divided by; adds up over batches."""
        ...

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        """Sum of the losses of a batch (log-probs and entropies [rows, tokens]), and metrics as sums."""
        ...


class _Objective(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    needs_baseline: ClassVar[bool] = False


class SFT(_Objective):
    """Weighted mean over tokens of the negative log-likelihood. Negative weights make a token less likely (negative
    examples); they count by their size."""

    type: Literal["sft"] = "sft"

    def count(self, batch: "Batch") -> float:
        return (batch.weights.abs() * batch.mask).sum().item()

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        from agentrl.losses.nll import nll_loss

        return nll_loss(logprobs, batch.weights * batch.mask).sum(), {}


class Preference(_Objective):
    """What losses over pairs share. The mean over pairs of the pair's loss, plus ``nll`` times the mean negative
    log-likelihood of the chosen side's trained tokens (Pang et al. 2024, equation 2), which keeps the chosen side
    from becoming less likely."""

    nll: float = Field(
        0.0, ge=0, description="weight of the chosen side's negative log-likelihood; 0 is the plain loss"
    )
    length_normalized: bool = Field(False, description="divide each side's log-probability by its trained tokens")
    reference: ClassVar[bool] = True

    def count(self, batch: "Batch") -> float:
        return batch.input_ids.shape[0] / 2

    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        """Loss of each pair, [pairs], from both sides' log-ratios (log-probs for a loss without reference)."""
        raise NotImplementedError

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        length = batch.mask.sum(-1)
        score = ((logprobs - batch.ref_logprobs if self.reference else logprobs) * batch.mask).sum(-1)
        if self.length_normalized:
            score = score / length
        chosen, rejected = score[0::2], score[1::2]
        loss = self.pair_loss(chosen, rejected).sum()
        if self.nll:
            loss = loss + self.nll * ((-logprobs * batch.mask).sum(-1) / length)[0::2].sum()
        margin = (chosen - rejected).detach()
        return loss, {
            "margin": margin.sum().item(),
            "accuracy": (margin > 0).float().sum().item(),
            "chosen_logratio": chosen.detach().sum().item(),
            "rejected_logratio": rejected.detach().sum().item(),
        }


class DPO(Preference):
    """Direct preference optimisation (Rafailov et al. 2023)."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0, description="strength of the pull towards the reference policy")

    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        from agentrl.losses.dpo import dpo_loss

        return dpo_loss(chosen, rejected, self.beta)


class IPO(Preference):
    """Identity preference optimisation (Azar et al. 2023), with log-ratios averaged over tokens as its authors do."""

    type: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0, description="the paper's tau: log-ratios differ by 1 / (2 beta) at the optimum")
    length_normalized: bool = True

    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        from agentrl.losses.preference import ipo_loss

        return ipo_loss(chosen, rejected, self.beta)


class SimPO(Preference):
    """Simple preference optimisation: mean log-probabilities, a margin and no reference (Meng et al. 2024)."""

    type: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    margin: float = Field(1.0, ge=0, description="the paper's gamma: by how much the chosen side should win")
    length_normalized: Literal[True] = True
    reference: ClassVar[bool] = False

    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        from agentrl.losses.preference import simpo_loss

        return simpo_loss(chosen, rejected, self.beta, self.margin)


class KTO(_Objective):
    """Kahneman-Tversky optimisation on unpaired rows (Ethayarajh et al. 2024). A row's ``label`` is 1 for desirable,
    -1 for undesirable. The baseline is the mean log-ratio of the rows of the whole optimiser step, not below 0, without
    gradient: tool output cannot be spliced into another task, as the paper's mismatched pairs would need."""

    type: Literal["kto"] = "kto"
    needs_baseline: ClassVar[bool] = True
    beta: float = Field(0.1, gt=0)
    desirable: float = Field(1.0, ge=0, description="weight of desirable rows")
    undesirable: float = Field(1.0, ge=0, description="weight of undesirable rows")
    length_normalized: bool = False

    def count(self, batch: "Batch") -> float:
        return float(batch.input_ids.shape[0])

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        from agentrl.losses.preference import kto_loss

        logratio = ((logprobs - batch.ref_logprobs) * batch.mask).sum(-1)
        if self.length_normalized:
            logratio = logratio / batch.mask.sum(-1)
        good = batch.label > 0
        weight = good * self.desirable + ~good * self.undesirable
        return (weight * kto_loss(logratio, batch.label, max(0.0, baseline), self.beta)).sum(), {
            "desirable_logratio": (logratio * good).sum().item(),
            "undesirable_logratio": (logratio * ~good).sum().item(),
        }


PairObjective = Annotated[DPO | IPO | SimPO, Field(discriminator="type")]
"""Losses over preference pairs."""

Objective = Annotated[SFT | DPO | IPO | SimPO | KTO, Field(discriminator="type")]
"""Losses over data at rest."""

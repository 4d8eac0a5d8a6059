"""Objectives: what a training step minimises. Each is a config of a union discriminated by ``type``; choosing a type
with no other key is the published algorithm.

An objective returns a *sum* and the count to divide it by. The trainer adds the counts over the whole optimiser step
before dividing, so one batch of eight rows and eight batches of one give the same gradient.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:  # a pipeline file is read, and planned, without torch
    from torch import Tensor

    from agentrl.batch import Batch

Sums = dict[str, float]
"""Metrics as sums over rows, tokens or pairs; divided by the same count as the loss."""


class _Objective(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SFT(_Objective):
    """Weighted mean over tokens of the negative log-likelihood."""

    type: Literal["sft"] = "sft"

    def count(self, batch: "Batch") -> float:
        return (batch.weights * batch.mask).sum().item()

    def loss(self, logprobs: "Tensor", batch: "Batch") -> "tuple[Tensor, Sums]":
        from agentrl.losses.nll import nll_loss

        return nll_loss(logprobs, batch.weights * batch.mask).sum(), {}


class DPO(_Objective):
    """Mean over pairs of the DPO loss, plus ``nll`` times the mean negative log-likelihood of the chosen side's trained
    tokens (Pang et al. 2024, equation 2), which keeps the chosen side from becoming less likely."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0, description="strength of the pull towards the reference policy")
    nll: float = Field(0.0, ge=0, description="weight of the negative log-likelihood term; 0 is plain DPO")

    def count(self, batch: "Batch") -> float:
        return batch.input_ids.shape[0] / 2

    def loss(self, logprobs: "Tensor", batch: "Batch") -> "tuple[Tensor, Sums]":
        from agentrl.losses.dpo import dpo_loss

        logratio = ((logprobs - batch.ref_logprobs) * batch.mask).sum(-1)
        chosen, rejected = logratio[0::2], logratio[1::2]
        loss = dpo_loss(chosen, rejected, self.beta).sum()
        if self.nll:
            mask = batch.mask[0::2]
            loss = loss + self.nll * ((-logprobs[0::2] * mask).sum(-1) / mask.sum(-1)).sum()
        margin = (chosen - rejected).detach()
        return loss, {
            "margin": (self.beta * margin).sum().item(),
            "accuracy": (margin > 0).float().sum().item(),
            "chosen_logratio": chosen.detach().sum().item(),
        }


class GRPO(_Objective):
    """Mean over sequences of the mean over their action tokens of the clipped surrogate (Shao et al. 2024, equation 3),
    without its KL term: the weights of a row are its advantage."""

    type: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)

    def count(self, batch: "Batch") -> float:
        return float(batch.input_ids.shape[0])

    def loss(self, logprobs: "Tensor", batch: "Batch") -> "tuple[Tensor, Sums]":
        from agentrl.losses.ppo_clip import ppo_clip_loss

        losses = ppo_clip_loss(logprobs, batch.logprobs, batch.weights, self.clip_low, self.clip_high)
        length = batch.mask.sum(-1).clamp(min=1)
        log_ratio = ((logprobs - batch.logprobs) * batch.mask).detach()
        clipped = ((log_ratio.exp() - 1 > self.clip_high) | (1 - log_ratio.exp() > self.clip_low)) & batch.mask
        return ((losses * batch.mask).sum(-1) / length).sum(), {
            "behaviour_kl": (-log_ratio.sum(-1) / length).sum().item(),
            "clip_share": (clipped.sum(-1) / length).sum().item(),
        }


Objective = Annotated[SFT | DPO | GRPO, Field(discriminator="type")]

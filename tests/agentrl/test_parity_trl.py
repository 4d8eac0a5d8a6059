"""Losses equal those of TRL, in value and gradient, on random tensors with random masks.

TRL's own loss code runs here, with a trainer and a model that only hand it the tensors.
"""

import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from agentrl.advantages.group import leave_one_out_advantages
from agentrl.algorithms.cispo import CISPO
from agentrl.algorithms.dapo import DAPO
from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.dr_grpo import DrGRPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.gspo import GSPO
from agentrl.algorithms.ipo import IPO
from agentrl.algorithms.kto import KTO
from agentrl.algorithms.policy_gradient import KL, PolicyGradient
from agentrl.schemas.installation import install_hint
from agentrl.training.batch import Batch

trl = pytest.importorskip("trl", reason=install_hint("parity"))

ROWS, TOKENS = 6, 11


class Stub(SimpleNamespace):
    """A trainer of which only the given attributes matter; the rest is for metrics."""

    def __getattr__(self, name: str) -> Any:
        return MagicMock()


def stub(**attributes: Any) -> Stub:
    same = lambda value, *_, **__: value  # noqa: E731
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        device=torch.device("cpu"),
        sync_gradients=False,
    )
    return Stub(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        **attributes,
    )


def tensors(seed: int) -> tuple[Batch, Tensor]:
    """A batch whose first column is no action, as a first token never is, and log-probs with a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.6
    mask[:, 0], mask[:, -1] = False, True
    logprobs = (normal(ROWS, TOKENS) - 3).requires_grad_()
    batch = Batch(
        input_ids=torch.zeros(ROWS, TOKENS, dtype=torch.long),
        mask=mask,
        weights=normal(ROWS, 1).expand(ROWS, TOKENS),
        logprobs=logprobs.detach() + 0.3 * normal(ROWS, TOKENS),
        ref_logprobs=logprobs.detach() + 0.3 * normal(ROWS, TOKENS),
        label=torch.tensor([1, -1] * (ROWS // 2)),
    )
    return batch, logprobs


def compare(ours: Tensor, theirs: Tensor, logprobs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, logprobs, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
    assert gradients[0].abs().sum() > 0


def our_mean(objective: Any, logprobs: Tensor, batch: Batch, baseline: float = 0.0) -> Tensor:
    loss, _ = objective.loss(logprobs, torch.zeros_like(logprobs), batch, baseline)
    return loss / objective.count(batch)


GRPO_CASES: list[tuple[PolicyGradient, dict[str, Any]]] = [
    (GRPO(), {"loss_type": "grpo"}),
    (GRPO(kl=KL(coef=0.04)), {"loss_type": "grpo", "beta": 0.04}),
    (GRPO(clip_low=0.1, clip_high=0.4), {"loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.4}),
    (DrGRPO(constant_length=50), {"loss_type": "dr_grpo", "max_completion_length": 50}),
    (DAPO(), {"loss_type": "dapo", "epsilon_high": 0.28}),
    (
        GSPO(clip_low=0.05, clip_high=0.07),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.07},
    ),
    (CISPO(clip_high=0.2), {"loss_type": "cispo", "epsilon_high": 1.2}),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("algorithm", "settings"), GRPO_CASES, ids=lambda case: getattr(case, "type", ""))
def test_policy_losses(algorithm: PolicyGradient, settings: dict[str, Any], seed: int) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    batch, logprobs = tensors(seed)
    defaults = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"}
    trainer = stub(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros(ROWS, TOKENS), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        **(defaults | settings),
    )
    empty = torch.zeros(ROWS, 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": batch.input_ids,
        "completion_mask": batch.mask.long(),
        "advantages": batch.weights[:, 0],
        "old_per_token_logps": batch.logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
        "num_items_in_batch": batch.mask.sum(),
    }
    compare(our_mean(algorithm, logprobs, batch), GRPOTrainer._compute_loss(trainer, None, inputs), logprobs)


def outputs_of(logprobs: Tensor, mask: Tensor) -> SimpleNamespace:
    """What TRL's patched model returns for the tokens after the first."""
    value = torch.zeros(mask.shape)[:, 1:]
    return SimpleNamespace(
        log_probs=(logprobs * mask)[:, 1:],
        entropy=value,
        mean_logits=value,
        is_top1=value.bool(),
        log_sum_sq_probs=value,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("objective", "name"), [(DPO(beta=0.2), "sigmoid"), (IPO(beta=0.2), "ipo")])
def test_preference_losses(objective: Any, name: str, seed: int) -> None:
    """TRL stacks all chosen sides above all rejected ones; here they alternate."""
    from trl.trainer.dpo_trainer import DPOTrainer

    batch, logprobs = tensors(seed)
    batch = replace(batch, weights=torch.ones_like(batch.weights))
    order = torch.tensor([*range(0, ROWS, 2), *range(1, ROWS, 2)])
    mask, reference = batch.mask[order], ((batch.ref_logprobs * batch.mask).sum(-1))[order]
    trainer = stub(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        use_weighting=False,
        beta=objective.beta,
    )
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": torch.ones(ROWS, TOKENS),
        "completion_mask": mask.long(),
        "ref_chosen_logps": reference[: ROWS // 2],
        "ref_rejected_logps": reference[ROWS // 2 :],
    }
    # For IPO, TRL counts the tokens of a side over the whole mask, whose first column is never an action.
    model = lambda **_: outputs_of(logprobs[order], mask)  # noqa: E731
    theirs = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    compare(our_mean(objective, logprobs, batch), theirs, logprobs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("baseline", [-0.4, 0.7])
def test_kto(seed: int, baseline: float) -> None:
    """With the same baseline. TRL takes it from rows whose answers were swapped."""
    from trl.trainer.kto_trainer import KTOTrainer

    batch, logprobs = tensors(seed)
    batch = replace(batch, weights=torch.ones_like(batch.weights))
    objective = KTO(beta=0.3, desirable=1.2, undesirable=0.7)
    trainer = stub(
        _compute_kl_logps=lambda *_: torch.full((ROWS,), baseline, dtype=torch.float64),
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=objective.beta,
        desirable_weight=objective.desirable,
        undesirable_weight=objective.undesirable,
    )
    inputs = {
        "label": batch.label > 0,
        "input_ids": batch.input_ids,
        "attention_mask": torch.ones(ROWS, TOKENS),
        "completion_mask": batch.mask.long(),
        "ref_logps": (batch.ref_logprobs * batch.mask).sum(-1),
        "ref_KL_logps": torch.zeros(ROWS, dtype=torch.float64),
    }
    theirs = KTOTrainer._compute_loss(trainer, lambda **_: outputs_of(logprobs, batch.mask), inputs, False)
    compare(our_mean(objective, logprobs, batch, baseline), theirs, logprobs)


def test_leave_one_out_is_the_formula_in_trl() -> None:
    """TRL computes it inside its sampling loop: (sum of the group - own reward) / (size - 1)."""
    rewards = torch.tensor([random.Random(index).random() for index in range(24)], dtype=torch.float64)
    grouped = rewards.view(-1, 4)
    theirs = (grouped - (grouped.sum(1, keepdim=True) - grouped) / 3).view(-1)
    ours = leave_one_out_advantages(rewards.tolist(), [index // 4 for index in range(24)])
    torch.testing.assert_close(torch.tensor(ours), theirs)

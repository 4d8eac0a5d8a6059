"""Losses against numbers worked out by hand."""

import math

import pytest
import torch

from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.gspo import GSPO
from agentrl.algorithms.kl import k1, k2, k3
from agentrl.algorithms.policy_gradient import KL, ppo_clip_loss
from agentrl.algorithms.rloo import RLOO
from agentrl.algorithms.sft import SFT
from agentrl.algorithms.simpo import SimPO, simpo_loss
from agentrl.online.critic import value_loss
from agentrl.schemas.training import TrainingRow
from agentrl.training.batch import collate
from agentrl.training.rows import TrainingRows
from agentrl.training.weights import template_weights


def test_kl_estimators_agree_in_expectation_and_in_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    p, q = logits.log_softmax(-1), torch.randn(5, dtype=torch.float64).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    weight = p.exp().detach()  # an expectation over samples, which carry no gradient
    assert (weight * k1(p, q)).sum().item() == pytest.approx(exact.item())
    assert (weight * k3(p, q)).sum().item() == pytest.approx(exact.item())
    of = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (exact, (weight * k2(p, q)).sum())]
    torch.testing.assert_close(of[0], of[1])
    assert torch.autograd.grad((weight * k1(p, q)).sum(), logits)[0].abs().max() < 1e-12


def test_clipping_keeps_the_pessimistic_side() -> None:
    old, new = torch.zeros(4), torch.tensor([0.5, 0.5, -0.5, -0.5])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    losses = ppo_clip_loss(new, old, advantages, 0.2, 0.3)
    assert losses.tolist() == pytest.approx([-1.3, math.exp(0.5), -math.exp(-0.5), 0.8])


def test_value_loss_takes_the_larger_of_both() -> None:
    loss = value_loss(torch.tensor([2.0, 1.1]), torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]), 0.2)
    assert loss.tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 0.9**2])
    assert value_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([2.0]), None).item() == 0


def test_simpo() -> None:
    loss = simpo_loss(torch.tensor([-1.0]), torch.tensor([-1.5]), 2.0, 0.4)
    assert loss.item() == pytest.approx(-math.log(1 / (1 + math.exp(-(2 * 0.5 - 0.4)))))


def rows(**changes: list) -> list[TrainingRow]:
    base = TrainingRow(
        row_id="r",
        input_ids=[1, 2, 3, 4],
        mask=[False, True, False, True],
        weights=[1.0] * 4,
        logprobs=[-1.0] * 4,
        ref_logprobs=[-2.0] * 4,
    )
    return [base, base.model_copy(update={"mask": [False, True, True, True], **changes})]


NONE = torch.zeros(2, 4)
LOGPROBS = torch.tensor([[0.0, -1.0, -9.0, -3.0], [0.0, -2.0, -2.0, -5.0]])


def mean(objective: object, data: list[TrainingRow], entropies: torch.Tensor = NONE) -> float:
    batch = collate(TrainingRows.of(data))
    loss, _ = objective.loss(LOGPROBS, entropies, batch)  # type: ignore[attr-defined]
    return loss.item() / objective.count(batch)  # type: ignore[attr-defined]


def test_aggregations() -> None:
    """-A log p: 1 + 3 over two tokens, and 2 + 2 + 5 over three; tool output at -9 is out of it."""
    assert mean(RLOO(aggregate="sequence"), rows(unit=1)) == pytest.approx((4 / 2 + 9 / 3) / 2)
    assert mean(RLOO(aggregate="sequence"), rows()) == pytest.approx(13 / 5), "two rows of one episode"
    assert mean(RLOO(aggregate="token"), rows()) == pytest.approx(13 / 5)
    assert mean(RLOO(aggregate="constant", constant_length=10), rows(unit=1)) == pytest.approx(13 / 20)


def test_entropy_bonus_and_kl_on_action_tokens_only() -> None:
    entropies = torch.tensor([[9.0, 0.5, 9.0, 0.5], [9.0, 1.0, 1.0, 1.0]])
    plain = mean(RLOO(aggregate="token"), rows())
    assert mean(RLOO(aggregate="token", entropy=0.1), rows(), entropies) == pytest.approx(plain - 0.1 * 4 / 5)
    divergence = [math.expm1(-2 - p) - (-2 - p) for p in (-1, -3, -2, -2, -5)]
    with_kl = mean(RLOO(aggregate="token", kl=KL(coef=0.5)), rows())
    assert with_kl == pytest.approx(plain + 0.5 * sum(divergence) / 5)


def test_supervised_weights() -> None:
    assert mean(SFT(), rows(weights=[2.0] * 4)) == pytest.approx((4 + 2 * 9) / (2 + 6))
    assert mean(SFT(), rows(weights=[-1.0] * 4)) == pytest.approx((4 - 9) / 5)  # a negative example counts by its size


def test_preference_terms() -> None:
    margin = (-4 + 4) - (-9 + 6)  # log-ratios of the two sides
    dpo = math.log1p(math.exp(-0.1 * margin))
    assert mean(DPO(), rows()) == pytest.approx(dpo)
    assert mean(DPO(nll=0.5), rows()) == pytest.approx(dpo + 0.5 * 4 / 2)
    assert mean(DPO(length_normalized=True), rows()) == pytest.approx(math.log1p(math.exp(-0.1 * (0 + 1))))
    assert mean(SimPO(), rows()) == pytest.approx(math.log1p(math.exp(-(2 * (-2 + 3) - 1))))


def test_metrics_of_a_policy_step() -> None:
    batch = collate(TrainingRows.of(rows()))
    _, sums = GRPO().loss(LOGPROBS, torch.zeros(2, 4), batch)
    ratios = torch.tensor([0.0, -2.0]).exp(), torch.tensor([-1.0, -1.0, -4.0]).exp()
    assert sums["clip_share"] == 4  # a sum over tokens, of which the batch has five
    expected = sum(((r - 1 - r.log()).sum()).item() for r in ratios)
    assert sums["behaviour_kl"] == pytest.approx(expected, rel=1e-5)


def test_template_tokens_of_a_call_weigh_less() -> None:
    pieces = ["<tool_call>", '{"name": "', "find", '", "arguments": {"', "who", '": "', "Ann", '", "n": ', "12", "}}",
              "</tool_call>", "ok"]  # fmt: skip
    decode = lambda ids: "".join(pieces[i] for i in ids)  # noqa: E731
    ids = list(range(len(pieces)))
    weights = template_weights(ids, [True] * len(ids), decode, 0.1)
    assert [piece for piece, weight in zip(pieces, weights, strict=True) if weight == 1.0] == [
        "find",
        "Ann",
        "12",
        "ok",
    ]
    assert template_weights(ids, [False] * len(ids), decode, 0.1) == [1.0] * len(ids)


def test_gspo_counts_what_it_clips_by_the_ratio_of_the_row() -> None:
    [row] = rows()[:1]
    logprobs = torch.tensor([[0.0, -0.9, 0.0, -1.1]])  # token ratios are far out of bounds, the row's is 1
    batch = collate(TrainingRows.of([row]))
    assert GSPO().loss(logprobs, torch.zeros(1, 4), batch)[1]["clip_share"] == 0
    assert (
        GRPO(clip_low=0.01, clip_high=0.01).loss(logprobs, torch.zeros(1, 4), batch)[1]["clip_share"] == 2
    )  # both tokens

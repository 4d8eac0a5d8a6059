import numpy as np
import pytest
import torch
from my_algorithms.soft_gate import MedianBaseline, SoftGate

from agentrl.algorithms.policy_gradient import Experience
from agentrl.schemas.trajectory import Trajectory
from agentrl.training.batch import Batch


def row(name: str, tokens: int) -> Trajectory:
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="model", env="lookup", split="train", prompt="?",
        reward=0.0, success=False, termination="answered", messages=[], input_ids=[1] * tokens,
        action_mask=[False] + [True] * (tokens - 1), logprobs=[float("nan")] + [-1.0] * (tokens - 1),
    )  # fmt: skip


def test_an_outlier_moves_no_other_rollout() -> None:
    rows = [row(f"r-{number}", 2 + number) for number in range(3)]
    step = Experience(rows, ["g"] * 3, np.array([0.0, 1.0, 9.0]), [[0.0] * len(row.input_ids) for row in rows])
    advantages = MedianBaseline(type="mine", scale=2.0).advantages(step)
    assert [values.tolist() for values in advantages.tokens] == [[-2.0] * 2, [0.0] * 3, [16.0] * 4]


def test_the_gradient_of_the_gate_is_that_of_the_plain_policy_gradient_on_policy() -> None:
    """At a ratio of 1, 4 / tau times the derivative of the sigmoid is 1, whatever tau is."""
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    weights = torch.tensor([[0.5, -3.0]])
    ones = torch.ones(1, 2)
    batch = Batch(
        input_ids=ones.long(), mask=ones.bool(), weights=weights, logprobs=logprobs.detach(), ref_logprobs=ones,
        label=ones[:, 0],
    )  # fmt: skip
    SoftGate(type="mine", tau_negative=3.0).token_loss(logprobs, batch).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-0.5, 3.0])

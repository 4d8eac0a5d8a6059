"""On-policy distillation: its advantages by hand, and its gradient against the enumerated reverse KL."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import random_rows, small_model, small_policy

from agentrl.algorithms.distill import Distill
from agentrl.algorithms.policy_gradient import Experience
from agentrl.models.policy import Policy, Speaker
from agentrl.online.credit import Extras, assign
from agentrl.online.teacher import Teacher, check_vocabulary
from agentrl.schemas.trajectory import Message, Role, Trajectory
from agentrl.training.batch import Batch, TrainingError
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs

NAN = float("nan")


def rollout(
    name: str, logprobs: list[float], reward: float = 0.0, ids: list[int] | None = None, **more: Any
) -> Trajectory:
    """NaN marks what the policy did not sample."""
    mask = [logprob == logprob for logprob in logprobs]
    first = mask.index(True)
    messages = [Message(role=Role.USER), Message(role=Role.ASSISTANT, token_start=first, token_end=len(mask))]
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="model", env="e", split="train", prompt="?",
        reward=reward, success=reward > 0, termination="answered", messages=messages, logprobs=logprobs,
        input_ids=ids or [1] * len(mask), action_mask=mask, n_tokens=len(mask), **more,
    )  # fmt: skip


def advantages(algorithm: Distill, rows: list[Trajectory], teacher: list[list[float]]) -> list[list[float]]:
    rewards = np.array([row.reward for row in rows])
    penalties = [np.zeros(len(row.input_ids)) for row in rows]
    step = Experience(rows, ["g"] * len(rows), rewards, penalties, teacher=teacher)
    return [np.asarray(token).tolist() for token in algorithm.advantages(step).tokens]


def test_the_advantage_is_what_the_teacher_finds_likelier() -> None:
    row = rollout("a", [NAN, -1.2, NAN, -0.5])
    [advantage] = advantages(Distill(), [row], [[0.0, -0.2, 0.0, -0.5]])
    assert advantage == pytest.approx([0.0, 1.0, 0.0, 0.0])
    [advantage] = advantages(Distill(coef=0.5), [row], [[0.0, -0.2, 0.0, -2.5]])
    assert advantage == pytest.approx([0.0, 0.5, 0.0, -1.0])


def test_a_teacher_that_is_the_student_teaches_nothing() -> None:
    row = rollout("a", [NAN, -1.2, -0.3])
    assert advantages(Distill(), [row], [[0.0, -1.2, -0.3]]) == [[0.0, 0.0, 0.0]]


def test_the_outcome_adds_the_advantages_of_the_group() -> None:
    rows = [rollout("a", [NAN, -1.2], reward=1.0), rollout("b", [NAN, -0.4])]
    result = advantages(Distill(outcome=0.5), rows, [[0.0, -0.2], [0.0, -0.4]])
    assert result[0] == pytest.approx([0.0, 1.5], abs=1e-5)
    assert result[1] == pytest.approx([0.0, -0.5], abs=1e-5)


def test_without_a_teacher_there_is_an_error() -> None:
    row = rollout("a", [NAN, -1.2])
    with pytest.raises(ValueError, match="distill needs the log-probs of a teacher"):
        assign(Distill(), [row])
    broken = rollout("b", [NAN, -1.0]).model_copy(update={"logprobs": [NAN, NAN]})
    with pytest.raises(TrainingError, match="distill gave b an advantage that is no finite number"):
        assign(Distill(), [broken], Extras(teacher=[[0.0, -1.0]]))


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """One position, three tokens: the mean over the policy's own draws, enumerated, against the closed form."""
    torch.manual_seed(0)
    logits = torch.randn(3, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    kl = (student.exp() * (student - teacher)).sum()
    [expected] = torch.autograd.grad(kl, logits)
    result = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        behaviour = student[token].item()
        row = rollout("a", [NAN, behaviour])
        [[_, advantage]] = advantages(Distill(), [row], [[0.0, teacher[token].item()]])
        logprobs = torch.stack([torch.zeros((), dtype=torch.float64), logits.log_softmax(-1)[token]])[None]
        batch = Batch(
            input_ids=torch.ones(1, 2, dtype=torch.long),
            mask=torch.tensor([[False, True]]),
            weights=torch.tensor([[0.0, advantage]], dtype=torch.float64),
            logprobs=torch.tensor([[0.0, behaviour]], dtype=torch.float64),
            ref_logprobs=torch.zeros(1, 2),
            label=torch.zeros(1),
        )
        algorithm = Distill()
        loss = algorithm.loss(logprobs, torch.zeros(1, 2), batch)[0] / algorithm.count(batch)
        result += student[token].exp().detach() * torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(result, expected)


def speaker(words: list[str]) -> Any:
    tokenizer = SimpleNamespace(get_vocab=lambda: {word: number for number, word in enumerate(words)})
    return SimpleNamespace(tokenizer=tokenizer, name=f"of {len(words)}")


def test_a_teacher_with_another_tokenizer_is_refused_with_the_remedy() -> None:
    ours: Speaker = speaker(["a", "b", "c"])
    check_vocabulary(speaker(["a", "b", "c", "d"]), ours)
    message = r"inputs\.teacher: of 3 has another tokenizer than the student of 3: 2 of 3 tokens.*'b'.*train\.sft"
    with pytest.raises(ValueError, match=message):
        check_vocabulary(speaker(["a", "c", "b"]), ours)


def taught(kind: str) -> tuple[Policy, list[Trajectory]]:
    """A policy, and rollouts with its own log-probs."""
    policy = small_policy(kind)
    policy.tokenizer = speaker([str(number) for number in range(61)]).tokenizer
    plain = [row.model_copy(update={"weights": [0.0] * len(row.mask)}) for row in random_rows(5)]
    rows = []
    for row, own in zip(plain, batch_logprobs(policy, TrainingRows.of(plain)), strict=True):
        logprobs = [float(item) if m else NAN for item, m in zip(own, row.mask, strict=True)]
        rows.append(rollout(row.row_id, logprobs, ids=row.input_ids))
    return policy, rows


class Scoring:
    """An engine that only scores."""

    def __init__(self, model: Any) -> None:
        self.model, self.asked = model.eval(), 0

    async def score(self, ids: list[int], start: int = 1) -> list[float]:
        self.asked += 1
        logp = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own = logp.gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()
        return own[start - 1 :]


def test_an_engine_scores_as_passes_in_this_process_do() -> None:
    student, rows = taught("qwen2")
    policy = small_policy("llama", seed=1)
    policy.tokenizer = student.tokenizer
    engine = Scoring(small_model("llama", seed=1))
    ours, theirs = Teacher(policy, student), Teacher(policy, student, engine)  # type: ignore[arg-type]
    for first, other, row in zip(ours.logprobs(rows), theirs.logprobs(rows), rows, strict=True):
        assert first == pytest.approx(other, abs=1e-4)
        assert (first[~np.array(row.action_mask)] == 0).all()
    assert engine.asked == len(rows)
    gaps = [np.array(row.logprobs)[m] - logprob[m] for row, logprob in zip(rows, ours.logprobs(rows), strict=True)
            for m in [np.array(row.action_mask)]]  # fmt: skip
    assert ours.metrics() == {"teacher_kl": pytest.approx(np.concatenate(gaps).mean(), rel=1e-5), "teacher_unread": 0}


def test_rollouts_that_are_too_long_for_the_teacher_are_counted_and_teach_nothing() -> None:
    student, rows = taught("qwen2")
    policy = small_policy("llama", seed=1)
    policy.tokenizer = student.tokenizer
    *others, longest = sorted(rows, key=lambda row: len(row.input_ids))
    policy.model.config.max_position_embeddings = len(longest.input_ids) - 1
    teacher = Teacher(policy, student)
    with pytest.warns(
        UserWarning, match=rf"{longest.trajectory_id} has {len(longest.input_ids)} tokens as the teacher"
    ):
        *scored, own = teacher.logprobs([*others, longest])
    credit = assign(Distill(), [*others, longest], Extras(teacher=[*scored, own]))
    assert credit.advantages[-1] == pytest.approx(0.0)
    assert abs(np.array(credit.advantages[:-1])).min() > 0
    assert teacher.metrics()["teacher_unread"] == 1
    assert teacher.metrics()["teacher_unread"] == 0
    teacher.logprobs([longest])
    with pytest.raises(ValueError, match=r"all 1 rollouts are too long for the teacher .* lower max_tokens"):
        teacher.metrics()


def test_a_student_is_its_own_teacher_without_an_advantage() -> None:
    student, rows = taught("qwen2")
    credit = assign(Distill(), rows, Extras(teacher=Teacher(student, student).logprobs(rows)))
    assert credit.advantages == pytest.approx([0.0] * len(rows), abs=1e-5)

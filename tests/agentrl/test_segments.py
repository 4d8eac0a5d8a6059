"""Segments by hand: what a compressed episode goes on from, and what its rows weigh."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.policy_gradient import KL, PolicyGradient
from agentrl.algorithms.rloo import RLOO
from agentrl.chat.codec import spanned
from agentrl.engines.base import Compress, Sampling
from agentrl.online.credit import Extras, assign
from agentrl.rollouts.compression import window
from agentrl.rollouts.segments import SUMMARY, episode_of, name_of, whole
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory
from agentrl.training.batch import TrainingError, collate
from agentrl.training.rows import TrainingRows


def row(name: str, segment: int, reward: float, actions: int, **changes: Any) -> Trajectory:
    """A prompt of one token, and ``actions`` sampled ones."""
    mask = [False] + [True] * actions
    fields: dict[str, Any] = {
        "trajectory_id": name_of(name, segment), "episode_id": name, "segment": segment, "task_id": "t",
        "group_id": "ticket", "source": "model", "env": "e", "split": "train", "prompt": "q", "reward": reward,
        "success": reward > 0, "termination": Termination.ANSWERED, "n_tokens": len(mask), "n_action_tokens": actions,
        "messages": [
            Message(role=Role.USER, content="q", token_start=0, token_end=1),
            Message(role=Role.ASSISTANT, content="a", token_start=1, token_end=len(mask)),
        ],
        "input_ids": [1] * len(mask), "action_mask": mask,
        "logprobs": [float("nan") if not acts else -1.0 for acts in mask],
    }  # fmt: skip
    return Trajectory(**{**fields, **changes})


def gradient(algorithm: PolicyGradient, rows: list[Trajectory]) -> dict[str, list[float]]:
    """The derivative of the loss by the log-prob of each sampled token, by episode, in order."""
    made = assign(algorithm, rows)
    names = [row.row_id for row in made.rows]
    batch = collate(TrainingRows.of(made.rows))
    logprobs = batch.logprobs.clone().requires_grad_()
    total, _ = algorithm.loss(logprobs, torch.zeros_like(logprobs), batch)
    (total / algorithm.count(batch)).backward()
    assert logprobs.grad is not None
    result: dict[str, list[float]] = {}
    for name, values, mask in zip(names, logprobs.grad, batch.mask, strict=True):
        result.setdefault(episode_of(name), []).extend(round(value, 7) for value in values[mask].tolist())
    return result


AGGREGATES = [{"aggregate": "sequence"}, {"aggregate": "token"}, {"aggregate": "constant", "constant_length": 10}]


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("kind", [GRPO, RLOO])
def test_three_segments_of_equal_tokens_weigh_as_one_row(kind: type[PolicyGradient], aggregate: dict[str, Any]) -> None:
    algorithm = kind(**aggregate)
    other = row("b", 0, 0.0, 4)
    together = gradient(algorithm, [row("a", 0, 1.0, 6), other])
    apart = gradient(algorithm, [*(row("a", n, 1.0, 2) for n in range(3)), other])
    assert apart == together
    if kind is RLOO and aggregate["aggregate"] == "sequence":  # by hand: two episodes, of 6 and 4 tokens
        assert together == {"a": [pytest.approx(-1 / 2 / 6)] * 6, "b": [pytest.approx(1 / 2 / 4)] * 4}


def test_the_pull_towards_a_reference_is_over_episodes_too() -> None:
    algorithm = GRPO(kl=KL(coef=0.5, estimator="k2"))
    batches = []
    for rows in ([row("a", 0, 1.0, 6)], [row("a", n, 1.0, 2) for n in range(3)]):
        rows = [*rows, row("b", 0, 0.0, 4)]
        made = assign(algorithm, rows, Extras(reference=[row.logprobs for row in rows])).rows
        batch = collate(TrainingRows.of(made))
        logprobs = (batch.logprobs - 0.5) * batch.mask
        total, _ = algorithm.loss(logprobs, torch.zeros_like(logprobs), batch)
        batches.append(float(total / algorithm.count(batch)))
    assert batches[0] == pytest.approx(batches[1])


def test_a_group_is_compared_by_episodes() -> None:
    """Rewards 1 (in three rows), 0 and 0: the mean is 1/3, not 3/5."""
    rows = [*(row("a", n, 1.0, 2) for n in range(3)), row("b", 0, 0.0, 2), row("c", 0, 0.0, 2)]
    assert assign(RLOO(), rows).advantages == pytest.approx([1, 1, 1, -0.5, -0.5])


def two_agents(rewards: list[tuple[float, float]]) -> list[Trajectory]:
    """Episodes of a white and a black agent, of 2 and 3 tokens."""
    return [
        row(f"game-{number}", position, reward, 2 + position, agent=("white", "black")[position])
        for number, both in enumerate(rewards)
        for position, reward in enumerate(both)
    ]


@pytest.mark.parametrize("credit", ["whole", "joint"])
def test_agents_that_share_a_reward_are_one_attempt(credit: str) -> None:
    """Rewards 1, 0 and 0 of three episodes: the mean is 1/3, and each episode is a third of the loss."""
    made = assign(RLOO(credit=credit), two_agents([(1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]))
    assert made.advantages == pytest.approx([1, 1, -0.5, -0.5, -0.5, -0.5])
    assert made.attempts.tolist() == [row.unit for row in made.rows] == [0, 0, 1, 1, 2, 2]


def test_agents_with_rewards_of_their_own_are_compared_with_the_same_agent_also_if_rewards_coincide() -> None:
    """White has 1, 1/2 and 0, black 0, 1/2 and 1/2: the second game is a draw."""
    rows = two_agents([(1.0, 0.0), (0.5, 0.5), (0.0, 0.5)])
    made = assign(RLOO(credit="agent"), rows)
    assert made.advantages == pytest.approx([0.75, -0.5, 0.0, 0.25, -0.75, 0.25])
    assert made.attempts.tolist() == list(range(6))
    segments = [row("game-0", 2, 1.0, 4, agent="white"), *rows]
    again = assign(RLOO(credit="agent"), segments)
    assert again.attempts.tolist() == [0, 0, *range(1, 6)], "segments of one agent are one attempt"
    assert again.advantages[1:] == pytest.approx(made.advantages)


@pytest.mark.parametrize("credit", ["whole", "joint", "fork_turn"])
def test_an_attempt_with_several_rewards_is_refused(credit: str) -> None:
    text = rf"credit: {credit}, and rows of the episode game-1 have several rewards in one group, 0.0 and 1.0, .*agent$"
    with pytest.raises(ValueError, match=text):
        assign(RLOO(credit=credit), two_agents([(1.0, 1.0), (0.0, 1.0)]))
    torn = [row("a", 0, 1.0, 2, agent="white"), row("a", 1, 0.0, 2, agent="white"), row("b", 0, 0.0, 2)]
    with pytest.raises(ValueError, match=r"the episode a have several rewards in one group, 1\.0 and 0\.0, but"):
        assign(RLOO(credit="agent"), torn)


def test_joint_credit_of_an_episode_in_several_groups_is_refused() -> None:
    rows = two_agents([(1.0, 1.0), (0.0, 0.0)])
    torn = [row.model_copy(update={"group_id": row.agent}) for row in rows]
    assert assign(RLOO(), torn).attempts.tolist() == [0, 1, 2, 3], "an attempt is what an episode has in one group"
    with pytest.raises(ValueError, match="rows of the episode game-0 are of several groups, 'white' and 'black'; give"):
        assign(RLOO(credit="joint"), torn)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_pull_towards_a_reference_that_is_not_given_is_refused(where: str) -> None:
    rows = [row("a", 0, 1.0, 2), row("b", 0, 0.0, 2)]
    with pytest.raises(TrainingError, match=r"algorithm.kl .* needs the log-probs of a reference policy; give them as"):
        assign(GRPO(kl=KL(where=where)), rows)


def test_an_episode_out_of_context_is_left_out_of_the_loss_and_counted() -> None:
    """It counts in the mean of its group: the success beats it."""
    lost = {"termination": Termination.MAX_CONTEXT}
    rows = [row("a", 0, 1.0, 2), *(row("b", n, 0.0, 3, **lost) for n in range(2))]
    made = assign(GRPO(), rows)
    assert made.trained == [True, False, False]
    assert made.metrics["out_of_context"] == 1
    assert made.advantages[0] == pytest.approx(1.0, abs=1e-4)
    [alone] = made.rows
    assert alone.weights[1] == pytest.approx(1.0, abs=1e-4), "the loss is divided by the episodes that are trained on"


def test_the_names_of_rows() -> None:
    assert [name_of("sample-00abcdef-000007", n) for n in (0, 12)] == [
        "sample-00abcdef-000007",
        "sample-00abcdef-000007.12",
    ]
    for name in ("sample-00abcdef-000007", "sample-00abcdef.1-000007", "trajectories.sample-1-00000000-000007"):
        assert [episode_of(name_of(name, n)) for n in (0, 1, 10)] == [name] * 3


def call(number: int, word: str) -> list[Message]:
    text = ToolCall(id=f"c{number}", name="go", arguments=f'{{"door": "{word}"}}')
    return [
        Message(role=Role.ASSISTANT, tool_calls=[text], reward=0.5),
        Message(role=Role.TOOL, tool_call_id=f"c{number}", content=f"room {number}"),
    ]


def conversation(steps: int, size: int) -> tuple[list[Message], list[int]]:
    """Steps of ``size`` tokens for the turn and as many for its answer, after an opening of five."""
    messages, ids = list[Message](), list(range(5))
    for number in range(steps):
        for item in call(number, "left"):
            messages += spanned([item], len(ids), len(ids) + size)
            ids += range(100 * number + len(ids), 100 * number + len(ids) + size)
    return messages, ids


OPENING = [Message(role=Role.USER, content="Where?")]


def words(opening: list[Message]) -> list[int]:
    return list(range(900, 904 + len(opening[-1].content.split())))


def test_what_an_episode_goes_on_from() -> None:
    messages, ids = conversation(3, 4)
    by_hand = {
        "drop": "Where?",
        "summary": "Where?\n\nSo far:\nin the attic",
        "schema": 'Where?\n\nSo far:\ngo {"door": "left"} -> room 0\ngo {"door": "left"} -> room 1',
    }
    for by, text in by_hand.items():
        compress = Compress(limit=32, keep_last=1, by=by)
        summary = "in the attic" if by == "summary" else ""
        row = window(OPENING, [], messages, ids, compress, summary, words)
        assert row is not None
        assert [message.content for message in row.messages] == [text, "", "room 2"]
        head = len(words(row.messages[:1]))
        assert row.ids == words(row.messages[:1]) + ids[-8:], "the tokens as they were"
        assert [(message.token_start, message.token_end) for message in row.messages] == [
            (0, head), (head, head + 4), (head + 4, head + 8)
        ]  # fmt: skip
        assert [message.reward for message in row.messages] == [None] * 3, "an answer is rewarded once"
        assert len(row.left_out) == 2


@given(steps=st.integers(1, 8), size=st.integers(1, 12), keep=st.integers(0, 9), limit=st.integers(32, 120))
def test_the_next_prompt_fits_and_ends_as_the_one_before(steps: int, size: int, keep: int, limit: int) -> None:
    messages, ids = conversation(steps, size)
    row = window(OPENING, [], messages, ids, Compress(limit=limit, keep_last=keep), "", words)
    assert row is not None, "the opening alone fits"
    kept = len(row.messages) // 2
    assert len(row.ids) == len(words(OPENING)) + kept * 2 * size <= limit
    assert kept == min(keep, steps) or len(row.ids) + 2 * size > limit, "no fewer than fit"
    assert row.ids[len(words(OPENING)) :] == ids[len(ids) - kept * 2 * size :]
    assert len(row.left_out) == steps - kept


def test_nothing_to_go_on_from_if_the_opening_does_not_fit() -> None:
    messages, ids = conversation(2, 4)
    summary = "word " * 40
    assert window(OPENING, [], messages, ids, Compress(limit=32, by="summary"), summary, words) is None


def test_an_episode_as_one_row_has_each_message_once() -> None:
    ask = Message(role=Role.USER, name=SUMMARY, content="Sum up.", token_start=3, token_end=4)
    told = Message(role=Role.ASSISTANT, content="so", token_start=4, token_end=5)
    first, second = row("a", 0, 1.0, 2, n_steps=1, n_tool_calls=1), row("a", 1, 1.0, 3, n_steps=2)
    first = first.model_copy(update={"messages": [*first.messages, ask, told], "n_tool_errors": 1})
    again = Message(role=Role.ASSISTANT, content="a", token_start=0, token_end=1)
    own = [message.model_copy(update={"content": "b"}) for message in second.messages[1:]]
    second = second.model_copy(update={"messages": [second.messages[0], again, *own]})
    entry = whole([first, second])
    assert [message.content for message in entry.messages] == ["q", "a", "b"]
    assert (entry.n_steps, entry.n_tool_calls, entry.n_tool_errors, entry.n_action_tokens) == (3, 1, 1, 5)
    assert entry.input_ids == []
    assert whole([first]) is first


def test_sampling_without_compression_is_written_as_before() -> None:
    assert "compress" not in Sampling().model_dump_json()
    assert Sampling.model_validate_json(Sampling(compress=Compress(limit=50)).model_dump_json()).compress == Compress(
        limit=50
    )
    assert np.isfinite(len(Sampling().model_dump()))

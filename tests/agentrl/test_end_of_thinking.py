"""Reasoning that gets nowhere is ended, and what ended it is not trained on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tabular import TabularEngine, stumbling

from agentrl.advantages.turns import turn_spans
from agentrl.engines.base import Sampling, Session, Turn
from agentrl.environments.rooms.environment import Rooms
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.stages.trajectories import SampleConfig
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.exploring import EndThinking, Explore
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.trajectory import Message, Role, Span, Trajectory

TASK = Rooms().tasks({"train": 4}, 0)["train"][0]


class Brooding(TabularEngine):
    """It thinks on and on, with these log-probs, one for each token; when its reasoning is closed, it answers."""

    def __init__(self, policy: Policy, logprobs: Sequence[float]) -> None:
        super().__init__(policy.codec, stumbling(0.5))
        self.policy_of, self.given, self.closed = policy, list(logprobs), 0
        self.thought: list[int] = policy.codec.template.encode("<think>" + "cave mill " * 200)

    async def turn(self, session: Session, sampling: Sampling, *, stop: Sequence[int], seed: int, **_: Any) -> Turn:
        text = self.policy_of.tokenizer.decode(session.ids)
        if "</think>" in text:
            self.closed += 1
            ids = self.policy_of.codec.assistant(Message(role=Role.ASSISTANT, content="here"))
            return Turn(ids, [-0.5] * len(ids), [Span(version=0, start=0, end=len(ids))], "stop")
        sampled = sum(session.mask)
        ids = self.thought[sampled : sampled + sampling.max_turn_tokens]
        return Turn(ids, self.given[sampled : sampled + len(ids)], [Span(version=0, start=0, end=len(ids))], "length")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy([demonstrate(Rooms(), TASK, 0.3, 0, "t").messages], seed=0)


def rolled(policy: Policy, logprobs: Sequence[float], explore: Explore) -> tuple[Trajectory, dict[str, int], Brooding]:
    engine = Brooding(policy, logprobs)
    sampling = Sampling(max_tokens=600, max_turn_tokens=100)
    runner = RolloutRunner(policy, engine, Rooms(), sampling, explore=explore)
    [row] = runner.run([Attempt(TASK)], 0, ["r"])
    return row, dict(runner.counts), engine


def test_reasoning_is_ended_when_its_uncertainty_stays(policy: Policy) -> None:
    """Windows of ten tokens have M 3, 2, 1, 1.02 and so on: the fourth changes by 0.02, so 40 tokens are sampled."""
    logprobs = [-3.0] * 10 + [-2.0] * 10 + [-1.0] * 10 + [-1.02] * 70
    explore = Explore(thinking=EndThinking(eta=0.05, window=10))
    row, counts, engine = rolled(policy, logprobs, explore)
    assert counts["thinking_ended"] == 1
    assert "thinking_ended:1" in row.tags
    [(start, end)] = turn_spans(row.messages, row.action_mask)
    mask = np.array(row.action_mask)[start:end]
    assert mask[:40].all()
    forced = np.flatnonzero(~mask)
    assert forced.tolist() == list(range(40, 40 + len(forced)))
    written = [row.input_ids[start + offset] for offset in forced]
    assert policy.tokenizer.decode(written) == "\n</think>\n\n"
    assert np.isnan(np.array(row.logprobs)[start + forced]).all()
    assert mask[40 + len(forced) :].all()
    assert engine.closed == 1
    answer = row.messages[-1]
    assert answer.content == "here"
    assert answer.reasoning is not None
    assert "cave mill" in answer.reasoning


def test_reasoning_that_moves_is_left_alone(policy: Policy) -> None:
    moving = [-float(number // 10) for number in range(100)]
    row, counts, _ = rolled(policy, moving, Explore(thinking=EndThinking(eta=0.05, window=10)))
    assert (counts, row.n_action_tokens) == ({}, 100)
    plain, _, _ = rolled(policy, moving, Explore())
    assert row.input_ids == plain.input_ids


def test_what_is_no_reasoning_is_never_ended(policy: Policy) -> None:
    engine = Brooding(policy, [-1.0] * 100)
    engine.thought = policy.codec.template.encode("cave mill " * 200)
    explore = Explore(thinking=EndThinking(eta=1.0, window=10))
    runner = RolloutRunner(policy, engine, Rooms(), Sampling(max_tokens=600, max_turn_tokens=100), explore=explore)
    [row] = runner.run([Attempt(TASK)], 0, ["r"])
    assert row.n_action_tokens == 100
    assert engine.closed == 0


def test_an_engine_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="explore needs the tokens of turns"):
        SampleConfig.model_validate(
            {"engine": {"type": "openai", "model": "m"}, "explore": {"thinking": {"eta": 0.1, "window": 8}}}
        )

"""Rollouts that explore: turns that are sampled again, and calls at random."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tabular import TabularEngine, stumbling

from agentrl.advantages.turns import turn_spans
from agentrl.engines.base import Sampling, Session, Turn
from agentrl.engines.blocking import blocking
from agentrl.environments.rooms.environment import Rooms
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.exploring import Explore, Resample, uncertainty
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.trajectory import Role, Span, Trajectory

TASKS = Rooms().tasks({"train": 12}, 0)["train"]


class Wavering(TabularEngine):
    """Its turns are as uncertain as ``says`` has it, one number for each time that it is asked in an episode."""

    def __init__(self, policy: Policy, says: Sequence[float]) -> None:
        super().__init__(policy.codec, stumbling(0.5))
        self.says = list(says)

    async def turn(self, session: Session, sampling: Sampling, *, stop: Sequence[int], seed: int, **more: Any) -> Turn:
        number = self.turns
        text = await super().turn(session, sampling, stop=stop, seed=seed, **more)
        ids = text.ids
        mean = self.says[number] if number < len(self.says) else 9.0 * number
        return Turn(ids, [-mean] * len(ids), [Span(version=0, start=0, end=len(ids))], "stop")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy([demonstrate(Rooms(), task, 0.3, 0, "t").messages for task in TASKS], seed=0)


def rolled(
    policy: Policy, engine: Any, explore: Explore, attempts: int = 12
) -> tuple[list[Trajectory], dict[str, int]]:
    runner = RolloutRunner(policy, engine, Rooms(), Sampling(max_tokens=400), explore=explore)
    rows = runner.run([Attempt(task) for task in TASKS[:attempts]], 0, [f"r{n}" for n in range(attempts)])
    return rows, dict(runner.counts)


def test_a_turn_as_uncertain_as_the_last_is_sampled_again_by_hand(policy: Policy) -> None:
    """M of the first turn is 1. The second comes as 1.2 and 1.1, which differ by less than 0.3, and as 2, which is
    taken; with one try, 1.1 is taken although it differs by 0.1."""
    says = [1.0, 1.2, 1.1, 2.0]
    for tries, again, second in ((2, 2, 2.0), (1, 1, 1.1)):
        explore = Explore(resample=Resample(eta=0.3, tries=tries))
        rows, counts = next(
            result for seed in range(12) if len((result := _one(policy, says, explore, seed))[0].messages) > 4
        )
        spans = turn_spans(rows.messages, rows.action_mask)
        means = [-fmean(rows.logprobs[start:end]) for start, end in spans]
        assert means[:2] == pytest.approx([1.0, second])
        assert f"resampled:{again}" in rows.tags
        assert counts["resampled"] == again
        assert counts["resampled_tokens"] > 0
        assert rows.n_action_tokens == sum(end - start for start, end in spans), "what was refused is in no row"
        assert len(rows.spans) == 1
        assert (rows.spans[0].start, rows.spans[0].end) == (spans[0][0], spans[-1][1])


def _one(policy: Policy, says: list[float], explore: Explore, number: int) -> tuple[Trajectory, dict[str, int]]:
    runner = RolloutRunner(policy, Wavering(policy, says), Rooms(), Sampling(max_tokens=400), explore=explore)
    [row] = runner.run([Attempt(TASKS[number])], 0, ["r"])
    return row, dict(runner.counts)


def test_eta_0_changes_nothing(policy: Policy) -> None:
    def engine() -> Any:
        return TabularEngine(policy.codec, stumbling(0.5))  # each of its turns has the same log-probs

    plain, _ = rolled(policy, engine(), Explore())
    same, counts = rolled(policy, engine(), Explore(resample=Resample(eta=0.0)))
    made = [[row.model_dump_json(exclude={"created_at", "message_seconds"}) for row in rows] for rows in (plain, same)]
    assert made[0] == made[1]
    assert not counts
    other, counts = rolled(policy, engine(), Explore(resample=Resample(eta=0.1, tries=2)))
    later = sum(len(turn_spans(row.messages, row.action_mask)) - 1 for row in other)
    assert counts["resampled"] == 2 * later, "equal turns are all tried twice again, but the first of each episode"
    assert [row.input_ids for row in other] != [row.input_ids for row in plain]


def test_uncertainty_by_hand() -> None:
    assert uncertainty([-1.0, -2.0]) == 1.5
    assert uncertainty([]) is None
    wants = Resample(eta=0.3).wants
    assert [wants(1.2, 1.0), wants(1.3, 1.0), wants(1.0, None), wants(None, 1.0)] == [True, False, False, False]


def test_the_embedded_engine_goes_on_after_a_turn_that_was_refused(policy: Policy) -> None:
    """What it keeps of a refused turn is computed anew: its log-probs are those of one pass over the session."""
    from agentrl.engines.configs import DEFAULT_ENGINE

    engine = DEFAULT_ENGINE.build(policy)
    sampling, opening = (
        Sampling(max_tokens=200, max_turn_tokens=9),
        policy.tokenizer.encode("attic to vault? cave mill"),
    )

    async def play() -> tuple[Session, list[list[int]], list[float]]:
        with engine.open() as session:
            session.observe(opening)
            texts = []
            for seed, keep in ((0, True), (1, False), (2, False), (3, True), (4, True)):
                start = len(session.ids)
                turn = await engine.turn(session, sampling, stop=[], seed=seed)
                texts.append(turn.ids)
                session.act(turn)
                if not keep:
                    session.forget(start)
                    assert len(session.ids) == len(session.mask) == len(session.logprobs) == session.spans[-1].end
            return session, texts, await engine.score(session.ids)

    session, text, scores = blocking(play())
    assert session.ids == [*opening, *text[0], *text[3], *text[4]]
    assert text[1] != text[2]
    mask = np.array(session.mask)
    np.testing.assert_allclose(np.array(session.logprobs)[mask], np.array([0.0, *scores])[mask], atol=1e-4)
    blocking(engine.close())


def test_calls_at_random_are_not_trained_on(policy: Policy) -> None:
    rows, counts = rolled(policy, TabularEngine(policy.codec, stumbling(0.0)), Explore(tool=0.5))
    count = 0
    for row in rows:
        spans = turn_spans(row.messages, row.action_mask)
        masked = [start for start, end in spans if not any(row.action_mask[start:end])]
        calls = [
            message for message in row.messages if message.role is Role.ASSISTANT and message.token_start in masked
        ]
        assert all(call.tool_calls for call in calls)
        assert len(calls) == sum(int(tag.split(":")[1]) for tag in row.tags if tag.startswith("random_calls:"))
        assert not np.isnan(np.array(row.logprobs)[np.array(row.action_mask)]).any()
        count += len(calls)
    assert count == counts["random_calls"] > 3
    assert any(row.n_steps > 9 for row in rows), "a policy that always finds the way is led astray"


def test_temperatures_are_annealed_over_the_iterations() -> None:
    explore, plain = Explore(temperature=(1.2, 0.7)), Sampling(max_tokens=9)
    matches = [explore.sampling(plain, iteration, 6) for iteration in (0, 3, 5, 9)]
    assert [item.temperature for item in matches if item] == pytest.approx([1.2, 0.9, 0.7, 0.7])
    assert {item.max_tokens for item in matches if item} == {9}
    assert Explore().sampling(plain, 0, 6) is None
    with pytest.raises(ValidationError, match="temperatures are above 0"):
        Explore(temperature=(1.0, 0.0))

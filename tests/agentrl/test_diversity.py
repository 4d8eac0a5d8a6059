"""Rollouts of one group that keep apart, against diverse beam search written out."""

import asyncio

import pytest
import torch

from agentrl.engines.base import Sampling, Session, Turn
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.environments.rooms.environment import Rooms
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.parts.selected import plainly_drawn
from agentrl.pipelines.stages.trajectories import SampleConfig
from agentrl.rollouts.demonstrations import demonstrate

TASK = Rooms().tasks({"train": 4}, 0)["train"][0]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy([demonstrate(Rooms(), TASK, 0.3, 0, "t").messages], seed=0)


def sampled(policy: Policy, roots: list[str], temperature: float, diversity: float, size: int = 6) -> list[Turn]:
    """A turn of each of these sessions, which begin alike."""
    engine, opening = DEFAULT_ENGINE.build(policy), policy.tokenizer.encode("attic to vault? cave mill")
    sampling = Sampling(temperature=temperature, diversity=diversity, max_turn_tokens=size, max_tokens=200)

    async def turn(number: int, session: Session) -> Turn:
        with session:
            return await engine.turn(session, sampling, stop=[], seed=number)

    async def play() -> list[Turn]:
        sessions = [engine.open((number,), root) for number, root in enumerate(roots)]
        for session in sessions:
            session.observe(opening)
        made = await asyncio.gather(*(turn(number, session) for number, session in enumerate(sessions)))
        await engine.close()
        return list(made)

    return blocking(play())


def log_probs(policy: Policy, ids: list[int]) -> torch.Tensor:
    """Of the token after these, [vocabulary]."""
    with torch.no_grad():
        return policy.model(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)


@pytest.mark.parametrize("strength", [0.0, 0.01, 0.5])
def test_greedy_groups_are_those_of_diverse_beam_search(policy: Policy, strength: float) -> None:
    """Of each group in turn the token with the highest log p - strength x (groups before it that took the token)."""
    opening = policy.tokenizer.encode("attic to vault? cave mill")
    beams: list[list[int]] = [[], [], []]
    for step in range(6):
        for number, beam in enumerate(beams):
            scores = log_probs(policy, [*opening, *beam])
            for other in beams[:number]:
                scores[other[step]] -= strength
            beam.append(int(scores.argmax()))
    assert [turn.ids for turn in sampled(policy, ["g"] * 3, 0.0, strength)] == beams
    assert len({tuple(beam) for beam in beams}) == (3 if strength > 0.1 else 1)


def test_other_groups_are_no_hindrance_and_log_probs_are_those_of_the_draw(policy: Policy) -> None:
    first, alone, second = sampled(policy, ["g", "h", "g"], 0.0, 50.0, size=1)
    assert first.ids == alone.ids != second.ids
    first, second = sampled(policy, ["g", "g"], 1.0, 2.0, size=1)
    lowered = log_probs(policy, policy.tokenizer.encode("attic to vault? cave mill"))
    assert first.logprobs[0] == pytest.approx(float(lowered[first.ids[0]]), abs=1e-4)
    lowered[first.ids[0]] -= 2.0
    assert second.logprobs[0] == pytest.approx(float(lowered.log_softmax(-1)[second.ids[0]]), abs=1e-4)


def test_rows_that_kept_apart_are_no_draws_of_the_policy() -> None:
    assert not plainly_drawn(Sampling(diversity=0.5).model_dump_json())
    assert plainly_drawn(Sampling().model_dump_json())
    assert "diversity" not in Sampling().model_dump()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"engine": {"type": "openai", "model": "m"}}, "does not let us"),
        ({"samples": 1}, "does nothing to one rollout"),
    ],
)
def test_what_cannot_keep_apart_is_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleConfig.model_validate({"sampling": {"diversity": 0.5}, **config})

import asyncio

import pytest
import torch
from architectures import POLICIES
from engine_rows import prompts_of, recomputed, scripted

from agentrl.engines.base import Sampling, Session, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.transformers import TransformersEngine


@pytest.mark.parametrize("name", POLICIES)
def test_a_beginning_that_all_share_is_computed_once(name: str) -> None:
    """As a system prompt with its tools is; what follows differs by task."""
    policy = POLICIES[name]()
    engine, tails = TransformersEngine(policy.model), prompts_of(policy)
    shared = (tails[0] * 70)[:70]
    sampling = Sampling(max_turn_tokens=6, max_tokens=400)

    async def one(number: int) -> Session:
        with engine.open((number,), f"task-{number // 2}") as session:
            session.observe([*shared, 1 + number // 2, *tails[number // 2]])
            session.act(await engine.turn(session, sampling, stop=(), seed=number))
        return session

    async def all_of_them() -> list[Session]:
        return await asyncio.gather(*(one(number) for number in range(24)))

    rows = blocking(all_of_them())
    prompts = sum(70 + len(tail) for tail in tails[:12])
    assert engine.work.computed - engine.work.sampled == prompts - 11 * 70
    for row in rows:
        expected = recomputed(policy, row.ids)
        assert row.logprobs[-6:] == pytest.approx(expected[-6:], abs=2e-4)


@pytest.mark.parametrize("name", POLICIES)
def test_bfloat16_gives_what_autocast_gives_also_after_new_weights(name: str) -> None:
    """Weights of linear layers are rounded once and not at each pass, and attention of one token is another kernel."""
    policy = POLICIES[name]()
    engine = TransformersEngine(policy.model, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    for version in (1, 2):
        with torch.no_grad():
            for weights in policy.model.parameters():
                weights.mul_(1.2)  # log-probs of the weights before differ by far more than rounding
        blocking(engine.load(Weights(version, policy.model)))
        gaps = []
        for row in scripted(policy, engine, Sampling(max_turn_tokens=12, max_tokens=80), version):
            with torch.autocast("cpu", torch.bfloat16):
                expected = recomputed(policy, row.ids)
            gaps += [abs(row.logprobs[number] - expected[number]) for number, flag in enumerate(row.mask) if flag]
        assert sum(gaps) / len(gaps) < 0.02

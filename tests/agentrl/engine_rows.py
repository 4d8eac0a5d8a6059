"""Rows that the embedded engine samples, and their log-probs by one plain pass, for tests."""

import asyncio

import torch
from architectures import lookup_tasks

from agentrl.engines.base import Sampling, Session
from agentrl.engines.blocking import blocking
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.policy import Policy
from agentrl.schemas.trajectory import Message, Role


def prompts_of(policy: Policy) -> list[list[int]]:
    return [policy.codec.opening([Message(role=Role.USER, content=t.prompt)], t.tools) for t in lookup_tasks(12)]


def stops(policy: Policy) -> list[int]:
    """Ordinary tokens, often sampled, so that turns end at different steps."""
    return [token for token in range(len(policy.tokenizer)) if token % 7 == 3]


def scripted(policy: Policy, engine: TransformersEngine, sampling: Sampling, seed: int = 0) -> list[Session]:
    """24 rows in groups of 2, whose turns are answered with observations of unequal length, up to three times."""
    prompts, stop = prompts_of(policy), stops(policy)

    async def one(number: int) -> Session:
        with engine.open((number,), f"group-{number // 2}") as session:
            session.observe(prompts[number // 2])
            for turn in range(3):
                session.act(await engine.turn(session, sampling, stop=stop, seed=1000 * seed + 10 * number + turn))
                observation = prompts[(number + turn) % 12][: 1 + number % 6]
                if (
                    turn == 2
                    or session.ids[-1] not in stop
                    or len(session.ids) + len(observation) >= sampling.max_tokens
                ):
                    break
                session.observe(observation)
        return session

    async def all_of_them() -> list[Session]:
        return await asyncio.gather(*(one(number) for number in range(24)))

    return blocking(all_of_them())


@torch.inference_mode()
def recomputed(policy: Policy, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities by one plain forward pass over the row."""
    logits = policy.model(torch.tensor([ids], device=policy.model.device)).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)
    return [float("nan"), *(logprobs[t - 1, ids[t]].item() for t in range(1, len(ids)))]

"""Whether sampling with our cache gives a model's own log-probs; some families scale, cap or route in ways that it does
not know."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.engines.base import Sampling, Session
from agentrl.engines.blocking import blocking
from agentrl.engines.transformers import TransformersEngine
from agentrl.schemas.training import TrainingRow

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the longest row of a batch."""

_HOT = 4.0
"""Temperature of the sampling that is probed: a model that is sure of each token would show no difference."""


_ALIBI = (
    "has ALiBi positions: it counts them from a mask of padding, and the embedded engine gives it masks of whole rows, "
    "since rows of different lengths share its cache; use a model with rotary positions, such as Qwen, Llama or "
    "Mistral, or an engine that knows ALiBi (engine: {type: vllm})"
)


class ModelMismatchError(ValueError):
    """A model whose sampled log-probs are not its own. Names the model and what differed."""


@torch.no_grad()
def check_sampling(policy: "Policy") -> None:
    """Raises ModelMismatchError if log-probs recorded in sampling with a cache, in a batch of prompts of different
    lengths, are not those of the model's own logits."""
    model, prompts = policy.model, [row.input_ids for row in probe_rows(policy.model)]
    sampling = Sampling(temperature=_HOT, max_tokens=max(map(len, prompts)) + 6, max_turn_tokens=6)
    where = f"model {policy.name} ({model.config.model_type})"
    try:
        with policy.autocast():
            made = blocking(_sampled(TransformersEngine(model), prompts, sampling))
    except Exception as error:
        if has_alibi(model.config.get_text_config()):
            raise ModelMismatchError(f"{where} {_ALIBI}") from error
        raise ModelMismatchError(
            f"{where} cannot be sampled with a key-value cache here ({type(error).__name__}: {error}); "
            "use a model whose layers are attention, such as Qwen, Llama, Mistral, Gemma or Phi"
        ) from error
    expected, worst = [], 0.0
    for turn in made:
        with policy.autocast():
            own = own_logprobs(model, turn.ids, _HOT)
        expected.append(own)
        mask = torch.tensor(turn.mask)
        worst = max(worst, gap(own[mask], torch.tensor(turn.logprobs)[mask]))
    rounded = model.dtype != torch.float32 or policy.precision != "float32"
    if worst > tolerance(expected, torch.bfloat16 if rounded else torch.float32):
        raise ModelMismatchError(
            f"{where}: log-probs sampled with a cache differ from its own logits by {worst:.2g} nats, so that it would "
            "be trained on wrong ratios; use a model whose layers are attention without length-dependent positions"
        )


def has_alibi(config: Any) -> bool:
    """Whether a model's positions are ALiBi: its attention falls with the distance of two tokens."""
    return bool(
        config.model_type == "bloom"
        or getattr(config, "alibi", False)
        or getattr(getattr(config, "attn_config", None), "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
    )


async def _sampled(engine: TransformersEngine, prompts: list[list[int]], sampling: Sampling) -> list[Session]:
    async def one(number: int, prompt: list[int]) -> Session:
        with engine.open((number,)) as session:
            session.observe(prompt)
            session.act(await engine.turn(session, sampling, stop=[], seed=number))
        return session

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def probe_rows(model: torch.nn.Module) -> list[TrainingRow]:
    """Fixed random tokens: rows with a shared prefix, of different lengths; one is longer than the original context if
    positions depend on length."""
    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    lengths = [9, 17, 12]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _BY_LENGTH:
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        lengths.append(int(getattr(config, "original_max_position_embeddings", None) or original) + 8)
    rng = random.Random(0)
    shared = [rng.randrange(3, config.vocab_size) for _ in range(5)]
    rows = []
    for number, length in enumerate(lengths):
        ids = shared + [rng.randrange(3, config.vocab_size) for _ in range(length - 5)]
        mask = [position > 0 for position in range(length)]
        rows.append(TrainingRow(row_id=str(number), unit=number, input_ids=ids, mask=mask, weights=[1.0] * length))
    return rows


def own_logprobs(model: Callable[..., object], ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [tokens] of one row from the model's own logits; 0 for the first token."""
    device = model.device  # type: ignore[attr-defined]
    tokens = torch.tensor([ids], device=device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float() / temperature  # type: ignore[attr-defined]
    chosen = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen]).cpu()


def gap(expected: Tensor, found_logprobs: Tensor) -> float:
    gap = (expected - found_logprobs).abs().max().item()
    return gap if gap == gap else float("inf")


def tolerance(expected: Sequence[Tensor], dtype: torch.dtype) -> float:
    """Rounding grows with the log-probs; bfloat16 has 8 bits of mantissa."""
    largest = max(logprobs.abs().max().item() for logprobs in expected)
    return 1e-4 * (1 + largest) if dtype == torch.float32 else 0.05 * (1 + largest)

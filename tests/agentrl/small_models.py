"""Models and rows small enough for tests of numbers."""

import random
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentrl.models.policy import Policy
from agentrl.schemas.training import TrainingRow

VOCABULARY = 61


def small_model(kind: str = "qwen2", seed: int = 0, vocabulary: int = VOCABULARY, inner: int = 48) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))


def small_policy(kind: str = "qwen2", seed: int = 0) -> Policy:
    return Policy(small_model(kind, seed), SimpleNamespace(), name=kind)  # type: ignore[arg-type]


def random_rows(number: int, seed: int = 0, shared: int = 6, pairs: bool = False) -> list[TrainingRow]:
    """Rows of 9 to 30 tokens; the first ``shared`` tokens are equal, as those of a system prompt are."""
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCABULARY) for _ in range(shared)]
    rows = []
    for index in range(number):
        length = rng.randint(9, 30)
        ids = prompt + [rng.randrange(VOCABULARY) for _ in range(length - shared)]
        mask = [False] * shared + [rng.random() < 0.6 for _ in range(length - shared - 1)] + [True]
        rows.append(
            TrainingRow(
                row_id=f"row-{index}",
                unit=index // 2 if pairs else index,
                label=1 - 2 * (index % 2),
                input_ids=ids,
                mask=mask,
                weights=[rng.uniform(0.5, 1) if pairs else rng.uniform(-1, 1)] * length,
                logprobs=[rng.uniform(-5, -3) if m else float("nan") for m in mask],
                ref_logprobs=[rng.uniform(-5, -3) if m else float("nan") for m in mask],
            )
        )
    return rows

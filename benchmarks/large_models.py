"""Models for CUDA devices, made from a config with random weights in bfloat16."""

from typing import Any


def qwen_05b(vocabulary: int) -> Any:
    """A Qwen2 of 0.5 B parameters, with the vocabulary of the real one. ``vocabulary`` is what its tokenizer needs."""
    assert vocabulary < 151_936
    return qwen(151_936, layers=24)


def qwen(vocabulary: int, layers: int, **settings: Any) -> Any:
    """A Qwen2 with layers as wide as those of Qwen2-0.5B."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **settings,
    )
    return Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)

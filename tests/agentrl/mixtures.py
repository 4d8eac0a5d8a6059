"""Small mixtures of experts of three families, for tests."""

from typing import Any

import torch
from architectures import qwen
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.models.policy import Policy

FAMILIES = ("qwen3-moe", "mixtral", "deepseek-v3")


def mixture(kind: str, experts: int = 4, layers: int = 2, scale: float = 0.1) -> Policy:
    """A token takes two experts in each layer with a router, which the first one of DeepSeek-V3 has not."""
    dense = qwen()
    sizes: dict[str, Any] = {
        "vocab_size": dense.model.config.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "num_experts_per_tok": 2,
        "initializer_range": scale,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    return Policy(_model(kind, sizes, experts).eval(), dense.tokenizer, kind)


def _model(kind: str, sizes: dict[str, Any], experts: int) -> Any:
    # the CPU build of vLLM has no kernel for heads that are smaller
    heads = {"num_key_value_heads": 2, "head_dim": 32}
    if kind == "qwen3-moe":
        own = {"num_experts": experts, "moe_intermediate_size": 32, "norm_topk_prob": True}  # as published ones
        config = Qwen3MoeConfig(**sizes, **heads, **own)
        return Qwen3MoeForCausalLM(config)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=experts))
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    groups = {"n_routed_experts": experts, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    mixed = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **latent, **groups, **mixed))

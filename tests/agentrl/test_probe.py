"""A model whose log-probs our passes would get wrong is trained by its own logits, or refused by name."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import VOCABULARY, random_rows
from torch import Tensor

from agentrl.algorithms.grpo import GRPO
from agentrl.engines.check import ModelMismatchError, check_sampling
from agentrl.models.policy import Policy
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.probe import needs_plain_pass
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs
from agentrl.training.step import Trainer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
LONG = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    },
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
FALCON = {"head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
FALCON |= {"mamba_n_groups": 1, "mamba_chunk_size": 8, "lm_head_multiplier": 0.3}
RECURRENT = {"lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 32, "head_dim": 8}
LLAMA4 = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "num_experts_per_tok": 1}

# name, changes to the sizes, whether our passes give its log-probs, whether it can be sampled
FAMILIES: list[tuple[str, dict[str, Any], bool, bool]] = [
    ("Qwen2", {}, True, True),
    ("Qwen3", {"head_dim": 8}, True, True),
    ("Llama", {}, True, True),
    ("Mistral", {"sliding_window": None}, True, True),
    ("Phi", {}, True, True),
    ("Phi3", {}, True, True),
    ("Gemma2", {"head_dim": 8}, True, True),
    ("GPT2", GPT2, True, True),
    ("Nemotron", {}, False, True),
    ("ModernBertDecoder", {}, False, True),
    ("Llama4Text", LLAMA4, False, True),
    ("FalconH1", FALCON, False, False),
    ("RecurrentGemma", RECURRENT, False, False),
    ("xLSTM", {"num_heads": 4, "num_blocks": 2, "embedding_dim": 32}, False, False),
    ("Mamba", {"state_size": 8}, True, False),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, True, False),
    ("Llama", DYNAMIC, False, False),
    ("Phi3", LONG, False, False),
]  # fmt: skip
HEADS = {"GPT2": "GPT2LMHeadModel", "Llama4Text": "Llama4ForCausalLM"}


def policy_of(name: str, changes: dict[str, Any]) -> Policy:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(changes if name == "GPT2" else SIZES | changes))
    model = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config).eval()
    if name == "RecurrentGemma":  # as large as those of a trained model, so that its soft cap acts
        model.lm_head.weight.data *= 10
    return Policy(model, SimpleNamespace(), name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "changes", "ours", "sampled"), FAMILIES, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(FAMILIES)]
)
def test_a_model_is_seen_alike_by_every_pass_or_refused(
    name: str, changes: dict[str, Any], ours: bool, sampled: bool
) -> None:
    policy = policy_of(name, changes)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert needs_plain_pass(policy) != ours
    assert any(f"{name} (" in str(entry.message) and "own logits" in str(entry.message) for entry in seen) != ours
    rows = random_rows(4)
    for row, logprob in zip(rows, batch_logprobs(policy, TrainingRows.of(rows)), strict=True):
        expected = own(policy.model, row.input_ids) * torch.tensor(row.mask)
        torch.testing.assert_close(torch.from_numpy(logprob), expected, atol=1e-3, rtol=1e-3)
    rows = [
        row.model_copy(update={"logprobs": logprob.tolist()})
        for row, logprob in zip(rows, batch_logprobs(policy, TrainingRows.of(rows)), strict=True)
    ]
    metrics = Trainer(policy, GRPO(), OptimizerConfig(), 1).step(TrainingRows.of(rows))
    assert metrics["behaviour_kl"] < 1e-4
    assert metrics["grad_norm"] > 0
    if sampled:
        check_sampling(policy_of(name, changes))
    else:
        with pytest.raises(ModelMismatchError, match=f"model {name} "):
            check_sampling(policy_of(name, changes))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("Falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}),
    ],
)
def test_models_whose_positions_are_alibi_are_refused_for_that(name: str, sizes: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with pytest.raises(ModelMismatchError, match=rf"^model {name} \({name.lower()}\) has ALiBi positions: .* rotary"):
        check_sampling(Policy(model, SimpleNamespace(), name))  # type: ignore[arg-type]


@torch.no_grad()
def own(model: Any, ids: list[int]) -> Tensor:
    logp = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), logp[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]])

"""Log-probabilities equal those of a plain forward pass, padded or packed, values and gradients."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from small_models import VOCABULARY, random_rows, small_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import agentrl.training.logprobs as module
import agentrl.training.packing as packing_module
from agentrl.training.batch import collate
from agentrl.training.logprobs import token_logprobs
from agentrl.training.packing import can_pack, pack, packed
from agentrl.training.rows import TrainingRows


def plain(model: torch.nn.Module, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [tokens] of one unpadded row, from all logits."""
    logp = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    chosen = logp[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen]), torch.cat([torch.zeros(1), -(logp.exp() * logp).sum(-1)[:-1]])


def gradients(model: torch.nn.Module, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize(("packing", "padded"), [(False, 0), (True, 1 << 20), (True, 200), (True, 1)])
@pytest.mark.parametrize("chunk", [1 << 24, 5 * VOCABULARY])
def test_equal_a_plain_forward_row_by_row(
    kind: str, packing: bool, padded: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_VALUES", chunk)
    monkeypatch.setattr(packing_module, "PADDED_SCORES", padded)
    model, rows = small_model(kind), random_rows(7)
    batch = collate(TrainingRows.of(rows), packing)
    noise = torch.randn(2, *batch.mask.shape)
    with packed(model, packing):
        logprobs, entropies = token_logprobs(model, batch.input_ids, batch.mask, batch.packing)
        ours = gradients(model, (noise[0] * logprobs + noise[1] * entropies).sum())
    total = torch.zeros(())
    for index, row in enumerate(rows):
        chosen, entropy = plain(model, row.input_ids)
        mask, n = torch.tensor(row.mask), len(row.input_ids)
        torch.testing.assert_close(logprobs[index, :n], chosen * mask, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropies[index, :n], entropy * mask, atol=1e-5, rtol=1e-5)
        total = total + ((noise[0, index, :n] * chosen + noise[1, index, :n] * entropy) * mask).sum()
    theirs = gradients(model, total)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "autocast", "kept"),
    [("cuda", torch.float32, False, True), ("cuda", torch.bfloat16, False, False),
     ("cuda", torch.float32, True, False), ("cpu", torch.float32, False, False)],
)  # fmt: skip
def test_grouped_heads_keep_scores_in_float32_on_cuda(
    device: str, dtype: torch.dtype, autocast: bool, kept: bool
) -> None:
    """Tensors of shapes alone stand for those on a GPU."""
    with FakeTensorMode():
        query = torch.empty(1, 4, 3, 8, device=device, dtype=dtype)
    with patch("torch.is_autocast_enabled", lambda device: autocast):
        assert packing_module._keeps_scores_of_groups(query) is kept


def test_keys_are_repeated_where_scores_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets as many heads of keys as of queries, and the same values and gradients come out."""
    model, rows = small_model("llama"), random_rows(5)
    batch = collate(TrainingRows.of(rows), True)
    heads: list[tuple[int, int, bool]] = []

    def watched(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, **settings: Any) -> Tensor:
        heads.append((query.shape[1], key.shape[1], enable_gqa))
        return attention(query, key, value, enable_gqa=enable_gqa, **settings)

    attention = packing_module.scaled_dot_product_attention
    monkeypatch.setattr(packing_module, "scaled_dot_product_attention", watched)
    results = []
    for kept in (False, True):
        monkeypatch.setattr(packing_module, "_keeps_scores_of_groups", lambda query, kept=kept: kept)
        with packed(model, True):
            logprobs, _ = token_logprobs(model, batch.input_ids, batch.mask, batch.packing)
        results.append((logprobs.detach(), gradients(model, logprobs.sum())))
    layers = model.config.num_hidden_layers
    assert heads == [(4, 2, True)] * layers + [(4, 4, False)] * layers
    (grouped, of_grouped), (repeated, of_repeated) = results
    torch.testing.assert_close(grouped, repeated, atol=1e-5, rtol=1e-5)
    for name, gradient in of_grouped.items():
        torch.testing.assert_close(gradient, of_repeated[name], atol=1e-4, rtol=1e-4)


def test_a_common_prefix_is_computed_once() -> None:
    packing = pack([[1, 2, 3, 4], [1, 2, 5], [7]])
    assert packing.input_ids.tolist() == [[1, 2, 3, 4, 5, 7]]
    assert packing.positions.tolist() == [[0, 1, 2, 3, 2, 0]]
    assert packing.places.tolist() == [[0, 1, 2, 3], [0, 1, 4, 0], [5, 0, 0, 0]]
    assert packing.blocks == ((3, 4),)


def test_attention_is_computed_for_rows_of_about_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "PADDED_SCORES", 28)
    packing = pack([[1, 2], [3, 4, 5, 6, 7], [8], [9, 10, 11, 12]])
    assert packing.blocks == ((2, 5), (2, 2)), "the two short rows would compute 42 scores of padding among the first"
    of_rows = [node for row in (1, 3, 0, 2) for node in packing.places[row].tolist()[: 5 if row in (1, 3) else 2]]
    assert packing.attended.tolist() == of_rows
    assert packing.attended[packing.outputs].tolist() == list(range(12)), "each output belongs to its node"


def test_no_attention_across_rows() -> None:
    """What another row of the pack holds changes nothing, to the last bit that the kernel keeps."""
    model = small_model().eval()
    first, other = random_rows(2, shared=0)
    changed = other.model_copy(update={"input_ids": [(token + 1) % VOCABULARY for token in other.input_ids]})
    results = []
    for neighbour in (other, changed):
        batch = collate(TrainingRows.of([first, neighbour]), packing=True)
        with torch.no_grad(), packed(model):
            results.append(token_logprobs(model, batch.input_ids, batch.mask, batch.packing)[0])
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=0)
    assert not torch.allclose(results[0][1], results[1][1])


def test_a_sliding_window_is_not_packed() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = small_model().config.to_dict() | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    config.pop("layer_types", None)
    assert can_pack(small_model())
    assert not can_pack(Qwen2ForCausalLM(Qwen2Config(**config)))


def test_the_attention_of_sampling_is_restored() -> None:
    model = small_model()
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError), packed(model):
        raise RuntimeError
    assert model.config._attn_implementation == before


def test_scaled_logits_are_refused() -> None:
    model = small_model()
    model.config.logit_scale = 0.5
    batch = collate(TrainingRows.of(random_rows(2)))
    with pytest.raises(ValueError, match="logit_scale"):
        token_logprobs(model, batch.input_ids, batch.mask)


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("name", "changes", "packs"),
    [
        ("Qwen3", {"head_dim": 8}, True),
        ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, True),
        ("Mistral", {"sliding_window": None}, True),
        ("Mistral", {"sliding_window": 8}, False),
        ("Phi3", {}, True),
        ("Gemma2", {"head_dim": 8}, False),  # soft caps
        ("Gemma3Text", {"head_dim": 8}, False),  # sliding windows
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}, True),
    ],
)
def test_other_architectures(name: str, changes: dict, packs: bool) -> None:
    """Packed where that is exact, padded elsewhere: the same numbers as a plain forward pass."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    sizes = SIZES | changes if name != "GPT2" else changes | {"vocab_size": VOCABULARY}
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, head)(config(**sizes)).eval()
    assert can_pack(model) == packs
    rows = random_rows(4)
    batch = collate(TrainingRows.of(rows), packs)
    with torch.no_grad(), packed(model, packs):
        logprobs, _ = token_logprobs(model, batch.input_ids, batch.mask, batch.packing)
    with torch.no_grad():
        for index, row in enumerate(rows):
            expected = plain(model, row.input_ids)[0] * torch.tensor(row.mask)
            torch.testing.assert_close(logprobs[index, : len(expected)], expected, atol=2e-5, rtol=1e-4)

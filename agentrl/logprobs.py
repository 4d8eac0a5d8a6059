"""Log-probabilities of given tokens under a model, without ever holding logits of all positions."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_VALUES = 1 << 26  # logits held at a time: 256 MiB in float32


def _chunk(hidden: Tensor, targets: Tensor, head: torch.nn.Module, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [tokens] of ``targets`` [tokens] given ``hidden`` [tokens, width]."""
    logits = head(hidden).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
    return chosen, entropy


def token_logprobs(model: "PreTrainedModel", input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and (detached) entropies [rows, tokens] of ``input_ids`` where ``mask``, 0 elsewhere.

    Element ``[:, t]`` belongs to ``input_ids[:, t]`` given the tokens before it. Rows are right-padded, so causal
    attention alone keeps padding out. Logits exist for masked positions only, a chunk at a time, and are recomputed in
    the backward pass.
    """
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    rows, places = mask[:, 1:].nonzero(as_tuple=True)
    flat = hidden[rows, places]
    targets = input_ids[rows, places + 1]
    head = model.get_output_embeddings()
    softcap = getattr(model.config, "final_logit_softcapping", None)
    size = max(1, _CHUNK_VALUES // model.config.vocab_size)
    parts = []
    for start in range(0, len(targets), size):
        arguments = (flat[start : start + size], targets[start : start + size], head, softcap)
        one_chunk = len(targets) <= size
        parts.append(
            checkpoint(_chunk, *arguments, use_reentrant=False)
            if torch.is_grad_enabled() and not one_chunk
            else _chunk(*arguments)
        )
    logprobs = torch.zeros(input_ids.shape, device=input_ids.device)
    entropies = torch.zeros_like(logprobs)
    if parts:
        chosen, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
        logprobs = logprobs.index_put((rows, places + 1), chosen)
        entropies[rows, places + 1] = entropy
    return logprobs, entropies

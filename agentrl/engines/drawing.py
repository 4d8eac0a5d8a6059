"""Drawing tokens from logits, with one given number per token."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from agentrl.engines.base import Sampling


def uniforms(seed: int, number: int) -> np.ndarray:
    """``number`` float32 numbers in [0, 1), a function of ``seed``; the first ones do not depend on ``number``."""
    digest = hashlib.shake_128(seed.to_bytes(8, "little")).digest(4 * number)
    return ((np.frombuffer(digest, dtype="<u4") >> 8) * np.float32(2.0**-24)).astype(np.float32)


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [rows, vocabulary] after temperature, top-k and top-p; excluded tokens are -inf."""
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return logits


def draw(logits: Tensor, sampling: Sampling, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row of ``logits`` [rows, vocabulary] and its log-probability, both [rows]: the first token at
    which the cumulative probability exceeds the row's number, in [0, 1)."""
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=torch.float32)
    logits = filtered(logits, sampling)
    largest = logits.amax(-1, keepdim=True)
    masses = (logits - largest).exp()
    cumulative = masses.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    tokens = torch.searchsorted(cumulative, numbers[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding never reaches a token of no probability
    tokens = torch.minimum(tokens, last)
    logprobs = logits.gather(-1, tokens) - largest - masses.sum(-1, keepdim=True).log()
    return tokens[:, 0], logprobs[:, 0]

"""Log-probabilities of training rows under a policy, without training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.models.policy import Policy
from agentrl.training.batch import check_rows, collate, micro_batches
from agentrl.training.logprobs import token_logprobs
from agentrl.training.packing import can_pack, packed
from schemas.training import TrainingRow


@torch.no_grad()
def batch_logprobs(policy: Policy, rows: Sequence[TrainingRow], micro_tokens: int = 8192) -> list[list[float]]:
    """Log-probabilities under ``policy`` of each row's tokens, in order; 0 for tokens whose mask is false."""
    model = policy.model.eval()
    packs = can_pack(model)
    filled: dict[int, list[float]] = {}
    with packed(model, packs):
        for part in micro_batches([[row] for row in rows], micro_tokens):
            batch = collate(part, packs).to(model.device)
            logprobs: Tensor = token_logprobs(model, batch.input_ids, batch.mask, batch.packing)[0].cpu()
            for row, values in zip(part, logprobs.tolist(), strict=True):
                filled[id(row)] = values[: len(row.input_ids)]
    return [filled[id(row)] for row in rows]


def reference_logprobs(policy: Policy, rows: Sequence[TrainingRow], micro_tokens: int = 8192) -> list[TrainingRow]:
    """The rows, in order, with ``ref_logprobs`` under ``policy`` on the tokens whose mask is true.

    Raises TrainingError if a row has a token outside the policy's vocabulary.
    """
    check_rows(rows, policy)
    values = batch_logprobs(policy, rows, micro_tokens)
    return [row.model_copy(update={"ref_logprobs": one}) for row, one in zip(rows, values, strict=True)]

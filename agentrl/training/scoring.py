"""Log-probabilities of training rows under a policy, without training."""

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from agentrl.models.policy import Policy
from agentrl.training.batch import check_rows, collate, micro_batches
from agentrl.training.logprobs import token_logprobs
from agentrl.training.packing import can_pack, packed
from agentrl.training.probe import needs_plain_pass
from agentrl.training.rows import TrainingRows, nested


@torch.no_grad()
def batch_logprobs(policy: Policy, rows: TrainingRows, micro_tokens: int = 8192) -> list[np.ndarray]:
    """Log-probabilities under ``policy`` of each row's tokens, [tokens] in float32, in order; 0 for tokens whose mask
    is false."""
    model = policy.model.eval()
    plain = needs_plain_pass(policy)
    packs = can_pack(model) and not plain
    lengths = np.diff(rows.lists("input_ids")[0])
    filled: dict[int, np.ndarray] = {}
    with policy.autocast(), packed(model, packs):
        for part in micro_batches(rows, [[row] for row in range(len(rows))], micro_tokens):
            batch = collate(rows.take(part), packs).to(model.device)
            logprobs: Tensor = token_logprobs(model, batch.input_ids, batch.mask, batch.packing, plain)[0].cpu()
            for row, values in zip(part, logprobs.float().numpy(), strict=True):
                filled[row] = values[: lengths[row]].copy()  # not a view, which would keep the padded batch
    return [filled[row] for row in range(len(rows))]


def reference_logprobs(policy: Policy, batch: pa.RecordBatch, micro_tokens: int = 8192) -> pa.RecordBatch:
    """The rows of a batch, in order, with ``ref_logprobs`` under ``policy`` on the tokens whose mask is true.

    Raises TrainingError if a row has a token outside the policy's vocabulary.
    """
    rows = TrainingRows([batch])
    if not len(rows):
        return batch
    check_rows(rows, policy)
    offsets, _ = rows.lists("input_ids")
    column = nested(offsets, np.concatenate(batch_logprobs(policy, rows, micro_tokens)), "ref_logprobs")
    return batch.set_column(batch.schema.get_field_index("ref_logprobs"), batch.schema.field("ref_logprobs"), column)

"""Log-probabilities of training rows under a policy, without training."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from agentrl.engines.routes import RouteShape, route_shape
from agentrl.models.policy import Policy
from agentrl.training.backend import Backend, OneProcess
from agentrl.training.batch import Batch, check_rows, collate, micro_batches
from agentrl.training.logprobs import token_logprobs
from agentrl.training.packing import packed
from agentrl.training.probe import packs, plain_pass
from agentrl.training.rows import TrainingRows, nested


@dataclass(frozen=True)
class Passes:
    """Passes of a model over micro batches, without training: each rank computes its share of them. Those of the
    policy are ``packed`` over prefixes. Those with the shape of ``routes`` replay the routes that rows have."""

    backend: Backend
    model: Any
    micro_tokens: int
    packed: bool
    routes: RouteShape | None = None

    @torch.no_grad()
    def by_row(
        self, rows: TrainingRows, groups: Sequence[Sequence[int]], work: Callable[[Batch], Tensor]
    ) -> list[np.ndarray]:
        """What ``work`` finds for each row's tokens, [tokens] in float32, in order, on all ranks. It gives [rows,
        tokens] for a batch. ``groups`` holds the rows that stay together, by position."""
        parts = list(micro_batches(rows, groups, self.micro_tokens))
        share, shares = self.backend.share, self.backend.shares
        lengths = np.diff(rows.lists("input_ids")[0])
        by_index: dict[int, np.ndarray] = {}
        with packed(self.model, self.packed):
            for number in range(share, shares * math.ceil(len(parts) / shares), shares):
                # all ranks must take part in every round: one without a part left computes one that does not count
                part = parts[number] if number < len(parts) else parts[0][:2]
                batch = collate(rows.take(part), self.packed, self.backend.sequence, self.routes)
                batch = batch.to(self.backend.device)
                values = self.backend.run(partial(work, batch)).float().cpu().numpy()
                if number < len(parts):
                    for row, row_values in zip(part, values, strict=True):
                        by_index[row] = row_values[
                            : lengths[row]
                        ].copy()  # not a view, which would keep the padded batch
        by_index = self.backend.collected(by_index)
        return [by_index[row] for row in range(len(rows))]


def batch_logprobs(
    policy: Policy, rows: TrainingRows, micro_tokens: int = 8192, backend: Backend | None = None
) -> list[np.ndarray]:
    """Log-probabilities under ``policy`` of each row's tokens, [tokens] in float32, in order; 0 for tokens whose mask
    is false. Without a ``backend``, the policy's model is whole in this process. Routes that rows have are
    replayed."""
    model = policy.model.eval()
    backend = backend or OneProcess(model)
    plain = plain_pass(policy, backend)

    def logprobs(batch: Batch) -> Tensor:
        with policy.autocast():
            return token_logprobs(model, batch.input_ids, batch.mask, batch.packing, plain, batch.routes)[0]

    passes = Passes(backend, model, micro_tokens, packs(model, backend, plain), route_shape(model))
    return passes.by_row(rows, alone(rows), logprobs)


def alone(rows: TrainingRows) -> list[list[int]]:
    """Each row by itself, as a group of rows."""
    return [[row] for row in range(len(rows))]


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

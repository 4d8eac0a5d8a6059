"""What training steps saw of the tokens that they trained on. It is taken from the pass that the gradients come from,
so it costs no pass of its own."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from agentrl.training.backend import Backend


class TokenRecord:
    """Log-probs and entropies of a step's trained tokens, by the position of their row, in float16."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}

    def clear(self) -> None:
        """Forget all, because a step begins."""
        self._rows = {}

    def add(self, positions: Sequence[int], mask: Tensor, logprobs: Tensor, entropies: Tensor) -> None:
        """Keep those of a micro batch: its rows' positions, and what is [rows, tokens]."""
        both = torch.stack([logprobs.detach()[mask], entropies.detach()[mask]]).half().cpu().numpy()
        ends = mask.sum(-1).cumsum(0).tolist()
        self._rows |= dict(zip(positions, np.split(both, ends[:-1], axis=1), strict=True))

    def table(self, rows: int, backend: Backend) -> pa.Table:
        """``train_logprobs`` and ``entropy`` of a step of so many rows, in their order: a number for each trained
        token, as the policy was before the step. All ranks must ask for it."""
        by_index = backend.collected(self._rows)
        both = [by_index[row] for row in range(rows)]
        offsets = pa.array(np.cumsum([0, *(values_of_row.shape[1] for values_of_row in both)]), pa.int32())
        values = np.concatenate(both, axis=1)
        return pa.table(
            {
                name: pa.ListArray.from_arrays(offsets, pa.array(values[index]))
                for index, name in enumerate(("train_logprobs", "entropy"))
            }
        )

"""Training rows as tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from schemas.training import TrainingRow


@dataclass(frozen=True)
class Batch:
    """Right-padded tensors, all [rows, tokens] but ``label`` [rows]. ``mask`` is true on the tokens trained on; padding
    is false everywhere. The two sides of a pair are neighbours: even rows chosen, odd rows rejected.
    """

    input_ids: Tensor
    mask: Tensor
    weights: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    label: Tensor

    def to(self, device: torch.device) -> "Batch":
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()})


def _pad(lists: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(len(lists), width, dtype=dtype)
    for row, values in enumerate(lists):
        out[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return out


def collate(rows: Sequence[TrainingRow]) -> Batch:
    """Rows as one padded batch. Log-probabilities outside the mask (NaN in the buffer) become 0."""
    width = max(len(row.input_ids) for row in rows)
    mask = _pad([row.mask for row in rows], width, torch.bool)
    return Batch(
        input_ids=_pad([row.input_ids for row in rows], width, torch.long),
        mask=mask,
        weights=_pad([row.weights for row in rows], width, torch.float32),
        logprobs=_pad([row.logprobs for row in rows], width, torch.float32).masked_fill(~mask, 0.0),
        ref_logprobs=_pad([row.ref_logprobs for row in rows], width, torch.float32).masked_fill(~mask, 0.0),
        label=torch.tensor([row.label for row in rows]),
    )


def units(rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
    """Rows grouped by unit, in order; rows of one unit must be neighbours."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row.unit)]


def micro_batches(groups: Sequence[list[TrainingRow]], max_tokens: int) -> Iterator[list[TrainingRow]]:
    """Split units into batches of at most ``max_tokens`` padded tokens, units of similar length together."""
    current: list[TrainingRow] = []
    width = 0
    for group in sorted(groups, key=lambda group: max(len(row.input_ids) for row in group)):
        grown = max(width, *(len(row.input_ids) for row in group))
        if current and grown * (len(current) + len(group)) > max_tokens:
            yield current
            current, grown = [], max(len(row.input_ids) for row in group)
        current, width = [*current, *group], grown
    if current:
        yield current

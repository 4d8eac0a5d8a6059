"""Training rows as tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.training.packing import Packing, pack
from schemas.training import TrainingRow

if TYPE_CHECKING:
    from agentrl.models.policy import Policy


class TrainingError(ValueError):
    """Data or a loss that cannot be trained on. Names the rows; ``rows`` are those of a step that failed."""

    def __init__(self, message: str, rows: "Sequence[TrainingRow]" = ()) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Batch:
    """Right-padded tensors, all [rows, tokens] except ``label`` [rows]. ``mask`` is true on the tokens trained on;
    padding is false everywhere. The two sides of a pair are neighbours: even rows chosen, odd rows rejected.
    ``packing`` is the same tokens as one packed sequence, if that was asked for.
    """

    input_ids: Tensor
    mask: Tensor
    weights: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    label: Tensor
    packing: Packing | None = None

    def to(self, device: torch.device) -> "Batch":
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if value is not None})


def _pad(lists: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*values, *[0] * (width - len(values))] for values in lists], dtype=dtype)


def collate(rows: Sequence[TrainingRow], packing: bool = False) -> Batch:
    """Rows as one padded batch. Log-probabilities outside the mask (NaN in the buffer) become 0."""
    width = max(len(row.input_ids) for row in rows)
    mask = _pad([row.mask for row in rows], width, torch.bool)

    def aligned(lists: Sequence[Sequence[float]]) -> Tensor:
        if not any(lists):
            return torch.zeros(mask.shape)
        return _pad(lists, width, torch.float32).masked_fill(~mask, 0.0)

    return Batch(
        input_ids=_pad([row.input_ids for row in rows], width, torch.long),
        mask=mask,
        weights=aligned([row.weights for row in rows]),
        logprobs=aligned([row.logprobs for row in rows]),
        ref_logprobs=aligned([row.ref_logprobs for row in rows]),
        label=torch.tensor([row.label for row in rows]),
        packing=pack([row.input_ids for row in rows]) if packing else None,
    )


def units(rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
    """Rows grouped by unit, in order; rows of one unit must be neighbours."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row.unit)]


def _length_class(length: int) -> int:
    """Bucket of a length. Rows of one bucket share a batch with at most about a quarter of padding."""
    step = 1 << max(0, length.bit_length() - 3)
    return -(-length // step) * step


def micro_batches(groups: Sequence[list[TrainingRow]], max_tokens: int) -> Iterator[list[TrainingRow]]:
    """Split units into batches of at most ``max_tokens`` padded tokens: units of similar length together, and among
    them those that begin alike, which a packed forward pass computes once."""

    def width_of(group: list[TrainingRow]) -> int:
        return max(len(row.input_ids) for row in group)

    current: list[TrainingRow] = []
    width = 0
    for group in sorted(groups, key=lambda group: (_length_class(width_of(group)), group[0].input_ids)):
        grown = max(width, width_of(group))
        if current and grown * (len(current) + len(group)) > max_tokens:
            yield current
            current, grown = [], width_of(group)
        current, width = [*current, *group], grown
    if current:
        yield current


def check_rows(rows: Sequence[TrainingRow], policy: "Policy") -> None:
    """Refuse rows that cannot be trained on, before the first step.

    Raises TrainingError that names the rows: no trained token; lists of different lengths; NaN or infinite weights
    (rewards, advantages) or log-probabilities on trained tokens; token ids outside the model's vocabulary.
    """
    size: int = policy.model.config.get_text_config().vocab_size
    problems: dict[str, list[str]] = {}
    for row in rows:
        for problem in _problems(row, size):
            problems.setdefault(problem, []).append(row.row_id)
    if problems:
        raise TrainingError(
            "; ".join(
                f"{problem} in {', '.join(ids[:5])}{f' and {len(ids) - 5} more' if len(ids) > 5 else ''}"
                for problem, ids in problems.items()
            )
        )


def _problems(row: TrainingRow, vocabulary: int) -> Iterator[str]:
    length = len(row.input_ids)
    for name in ("mask", "weights", "logprobs", "ref_logprobs"):
        values = getattr(row, name)
        if len(values) != length and (values or name in ("mask", "weights")):
            yield f"{name} and input_ids differ in length"
            return
        if name != "mask" and any(not math.isfinite(v) for v, m in zip(values, row.mask, strict=False) if m):
            yield f"{name} not finite on a trained token (look at the rewards and log-probs of the rollouts)"
    if not any(row.mask[1:]):
        yield "no action token to train on (look at action_mask)"
    if row.input_ids and not 0 <= min(row.input_ids) <= max(row.input_ids) < vocabulary:
        yield f"a token id outside the model's vocabulary of {vocabulary} (another tokenizer?)"

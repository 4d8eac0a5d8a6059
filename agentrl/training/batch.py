"""Training rows as tensors."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentrl.engines.routes import Routes, RouteShape
from agentrl.schemas.training import CE_WEIGHTS, ROUTES
from agentrl.training.epochs import starts_of
from agentrl.training.packing import Packing, pack
from agentrl.training.rows import TrainingRows, flat, holds_true

if TYPE_CHECKING:
    import pyarrow as pa

    from agentrl.models.policy import Policy
    from agentrl.training.sequence import SequenceGroup


class TrainingError(ValueError):
    """Data or a loss that cannot be trained on. Names the rows; ``rows`` are those of a step that failed."""

    def __init__(self, message: str, rows: TrainingRows | None = None) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Batch:
    """Right-padded tensors, all [rows, tokens] except ``label`` [rows]. ``mask`` is true on the tokens trained on;
    padding is false everywhere. The two sides of a pair are neighbours: even rows chosen, odd rows rejected.
    ``packing`` is the same tokens as one packed sequence, if that was asked for. ``ce_weights`` are the weights of the
    second stream, if the rows have one. ``unit`` [rows] numbers units from 0, if one of them has several rows.
    ``routes`` are those of a pass over the batch: of the nodes of ``packing``, or of all padded tokens.
    """

    input_ids: Tensor
    mask: Tensor
    weights: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    label: Tensor
    packing: Packing | None = None
    ce_weights: Tensor | None = None
    unit: Tensor | None = None
    routes: Routes | None = None

    def of_episodes(self, values: Tensor) -> Tensor:
        """Sums of values [rows] over the rows of each unit, [units]: a policy gradient's units are episodes."""
        if self.unit is None:
            return values
        return values.new_zeros(int(self.unit.max()) + 1).index_add(0, self.unit, values)

    @property
    def scored(self) -> Tensor:
        """The tokens whose log-probs a loss needs, of either stream, [rows, tokens]."""
        return self.mask if self.ce_weights is None else self.mask | (self.ce_weights != 0)

    @property
    def row_weights(self) -> Tensor:
        """What each row counts in a loss of whole rows, [rows]: the mean weight of its trained tokens."""
        return (self.weights * self.mask).sum(-1) / self.mask.sum(-1)

    def to(self, device: torch.device) -> "Batch":
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if value is not None})


def collate(
    rows: TrainingRows,
    packing: bool = False,
    sequence: "SequenceGroup | None" = None,
    shape: RouteShape | None = None,
) -> Batch:
    """Rows as one padded batch. Log-probabilities outside the mask (NaN in the buffer) become 0; so does a column of
    which a row has nothing. ``sequence`` are the ranks that compute the packing together. Routes of rows that have some
    are read if ``shape`` says what those of the model are like."""
    offsets, ids = rows.lists("input_ids")
    places = np.arange(np.diff(offsets).max())

    def padded(name: str, dtype: torch.dtype) -> Tensor:
        starts, values = rows.lists(name)
        out = torch.zeros((len(rows), len(places)), dtype=dtype)
        out[torch.from_numpy(places < np.diff(starts)[:, None])] = torch.from_numpy(values.copy()).to(dtype)
        return out

    mask = padded("mask", torch.bool)
    mask[:, 0] = False  # nothing comes before the first token, so it has no log-probability

    def aligned(name: str) -> Tensor:
        return padded(name, torch.float32).masked_fill(~mask, 0.0)

    ce_weights = None
    if CE_WEIGHTS in rows.schema.names:
        ce_weights = padded(CE_WEIGHTS, torch.float32)
        ce_weights[:, 0] = 0.0
    routes, marks, lengths = None, None, np.diff(offsets)
    if shape and ROUTES in rows.schema.names:
        data = rows.table()[ROUTES].to_pylist()
        routes, marks = _routes(data, shape, lengths), _marks(data, shape, lengths) if packing else None
    packed = None
    if packing:
        packed = pack([row_ids.tolist() for row_ids in np.split(ids, offsets[1:-1])], sequence, marks)
    return Batch(
        input_ids=padded("input_ids", torch.long),
        mask=mask,
        weights=aligned("weights"),
        logprobs=aligned("logprobs"),
        ref_logprobs=aligned("ref_logprobs"),
        label=torch.from_numpy(rows.scalars("label").astype(np.int64)),
        packing=packed,
        ce_weights=ce_weights,
        unit=_numbered(unit_starts(rows)),
        routes=routes.part(packed.owner) if routes and packed else routes,
    )


def _routes(data: Sequence[bytes], shape: RouteShape, lengths: np.ndarray) -> Routes:
    """Routes of padded rows, [rows x width], from their bytes. Raises TrainingError if a row has too many, or some of
    another model."""
    indices = np.zeros((len(data), lengths.max(), len(shape.layers), shape.k), np.uint8 if shape.bytewise else np.int32)
    known = np.zeros(indices.shape[:2], bool)
    for number, (row, length) in enumerate(zip(data, lengths, strict=True)):
        try:
            given = shape.read(row)
        except ValueError as error:
            raise TrainingError(f"{error}; leave routes out") from None
        if len(given) > length:
            raise TrainingError(f"a row of {length} tokens has routes of {len(given)}; they are of another row")
        indices[number, : len(given)], known[number, : len(given)] = given, True
    return Routes(torch.from_numpy(indices).flatten(0, 1), torch.from_numpy(known).flatten())


def _marks(data: Sequence[bytes], shape: RouteShape, lengths: np.ndarray) -> list[list[bytes]]:
    """What differs between tokens that go to different experts, [rows][tokens]."""
    size = shape.token_bytes
    return [
        [row[size * number : size * (number + 1)] for number in range(length)]
        for row, length in zip(data, lengths, strict=True)
    ]


def _numbered(starts: np.ndarray) -> Tensor | None:
    """The number of each row's unit in a batch, [rows]; None if each has one row."""
    sizes = np.diff(starts)
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)) if (sizes > 1).any() else None


def units(rows: TrainingRows) -> list[list[int]]:
    """Positions of rows grouped by unit, in order; rows of one unit must be neighbours."""
    starts = unit_starts(rows).tolist()
    return [list(range(start, end)) for start, end in pairwise(starts)]


def unit_starts(rows: TrainingRows) -> np.ndarray:
    """The position of the first row of each unit, [units + 1]; the last one is the number of rows."""
    return starts_of(rows.scalars("unit"))


def _length_class(length: int) -> int:
    """Bucket of a length. Rows of one bucket share a batch with at most about a quarter of padding."""
    step = 1 << max(0, length.bit_length() - 3)
    return -(-length // step) * step


def micro_batches(rows: TrainingRows, groups: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
    """Split units, given by the positions of their rows, into batches of at most ``max_tokens`` padded tokens: units of
    similar length together, and among them those that begin alike, which a packed forward pass computes once."""
    offsets, ids = rows.lists("input_ids")
    lengths = np.diff(offsets).tolist()
    text = ids.astype(">u4").tobytes()  # compares as the token ids do

    def width_of(group: Sequence[int]) -> int:
        return max(lengths[row] for row in group)

    def place_of(group: Sequence[int]) -> tuple[int, bytes]:
        first = group[0]
        return _length_class(width_of(group)), text[4 * offsets[first] : 4 * offsets[first + 1]]

    current: list[int] = []
    width = 0
    for group in sorted(groups, key=place_of):
        grown = max(width, width_of(group))
        if current and grown * (len(current) + len(group)) > max_tokens:
            yield current
            current, grown = [], width_of(group)
        current, width = [*current, *group], grown
    if current:
        yield current


def check_rows(rows: TrainingRows, policy: "Policy", rank: int = 0, world: int = 1) -> None:
    """Refuse rows that cannot be trained on, before the first step. Rank ``rank`` of ``world`` looks at its share.

    Raises TrainingError that names the rows: no trained token; lists of different lengths; NaN or infinite weights
    (rewards, advantages) or log-probabilities on trained tokens; token ids outside the model's vocabulary; weights of
    the second stream that are not finite.
    """
    size: int = policy.model.config.get_text_config().vocab_size
    problems: dict[str, list[str]] = {}
    for batch in rows.batches[rank::world]:
        for problem, places in _problems(batch, size):
            names = batch.column("row_id").take(places).to_pylist() if len(places) else []
            problems.setdefault(problem, []).extend(names)
    if problems_found := {problem: ids for problem, ids in problems.items() if ids}:
        raise TrainingError(
            "; ".join(
                f"{problem} in {', '.join(ids[:5])}{f' and {len(ids) - 5} more' if len(ids) > 5 else ''}"
                for problem, ids in problems_found.items()
            )
        )


def check_lengths(rows: TrainingRows, policy: "Policy") -> None:
    """Warn of rows that are longer than the model's context, and count them: its rollouts end before they come that
    far, and its positions beyond are untrained. Raises TrainingError if all rows are."""
    context: int | None = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    lengths = [np.diff(batch.column("input_ids").offsets.to_numpy()) for batch in rows.batches]
    longer = sum(int((length > context).sum()) for length in lengths) if context else 0
    if not longer:
        return
    reason = (
        f"{longer} of {len(rows)} rows to train on are longer than the context of {context} tokens of the model "
        f"{policy.name} (the longest has {max(int(length.max()) for length in lengths)}), whose rollouts end before "
        "that; take a model with a longer context (size.context of the tiny one), or shorter rows "
        "(trajectories.segment)"
    )
    if longer == len(rows):
        raise TrainingError(reason)
    warnings.warn(reason, stacklevel=2)


def _problems(batch: "pa.RecordBatch", vocabulary: int) -> Iterator[tuple[str, np.ndarray]]:
    """What may be wrong with rows, and the places in ``batch`` of those that have it. Of a row whose lists differ in
    length nothing more is said."""
    offsets, ids = flat(batch.column("input_ids"))
    length = np.diff(offsets)
    usable = np.ones(len(length), dtype=bool)
    second = [CE_WEIGHTS] * (CE_WEIGHTS in batch.schema.names)
    columns = {name: flat(batch.column(name)) for name in ("mask", "weights", "logprobs", "ref_logprobs", *second)}
    for name, (starts, _) in columns.items():
        own = np.diff(starts)
        differs = usable & (own != length) & ((own > 0) | (name in ("mask", "weights")))
        yield f"{name} and input_ids differ in length", np.flatnonzero(differs)
        usable &= ~differs
    mask_starts, mask = columns.pop("mask")
    cross_entropy = columns.pop(CE_WEIGHTS, None)
    for name, (starts, values) in columns.items():
        broken = ~np.isfinite(values)
        if broken.any():
            owner, offset = _owners(starts, np.flatnonzero(broken))
            known = usable[owner]
            owner, offset = owner[known], offset[known]
            owner = owner[mask[mask_starts[owner] + offset]]
            problem = f"{name} not finite on a trained token (look at the rewards and log-probs of the rollouts)"
            yield problem, np.unique(owner)
    # nothing comes before the first token of a row, so it is not trained on
    untrained = usable & ~holds_true(mask_starts[:-1] + 1, mask_starts[1:], mask)
    if cross_entropy is not None:
        ce_starts, ce_weights = cross_entropy
        owner, _ = _owners(ce_starts, np.flatnonzero(~np.isfinite(ce_weights)))
        yield f"{CE_WEIGHTS} not finite", np.unique(owner[usable[owner]])
        untrained &= ~holds_true(ce_starts[:-1] + 1, ce_starts[1:], np.not_equal(ce_weights, 0))
    yield "no action token to train on (look at action_mask)", np.flatnonzero(untrained)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        owner, _ = _owners(offsets, np.flatnonzero((ids < 0) | (ids >= vocabulary)))
        yield (
            f"a token id outside the model's vocabulary of {vocabulary} (another tokenizer?)",
            np.unique(owner[usable[owner]]),
        )


def _owners(starts: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each place in a column's values, and the place within the row."""
    owner = np.searchsorted(starts, places, side="right") - 1
    return owner, places - starts[owner]

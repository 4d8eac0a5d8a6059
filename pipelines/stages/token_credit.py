"""Training rows of stored rollouts whose tokens weigh different amounts: by what the group did, by log-probs, or by
advantages of the user's own. Rollouts pass through memory in parts; of each one, only numbers stay."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload

import numpy as np
import pyarrow as pa

from agentrl.advantages.turns import progress_weights
from agentrl.algorithms.policy_gradient import WHOLE, ByToken, Experience, PolicyGradient
from agentrl.pipelines.parts.selected import TEXT_ROWS, Selected
from agentrl.pipelines.parts.training_rows import outcomes, sides, trained_on
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.models.policy import Policy
    from agentrl.online.off_policy import RatioSums
    from agentrl.online.teacher import Teacher
    from agentrl.training.rows import TrainingRows

Item = TypeVar("Item")

PART_TOKENS = 2**18
"""The most tokens that are held as rollouts, unless one group has more."""


class TokenCredit(NamedTuple):
    """``batches`` of training rows; ``lr_scale`` is 0 if the update is to be skipped."""

    metrics: dict[str, float]
    lr_scale: float
    batches: Iterator[pa.RecordBatch]


def credited_by_token(
    chosen: Selected,
    algorithm: PolicyGradient,
    policy: "Policy",
    micro_tokens: int,
    folder: Path,
    values: Mapping[str, Sequence[StepValue]] = MappingProxyType({}),
    teacher: "Teacher | None" = None,
) -> TokenCredit:
    """Training rows of any algorithm that needs no new rollouts. Rows lie in files in ``folder``, with the log-probs of
    ``policy`` if they are needed, and later with their weights. ``chosen`` has the columns ``OUTCOME``; ``values`` of
    turns, by trajectory, are for ``credit: values``, and ``teacher`` is that of an algorithm that needs one."""
    from agentrl.online.credit import share_of
    from agentrl.online.off_policy import guarded
    from agentrl.training.rows import write_rows

    work = _Work(chosen, algorithm, policy, micro_tokens, values, teacher)
    write_rows(folder / "scored.arrow", work.scored())
    of_rows = work.found
    advantages, keep, degenerate = work.advantages(folder / "scored.arrow")
    keep = keep & ~of_rows.out_of_context
    metrics, lr_scale = {"degenerate_rows": float(degenerate.sum())}, 1.0
    if teacher:
        metrics |= teacher.metrics()
    if algorithm.off_policy:
        versions = chosen.scalars["policy_version"].to_numpy()[of_rows.positions]
        staleness = versions.max(initial=0) - versions
        keep, more, lr_scale = guarded(algorithm.off_policy, work.sums(), staleness, keep)
        metrics.update(more)
    live = np.zeros(len(keep), dtype=bool)
    write_rows(folder / "weighted.arrow", work.weighted(folder / "scored.arrow", advantages, keep, live))
    (folder / "scored.arrow").unlink()
    share = share_of(algorithm, of_rows.actions, live, keep, of_rows.episodes)
    made = (_scaled(rows, share, of_rows.episodes) for rows in _batches(folder / "weighted.arrow"))
    return TokenCredit(metrics, lr_scale, made)


class _Work:
    """One credit at work. Numbers of rows are places in ``found``, and in a file the ``unit`` of a row."""

    def __init__(
        self,
        chosen: Selected,
        algorithm: PolicyGradient,
        policy: "Policy",
        micro_tokens: int,
        values: Mapping[str, Sequence[StepValue]],
        teacher: "Teacher | None" = None,
    ) -> None:
        self.chosen = chosen
        self.values = values
        self.teacher = teacher
        self.algorithm = algorithm
        self.policy = policy
        self.micro_tokens = micro_tokens
        self.found = outcomes(chosen, algorithm, policy)
        self.taken = np.zeros(len(self.found.positions))
        self._sums: list[RatioSums] = []
        self._summed: list[np.ndarray] = []

    def scored(self) -> Iterator[pa.RecordBatch]:
        """Rows, with the log-probs of the policy as ``ref_logprobs`` if the algorithm needs them. Each batch holds
        whole groups."""
        from agentrl.training.scoring import reference_logprobs

        of_rows, labels = self.found, sides(self.chosen)
        number = np.zeros(len(self.chosen), np.int64)
        number[of_rows.positions] = np.arange(len(of_rows.positions))
        for part in self.chosen.in_groups(self.policy, of_rows.positions, of_rows.groups, PART_TOKENS):
            ones = np.ones(len(part.positions))
            rows = trained_on(part, ones, labels[part.positions], units=number[part.positions])
            if self.algorithm.kl or self.algorithm.off_policy or not self.algorithm.credits_returns:
                rows = reference_logprobs(self.policy, rows, self.micro_tokens)
                self._measure(rows)
            yield rows

    def _measure(self, rows: pa.RecordBatch) -> None:
        """Keep what all rows must be known for: penalties, and sums of ratios."""
        from agentrl.online.credit import penalty
        from agentrl.online.off_policy import RatioSums, ratio_sums

        kl, numbers = self.algorithm.kl, rows.column("unit").to_numpy()
        sums = []
        for number, (mask, sampled, current) in zip(numbers.tolist(), _rows_of(rows), strict=True):
            if kl and kl.where == "reward":
                self.taken[number] = float(penalty(kl, sampled, current, mask).double().sum())
            if self.algorithm.off_policy:
                ratio, inside, importance = self._importance(mask, sampled, current)
                sums.append(ratio_sums(ratio, inside, importance))
        if sums:
            self._sums.append(RatioSums.concat(sums))
            self._summed.append(numbers)

    def advantages(self, path: Path) -> tuple[np.ndarray | ByToken, np.ndarray, np.ndarray]:
        """Of the rows of a file: the advantage of each one, or of each of its tokens; which the algorithm keeps, and
        which are in a group of equal rewards."""
        from agentrl.online.credit import row_advantages, token_advantages
        from agentrl.training.rows import TrainingRows

        of_rows = self.found
        rewards, shaped, groups = of_rows.of_episodes()
        taken = np.bincount(of_rows.episodes, self.taken, len(rewards))
        if self.algorithm.credits_returns:
            by_episode = row_advantages(self.algorithm, shaped, rewards, groups, taken)
            advantages, keep, degenerate = (values[of_rows.episodes] for values in by_episode)
            return advantages, keep, degenerate
        rows = TrainingRows.open(path)
        number = len(rows)
        rollouts = _Rollouts(self.chosen, of_rows.positions)
        step = Experience(
            rollouts,
            groups,
            shaped,
            _OnDemand(number, lambda number: self._penalties(rows, number)),
            proximal=_OnDemand(number, lambda number: rows.values("ref_logprobs", number)),
            teacher=_Taught(rollouts, self.teacher) if self.teacher else None,
            whose=of_rows.episodes,
        )
        made, keep, degenerate = token_advantages(self.algorithm, step, rewards - taken)
        return made.tokens, keep, degenerate

    def _penalties(self, rows: "TrainingRows", number: int) -> np.ndarray:
        """What the divergence from the reference takes off the reward of each token of a row."""
        import torch

        from agentrl.online.credit import penalty

        kl, mask = self.algorithm.kl, rows.values("mask", number)
        if not (kl and kl.where == "reward"):
            return np.broadcast_to(0.0, len(mask))
        sampled, current = (torch.tensor(rows.values(name, number)) for name in ("logprobs", "ref_logprobs"))
        return penalty(kl, sampled, current, torch.tensor(mask)).double().numpy()

    def _importance(self, mask: "Tensor", sampled: "Tensor", current: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        """Log-ratios, mask and importance weights of one row, each [1, tokens]."""
        from agentrl.online.off_policy import importance_weights

        assert self.algorithm.off_policy is not None
        ratio, inside = (current - sampled).masked_fill(~mask, 0.0)[None], mask[None]
        return ratio, inside, importance_weights(self.algorithm.off_policy, ratio, inside)

    def sums(self) -> "RatioSums":
        """Sums of the ratios of all rows, in the order of their numbers."""
        from agentrl.online.off_policy import RatioSums

        order = np.argsort(np.concatenate(self._summed))
        return RatioSums(*(values[order] for values in vars(RatioSums.concat(self._sums)).values()))

    def weighted(
        self, path: Path, advantages: np.ndarray | ByToken, keep: np.ndarray, live: np.ndarray
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a file that are trained on, with what their tokens weigh. ``live`` is set for them."""
        from agentrl.training.rows import flat, holds_true, nested

        for rows in _batches(path):
            numbers = rows.column("unit").to_numpy()
            offsets, mask = flat(rows.column("mask"))
            weights = self._blamed(rows, advantages, np.diff(offsets))
            if self.algorithm.off_policy:
                weights = weights * np.concatenate([self._importance(*row)[2][0].numpy() for row in _rows_of(rows)])
            teaches = holds_true(offsets[:-1], offsets[1:], mask & (abs(weights) > 1e-9))
            live[numbers] = keep[numbers] & (self.algorithm.acts_on_every_row | teaches)
            counts = np.repeat(self.chosen.weights[self.found.positions[numbers]], np.diff(offsets))
            changed = {"weights": nested(offsets, counts * weights, "weights")}
            if self.algorithm.off_policy:
                changed["logprobs"] = rows.column("ref_logprobs")
            if not self.algorithm.kl:
                changed["ref_logprobs"] = nested(np.zeros_like(offsets), np.zeros(0, np.float32), "ref_logprobs")
            yield _changed(rows, changed).filter(pa.array(live[numbers]))

    def _blamed(self, rows: pa.RecordBatch, advantages: np.ndarray | ByToken, lengths: np.ndarray) -> np.ndarray:
        """What the tokens of rows weigh by credit alone, [tokens of all rows]."""
        from agentrl.online.credit import blamed

        numbers = rows.column("unit").to_pylist()
        weights: ByToken
        if isinstance(advantages, np.ndarray):
            weights = [np.broadcast_to(advantages[number], size) for number, size in zip(numbers, lengths, strict=True)]
        else:
            weights = [advantages[number] for number in numbers]
        if self.algorithm.credit == "values":
            names = zip(rows.column("row_id").to_pylist(), weights, strict=True)
            weights = [
                progress_weights(len(values), of) if (of := self.values.get(name)) else values for name, values in names
            ]
        elif self.algorithm.credit not in WHOLE:
            rollouts = list(self.chosen.trajectories(rows.column("row_id")))
            weights = blamed(self.algorithm, rollouts, [self.found.groups[number] for number in numbers], weights)
        return np.concatenate([np.zeros(0), *weights])


class _OnDemand(Sequence[Item], Generic[Item]):
    """A sequence of which an item is made each time it is asked for, and none is kept."""

    def __init__(self, number: int, make: Callable[[int], Item]) -> None:
        self._places = range(number)
        self._make = make

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._make(item_key) for item_key in self._places[index]]
        return self._make(self._places[index])


class _Rollouts(_OnDemand[Trajectory]):
    """Whole rows of a selection, read a block at a time."""

    def __init__(self, chosen: Selected, positions: np.ndarray) -> None:
        super().__init__(len(positions), self._row)
        self._chosen = chosen
        self._ids = chosen.scalars["trajectory_id"].combine_chunks().take(pa.array(positions))
        self._first, self._block = 0, list[Trajectory]()

    def _row(self, number: int) -> Trajectory:
        if not self._first <= number < self._first + len(self._block):
            self._first = number - number % TEXT_ROWS
            self._block = list(self._chosen.trajectories(self._ids.slice(self._first, TEXT_ROWS)))
        return self._block[number - self._first]


class _Taught(_OnDemand[np.ndarray]):
    """What a teacher says of the tokens of rollouts, a block at a time."""

    def __init__(self, rollouts: Sequence[Trajectory], teacher: "Teacher") -> None:
        super().__init__(len(rollouts), self._row)
        self._rollouts, self._teacher = rollouts, teacher
        self._first, self._block = 0, list[np.ndarray]()

    def _row(self, number: int) -> np.ndarray:
        if not self._first <= number < self._first + len(self._block):
            self._first = number - number % TEXT_ROWS
            self._block = self._teacher.logprobs(self._rollouts[self._first : self._first + TEXT_ROWS])
        return self._block[number - self._first]


def _rows_of(rows: pa.RecordBatch) -> "Iterator[tuple[Tensor, Tensor, Tensor]]":
    """Mask, log-probs of the policy that sampled, and those of ``ref_logprobs`` of each row, each [tokens]."""
    import torch

    from agentrl.training.rows import flat

    offsets, mask = flat(rows.column("mask"))
    columns = (mask, *(flat(rows.column(name))[1] for name in ("logprobs", "ref_logprobs")))
    parts = (torch.split(torch.from_numpy(values.copy()), np.diff(offsets).tolist()) for values in columns)
    return zip(*parts, strict=True)


def _changed(rows: pa.RecordBatch, columns: dict[str, pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [columns.get(name, column) for name, column in zip(rows.schema.names, rows.columns, strict=True)],
        schema=rows.schema,
    )


def _scaled(rows: pa.RecordBatch, share: float, episodes: np.ndarray) -> pa.RecordBatch:
    """The rows with their weights times ``share``, and the number of their episode as ``unit``."""
    from agentrl.training.rows import flat, nested

    offsets, weights = flat(rows.column("weights"))
    units = pa.array(episodes[rows.column("unit").to_numpy()].astype(np.int32))
    return _changed(rows, {"weights": nested(offsets, share * weights, "weights"), "unit": units})


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a file, mapped into memory."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return (reader.get_batch(number) for number in range(reader.num_record_batches))

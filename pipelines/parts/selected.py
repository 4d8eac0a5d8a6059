"""Rows of selections for training stages: their scalars in memory, their tokens as a stream of columns."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from agentrl.advantages.turns import acting
from agentrl.chat.codec import tokenize
from agentrl.datastore.errors import UnknownTrajectoryError
from agentrl.datastore.read.prefixes import sampled
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.parts.common import warn_of_splits
from agentrl.rollouts.corrections import SOURCE as CORRECTED
from agentrl.rollouts.exploring import RESAMPLED
from agentrl.schemas.training import TRAINING_SCHEMA
from agentrl.schemas.trajectory import INFRASTRUCTURE, NOT_TRAINED, Message, Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Speaker

SCALARS = (
    "trajectory_id",
    "task_id",
    "source",
    "reward",
    "success",
    "n_tokens",
    "split",
    "tags",
    "sampling",
    "tokenizer",
    "termination",
)
BATCH_TOKENS, BATCH_ROWS = 2**21, 8192
"""The most tokens and rows that a training stage holds at once, apart from the rows of a step."""

SPLICED = "spliced"
CORRECTING = (CORRECTED, SPLICED)
"""Sources of rows whose parents did, before ``fork_at``, what is not to be learned."""

TEXT_ROWS = 256
"""Rows that are read whole at once, for their messages."""


OtherTemperatures = Annotated[
    Literal["refuse", "leave_out", "keep"],
    Field(description="what happens to rows drawn at another temperature than 1, or with top_p, top_k or diversity"),
]


def plainly_drawn(sampling: str) -> bool:
    """Whether a row with these settings has tokens that were drawn from the policy's own distribution, or none that
    were drawn at all."""
    settings = json.loads(sampling or "{}")
    if not isinstance(settings, dict):
        return True
    changed = settings.get("top_k") or settings.get("diversity")
    return settings.get("temperature", 1.0) == 1.0 and settings.get("top_p", 1.0) == 1.0 and not changed


class Tokens(NamedTuple):
    """Some rows of a selection: their ``positions`` in it, ids, and token columns."""

    positions: np.ndarray
    row_ids: pa.Array
    input_ids: pa.ListArray
    mask: pa.ListArray
    logprobs: pa.ListArray | None = None


class Selected:
    """Rows of several selections, in order, with ``weights`` [rows]. Rows that are tagged as not trained on (a judge's,
    a fixed opponent's) are left out, and those that failed by no doing of the policy; warnings say how many of each.
    Another one says how many are not of the train split.
    ``scalars`` has the columns :data:`SCALARS` up to ``n_tokens``, and ``more``."""

    def __init__(self, selections: list[Trajectories], more: Sequence[str] = ()) -> None:
        self._first, self._buffer = selections[0], selections[0].buffer
        names = list(dict.fromkeys([*SCALARS, *more]))
        scalars = pa.concat_tables(selection.table(names) for selection in selections).combine_chunks()
        weights = np.concatenate([selection.selection()["weight"].to_numpy() for selection in selections])
        counted = pc.value_counts(scalars["split"].combine_chunks()).to_pylist()
        warn_of_splits({count["values"]: count["counts"] for count in counted}, "rows")
        tags = scalars["tags"].combine_chunks()
        tagged = tags.value_parent_indices().filter(pc.equal(tags.flatten(), NOT_TRAINED))
        trained = np.ones(len(scalars), dtype=bool)
        trained[tagged.to_numpy()] = False
        ends = pa.array(INFRASTRUCTURE, pa.string())
        failed = pc.is_in(scalars["termination"].combine_chunks().cast(pa.string()), ends).to_numpy(
            zero_copy_only=False
        )
        again = tags.value_parent_indices().filter(pc.starts_with(tags.flatten(), f"{RESAMPLED}:"))
        self._resampled = np.zeros(len(scalars), dtype=bool)
        self._resampled[again.to_numpy()] = True
        kept = np.flatnonzero(trained & ~failed)
        if left := int((~trained).sum()):
            warnings.warn(
                f"{left} of {len(scalars)} rows are tagged {NOT_TRAINED!r} and are not trained on", stacklevel=3
            )
        if left := int((trained & failed).sum()):
            warnings.warn(
                f"{left} of {len(scalars)} rows failed by no doing of the policy and are not trained on", stacklevel=3
            )
        tokenizers = scalars["tokenizer"].combine_chunks().dictionary_encode()
        self._tokenizers, self._tokenizer = tokenizers.dictionary.to_pylist(), tokenizers.indices.to_numpy()
        unasked = [name for name in ("split", "tags", "sampling", "tokenizer", "termination") if name not in more]
        self.scalars, self.weights = scalars.drop_columns(unasked), weights.astype(np.float64)
        settings = scalars["sampling"].combine_chunks().dictionary_encode()
        plain = np.array([plainly_drawn(setting) for setting in settings.dictionary.to_pylist()], dtype=bool)
        self._plain = plain[settings.indices.to_numpy()] if len(scalars) else np.zeros(0, bool)
        self._prefixes = self._again = False
        self.tokenised_again = 0
        self._keep(kept)

    def __len__(self) -> int:
        return len(self.weights)

    def _keep(self, positions: np.ndarray) -> None:
        if len(positions) < len(self):
            self.scalars = self.scalars.take(pa.array(positions))
            self.weights, self._plain = self.weights[positions], self._plain[positions]
            self._resampled = self._resampled[positions]
            self._tokenizer = self._tokenizer[positions]

    def merged(self) -> "Selected":
        """This selection, in which a row that was drawn several times is there once, with the sum of its weights."""
        codes = self.scalars["trajectory_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        weights = np.bincount(codes, self.weights)
        self._keep(np.unique(codes, return_index=True)[1])
        self.weights = weights.astype(np.float64)
        return self

    def at_temperature_1(self, others: OtherTemperatures) -> "Selected":
        """This selection, of which the rows that were not drawn from a policy's own distribution are refused, left out
        with a warning that says how many, or kept.

        Raises ValueError that names such rows if they are refused.
        """
        shifted = np.flatnonzero(~self._plain)
        if not len(shifted) or others == "keep":
            return self
        names = self.scalars["trajectory_id"].take(pa.array(shifted[:3])).to_pylist()
        problem = (
            f"{len(shifted)} of {len(self)} rows were not sampled at temperature 1 without top_p, top_k and diversity"
        )
        if others == "refuse":
            raise ValueError(
                f"{problem}, such as {', '.join(names)}: they are no samples of the policy, and their log-probs are "
                "not its own; set other_temperatures: leave_out, or keep, in this stage"
            )
        warnings.warn(f"{problem}; they are left out", stacklevel=3)
        self._keep(np.flatnonzero(self._plain))
        return self

    def check_drawn(self) -> None:
        """Raise ValueError that names rows of which turns were sampled again until they differed (``explore``): ratios
        to their log-probs mean nothing."""
        if not self._resampled.any():
            return
        names = self.scalars["trajectory_id"].take(pa.array(np.flatnonzero(self._resampled)[:3])).to_pylist()
        raise ValueError(
            f"{int(self._resampled.sum())} of {len(self)} rows are tagged {RESAMPLED!r}, such as {', '.join(names)}: "
            "turns of them were sampled again until they differed, so they are no draws of the policy, and ratios to "
            "their log-probs mean nothing; set algorithm.off_policy, such as {truncate: 2.0}, leave the rows out "
            "(trajectories.select), or train on them with train.sft"
        )

    def with_prefixes(self) -> "Selected":
        """This selection, in which a continuation has the mask of its parents before ``fork_at``: what they sampled
        there is trained on too.

        Raises ValueError that names rows which correct what their parent did.
        """
        correcting = pc.is_in(self.scalars["source"], value_set=pa.array(CORRECTING)).to_numpy(zero_copy_only=False)
        if correcting.any():
            names = self.scalars["trajectory_id"].take(pa.array(np.flatnonzero(correcting)[:3])).to_pylist()
            raise ValueError(
                f"prefixes: trained, and {int(correcting.sum())} of {len(self)} rows have the source "
                f"{' or '.join(map(repr, CORRECTING))}, such as {', '.join(names)}: they begin with what they correct. "
                "Set prefixes: context, or leave these rows to a stage of their own"
            )
        self._prefixes = True
        return self

    def with_tokens_of_policy(self) -> "Selected":
        """This selection, in which rows of another tokenizer than the policy's are tokenised from their messages, as
        rows without tokens are. ``tokenised_again`` counts them while they are read."""
        self._again = True
        return self

    def _foreign(self, policy: "Speaker", positions: np.ndarray) -> np.ndarray:
        """Whether rows have tokens of another tokenizer than the policy's, bool [positions]."""
        same = np.array([fingerprint == policy.tokenizer_fingerprint for fingerprint in self._tokenizers], dtype=bool)
        return ~same[self._tokenizer[positions]] & (self.scalars["n_tokens"].to_numpy()[positions] > 0)

    def trajectories(self, ids: pa.Array | None = None) -> Iterator[Trajectory]:
        """Whole rows in order (default: all), read as they are asked for."""
        wanted = self.scalars["trajectory_id"] if ids is None else ids
        for start in range(0, len(wanted), TEXT_ROWS):
            yield from self._first.rows(wanted.slice(start, TEXT_ROWS))

    def conversations(self) -> Iterator[list[Message]]:
        """The messages of each row in order, read as they are asked for."""
        ids = self.scalars["trajectory_id"]
        for start in range(0, len(ids), TEXT_ROWS):
            for messages in self._buffer.read(ids.slice(start, TEXT_ROWS), ["messages"])["messages"].to_pylist():
                yield [Message.model_validate(message) for message in messages]

    def check_tokenizers(self, policy: "Speaker", positions: np.ndarray) -> None:
        """Raise ValueError that names a row if one of those at ``positions`` was tokenised by another tokenizer than
        the policy's."""
        if not self._again and (foreign := self._foreign(policy, positions)).any():
            first = int(positions[np.flatnonzero(foreign)[0]])
            name = self.scalars["trajectory_id"][first].as_py()
            check_tokenizer(name, self._tokenizers[self._tokenizer[first]], policy)

    def one_tokenizer(self, positions: np.ndarray) -> tuple[str, str] | None:
        """The tokenizer that all of the rows at ``positions`` were tokenised by, and one of these rows. None if they
        were by several, or by none."""
        made = positions[self.scalars["n_tokens"].to_numpy()[positions] > 0]
        if len(np.unique(self._tokenizer[made])) != 1:
            return None
        return self._tokenizers[self._tokenizer[made[0]]], self.scalars["trajectory_id"][int(made[0])].as_py()

    def tokens(
        self,
        policy: "Callable[[], Speaker]",
        positions: np.ndarray | None = None,
        logprobs: bool = False,
        check: bool = True,
    ) -> Iterator[Tokens]:
        """The token columns of the rows at ``positions`` (default: all), batch by batch, in the order in which the
        buffer keeps them. Rows without tokens are tokenised: for them alone ``policy`` is asked for before the last
        batch. With ``logprobs``, which are those of the policy that sampled, all rows must have tokens.

        Raises ValueError after the last batch if a row was tokenised by another tokenizer than the policy's, unless
        ``check`` is false.
        """
        chosen = np.arange(len(self)) if positions is None else positions
        ids = self.scalars["trajectory_id"].combine_chunks().take(pa.array(chosen))
        stored = chosen[pc.sort_indices(ids).to_numpy()]
        for part in _parts(stored, self.scalars["n_tokens"].to_numpy()[stored]):
            yield self._read(part, policy, logprobs)
        if check:
            self.check_tokenizers(policy(), chosen)

    def in_groups(
        self, policy: "Speaker", positions: np.ndarray, groups: Sequence[str], limit: int
    ) -> Iterator[Tokens]:
        """The token columns, with log-probs, of the rows at ``positions``, of which ``groups`` [positions] names the
        groups. Each batch holds whole groups, of at most ``limit`` tokens unless one group alone has more.

        Raises ValueError if a row was tokenised by another tokenizer than the policy's.
        """
        self.check_tokenizers(policy, positions)
        ids = self.scalars["trajectory_id"].combine_chunks().take(pa.array(positions))
        stored = pc.sort_indices(ids).to_numpy()
        group = np.unique(np.asarray(groups, dtype=str), return_inverse=True)[1][stored]
        first = np.unique(group, return_index=True)[1]  # groups in the order in which the buffer keeps their first rows
        order = np.argsort(first[group], kind="stable")
        rows = positions[stored[order]]
        starts = np.flatnonzero(np.diff(group[order], prepend=-1))
        ends = np.append(starts[1:], len(rows))
        sizes = np.add.reduceat(self.scalars["n_tokens"].to_numpy()[rows].astype(np.int64), starts)
        for part in _parts(np.arange(len(starts)), sizes, limit):
            yield self._read(rows[starts[part[0]] : ends[part[-1]]], lambda: policy, logprobs=True)

    def _read(self, positions: np.ndarray, policy: "Callable[[], Speaker]", logprobs: bool) -> Tokens:
        row_ids = self.scalars["trajectory_id"].combine_chunks().take(pa.array(positions))
        more = [*["logprobs"] * logprobs, *["parent_id", "fork_at"] * self._prefixes]
        table = self._buffer.read(row_ids, ["input_ids", "action_mask", *more])
        if self._prefixes:
            index = table.schema.get_field_index("action_mask")
            table = table.set_column(index, "action_mask", self._sampled(table))
        ids, mask = (_one(table[name], TRAINING_SCHEMA.field(of).type) for name, of in _TOKENS)
        lacking = pc.list_value_length(ids).to_numpy() == 0
        if self._again:
            foreign = self._foreign(policy(), positions)
            self.tokenised_again += int(foreign.sum())
            lacking |= foreign
        missing = np.flatnonzero(lacking)
        if not len(missing):
            sampled_logprobs = _one(table["logprobs"], TRAINING_SCHEMA.field("logprobs").type) if logprobs else None
            return Tokens(positions, row_ids, ids, mask, sampled_logprobs)
        made = self._tokenised(row_ids.take(pa.array(missing)), policy())
        order = np.arange(len(positions))
        order[missing] = len(positions) + np.arange(len(missing))
        both = (pa.concat_arrays([old, new]).take(pa.array(order)) for old, new in zip((ids, mask), made, strict=True))
        return Tokens(positions, row_ids, *both)

    def _sampled(self, table: pa.Table) -> pa.ListArray:
        try:
            return sampled(self._buffer, table)
        except UnknownTrajectoryError as error:
            raise ValueError(
                f"prefixes: trained, and rows go on from {error.missing[0]!r}, which the store does not have: bring in "
                "their parents too, or set prefixes: context"
            ) from None

    def _tokenised(self, names: pa.Array, policy: "Speaker") -> tuple[pa.ListArray, pa.ListArray]:
        parts: list[list[pa.Array]] = [[], []]
        for start in range(0, len(names), TEXT_ROWS):
            raw = self._buffer.get_many(names.slice(start, TEXT_ROWS))
            rows = [_anew(row, policy) for row in raw]
            for part, (name, of) in zip(parts, _TOKENS, strict=True):
                part.append(pa.array([getattr(row, name) for row in rows], TRAINING_SCHEMA.field(of).type))
        return pa.concat_arrays(parts[0]), pa.concat_arrays(parts[1])


_TOKENS = (("input_ids", "input_ids"), ("action_mask", "mask"))
"""Token columns, as trajectories and as training rows name them."""


def _anew(row: Trajectory, policy: "Speaker") -> Trajectory:
    """A row with the policy's tokens. What was not trained on, such as answers of an opening and turns before a fork,
    still is not."""
    made = tokenize(row.model_copy(update={"input_ids": []}), policy.codec, policy.tokenizer_fingerprint)
    if not row.input_ids:
        return made
    mask, turns = [False] * len(made.input_ids), {id(message) for message in acting(row.messages)}
    for old, new in zip(row.messages, made.messages, strict=True):
        # tokens without spans do not say which turns were trained on
        if id(old) in turns and (old.token_start is None or all(row.action_mask[old.token_start : old.token_end])):
            mask[new.token_start : new.token_end] = made.action_mask[new.token_start : new.token_end]
    return made.model_copy(update={"action_mask": mask})


def _one(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ListArray:
    return column.cast(kind).combine_chunks()


def _parts(positions: np.ndarray, tokens: np.ndarray, limit: int = BATCH_TOKENS) -> Iterator[np.ndarray]:
    """Positions in order, so many at once that neither ``limit``, of tokens, nor :data:`BATCH_ROWS` is passed, unless
    one alone passes it."""
    ends = np.cumsum(tokens, dtype=np.int64)
    start = 0
    while start < len(positions):
        before = ends[start - 1] if start else 0
        end = int(np.searchsorted(ends, before + limit, side="right"))
        end = min(max(end, start + 1), start + BATCH_ROWS)
        yield positions[start:end]
        start = end


def check_tokenizer(row_id: str, tokenizer: str, policy: "Speaker") -> None:
    """Raise ValueError if a row was tokenised by another tokenizer than the policy's."""
    if wrong := policy.wrote(row_id, tokenizer):
        raise ValueError(wrong)

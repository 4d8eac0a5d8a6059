"""Training rows in columns, from parts of a selection."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.algorithms.policy_gradient import PolicyGradient
from agentrl.pipelines.parts.selected import Selected, Tokens
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.training import TRAINING_SCHEMA
from agentrl.schemas.trajectory import REPLACED, Termination, Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Policy, Speaker
    from agentrl.online.credit import RowCredit


def decode(policy: "Callable[[], Speaker]", ids: list[int]) -> str:
    return str(policy().tokenizer.decode(ids))


def trained_on(
    part: Tokens,
    weights: np.ndarray,
    labels: np.ndarray | None = None,
    weigh: "Callable[[list[int], list[bool]], list[float]] | None" = None,
    units: np.ndarray | None = None,
) -> pa.RecordBatch:
    """Training rows of a part of a selection. Each token has its row's weight [rows], times what ``weigh`` gives for
    the tokens of a row. ``units`` [rows] are the positions unless given."""
    from agentrl.training.rows import flat, nested

    offsets, _ = flat(part.input_ids)
    lengths = np.diff(offsets)
    if weigh is None:
        tokens = np.repeat(weights.astype(np.float32), lengths)
    else:
        rows = zip(part.input_ids.to_pylist(), part.mask.to_pylist(), strict=True)
        tokens = np.repeat(weights, lengths) * np.concatenate([weigh(ids, mask) for ids, mask in rows])
    made = nested(offsets, tokens, "weights")
    number = part.positions if units is None else units
    return as_batch(part.row_ids, number, labels, part.input_ids, part.mask, made, part.logprobs)


def as_batch(
    row_ids: pa.Array,
    units: np.ndarray,
    labels: np.ndarray | None,
    input_ids: pa.ListArray,
    mask: pa.ListArray,
    weights: pa.ListArray,
    logprobs: pa.ListArray | None = None,
) -> pa.RecordBatch:
    """Training rows without log-probs of a reference; without ``labels`` they have no sides."""
    from agentrl.training.rows import nested

    nothing = nested(np.zeros(len(units) + 1, np.int32), np.zeros(0, np.float32), "logprobs")
    label = np.zeros(len(units)) if labels is None else labels
    numbers = (pa.array(values.astype(np.int32)) for values in (units, label))
    columns = [row_ids, *numbers, input_ids, mask, weights, logprobs if logprobs is not None else nothing, nothing]
    return pa.RecordBatch.from_arrays(columns, schema=TRAINING_SCHEMA)


def reweighted(
    rows: pa.RecordBatch,
    values: Mapping[str, Sequence[StepValue]],
    weigh: Callable[[np.ndarray, Sequence[StepValue]], np.ndarray],
) -> pa.RecordBatch:
    """The rows of a batch; those with values of their turns have the weights that ``weigh`` makes of theirs."""
    from agentrl.training.rows import flat, nested

    offsets, weights = flat(rows.column("weights"))
    made = np.array(weights)
    for name, start, end in zip(rows.column("row_id").to_pylist(), offsets[:-1], offsets[1:], strict=True):
        if name in values:
            made[start:end] = weigh(made[start:end], values[name])
    index = rows.schema.get_field_index("weights")
    return rows.set_column(index, rows.schema.field(index), nested(offsets, made, "weights"))


def acting(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of a batch that have an action token."""
    from agentrl.training.rows import flat, holds_true

    offsets, mask = flat(rows.column("mask"))
    acts = holds_true(offsets[:-1], offsets[1:], mask)
    return rows if acts.all() else rows.filter(pa.array(acts))


OUTCOME = (
    "episode_id",
    "agent",
    "group_id",
    "fingerprint",
    "policy",
    "policy_version",
    "env",
    "level",
    "sampling",
    "tags",
    "n_action_tokens",
    "termination",
)
"""The columns that credit of whole rollouts needs, beside those of every selection."""

ROWS_AT_ONCE = 4096


class Outcomes(NamedTuple):
    """What credit looks at besides tokens, of the rows at ``positions``, which have action tokens; the others are
    [positions] too. ``shaped`` are rewards after punishments and normalisation. ``episodes`` are numbers in the order
    of their first rows, as :func:`agentrl.rollouts.segments.numbered` gives them: rows of one have one group and one
    reward."""

    positions: np.ndarray
    rewards: np.ndarray
    shaped: np.ndarray
    groups: list[str]
    actions: np.ndarray
    episodes: np.ndarray
    out_of_context: np.ndarray

    def of_episodes(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Rewards, shaped rewards and groups of episodes, [episodes]."""
        first = np.unique(self.episodes, return_index=True)[1]
        return self.rewards[first], self.shaped[first], [self.groups[index] for index in first.tolist()]


def outcomes(chosen: Selected, algorithm: PolicyGradient, policy: "Policy") -> Outcomes:
    """Rewards and groups of all rows that have action tokens, or are alternatives that others are compared with.
    ``chosen`` has the columns :data:`OUTCOME`."""
    from agentrl.online.credit import by_level, group_of, of_attempts, plain_rewards
    from agentrl.rollouts.segments import numbered

    replaced = np.array([REPLACED in tags for tags in chosen.scalars["tags"].to_pylist()], dtype=bool)
    acting = np.flatnonzero((chosen.scalars["n_action_tokens"].to_numpy() > 0) | replaced)
    outcome = chosen.scalars.take(pa.array(acting))
    prompts = _prompts(chosen, policy, acting) if algorithm.overlong else np.zeros(len(acting), np.int64)
    rewards, groups, levels = [np.zeros(0)], list[str](), list[tuple[str, int]]()
    for start in range(0, len(acting), ROWS_AT_ONCE):
        values = zip(outcome.slice(start, ROWS_AT_ONCE).to_pylist(), prompts[start:].tolist(), strict=False)
        rows = [
            Trajectory.model_construct(**scalars, action_mask=[False] * prompt + [True]) for scalars, prompt in values
        ]
        rewards.append(plain_rewards(algorithm, rows))
        groups += [group_of(row, algorithm.credit) for row in rows]
        levels += [(row.env, row.level) for row in rows]
    plain = np.concatenate(rewards)
    names = pc.if_else(pc.equal(outcome["episode_id"], ""), outcome["trajectory_id"], outcome["episode_id"])
    codes = names.combine_chunks().dictionary_encode().indices.to_pylist()
    scored = outcome["reward"].to_numpy()
    episodes = numbered(codes, groups, scored.tolist(), algorithm.credit, lambda row: names[row].as_py())
    _check_weights(chosen.weights[acting], groups)
    first = np.unique(episodes, return_index=True)[1]
    by_attempt = of_attempts(plain, episodes)
    shaped = by_level(algorithm, by_attempt, [levels[index] for index in first.tolist()])[episodes]
    actions = outcome["n_action_tokens"].to_numpy()
    lost = pc.equal(outcome["termination"], Termination.MAX_CONTEXT.value).to_numpy()
    return Outcomes(acting, scored, shaped, groups, actions, episodes, lost)


def _check_weights(weights: np.ndarray, groups: list[str]) -> None:
    """Raise ValueError that names a group whose rows have several weights: the mean of what was drawn of it is not that
    of the group."""
    first: dict[str, float] = {}
    for group, weight in zip(groups, weights.tolist(), strict=True):
        if not np.isclose(first.setdefault(group, weight), weight):
            raise ValueError(
                f"rows of the group {group!r} have the weights {first[group]:.3g} and {weight:.3g}, so they cannot be "
                "compared with each other; draw whole groups (trajectories.select {draw: {of: groups}}), or train on "
                "the rows with train.sft"
            )


def sides(chosen: Selected) -> np.ndarray:
    """1 for a success, -1 for a failure, 0 if it is not known, [rows]."""
    labels: np.ndarray = pc.fill_null(pc.if_else(chosen.scalars["success"], 1, -1), 0).to_numpy()
    return labels


def credited(
    chosen: Selected, algorithm: PolicyGradient, policy: "Policy", micro_tokens: int
) -> tuple[dict[str, float], Iterator[pa.RecordBatch]]:
    """Metrics, and training rows of an algorithm that ``credits_whole_rows``. Rewards and groups of all rows are in
    memory, their tokens are a stream. ``chosen`` has the columns :data:`OUTCOME`."""
    from agentrl.online.credit import assign_rows

    of_rows = outcomes(chosen, algorithm, policy)
    credit = assign_rows(
        algorithm,
        of_rows.shaped,
        of_rows.rewards,
        of_rows.groups,
        of_rows.actions,
        of_rows.episodes,
        of_rows.out_of_context,
    )
    return credit.metrics, _credited_batches(chosen, algorithm, policy, micro_tokens, of_rows, credit)


def _credited_batches(
    chosen: Selected,
    algorithm: PolicyGradient,
    policy: "Policy",
    micro_tokens: int,
    of_rows: Outcomes,
    credit: "RowCredit",
) -> Iterator[pa.RecordBatch]:
    from agentrl.training.scoring import reference_logprobs

    acting, weights, units = of_rows.positions, np.zeros(len(chosen)), np.zeros(len(chosen), np.int64)
    weights[acting] = chosen.weights[acting] * credit.weights
    units[acting] = of_rows.episodes
    labels = sides(chosen)
    for part in chosen.tokens(lambda: policy, acting[credit.live], logprobs=True):
        positions = part.positions
        rows = trained_on(part, weights[positions], labels[positions], units=units[positions])
        yield reference_logprobs(policy, rows, micro_tokens) if algorithm.kl else rows


def _prompts(chosen: Selected, policy: "Policy", positions: np.ndarray) -> np.ndarray:
    """The number of tokens before the first action of the rows at these positions, [positions]."""
    from agentrl.training.rows import flat

    lengths = np.zeros(len(chosen), np.int64)
    for part in chosen.tokens(lambda: policy, positions):
        offsets, mask = flat(part.mask)
        true = np.flatnonzero(mask)
        lengths[part.positions] = true[np.searchsorted(true, offsets[:-1])] - offsets[:-1]
    return lengths[positions]

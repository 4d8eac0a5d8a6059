"""What a reward model learns from stored rows: labelled tokens, and which tasks are kept for measuring."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.advantages.turns import action_runs
from agentrl.pipelines.parts.selected import Selected, Tokens
from agentrl.pipelines.parts.training_rows import as_batch
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import UnscoredError

if TYPE_CHECKING:
    from agentrl.models.policy import Speaker


class Labelled(NamedTuple):
    """A row's labels: tokens after which the head speaks (``last``: the last action token; ``turns``: the last of each
    turn, all with one label), and what it should say."""

    tokens: list[int] | Literal["last", "turns"]
    labels: list[float]
    weight: float = 1.0


Labels = dict[int, Labelled]
"""The position of a row in a selection -> its labels."""


def outcome_labels(chosen: Selected) -> Labels:
    """Success of each row that acts, at its last action token. Raises UnscoredError that names rows of unknown
    success."""
    acting = np.flatnonzero(chosen.scalars["n_action_tokens"].to_numpy())
    success = chosen.scalars["success"].take(pa.array(acting))
    if success.null_count:
        unknown = chosen.scalars["trajectory_id"].take(pa.array(acting)).filter(pc.is_null(success))
        raise UnscoredError("success", unknown.to_pylist())
    return {
        position: Labelled("last", [float(outcome)], float(chosen.weights[position]))
        for position, outcome in zip(acting.tolist(), success.to_pylist(), strict=True)
    }


def step_labels(chosen: Selected, values: Mapping[tuple[str, int], StepValue]) -> Labels:
    """The value ``q`` of each valued turn at the turn's last token, and ``v`` of a first turn at the token before it.

    Raises ValueError if no row of the selection has a value, or if one lies outside [0, 1].
    """
    by_row: dict[str, dict[int, float]] = {}
    for (name, turn), step in values.items():
        places = by_row.setdefault(name, {})
        places[step.token_end - 1] = step.q
        if turn == 0 and step.token_start > 1:
            places[step.token_start - 1] = step.v
    names = chosen.scalars["trajectory_id"].to_pylist()
    labels: Labels = {}
    for position, name in enumerate(names):
        if valued := by_row.get(name):
            tokens = sorted(valued)
            labels[position] = Labelled(tokens, [valued[token] for token in tokens], float(chosen.weights[position]))
    if not labels:
        raise ValueError("inputs.values value no turn of inputs.trajectories; wire the rows that were valued")
    every = [value for row in labels.values() for value in row.labels]
    if not 0 <= min(every) <= max(every) <= 1:
        raise ValueError(
            f"inputs.values lie in [{min(every):g}, {max(every):g}], and labels are probabilities, in [0, 1]; value "
            "rows by a reward in [0, 1], or set hard: true in steps.value"
        )
    return labels


def demonstrated(chosen: Selected, shown: Set[str]) -> Labels:
    """1 for the turns of each row that is among those ``shown`` by a demonstrator, 0 for the turns of others, which
    weigh as much together. Text counts too. Raises ValueError if there are none of one side that act."""
    acting = np.flatnonzero(chosen.scalars["n_steps"].to_numpy()).tolist()
    names = chosen.scalars["trajectory_id"].take(pa.array(acting, pa.int64())).to_pylist()
    sides = Counter(name in shown for name in names)
    if len(sides) < 2:
        missing = "trajectories" if sides[True] else "demonstrations"
        raise ValueError(f"no row of inputs.{missing} acts, and kind: inverse compares both; wire some that do")
    return {
        position: Labelled(
            "turns", [float(name in shown)], float(chosen.weights[position]) * len(names) / (2 * sides[name in shown])
        )
        for position, name in zip(acting, names, strict=True)
    }


def check_differ(labels: Labels, kind: str) -> None:
    """Raise ValueError if all labels are equal."""
    every = [value for row in labels.values() for value in row.labels]
    if len(set(every)) > 1:
        return
    what = f"{len(every)} turns are worth {every[0]:g}"
    if kind == "orm":
        what = f"{len(every)} rows {'succeeded' if every[0] else 'failed'}"
    raise ValueError(
        f"all {what} of the tasks to train on, and a reward model learns from the difference; wire more rows, of tasks "
        "that are solved sometimes"
    )


def balanced(labels: Labels, tasks: Sequence[str]) -> Labels:
    """The labels of rows of tasks with both outcomes, of which successes and failures weigh the same in each task. The
    ``tasks`` are those of all positions. Raises ValueError if no task has both."""
    counts = Counter((tasks[position], row.labels[0]) for position, row in labels.items())
    weighed = {}
    for position, row in labels.items():
        same, other = (counts[tasks[position], label] for label in (row.labels[0], 1 - row.labels[0]))
        if other:
            weighed[position] = row._replace(weight=row.weight * (same + other) / (2 * same))
    if not weighed:
        raise ValueError(
            "balance: task, and no task has both a success and a failure; sample more of each, or set balance: none"
        )
    return weighed


def held_out(tasks: Sequence[str], share: float, seed: int) -> set[str]:
    """A share of the tasks, at least one unless it is 0, drawn by ``seed``. Raises ValueError if none would be left."""
    names = sorted(set(tasks))
    if not share:
        return set()
    number = max(1, round(share * len(names)))
    if number >= len(names):
        raise ValueError(
            f"holdout: {share:g} of {len(names)} tasks leaves none to train on; wire rows of more tasks, or lower it"
        )
    return set(random.Random(f"{seed}-holdout").sample(names, number))


def training_batches(
    chosen: Selected, labels: Labels, positions: Sequence[int], policy: "Speaker"
) -> Iterator[pa.RecordBatch]:
    """Training rows of the labelled rows at ``positions``: the mask is true on labelled tokens alone, and the column
    ``logprobs`` has the labels.

    Raises ValueError if a row was tokenised by another tokenizer than the policy's.
    """
    for part in chosen.tokens(lambda: policy, np.asarray(positions, np.int64)):
        yield _marked(part, [labels[position] for position in part.positions.tolist()])


def _marked(part: Tokens, rows: Sequence[Labelled]) -> pa.RecordBatch:
    from agentrl.training.rows import flat, nested

    offsets, acting = flat(part.mask)
    mask, labels = np.zeros(len(acting), bool), np.zeros(len(acting), np.float32)
    for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
        places = start + np.asarray(_tokens(row, acting[start:end]))
        mask[places], labels[places] = True, row.labels
    weights = np.repeat(np.array([row.weight for row in rows], np.float32), np.diff(offsets))
    made = {"mask": mask, "weights": weights, "logprobs": labels}
    columns = {name: nested(offsets, values, name) for name, values in made.items()}
    return as_batch(part.row_ids, part.positions, None, part.input_ids, **columns)


def _tokens(row: Labelled, acting: np.ndarray) -> list[int]:
    """The tokens of a row that are labelled, by its action mask."""
    if isinstance(row.tokens, list):
        return row.tokens
    ends = [end - 1 for _, end in action_runs(acting.tolist())]
    return ends if row.tokens == "turns" else ends[-1:]

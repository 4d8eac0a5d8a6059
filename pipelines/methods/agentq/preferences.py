"""Preference pairs from rollouts of one task, in the manner of Agent Q (Putta et al. 2024).

Rollouts of a task form a tree: those that made the same steps share a path. The value of a step is the mean reward of
the rollouts that went through it, a Monte-Carlo estimate of Agent Q's Q-value, or what a table of values says of it. If
siblings differ in value, the better one is preferred to the worse one, after exactly the same prefix. The loss covers
only the step that differs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentrl.advantages.turns import Span, turn_spans
from agentrl.pipelines.parts.pairing import SideOfPair, pair_of
from agentrl.schemas.pair import Pair, PairKind
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import Trajectory

Values = Mapping[tuple[str, int], StepValue]
"""Id of a trajectory, number of a turn -> what the turn is worth."""


@dataclass(frozen=True)
class _Step:
    """One choice at a node of the tree, with every rollout that made it. ``low`` and ``high`` bound its value."""

    turns: tuple[SideOfPair, ...]
    value: float
    low: float
    high: float

    def example(self, best: bool) -> SideOfPair:
        """The rollout that shows this choice at its best, or worst; ties go to the shortest, then to the first."""
        return min(
            self.turns,
            key=lambda turn: (
                -turn.trajectory.scored_reward() if best else turn.trajectory.scored_reward(),
                turn.trajectory.n_tokens,
                turn.trajectory.trajectory_id,
            ),
        )

    def beats(self, other: "_Step", margin: float, apart: bool) -> bool:
        """Whether it is better by ``margin``, and if they are to be ``apart``, what bounds the values does not
        overlap."""
        return self.value - other.value >= margin and (not apart or self.low > other.high)


Path = tuple[Trajectory, list[Span]]
"""A rollout, and the spans of its turns."""


def _forks(paths: list[Path], values: Values | None, counts: Counter[str], depth: int = 0) -> Iterator[list[_Step]]:
    """Every node of the tree at which the rollouts made different choices, as the list of these choices. A row that was
    forked made only the choices from its fork on. Choices at such a node that have no value are counted."""
    choices: dict[tuple[int, ...], list[Path]] = defaultdict(list)
    for trajectory, runs in paths:
        if depth < len(runs):
            choices[tuple(trajectory.input_ids[: runs[depth][1]])].append((trajectory, runs))
    # Choices count as siblings only after the same prefix; an environment that answers differently makes another node.
    siblings: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for path, members in choices.items():
        siblings[path[: members[0][1][depth][0]]].append(path)
    for several in siblings.values():
        sampled = [turns for path in several if (turns := _sampled(choices[path], depth))]
        if len(sampled) < 2:
            continue
        steps = [step for turns in sampled if (step := _step(turns, values, depth))]
        counts["choices_without_value"] += len(sampled) - len(steps)
        if len(steps) > 1:
            yield steps
    for members in choices.values():
        if len(members) > 1:
            yield from _forks(members, values, counts, depth + 1)


def _sampled(members: Sequence[Path], depth: int) -> tuple[SideOfPair, ...]:
    """The turns at this depth of the rollouts that sampled it."""
    return tuple(SideOfPair(row, *runs[depth]) for row, runs in members if any(row.action_mask[slice(*runs[depth])]))


def _step(turns: tuple[SideOfPair, ...], values: Values | None, depth: int) -> _Step | None:
    """The choice that rollouts made at this depth; None if its value is not known."""
    if values is None:
        mean = sum(turn.trajectory.scored_reward() for turn in turns) / len(turns)
        return _Step(turns, mean, mean, mean)
    known = [estimate for turn in turns if (estimate := values.get((turn.trajectory.trajectory_id, depth)))]
    if not known:
        return None
    number = sum(estimate.n for estimate in known)
    value, low, high = (
        sum(getattr(estimate, name) * estimate.n for estimate in known) / number for name in ("q", "low", "high")
    )
    return _Step(turns, value, low, high)


def step_pairs(
    rollouts: Sequence[Trajectory],
    margin: float,
    limit: int,
    values: Values | None = None,
    apart: bool = True,
    counts: Counter[str] | None = None,
) -> list[Pair]:
    """Pairs from the steps at which rollouts of *one* task diverge: the best choice of each node against every other
    whose value is lower by ``margin`` or more, largest difference first, at most ``limit``. With ``values``, these are
    the values of the choices, choices without one are left out, and the intervals of the two must not overlap if they
    are to be ``apart``.

    ``chosen_reward`` and ``rejected_reward`` are the values of the two steps. ``counts`` is told of what was left out:
    ``choices_without_value``, ``pairs_too_close`` by ``margin`` and ``apart``, and ``pairs_beyond_per_task``.
    """
    pairs = []
    counts = Counter() if counts is None else counts
    for fork in _forks([(row, turn_spans(row.messages, row.action_mask)) for row in rollouts], values, counts):
        best = max(fork, key=lambda step: step.value)
        strict = apart and values is not None
        worse = [step for step in fork if step is not best and best.beats(step, margin, strict)]
        counts["pairs_too_close"] += len(fork) - 1 - len(worse)
        pairs += [(best, step) for step in worse]
    counts["pairs_beyond_per_task"] += max(0, len(pairs) - limit)
    pairs.sort(key=lambda pair: pair[1].value - pair[0].value)
    return [
        pair_of(
            number,
            PairKind.STEP,
            best.example(best=True),
            worse.example(best=False),
            (best.value, worse.value),
            "agentq",
        )
        for number, (best, worse) in enumerate(pairs[:limit])
    ]


def trajectory_pairs(
    rollouts: Sequence[Trajectory], margin: float, limit: int, counts: Counter[str] | None = None
) -> list[Pair]:
    """Whole rollouts of *one* task: the best ones against the worst ones, ranked by reward, then fewest tokens.
    ``counts`` is told of ``pairs_beyond_per_task``."""
    counts = Counter() if counts is None else counts
    ranked = sorted(rollouts, key=lambda t: (-t.scored_reward(), t.n_tokens, t.trajectory_id))
    pairs = []
    for number, (best, worst) in enumerate(zip(ranked, reversed(ranked), strict=True)):
        values = (best.scored_reward(), worst.scored_reward())
        if values[0] - values[1] < margin:
            break
        if number >= limit:
            counts["pairs_beyond_per_task"] += 1
            continue
        sides = (SideOfPair(best, 0, best.n_tokens), SideOfPair(worst, 0, worst.n_tokens))
        pairs.append(pair_of(number, PairKind.TRAJECTORY, *sides, values, "outcome"))
    return pairs

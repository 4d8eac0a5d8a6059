"""Preference pairs from rollouts of one task, in the manner of Agent Q (Putta et al. 2024).

Rollouts of a task form a tree: those that made the same steps share a path. The value of a step is the mean reward of
the rollouts that went through it, a Monte-Carlo estimate of Agent Q's Q-value. If siblings differ in value, the
better one is preferred to the worse one, after exactly the same prefix. The loss covers only the step that differs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from agentrl.advantages.turns import turn_spans
from schemas.pair import Pair, PairKind
from schemas.trajectory import Trajectory


@dataclass(frozen=True)
class _Turn:
    """One step on one path: ``end`` is the exclusive end of its action tokens, ``start`` their beginning."""

    trajectory: Trajectory
    start: int
    end: int


@dataclass(frozen=True)
class _Step:
    """One choice at a node of the tree, with every rollout that made it."""

    turns: tuple[_Turn, ...]

    @property
    def value(self) -> float:
        return sum(turn.trajectory.scored_reward() for turn in self.turns) / len(self.turns)

    def example(self, best: bool) -> _Turn:
        """The rollout that shows this choice at its best, or worst; ties go to the shortest, then to the first."""
        return min(
            self.turns,
            key=lambda turn: (
                -turn.trajectory.scored_reward() if best else turn.trajectory.scored_reward(),
                turn.trajectory.n_tokens,
                turn.trajectory.trajectory_id,
            ),
        )


def _forks(turns: list[tuple[Trajectory, list[tuple[int, int]]]], depth: int = 0) -> Iterator[list[_Step]]:
    """Every node of the tree at which the rollouts made different choices, as the list of these choices."""
    choices: dict[tuple[int, ...], list[tuple[Trajectory, list[tuple[int, int]]]]] = defaultdict(list)
    for trajectory, runs in turns:
        if depth < len(runs):
            choices[tuple(trajectory.input_ids[: runs[depth][1]])].append((trajectory, runs))
    # Choices count as siblings only after the same prefix; an environment that answers differently makes another node.
    siblings: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for path, members in choices.items():
        siblings[path[: members[0][1][depth][0]]].append(path)
    for paths in siblings.values():
        if len(paths) > 1:
            yield [_Step(tuple(_Turn(t, *runs[depth]) for t, runs in choices[path])) for path in paths]
    for members in choices.values():
        if len(members) > 1:
            yield from _forks(members, depth + 1)


def _pair(number: int, kind: PairKind, chosen: _Turn, rejected: _Turn, values: tuple[float, float]) -> Pair:
    first, second = chosen.trajectory, rejected.trajectory

    def side(turn: _Turn) -> tuple[list[int], list[bool]]:
        mask = turn.trajectory.action_mask[: turn.end]
        return turn.trajectory.input_ids[: turn.end], [False] * turn.start + mask[turn.start :]

    chosen_ids, chosen_mask = side(chosen)
    rejected_ids, rejected_mask = side(rejected)
    shared = next(
        (i for i, (a, b) in enumerate(zip(chosen_ids, rejected_ids, strict=False)) if a != b),
        min(len(chosen_ids), len(rejected_ids)),
    )
    return Pair(
        pair_id=f"{first.task_id}-{kind}-{number}",
        task_id=first.task_id,
        kind=kind,
        chosen_id=first.trajectory_id,
        rejected_id=second.trajectory_id,
        method="agentq" if kind is PairKind.STEP else "outcome",
        chosen_reward=values[0],
        rejected_reward=values[1],
        shared_prefix=shared,
        tokenizer=first.tokenizer,
        chosen_ids=chosen_ids,
        chosen_mask=chosen_mask,
        rejected_ids=rejected_ids,
        rejected_mask=rejected_mask,
    )


def step_pairs(rollouts: Sequence[Trajectory], margin: float, limit: int) -> list[Pair]:
    """Pairs from the steps at which rollouts of *one* task diverge: the best choice of each node against every other
    whose value is lower by ``margin`` or more, largest difference first, at most ``limit``.

    ``chosen_reward`` and ``rejected_reward`` are the values of the two steps.
    """
    found = []
    for fork in _forks([(rollout, turn_spans(rollout.action_mask)) for rollout in rollouts]):
        best = max(fork, key=lambda step: step.value)
        found += [(best, step) for step in fork if best.value - step.value >= margin and step is not best]
    found.sort(key=lambda pair: pair[1].value - pair[0].value)
    return [
        _pair(number, PairKind.STEP, best.example(best=True), worse.example(best=False), (best.value, worse.value))
        for number, (best, worse) in enumerate(found[:limit])
    ]


def trajectory_pairs(rollouts: Sequence[Trajectory], margin: float, limit: int) -> list[Pair]:
    """Whole rollouts of *one* task: the best ones against the worst ones, ranked by reward, then fewest tokens."""
    ranked = sorted(rollouts, key=lambda t: (-t.scored_reward(), t.n_tokens, t.trajectory_id))
    pairs = []
    for number, (best, worst) in enumerate(zip(ranked, reversed(ranked), strict=True)):
        values = (best.scored_reward(), worst.scored_reward())
        if number == limit or values[0] - values[1] < margin:
            break
        sides = (_Turn(best, 0, best.n_tokens), _Turn(worst, 0, worst.n_tokens))
        pairs.append(_pair(number, PairKind.TRAJECTORY, *sides, values))
    return pairs


def by_task(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Trajectories grouped by task, in order of first appearance."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.task_id].append(trajectory)
    return dict(groups)

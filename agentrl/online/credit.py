"""From rollouts to training rows: shaped rewards, advantages, off-policy weights, and which rows are left out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.advantages.group import degenerate_groups, most_uncertain, normalise_by_domain
from agentrl.advantages.turns import acting, divergence_weights, fork_turn_weights, subgoal_weights, turn_spans
from agentrl.algorithms.policy_gradient import KL, Advantages, ByToken, Experience, PolicyGradient, total
from agentrl.online.forest import ForestConfig, forest_advantages
from agentrl.online.off_policy import correct
from agentrl.rollouts.segments import numbered
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Termination, Trajectory, UnscoredError
from agentrl.training.batch import TrainingError


@dataclass(frozen=True)
class Extras:
    """What some algorithms need besides the rollouts, by token: log-probs of the ``reference`` policy, of the
    ``proximal`` policy (the one about to be updated) and of a ``teacher``, ``values`` of a critic; and the reward of
    each task's ``greedy`` rollout. ``version`` is that of the policy about to be updated."""

    reference: ByToken | None = None
    proximal: ByToken | None = None
    values: ByToken | None = None
    greedy: dict[Any, float] = field(default_factory=dict)
    version: int = 0
    teacher: ByToken | None = None


@dataclass(frozen=True)
class Credit:
    """``rows`` to train on; ``advantages`` (mean over action tokens) and ``trained`` of every rollout; ``targets`` for
    the value head; ``attempts`` [rollouts] numbers what counts once, see :func:`agentrl.rollouts.segments.numbered`;
    ``lr_scale`` from the guard of off-policy training, 0 if the update is to be skipped; ``counted`` is what the loss
    over these rows is divided by, in episodes or tokens, see :func:`counted_of`."""

    rows: list[TrainingRow]
    advantages: list[float]
    trained: list[bool]
    targets: list[TrainingRow]
    metrics: dict[str, float]
    attempts: np.ndarray
    lr_scale: float = 1.0
    counted: float = 0.0


def shaped_rewards(
    algorithm: PolicyGradient, rollouts: Sequence[Trajectory], attempts: np.ndarray | None = None
) -> np.ndarray:
    """Reward of each attempt, [attempts], with soft overlong punishment and normalisation per environment and level.
    ``attempts`` [rows] numbers them; without it each rollout is one. Raises as :func:`plain_rewards` does."""
    whose = np.arange(len(rollouts)) if attempts is None else attempts
    first = np.unique(whose, return_index=True)[1].tolist()
    rewards = of_attempts(plain_rewards(algorithm, rollouts), whose)
    return by_level(algorithm, rewards, [(rollouts[index].env, rollouts[index].level) for index in first])


def plain_rewards(algorithm: PolicyGradient, rollouts: Sequence[Trajectory]) -> np.ndarray:
    """Reward of each rollout, [rows], with soft overlong punishment.

    Raises UnscoredError that names rollouts without a reward, and TrainingError that names those whose reward is not a
    finite number.
    """
    _check_scored(rollouts)
    rewards = np.array([row.scored_reward() for row in rollouts], dtype=np.float64)
    if algorithm.overlong:
        rewards -= [algorithm.overlong.punishment(row) for row in rollouts]
    return rewards


def by_level(algorithm: PolicyGradient, rewards: np.ndarray, levels: Sequence[tuple[str, int]]) -> np.ndarray:
    """Rewards [rows], normalised per environment and level if the algorithm says so."""
    return normalise_by_domain(rewards.tolist(), levels) if algorithm.per_level else rewards


def of_attempts(rewards: np.ndarray, attempts: np.ndarray) -> np.ndarray:
    """Rewards of rows [rows] as those of their attempts, [attempts], which ``attempts`` [rows] numbers from 0. The rows
    of one differ by punishments alone; it has the largest."""
    lowest = np.full(attempts.max(initial=-1) + 1, np.inf)
    np.minimum.at(lowest, attempts, rewards)
    return lowest


def group_of(row: Trajectory, credit: str = "whole") -> str:
    """The ticket that a rollout is of, whose samples are compared with each other. Rows that name none, or only their
    task, are grouped by task and by the policy that sampled them: rewards of another policy are no baseline. Under
    ``credit: agent`` each agent has a group of its own."""
    group = row.group_id
    if not group or group == row.task_id:
        group = f"{row.task_id} {row.fingerprint} {row.policy} {row.policy_version}"
    return f"{group} {row.agent}" if credit == "agent" else group


def _check_reference(algorithm: PolicyGradient, extras: Extras) -> None:
    if algorithm.kl and extras.reference is None:
        raise TrainingError(
            f"algorithm.kl {algorithm.kl.model_dump()} needs the log-probs of a reference policy; give them as "
            "Extras(reference=...), [rollouts][tokens], or leave kl out"
        )


def _check_scored(rollouts: Sequence[Trajectory]) -> None:
    if unscored := [row.trajectory_id for row in rollouts if row.reward is None]:
        raise UnscoredError("reward", unscored)
    if broken := [row.trajectory_id for row in rollouts if not np.isfinite(row.scored_reward())]:
        raise TrainingError(f"reward not finite in {', '.join(broken[:5])}; look at the environment's score")


def assign(
    algorithm: PolicyGradient,
    rollouts: Sequence[Trajectory],
    extras: Extras = Extras(),
    fork: ForestConfig | None = None,
) -> Credit:
    """Training rows of ``rollouts``, by ``algorithm``; with ``fork`` they are trees. Rows stay in order; a row's
    ``logprobs`` are what ratios are taken to: the proximal policy's under off-policy correction, else those of the
    policy that sampled.

    Raises UnscoredError as :func:`plain_rewards` does, TrainingError if the algorithm needs a reference and ``extras``
    has none, and ValueError as :func:`agentrl.rollouts.segments.numbered` does.
    """
    _check_reference(algorithm, extras)
    _check_scored(rollouts)
    groups = [group_of(row, algorithm.credit) for row in rollouts]
    names = [row.episode_id or row.trajectory_id for row in rollouts]
    episodes = numbered(names, groups, [row.reward for row in rollouts], algorithm.credit, names.__getitem__)
    first = np.unique(episodes, return_index=True)[1].tolist()
    rewards = shaped_rewards(algorithm, rollouts, episodes)
    penalties = _penalties(algorithm, rollouts, extras.reference)
    taken = np.bincount(episodes, [total(costs) for costs in penalties])
    scored = np.array([rollouts[index].scored_reward() for index in first])
    step = Experience(
        rollouts, [groups[index] for index in first], rewards, penalties,
        extras.values, extras.proximal, extras.greedy, extras.teacher, episodes,
    )  # fmt: skip
    credited, keep, degenerate = token_advantages(algorithm, step, scored - taken, fork)
    keep &= np.array([row.termination is not Termination.MAX_CONTEXT for row in rollouts])
    weights = blamed(algorithm, rollouts, groups, credited.tokens)
    anchors: ByToken = [row.logprobs for row in rollouts]
    metrics = {"degenerate_rows": float(degenerate.sum())}
    if lost := sum(rollouts[index].termination is Termination.MAX_CONTEXT for index in first):
        metrics["out_of_context"] = float(lost)
    lr_scale = 1.0
    if algorithm.off_policy and extras.proximal is not None:
        weights, keep, more, lr_scale = correct(
            algorithm.off_policy, rollouts, weights, keep, extras.proximal, extras.version
        )
        metrics.update(more)
        anchors = extras.proximal
    means = [_mean_where(weight, row.action_mask) for weight, row in zip(weights, rollouts, strict=True)]
    live = keep & (
        algorithm.acts_on_every_row | np.array([_teaches(*pair) for pair in zip(weights, rollouts, strict=True)])
    )
    actions = np.array([sum(row.action_mask) for row in rollouts])
    share, counted = share_of(algorithm, actions, live, keep, episodes), counted_of(algorithm, actions, keep, episodes)
    references: ByToken = extras.reference or [[]] * len(rollouts)
    rows = [
        _training_row(rollouts[n], int(episodes[n]), share * np.asarray(weights[n]), anchors[n], references[n])
        for n in np.flatnonzero(live).tolist()
    ]
    return Credit(rows, means, live.tolist(), credited.targets, metrics, episodes, lr_scale, counted)


def _training_row(row: Trajectory, unit: int, weights: np.ndarray, anchors: Any, reference: Any) -> TrainingRow:
    return TrainingRow(
        row_id=row.trajectory_id,
        unit=unit,
        label=0 if row.success is None else 2 * row.success - 1,
        input_ids=row.input_ids,
        mask=row.action_mask,
        weights=weights.tolist(),
        logprobs=list(anchors),
        ref_logprobs=list(reference),
    )


def token_advantages(
    algorithm: PolicyGradient, step: Experience, scored: np.ndarray, fork: ForestConfig | None = None
) -> tuple[Advantages, np.ndarray, np.ndarray]:
    """The advantages of a step's tokens; which rollouts the algorithm keeps, and which are in a group of equal
    rewards, both [rollouts]. ``scored`` [episodes] are rewards as they came, less what penalties take. With ``fork``,
    rollouts are trees.

    Raises TrainingError unless there is a finite number for each token of each rollout.
    """
    keep, degenerate = _kept(algorithm, step.rewards, scored, step.groups)
    credited = forest_advantages(algorithm, step, fork) if fork else (algorithm.advantage or algorithm).advantages(step)
    whose = (algorithm.advantage or algorithm).type
    if len(credited.tokens) != len(step.penalties):
        raise TrainingError(
            f"{whose} gave advantages of {len(credited.tokens)} rollouts; there are {len(step.penalties)}"
        )
    for number, (values, tokens) in enumerate(zip(credited.tokens, map(len, step.penalties), strict=True)):
        if len(values) != tokens:
            what = f"{len(values)} advantages for the {tokens} tokens of {step.rollouts[number].trajectory_id}"
            raise TrainingError(f"{whose} gave {what}; Experience.every_token spreads one number over a rollout")
        if not np.isfinite(values).all():
            name = step.rollouts[number].trajectory_id
            raise TrainingError(f"{whose} gave {name} an advantage that is no finite number")
    return credited, step.of_rollouts(keep), step.of_rollouts(degenerate)


def _teaches(weights: Sequence[float] | np.ndarray, row: Trajectory) -> bool:
    """Whether a row has an advantage on any action token: without, its policy gradient is zero."""
    return bool((np.abs(weights)[row.action_mask] > 1e-9).any())


def _kept(
    algorithm: PolicyGradient, rewards: np.ndarray, scored: np.ndarray, groups: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows the algorithm keeps, and which are in a group of equal ``scored`` rewards, both [rows]."""
    degenerate = degenerate_groups(scored.tolist(), groups)
    keep = np.ones(len(rewards), dtype=bool)
    if algorithm.degenerate == "drop":
        keep &= ~degenerate
    if algorithm.keep_uncertain < 1:
        keep &= most_uncertain(rewards.tolist(), groups, algorithm.keep_uncertain)
    return keep, degenerate


def share_of(
    algorithm: PolicyGradient, actions: np.ndarray, live: np.ndarray, keep: np.ndarray, episodes: np.ndarray
) -> float:
    """What the advantages of the rows that are computed (``live``) are scaled by, so that the loss is divided by all
    episodes, or all their tokens, that the algorithm counts: those that it keeps, or for a constant denominator all.
    Rows without gradient are not computed. ``actions`` counts the action tokens of each row, ``episodes`` numbers the
    episode of each; both [rows]."""
    counted = counted_of(algorithm, actions, keep, episodes)
    return size_of(algorithm, actions, live, episodes) / counted if counted else 1.0


def counted_of(algorithm: PolicyGradient, actions: np.ndarray, keep: np.ndarray, episodes: np.ndarray) -> float:
    """What the loss is divided by: the episodes that the algorithm counts, or their tokens; see :func:`share_of`."""
    return size_of(algorithm, actions, np.ones_like(keep) if algorithm.aggregate == "constant" else keep, episodes)


def size_of(algorithm: PolicyGradient, actions: np.ndarray, rows: np.ndarray, episodes: np.ndarray) -> float:
    """What some ``rows`` (a mask, [rows]) count: their episodes, or their action tokens; see :func:`share_of`."""
    return float(actions[rows].sum()) if algorithm.aggregate == "token" else float(len(np.unique(episodes[rows])))


@dataclass(frozen=True)
class RowCredit:
    """What all tokens of each rollout weigh, ``weights`` [rows], and ``live`` [rows]: which rollouts to train on."""

    weights: np.ndarray
    live: np.ndarray
    metrics: dict[str, float]


def assign_rows(
    algorithm: PolicyGradient,
    rewards: np.ndarray,
    scored: np.ndarray,
    groups: Sequence[str],
    actions: np.ndarray,
    episodes: np.ndarray | None = None,
    out_of_context: np.ndarray | None = None,
) -> RowCredit:
    """The same as :func:`assign`, for an algorithm that ``credits_whole_rows``, from columns [rows]: shaped and
    ``scored`` rewards, groups, and the number of action tokens. ``episodes`` [rows] are numbers; rows of one episode
    count once in the statistics of its group, and have its advantage. Without it each row is an episode. Rows that are
    ``out_of_context`` [rows] are left out, and count in the statistics."""
    first = whose = np.arange(len(rewards))
    if episodes is not None:
        _, first, whose = np.unique(episodes, return_index=True, return_inverse=True)
    of_episodes = rewards[first], scored[first], [groups[index] for index in first.tolist()], np.zeros(len(first))
    advantages, keep, degenerate = (part[whose] for part in row_advantages(algorithm, *of_episodes))
    if out_of_context is not None:
        keep = keep & ~out_of_context
    live = keep & (algorithm.acts_on_every_row | ((abs(advantages) > 1e-9) & (actions > 0)))
    share = share_of(algorithm, actions, live, keep, whose)
    return RowCredit(share * advantages, live, {"degenerate_rows": float(degenerate.sum())})


def row_advantages(
    algorithm: PolicyGradient, rewards: np.ndarray, scored: np.ndarray, groups: Sequence[str], taken: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The advantage that all tokens of a rollout have, if the algorithm ``credits_returns``; which rollouts it keeps,
    and which are in a group of equal rewards: each [rows]. ``taken`` [rows] is what penalties take off the rewards."""
    keep, degenerate = _kept(algorithm, rewards, scored - taken, groups)
    step = Experience([], groups, rewards, [[cost] for cost in taken.tolist()])  # as if each had one token
    return np.array([advantage for [advantage] in algorithm.advantages(step).tokens]), keep, degenerate


def _penalties(
    algorithm: PolicyGradient, rollouts: Sequence[Trajectory], reference: ByToken | None
) -> list[np.ndarray]:
    """What is subtracted from the reward of each token for the divergence from the reference, [rows][tokens]."""
    if not (algorithm.kl and algorithm.kl.where == "reward"):
        return [np.broadcast_to(0.0, len(row.input_ids)) for row in rollouts]
    assert reference is not None
    return [
        penalty(algorithm.kl, torch.tensor(row.logprobs), torch.tensor(ref), torch.tensor(row.action_mask))
        .double()
        .numpy()
        for row, ref in zip(rollouts, reference, strict=True)
    ]


def penalty(kl: KL, logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """What the divergence from a reference takes off the reward of each token, [tokens]; 0 where ``mask`` is false."""
    from agentrl.algorithms.kl import ESTIMATORS

    return (ESTIMATORS[kl.estimator](logprobs, reference) * kl.coef).where(mask, torch.zeros(()))


def blamed(
    algorithm: PolicyGradient, rollouts: Sequence[Trajectory], groups: Sequence[str], weights: ByToken
) -> ByToken:
    """Weights of the tokens of whole groups, of which a failed rollout keeps those on the tokens that the algorithm's
    ``credit`` blames, and a continuation those of its first turn under ``fork_turn``.

    Raises TrainingError that names a later segment of an episode, if turns are blamed that other segments may have.
    """
    parts = [row.trajectory_id for row in rollouts if row.segment]
    if parts and algorithm.credit in ("first_divergence", "subgoal"):
        raise TrainingError(
            f"credit: {algorithm.credit} compares whole episodes, and {parts[0]} is a segment of one; use credit: "
            "whole, or sample without compress"
        )
    if algorithm.credit == "first_divergence":
        return _blame_divergence(rollouts, groups, weights)
    if algorithm.credit == "fork_turn":
        return [
            np.multiply(weight, fork_turn_weights(len(weight), turn_spans(row.messages, row.action_mask), row.fork_at))
            for row, weight in zip(rollouts, weights, strict=True)
        ]
    if algorithm.credit == "values":
        raise TrainingError(
            "credit: values needs values of stored rows; use train.offline with the steps of steps.value"
        )
    return _blame_subgoal(rollouts, weights) if algorithm.credit == "subgoal" else weights


def _blame_divergence(rollouts: Sequence[Trajectory], groups: Sequence[str], weights: ByToken) -> ByToken:
    solved: dict[str, list[list[int]]] = {}
    for row, group in zip(rollouts, groups, strict=True):
        if row.scored_success():
            solved.setdefault(group, []).append(row.input_ids)
    out: list[Sequence[float] | np.ndarray] = []
    for row, group, weight in zip(rollouts, groups, weights, strict=True):
        if row.scored_success():
            out.append(weight)
            continue
        blame = divergence_weights(row.input_ids, turn_spans(row.messages, row.action_mask), solved.get(group, []))
        out.append(np.multiply(weight, blame))
    return out


def _blame_subgoal(rollouts: Sequence[Trajectory], weights: ByToken) -> ByToken:
    """A failed row keeps its advantage on the turns spent on its first failed subgoal; the answer is the last one."""
    out: list[Sequence[float] | np.ndarray] = []
    silent = []
    for row, weight in zip(rollouts, weights, strict=True):
        state = json.loads(row.final_state)
        calls = state.get("subgoals") if isinstance(state, dict) else None
        if calls is None:
            silent.append(row.trajectory_id)
        elif row.scored_success():
            out.append(weight)
        else:
            turns = [turn for turn, message in enumerate(acting(row.messages)) for _ in message.tool_calls]
            reached = [None if call is None else turns[call] for call in calls]
            spans = turn_spans(row.messages, row.action_mask)
            blame = subgoal_weights(len(row.input_ids), spans, [*reached, None])
            out.append(np.multiply(weight, blame))
    if silent:
        raise TrainingError(
            f"credit: subgoal, but final_state of {', '.join(silent[:5])} names no subgoals; let the environment's "
            "state() give them, or use credit: first_divergence"
        )
    return out


def _mean_where(values: Sequence[float] | np.ndarray, mask: Sequence[bool]) -> float:
    chosen = np.asarray(values)[mask]
    return total(chosen) / len(chosen) if len(chosen) else 0.0

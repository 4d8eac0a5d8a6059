"""Stored rollouts that are trained on again beside fresh ones: which are drawn, and what they weigh in a step.

Whole groups are drawn, and advantages are those of the stored group alone: rewards of another policy are another
baseline (RePO: Li et al. 2025, arXiv 2506.09340, normalises replayed groups by themselves too). Fresh groups keep the
advantages that they have without replay. A group of equal rewards has no advantage, and is never drawn.

Draws by priority are those of prioritised experience replay (PER: Schaul et al. 2016, arXiv 1511.05952): a group ``i``
of ``N`` is drawn with ``P(i) = p_i^alpha / sum_k p_k^alpha`` (equation 1), and weighs ``(N P(i))^-beta`` (its section
3.4). There the weights are divided by their maximum, so that they scale updates downwards only; then one unlikely group
in a draw shrinks all others, and the step. Here they are divided by their mean over the draw: replayed groups together
weigh as much as if they had been drawn alike.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.algorithms.policy_gradient import OffPolicy, PolicyGradient
from agentrl.engines.seeds import stream
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.online.credit import Credit

PER = {"alpha": 0.6, "beta": 0.4}
"""As Schaul et al. 2016 set them for the proportional variant (table 3)."""


class ReplayConfig(BaseModel):
    """What is trained on again beside fresh rollouts: those of earlier iterations, and those of ``inputs.replay``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(0.25, gt=0, lt=1, description="share of the groups of a step that are replayed")
    draw: Literal["uniform", "priority", "success_first"] = Field(
        "uniform",
        description="how groups are drawn: alike; by priority, how far rewards are from the mean of their group; or "
        "groups with a success first",
    )
    alpha: float = Field(PER["alpha"], ge=0, description="of priority: 0 draws all alike, 1 in proportion to it")
    beta: float = Field(
        PER["beta"], ge=0, le=1, description="of priority: how far weights undo its bias; 1 does wholly"
    )
    own: bool = Field(True, description="replay rollouts of earlier iterations of this run")
    max_age: int | None = Field(
        None, ge=1, description="of own: greatest age in versions; rows of other runs have no age; None: any"
    )
    correction: OffPolicy | None = Field(
        OffPolicy(truncate=2.0, min_ess=0.2),
        description="importance weights of replayed tokens. Below min_ess, the guard scales down the replayed part, or "
        "leaves it out (skip). None: ratios of the loss are to the policy that sampled",
    )

    @model_validator(mode="after")
    def _settings_do_something(self) -> "ReplayConfig":
        given = [name for name, default in PER.items() if getattr(self, name) != default]
        if given and self.draw != "priority":
            raise ValueError(f"{given[0]} does nothing with draw: {self.draw}; it is for draw: priority")
        if self.max_age is not None and not self.own:
            raise ValueError(
                f"max_age: {self.max_age} does nothing with own: false: versions of other runs are not compared with "
                "this one's; leave out old rows by trajectories.select with where: policy_version >= N"
            )
        if self.correction and (self.correction.vtrace or self.correction.max_staleness is not None):
            raise ValueError("correction takes no vtrace, which needs a critic, and no max_staleness; use max_age")
        return self

    def needs_logprobs(self, algorithm: PolicyGradient) -> bool:
        """Whether replayed rows need the log-probs of the policy that sampled them."""
        has_ratio = type(algorithm).token_loss is not PolicyGradient.token_loss
        in_reward = algorithm.kl is not None and algorithm.kl.where == "reward"
        return self.correction is not None or has_ratio or in_reward


@dataclass(frozen=True)
class StoredGroup:
    """A stored group: the ids of its rows, how far their rewards are from the mean on average, whether one succeeded,
    and the oldest version that sampled it, if it is of this run."""

    ids: tuple[str, ...]
    priority: float
    success: bool
    version: int | None = None


def groups_of(rows: Iterable[Trajectory], credit: str, own: bool) -> list[StoredGroup]:
    """The groups of scored rows, in the order of their first rows. Only scalars of the rows are looked at. Under
    ``credit: agent`` rewards are compared with those of the same agent. Groups of equal rewards are left out."""
    from agentrl.online.credit import group_of

    rows_of_group: dict[str, list[Trajectory]] = {}
    for row in rows:
        rows_of_group.setdefault(group_of(row), []).append(row)
    groups = []
    for members in rows_of_group.values():
        rewards = np.array([row.scored_reward() for row in members])
        compared = np.array([group_of(row, credit) for row in members])
        distance = np.zeros(len(members))
        for name in np.unique(compared):
            distance[compared == name] = abs(rewards[compared == name] - rewards[compared == name].mean())
        if distance.max() > 1e-9:
            version = min(row.policy_version for row in members) if own else None
            ids = tuple(row.trajectory_id for row in members)
            groups.append(StoredGroup(ids, float(distance.mean()), any(row.success for row in members), version))
    return groups


@dataclass(frozen=True)
class ReplayDraw:
    """Rows of groups that are replayed in a step, and what each of them weighs, [rows]. ``age`` is how many versions
    old groups of this run are on average, if there are some."""

    rows: list[Trajectory]
    weights: list[float]
    age: float | None = None


class Replay:
    """The groups that a run may replay, and the draws from them. ``size`` is the number of fresh groups of a step,
    ``stored`` are groups of other runs, and ``read`` gives rows by their ids, in that order."""

    def __init__(
        self,
        config: ReplayConfig,
        algorithm: PolicyGradient,
        size: int,
        seed: int,
        stored: Sequence[StoredGroup],
        read: Callable[[Sequence[str]], list[Trajectory]],
    ) -> None:
        self.config, self.seed, self._read = config, seed, read
        self._credit = algorithm.credit
        self._stored, self._own = list(stored), list[StoredGroup]()
        self.number = max(1, round(size * config.share / (1 - config.share)))

    def add(self, rows: Iterable[Trajectory]) -> None:
        """Take the rollouts of an iteration that is done."""
        if self.config.own:
            self._own += groups_of((row for row in rows if row.reward is not None), self._credit, own=True)

    def draw(self, iteration: int, version: int) -> ReplayDraw | None:
        """What an iteration replays, from seed and iteration alone; None if there is nothing yet. ``version`` is that
        of the policy that is about to be updated."""
        if self.config.max_age is not None:
            oldest = version - self.config.max_age
            self._own = [group for group in self._own if group.version is not None and group.version >= oldest]
        groups = [*self._stored, *self._own]
        if not groups:
            return None
        random = np.random.default_rng(stream(self.seed, "replay", iteration))
        numbers, weights = drawn(groups, min(self.number, len(groups)), self.config, random)
        ids = [(name, weight) for n, weight in zip(numbers, weights, strict=True) for name in groups[n].ids]
        ages = [version - group.version for n in numbers if (group := groups[n]).version is not None]
        rows = self._read([name for name, _ in ids])
        return ReplayDraw(rows, [weight for _, weight in ids], sum(ages) / len(ages) if ages else None)


def drawn(
    groups: Sequence[StoredGroup], n: int, config: ReplayConfig, random: np.random.Generator
) -> tuple[list[int], list[float]]:
    """The numbers of the groups of ``n`` draws, each once, and what each weighs: 1 on average over the draws. By
    priority draws are with replacement, and a group that was drawn twice weighs twice as much."""
    if config.draw != "priority":
        order = random.permutation(len(groups))
        if config.draw == "success_first":
            order = np.array(sorted(order.tolist(), key=lambda number: not groups[number].success))
        return sorted(order[:n].tolist()), [1.0] * n
    scaled = np.array([group.priority for group in groups]) ** config.alpha
    chances = scaled / scaled.sum()
    numbers, counts = np.unique(random.choice(len(groups), size=n, p=chances), return_counts=True)
    return numbers.tolist(), priority_weights(chances, numbers, counts, config.beta).tolist()


def priority_weights(chances: np.ndarray, numbers: np.ndarray, counts: np.ndarray, beta: float) -> np.ndarray:
    """``counts (N P)^-beta`` of the groups ``numbers`` [drawn], which were drawn ``counts`` [drawn] times with
    ``chances`` [groups], divided by its mean over all draws."""
    weights = (len(chances) * chances[numbers]) ** -beta
    scaled: np.ndarray = counts * weights * counts.sum() / (counts * weights).sum()
    return scaled


def corrected(algorithm: PolicyGradient, config: ReplayConfig) -> PolicyGradient:
    """The algorithm as it credits replayed rows."""
    return algorithm.model_copy(update={"off_policy": config.correction})


def reweighted(credit: "Credit", weights: Sequence[float]) -> "Credit":
    """The credit of replayed rollouts, in which each counts by its weight [rollouts]."""
    live = [weight for weight, trained in zip(weights, credit.trained, strict=True) if trained]
    rows = [_times(row, weight) for row, weight in zip(credit.rows, live, strict=True)]
    advantages = [advantage * weight for advantage, weight in zip(credit.advantages, weights, strict=True)]
    return replace(credit, rows=rows, advantages=advantages)


def mixed(algorithm: PolicyGradient, fresh: "Credit", replayed: "Credit") -> list[TrainingRow]:
    """The rows of a step over both. Its loss is the sum of both over what both count, in episodes or tokens; replayed
    ones count, and weigh, ``replayed.lr_scale`` times as much. Rows come fresh first; units stay apart."""
    scale = replayed.lr_scale
    if not scale:
        return fresh.rows
    sizes = [_size(algorithm, credit.rows) for credit in (fresh, replayed)]
    counted = fresh.counted + scale * replayed.counted
    rows: list[TrainingRow] = []
    for credit, size, factor in ((fresh, sizes[0], 1.0), (replayed, sizes[1], scale)):
        # the rows of a credit are scaled for a step over them alone, see credit.share_of
        alone = size / credit.counted if credit.counted else 1.0
        whole = sum(sizes) / counted
        first = 1 + max((row.unit for row in rows), default=-1)
        rows += [
            _times(row, factor * whole / alone).model_copy(update={"unit": first + row.unit}) for row in credit.rows
        ]
    return rows


def _size(algorithm: PolicyGradient, rows: Sequence[TrainingRow]) -> float:
    """What the loss of a step over these rows is divided by: their episodes, or their action tokens."""
    from agentrl.online.credit import size_of

    actions = np.array([sum(row.mask) for row in rows], int)
    return size_of(algorithm, actions, actions > 0, np.array([row.unit for row in rows]))


def _times(row: TrainingRow, factor: float) -> TrainingRow:
    return row.model_copy(update={"weights": [factor * weight for weight in row.weights]})


def metrics_of(groups: ReplayDraw | None, credit: "Credit | None") -> dict[str, float]:
    """What is said of the replayed part of a step."""
    if groups is None or credit is None:
        return {"replay_rows": 0.0}
    scale = credit.lr_scale
    metrics = {
        "replay_rows": float(len(groups.rows)),
        "replay_scale": scale,
        "replay_dropped": float(scale == 0),
        "replay_scaled": float(0 < scale < 1),
    }
    if groups.age is not None:
        metrics["replay_age"] = groups.age
    names = {"ess": "replay_ess", "mean_importance": "replay_importance", "masked_share": "replay_masked"}
    return metrics | {name: credit.metrics[key] for key, name in names.items() if key in credit.metrics}

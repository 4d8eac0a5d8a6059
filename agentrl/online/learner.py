"""What an online run learns from its rollouts: it turns them into a batch, and has the steps over it taken."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.algorithms.policy_gradient import PolicyGradient
from agentrl.algorithms.ppo import PPO
from agentrl.engines.routes import route_shape
from agentrl.models.policy import Policy
from agentrl.online.agents import by_agent
from agentrl.online.credit import Credit, Extras, assign, group_of
from agentrl.online.forest import ForestConfig
from agentrl.online.mismatch import mismatch
from agentrl.online.models import Models, Scores
from agentrl.online.observed import Observed
from agentrl.online.off_policy import divergence
from agentrl.online.recorded import Recorded
from agentrl.online.replay import ReplayConfig, ReplayDraw, corrected, metrics_of, mixed, reweighted
from agentrl.rollouts.outcomes import shares_of_ends
from agentrl.rollouts.segments import firsts
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Trajectory
from agentrl.statistics.excluded import excluded
from agentrl.training.batch import check_rows, units
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows

if TYPE_CHECKING:
    from agentrl.online.ranks import ModelsOnRanks
    from agentrl.online.teacher import Teacher


REPLAYED = "replay_weight"
"""In the records of a run that replays: what a stored rollout weighed in the draw of the step, 0 for a fresh one."""


@dataclass
class OnlineState:
    """What has been recorded so far: metrics of iterations, records of rollouts, rows of tickets."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    tickets: list[dict[str, Any]] = field(default_factory=list)


class Learner:
    """Trains ``policy`` by ``algorithm`` in ``iterations`` iterations, of ``updates`` optimiser steps each, over groups
    of ``samples`` rollouts. ``models`` are those on ranks; without them, all models are in this process, and
    ``record_tokens`` says whether they keep what updates saw of their tokens. ``observe`` gives the weights of
    observations in the second stream, see :class:`agentrl.online.observed.Observed`. ``teacher`` is that of an
    algorithm that needs one. With ``fork``, rollouts are trees (:mod:`agentrl.online.forest`). With ``replay``, stored
    rollouts are trained on beside them (:mod:`agentrl.online.replay`)."""

    def __init__(
        self,
        policy: Policy,
        algorithm: PolicyGradient,
        optimizer: OptimizerConfig,
        *,
        iterations: int,
        samples: int,
        seed: int,
        updates: int = 1,
        models: "Models | ModelsOnRanks | None" = None,
        record_tokens: bool = False,
        observe: Mapping[str, float] = MappingProxyType({}),
        teacher: "Teacher | None" = None,
        fork: ForestConfig | None = None,
        replay: ReplayConfig | None = None,
    ) -> None:
        self.fork, self.replay = fork, replay
        self.routed = route_shape(policy.model)
        self._routes: Mapping[str, bytes] | None = None
        self.policy, self.algorithm = policy, algorithm
        self.iterations, self.samples, self.seed, self.updates = iterations, samples, seed, updates
        self.teacher = teacher
        self.observed = Observed(observe, lambda ids: str(policy.tokenizer.decode(ids))) if observe else None
        policy.prepare(optimizer.precision)
        steps = iterations * updates
        self.models = models or Models(policy, algorithm, optimizer, steps, seed, updates, record_tokens=record_tokens)

    def batch(
        self,
        iteration: int,
        sampled: Sequence[Trajectory],
        greedy: Sequence[Trajectory],
        drawn: ReplayDraw | None = None,
        routes: Mapping[str, bytes] | None = None,
    ) -> Recorded:
        """What an iteration trains on, from whole groups of rollouts, greedy ones of the same tasks if the algorithm
        compares with them, and stored ones that were ``drawn``. Nothing is changed. ``routes`` are those that the
        rollouts were sampled with, which passes of the policy over them replay.

        Raises ValueError if no rollout has a reward.
        """
        self._routes = routes
        compared = {group_of(row) for row in (greedy or sampled) if row.reward is not None}
        made = [row for row in sampled if row.reward is not None and group_of(row) in compared]
        if not made:
            raise ValueError(
                f"no rollout of {len(sampled)} could be scored: {sampled[0].tags}; look at the environment"
            )
        credit = assign(self.algorithm, made, self._extras(made, greedy), self.fork)
        trained = {row.episode_id for row, live in zip(made, credit.trained, strict=True) if live}
        seen = by_agent(made, credit.advantages)
        if self.observed:
            credit = replace(credit, rows=self.observed.rows(credit.rows, made, credit.attempts))
            seen["observations_unplaced"] = float(self.observed.unplaced)
            self.observed.unplaced = 0
        if self.teacher:
            seen |= self.teacher.metrics()
        again = self._credited_again(drawn) if drawn else None
        if self.replay:
            seen |= metrics_of(drawn, again)
        metrics = {"step": float(iteration), **self._of_rollouts(sampled, made, len(trained)), **credit.metrics, **seen}
        if self.routed:
            metrics |= mismatch(self.routed, made, routes, self._routed_logprobs)
        rows = credit.rows if again is None else mixed(self.algorithm, credit, again)
        parts = self._parts(iteration, rows, credit.lr_scale, metrics)
        fresh = [0.0] * len(made) if self.replay else None
        records = _records(iteration, made, credit, bool(parts), fresh)
        if drawn and again:
            records += _records(iteration, drawn.rows, again, bool(parts) and again.lr_scale > 0, drawn.weights)
        numbered = list(enumerate(parts, self.models.done))
        targets = TrainingRows.of(credit.targets) if self.algorithm.needs_critic else None
        return Recorded(iteration, numbered, targets, credit.lr_scale, metrics, records)

    def _of_rollouts(self, sampled: Sequence[Trajectory], made: Sequence[Trajectory], trained: int) -> dict[str, float]:
        """Metrics of what was ``sampled``, of which ``made`` has a reward, and so many episodes are trained on."""
        episodes, ages = firsts(made), [self.policy.version - row.policy_version for row in made]
        judged = [row for row in episodes if row.success is not None]  # words have the reward of several acts
        return {
            "success": sum(row.scored_success() for row in judged) / max(1, len(judged)),
            "reward": sum(row.scored_reward() for row in episodes) / len(episodes),
            "tokens_per_rollout": sum(row.n_tokens for row in made) / len(episodes),
            "dropped_groups": (len(episodes) - trained) / self.samples,
            "unscored": float(len(firsts(sampled)) - len(episodes)),
            "staleness": sum(ages) / len(ages),
            "max_staleness": float(max(ages)),
            **({"segments": len(made) / len(episodes)} if len(made) > len(episodes) else {}),
            **shares_of_ends(row.termination for row in firsts(sampled)),
            **({"excluded": float(failed)} if (failed := excluded(row.termination for row in firsts(sampled))) else {}),
        }

    def _credited_again(self, drawn: ReplayDraw) -> Credit:
        """The credit of stored rollouts, by themselves, with their importance weights."""
        assert self.replay is not None
        rows, extras = drawn.rows, self._extras(drawn.rows, ())
        needed = self.replay.needs_logprobs(self.algorithm)
        if self.replay.correction or not needed:
            proximal = extras.proximal or self._logprobs(rows)
            extras = replace(extras, proximal=proximal)
            if not needed:  # rows may have none; no ratio to them is taken, and metrics are of those of the policy
                rows = [row.model_copy(update={"logprobs": list(own)}) for row, own in zip(rows, proximal, strict=True)]
        return reweighted(assign(corrected(self.algorithm, self.replay), rows, extras), drawn.weights)

    def _logprobs(self, rows: Sequence[Trajectory]) -> list[list[float]]:
        """Log-probs of the tokens of rollouts by the policy as it is, from the passes that the step makes."""
        return self._routed_logprobs(rows, None)

    def _routed_logprobs(self, rows: Sequence[Trajectory], routes: Mapping[str, bytes] | None) -> list[list[float]]:
        """The same with these routes; without any, with the policy's own."""
        [scored] = self.models.anchored([_unweighted(rows, routes)])
        offsets, values = scored.lists("logprobs")
        return [part.tolist() for part in np.split(values, offsets[1:-1])]

    def _parts(
        self, iteration: int, trained: Sequence[TrainingRow], lr_scale: float, metrics: dict[str, float]
    ) -> list[TrainingRows]:
        """The rows of each optimiser step; none if the update is skipped."""
        warming = isinstance(self.algorithm, PPO) and iteration < self.algorithm.critic.pretrain
        if not trained or warming or lr_scale == 0:
            return []
        rows = TrainingRows.of(trained)
        rows = rows if self._routes is None else rows.routed(self._routes)
        check_rows(rows, self.policy)
        order = units(rows)  # the segments of an episode stay together
        if self.updates > 1:
            Random(f"{self.seed}-updates-{iteration}").shuffle(order)
        parts = [
            rows.take([index for unit in order[start :: self.updates] for index in unit])
            for start in range(min(self.updates, len(order)))
        ]
        if self.policy.precision != "float32":
            fresh = self.models.anchored(parts)
            if not self.algorithm.off_policy:  # else rows are anchored at the proximal policy, not at the sampler
                metrics["sampler_kl"] = divergence(parts, fresh)
            parts = fresh
        return parts

    def update(self, made: Recorded) -> dict[str, float]:
        """Take the steps over what was recorded. Returns all metrics of the iteration; those of its optimiser steps are
        means."""
        metrics = {**made.metrics, **self.models.update(made)}
        if made.parts:
            self.policy.version += 1
        return metrics

    def _extras(self, made: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> Extras:
        rows = _unweighted(made, self._routes)
        scores = {
            name: [values_of_row.tolist() for values_of_row in values] for name, values in self._scores(rows).items()
        }
        credit = self.algorithm.credit
        greedy_rewards = {group_of(row, credit): row.reward for row in greedy if row.reward is not None}
        taught = self.teacher.logprobs(made) if self.teacher else None
        return Extras(**scores, greedy=greedy_rewards, version=self.policy.version, teacher=taught)

    def _scores(self, rows: TrainingRows) -> Scores:
        algorithm = self.algorithm
        needed = algorithm.kl or algorithm.off_policy or algorithm.needs_critic
        return self.models.scores(rows) if needed else {}

    def save(self, path: Path, state: OnlineState, progress: dict[str, Any]) -> None:
        """Write everything that :meth:`restore` needs to go on as if nothing had happened; ``progress`` is the loop's
        part of it."""
        # as text: pickled, equal records would have other bytes after a restart
        records = {name: json.dumps(value) for name, value in vars(state).items()}
        self.models.save(path, {"version": self.policy.version, "progress": json.dumps(progress), **records})

    def restore(self, path: Path) -> tuple[OnlineState, dict[str, Any]] | None:
        """State and progress at the newest checkpoint that can be read. If there is none, None, and nothing is
        changed."""
        saved = self.models.load(path)
        if saved is None:
            return None
        self.policy.version = saved["version"]
        state = OnlineState(*(json.loads(saved[name]) for name in ("metrics", "steps", "tickets")))
        return state, json.loads(saved["progress"])


def _unweighted(rollouts: Sequence[Trajectory], routes: Mapping[str, bytes] | None) -> TrainingRows:
    """The tokens of rollouts as rows that weigh nothing, each a unit, with their routes if they are replayed."""
    rows = TrainingRows.of(
        [
            TrainingRow(
                row_id=row.trajectory_id,
                unit=number,
                input_ids=row.input_ids,
                mask=row.action_mask,
                weights=[0.0] * len(row.input_ids),
            )
            for number, row in enumerate(rollouts)
        ]
    )
    return rows if routes is None else rows.routed(routes)


def _records(
    iteration: int, rollouts: Sequence[Trajectory], credit: Credit, took: bool, weights: Sequence[float] | None
) -> list[dict[str, Any]]:
    """What is recorded of rollouts, with the ``weights`` [rollouts] of their draw if the run replays. ``took`` says
    whether the update took those with an advantage."""
    records: list[dict[str, Any]] = [
        {"step": iteration, "trajectory_id": row.trajectory_id, "advantage": a, "trained": t and took}
        for row, a, t in zip(rollouts, credit.advantages, credit.trained, strict=True)
    ]
    for record, weight in zip(records, weights or (), strict=bool(weights)):
        record[REPLAYED] = weight
    return records

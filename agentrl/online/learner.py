"""The half of online training that has the weights: it turns rollouts into a batch, and takes the steps over it."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from agentrl.algorithms.policy_gradient import ByToken, PolicyGradient
from agentrl.algorithms.ppo import PPO
from agentrl.models.policy import Policy
from agentrl.online.credit import Credit, Extras, assign, group_of
from agentrl.online.critic import CriticTrainer
from agentrl.online.off_policy import divergence
from agentrl.online.recorded import Recorded
from agentrl.rollouts.outcomes import shares_of_ends
from agentrl.training.batch import check_rows
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs
from agentrl.training.step import Trainer
from schemas.training import TrainingRow
from schemas.trajectory import Trajectory


@dataclass
class OnlineState:
    """What has been recorded so far: metrics of iterations, records of rollouts, rows of tickets."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    tickets: list[dict[str, Any]] = field(default_factory=list)


class Learner:
    """Trains ``policy`` by ``algorithm`` in ``iterations`` iterations, of ``updates`` optimiser steps each, over groups
    of ``samples`` rollouts."""

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
    ) -> None:
        self.policy, self.algorithm = policy, algorithm
        self.iterations, self.samples, self.seed, self.updates = iterations, samples, seed, updates
        self.micro_tokens = optimizer.micro_tokens
        policy.prepare(optimizer.precision)
        self.reference = _frozen(policy) if algorithm.kl else None
        self.critic = None
        if isinstance(algorithm, PPO):
            torch.manual_seed(seed)
            self.critic = CriticTrainer(policy, algorithm.critic, optimizer.micro_tokens)
        self.trainer = Trainer(policy, algorithm, optimizer, iterations * updates, seed=seed)

    def batch(self, iteration: int, sampled: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> Recorded:
        """What an iteration trains on, from whole groups of rollouts, and greedy ones of the same tasks if the
        algorithm compares with them. Nothing is changed.

        Raises ValueError if no rollout has a reward.
        """
        compared = {group_of(row) for row in (greedy or sampled) if row.reward is not None}
        made = [row for row in sampled if row.reward is not None and group_of(row) in compared]
        if not made:
            raise ValueError(
                f"no rollout of {len(sampled)} could be scored: {sampled[0].tags}; look at the environment"
            )
        credit = assign(self.algorithm, made, self._extras(made, greedy))
        ages = [self.policy.version - row.policy_version for row in made]
        metrics = {
            "step": float(iteration),
            "success": sum(row.scored_success() for row in made) / len(made),
            "reward": sum(row.scored_reward() for row in made) / len(made),
            "tokens_per_rollout": sum(row.n_tokens for row in made) / len(made),
            "dropped_groups": (len(made) - sum(credit.trained)) / self.samples,
            "unscored": float(len(sampled) - len(made)),
            "staleness": sum(ages) / len(ages),
            "max_staleness": float(max(ages)),
            **shares_of_ends(row.termination for row in sampled),
            **credit.metrics,
        }
        parts = self._parts(iteration, credit, metrics)
        records = [
            {"step": iteration, "trajectory_id": row.trajectory_id, "advantage": a, "trained": t and bool(parts)}
            for row, a, t in zip(made, credit.advantages, credit.trained, strict=True)
        ]
        numbered = list(enumerate(parts, self.trainer.done))
        targets = TrainingRows.of(credit.targets) if self.critic else None
        return Recorded(iteration, numbered, targets, credit.lr_scale, metrics, records)

    def _parts(self, iteration: int, credit: Credit, metrics: dict[str, float]) -> list[TrainingRows]:
        """The rows of each optimiser step; none if the update is skipped."""
        warming = isinstance(self.algorithm, PPO) and iteration < self.algorithm.critic.pretrain
        if not credit.rows or warming or credit.lr_scale == 0:
            return []
        rows = TrainingRows.of(credit.rows)
        check_rows(rows, self.policy)
        order = list(range(len(rows)))
        if self.updates > 1:
            Random(f"{self.seed}-updates-{iteration}").shuffle(order)
        parts = [rows.take(order[start :: self.updates]) for start in range(min(self.updates, len(order)))]
        if self.policy.precision != "float32":
            fresh = [self.trainer.anchored(part) for part in parts]
            if not self.algorithm.off_policy:  # else rows are anchored at the proximal policy, not at the sampler
                metrics["sampler_kl"] = divergence(parts, fresh)
            parts = fresh
        return parts

    def update(self, made: Recorded) -> dict[str, float]:
        """Take the steps over what was recorded. Returns all metrics of the iteration; those of its optimiser steps are
        means."""
        metrics = dict(made.metrics)
        if self.critic and made.targets is not None:
            metrics.update(self.critic.step(made.targets))
        history = [
            self.trainer.step(part, made.lr_scale, place)
            for place, (_, part) in enumerate(made.parts, made.iteration * self.updates)
        ]
        if history:
            metrics.update({name: sum(one[name] for one in history) / len(history) for name in history[0]})
            self.policy.version += 1
        return metrics

    def _extras(self, made: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> Extras:
        rows = TrainingRows.of(
            [
                TrainingRow(
                    row_id=row.trajectory_id,
                    input_ids=row.input_ids,
                    mask=row.action_mask,
                    weights=[0.0] * len(row.input_ids),
                )
                for row in made
            ]
        )

        def logprobs(policy: Policy) -> ByToken:
            return [one.tolist() for one in batch_logprobs(policy, rows, self.micro_tokens)]

        algorithm = self.algorithm
        return Extras(
            reference=logprobs(self.reference) if self.reference else None,
            proximal=logprobs(self.policy) if algorithm.off_policy else None,
            values=self.critic.values(rows) if self.critic else None,
            greedy={group_of(row): row.reward for row in greedy if row.reward is not None},
            version=self.policy.version,
        )

    def save(self, path: Path, state: OnlineState, progress: dict[str, Any]) -> None:
        """Write everything that :meth:`restore` needs to go on as if nothing had happened; ``progress`` is the loop's
        part of it."""
        critic = self.critic.state() if self.critic else None
        # as text: pickled, equal records would have other bytes after a restart
        records = {name: json.dumps(value) for name, value in vars(state).items()}
        about = {"version": self.policy.version, "critic": critic, "progress": json.dumps(progress)}
        self.trainer.save(path, {**about, **records})

    def restore(self, path: Path) -> tuple[OnlineState, dict[str, Any]] | None:
        """State and progress at the newest checkpoint that can be read. If there is none, None, and nothing is
        changed."""
        saved = self.trainer.load(path)
        if saved is None:
            return None
        self.policy.version = saved["version"]
        if self.critic:
            self.critic.restore(saved["critic"])
        state = OnlineState(*(json.loads(saved[name]) for name in ("metrics", "steps", "tickets")))
        return state, json.loads(saved["progress"])


def _frozen(policy: Policy) -> Policy:
    """A copy that later updates do not change."""
    return replace(policy, model=copy.deepcopy(policy.model).requires_grad_(False))

"""The online loop: sample groups of rollouts, turn them into advantages, take optimiser steps."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import torch

from agentrl.advantages.group import degenerate_groups
from agentrl.algorithms.policy_gradient import ByToken, PolicyGradient
from agentrl.algorithms.ppo import PPO
from agentrl.engines.streams import stream
from agentrl.models.policy import Policy
from agentrl.online.credit import Credit, Extras, assign, group_of
from agentrl.online.critic import CriticTrainer
from agentrl.online.off_policy import divergence
from agentrl.rollouts.outcomes import shares_of_ends
from agentrl.rollouts.runner import Attempt, RolloutRunner, tickets
from agentrl.training.batch import check_rows
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs
from agentrl.training.step import Trainer
from schemas.task import Task
from schemas.training import TrainingRow
from schemas.trajectory import Trajectory


@dataclass
class OnlineStep:
    """What one iteration made: all its rollouts, a record for each (iteration, trajectory_id, advantage, trained), the
    rows of each optimiser step by its number, and metrics."""

    trajectories: list[Trajectory]
    records: list[dict[str, Any]]
    batches: list[tuple[int, TrainingRows]]
    metrics: dict[str, float]


@dataclass
class OnlineState:
    """What has been recorded so far."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


class OnlineLoop:
    """Each iteration draws ``tasks_per_step`` tasks, makes ``samples`` rollouts of each, and takes ``updates``
    optimiser steps over what the algorithm keeps of them. Every task is drawn once before any is drawn again."""

    def __init__(
        self,
        policy: Policy,
        runner: RolloutRunner,
        tasks: Sequence[Task],
        algorithm: PolicyGradient,
        optimizer: OptimizerConfig,
        *,
        iterations: int,
        tasks_per_step: int,
        samples: int,
        seed: int,
        updates: int = 1,
    ) -> None:
        self.policy = policy
        self.runner = runner
        self.tasks = tasks
        self.algorithm = algorithm
        self.tasks_per_step = tasks_per_step
        self.samples = samples
        self.seed = seed
        self.updates = updates
        self.iterations = iterations
        self.iteration = self.drawn = self.made = 0
        self.micro_tokens = optimizer.micro_tokens
        policy.prepare(optimizer.precision)
        self.reference = _frozen(policy) if algorithm.kl else None
        self.critic = None
        if isinstance(algorithm, PPO):
            torch.manual_seed(seed)
            self.critic = CriticTrainer(policy, algorithm.critic, optimizer.micro_tokens)
        self.trainer = Trainer(policy, algorithm, optimizer, iterations * updates, seed=seed)

    def step(self, name: Callable[[int], str], stored: Mapping[str, Trajectory] = MappingProxyType({})) -> OnlineStep:
        """One iteration; ``name`` gives the id of a rollout by its number, which follows from iteration, round, ticket
        and sample. ``stored`` holds, by id, the rollouts that this iteration made before a run was killed: they are
        taken as they are, and nothing is sampled.

        Raises ValueError if ``stored`` holds others than this iteration makes.
        """
        sampled, greedy, rounds = self._sample(name, stored)
        compared = {group_of(row) for row in (greedy or sampled) if row.reward is not None}
        made = [row for row in sampled if row.reward is not None and group_of(row) in compared]
        credit = assign(self.algorithm, made, self._extras(made, greedy))
        metrics = {
            "step": float(self.iteration),
            "success": sum(row.scored_success() for row in made) / len(made),
            "reward": sum(row.scored_reward() for row in made) / len(made),
            "tokens_per_rollout": sum(row.n_tokens for row in made) / len(made),
            "dropped_groups": (len(made) - sum(credit.trained)) / self.samples,
            "rounds": float(rounds),
            "unscored": float(len(sampled) - len(made)),
            **shares_of_ends(row.termination for row in sampled),
            **credit.metrics,
        }
        if self.critic:
            metrics.update(self.critic.step(TrainingRows.of(credit.targets)))
        batches = self._update(credit, metrics)
        records = [
            {"step": self.iteration, "trajectory_id": row.trajectory_id, "advantage": a, "trained": t and bool(batches)}
            for row, a, t in zip(made, credit.advantages, credit.trained, strict=True)
        ]
        self.iteration += 1
        self.policy.version += bool(batches)
        return OnlineStep(sampled + greedy, records, batches, metrics)

    def _update(self, credit: Credit, metrics: dict[str, float]) -> list[tuple[int, TrainingRows]]:
        """Take the optimiser steps, add the means of their metrics, and return the rows of each step."""
        warming = isinstance(self.algorithm, PPO) and self.iteration < self.algorithm.critic.pretrain
        if not credit.rows or warming or credit.lr_scale == 0:
            return []
        rows = TrainingRows.of(credit.rows)
        check_rows(rows, self.policy)
        order = list(range(len(rows)))
        if self.updates > 1:
            Random(f"{self.seed}-updates-{self.iteration}").shuffle(order)
        parts = [rows.take(order[start :: self.updates]) for start in range(min(self.updates, len(order)))]
        if self.policy.precision != "float32":
            fresh = [self.trainer.anchored(part) for part in parts]
            if not self.algorithm.off_policy:  # else rows are anchored at the proximal policy, not at the sampler
                metrics["sampler_kl"] = divergence(parts, fresh)
            parts = fresh
        taken, history = [], []
        for place, part in enumerate(parts, self.iteration * self.updates):
            taken.append((self.trainer.done, part))
            history.append(self.trainer.step(part, credit.lr_scale, place))
        metrics.update({name: sum(one[name] for one in history) / len(history) for name in history[0]})
        return taken

    def numbers(self, iteration: int) -> range:
        """The numbers of all rollouts that an iteration may make: fewer if it needs fewer rounds than are allowed."""
        size = (1 + self.algorithm.resample) * self.tasks_per_step * self._per_ticket
        return range(iteration * size, (iteration + 1) * size)

    @property
    def _per_ticket(self) -> int:
        return self.samples + self.algorithm.needs_greedy

    def _sample(
        self, name: Callable[[int], str], stored: Mapping[str, Trajectory]
    ) -> tuple[list[Trajectory], list[Trajectory], int]:
        """Rollouts of this iteration, greedy ones of the same tasks if the algorithm compares with them, and the
        number of rounds: while too few groups differ in reward, more tasks are drawn, as often as is allowed."""
        kept: list[Trajectory] = []
        greedy: list[Trajectory] = []
        for round_ in range(1 + self.algorithm.resample):
            first = self.numbers(self.iteration).start + round_ * self.tasks_per_step * self._per_ticket
            attempts = tickets(self._draw(), self.samples, name, first, extra=self._per_ticket - self.samples)
            seed = stream(self.seed, "online", self.iteration, round_)
            kept += self._made(self.runner, attempts, seed, stored)
            if self.algorithm.needs_greedy:
                best = {
                    name(first + place * self._per_ticket + self.samples): replace(one, index=self.samples)
                    for place, one in enumerate(list(attempts.values())[:: self.samples])
                }
                greedy += self._greedy(best, seed, stored)
            scored = [row for row in kept if row.reward is not None]
            if not scored:
                raise ValueError(f"no rollout of {len(kept)} could be scored: {kept[0].tags}; look at the environment")
            useful = ~degenerate_groups([row.scored_reward() for row in scored], [group_of(row) for row in scored])
            if useful.sum() >= self.tasks_per_step * self.samples:
                break
        if others := stored.keys() - {row.trajectory_id for row in [*kept, *greedy]}:
            raise ValueError(
                f"iteration {self.iteration} has stored rollouts that it does not make: {sorted(others)[:5]}"
            )
        self.made += len(kept) + len(greedy)
        return kept, greedy, round_ + 1

    @staticmethod
    def _made(
        runner: RolloutRunner, attempts: Mapping[str, Attempt], seed: int, stored: Mapping[str, Trajectory]
    ) -> list[Trajectory]:
        """Rollouts by their ids: sampled, or if this iteration has stored some, all of them from there."""
        if not stored:
            return runner.run(list(attempts.values()), seed, list(attempts))
        if missing := [one for one in attempts if one not in stored]:
            raise ValueError(f"the stored rollouts of this iteration lack {len(missing)}, among them {missing[:5]}")
        return [stored[one] for one in attempts]

    def _greedy(self, attempts: Mapping[str, Attempt], seed: int, stored: Mapping[str, Trajectory]) -> list[Trajectory]:
        sampling = self.runner.sampling.model_copy(update={"temperature": 0.0})
        made = self._made(self.runner.sampling_as(sampling), attempts, seed, stored)
        return [row.model_copy(update={"tags": ["greedy", *row.tags]}) for row in made]

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

    def save(self, path: Path, state: OnlineState) -> None:
        """Write everything that :meth:`restore` needs to go on as if nothing had happened."""
        counters = [self.iteration, self.drawn, self.made, self.policy.version]
        critic = self.critic.state() if self.critic else None
        # as text: pickled, equal records would have other bytes after a restart
        records = {"metrics": json.dumps(state.metrics), "steps": json.dumps(state.steps)}
        progress = {"counters": counters, "critic": critic, **records}
        self.trainer.save(path, progress)

    def restore(self, path: Path) -> OnlineState:
        """The state at the newest checkpoint that can be read. If there is none, a new state; nothing is changed
        then."""
        saved = self.trainer.load(path)
        if saved is None:
            return OnlineState()
        self.iteration, self.drawn, self.made, self.policy.version = saved["counters"]
        if self.critic:
            self.critic.restore(saved["critic"])
        return OnlineState(json.loads(saved["metrics"]), json.loads(saved["steps"]))

    def _draw(self) -> list[Task]:
        """The next tasks: consecutive places in an endless sequence of seeded permutations."""
        size, start = len(self.tasks), self.drawn
        self.drawn += self.tasks_per_step
        drawn = []
        for place in range(start, self.drawn):
            order = list(range(size))
            Random(f"{self.seed}-{place // size}").shuffle(order)
            drawn.append(self.tasks[order[place % size]])
        return drawn


def _frozen(policy: Policy) -> Policy:
    """A copy that later updates do not change."""
    return replace(policy, model=copy.deepcopy(policy.model).requires_grad_(False))

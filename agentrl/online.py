"""The online loop: sample groups of rollouts, weigh them against each other, take one step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from agentrl.advantages.group import group_advantages
from agentrl.objectives import GRPO
from agentrl.optimizer import OptimizerConfig
from agentrl.policy import Policy
from agentrl.rollout import Attempt, Rollouts
from agentrl.trainer import Trainer, save_checkpoint
from schemas.task import Task
from schemas.training import TrainingRow
from schemas.trajectory import Trajectory


@dataclass
class OnlineStep:
    """What one iteration made: all its rollouts, a record for each (iteration, trajectory_id, advantage, trained), and
    its metrics."""

    trajectories: list[Trajectory]
    records: list[dict[str, Any]]
    metrics: dict[str, float]


@dataclass
class OnlineState:
    """What has been recorded so far."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


class OnlineLoop:
    """Each iteration draws ``tasks_per_step`` tasks, makes ``samples`` rollouts of each, drops the groups in which all
    rewards are equal, and takes one optimiser step on the rest. Every task is drawn once before any is drawn again."""

    def __init__(
        self,
        policy: Policy,
        rollouts: Rollouts,
        tasks: Sequence[Task],
        objective: GRPO,
        optimizer: OptimizerConfig,
        *,
        iterations: int,
        tasks_per_step: int,
        samples: int,
        seed: int,
    ) -> None:
        self.policy = policy
        self.rollouts = rollouts
        self.tasks = tasks
        self.tasks_per_step = tasks_per_step
        self.samples = samples
        self.seed = seed
        self.iteration = 0
        self.trainer = Trainer(policy, objective, optimizer, iterations)

    def step(self, ids: Sequence[str]) -> OnlineStep:
        """One iteration; ``ids`` name its rollouts. A step repeated from the same state makes the same rollouts."""
        attempts = [Attempt(task, index) for task in self._draw() for index in range(self.samples)]
        made = self.rollouts.run(attempts, self.seed * 1_000_003 + self.iteration, ids)
        advantages, degenerate = group_advantages([row.reward for row in made], [row.group_id for row in made])
        rows = [
            TrainingRow(
                row_id=row.trajectory_id,
                unit=number,
                input_ids=row.input_ids,
                mask=row.action_mask,
                weights=[advantage] * row.n_tokens,
                logprobs=row.logprobs,
            )
            for number, (row, advantage) in enumerate(zip(made, advantages, strict=True))
            if not degenerate[number]
        ]
        trained = self.trainer.step(rows) if rows else {}
        records = [
            {"step": self.iteration, "trajectory_id": row.trajectory_id, "advantage": float(a), "trained": not bool(d)}
            for row, a, d in zip(made, advantages, degenerate, strict=True)
        ]
        metrics = {
            "step": float(self.iteration),
            "success": sum(row.success for row in made) / len(made),
            "reward": sum(row.reward for row in made) / len(made),
            "tokens_per_rollout": sum(row.n_tokens for row in made) / len(made),
            "dropped_groups": float(degenerate.sum() / self.samples),
            **trained,
        }
        self.iteration += 1
        self.policy.version += bool(rows)
        return OnlineStep(made, records, metrics)

    def save(self, path: Path, state: OnlineState) -> None:
        """Write everything that :meth:`restore` needs to go on as if nothing had happened."""
        saved = {"iteration": self.iteration, "version": self.policy.version, "trainer": self.trainer.state()}
        save_checkpoint(path, {**saved, "metrics": state.metrics, "steps": state.steps})

    def restore(self, path: Path) -> OnlineState:
        saved = torch.load(path, weights_only=True)
        self.iteration, self.policy.version = saved["iteration"], saved["version"]
        self.trainer.restore(saved["trainer"])
        return OnlineState(saved["metrics"], saved["steps"])

    def _draw(self) -> list[Task]:
        """The tasks of this iteration: consecutive places in an endless sequence of seeded permutations."""
        size, start = len(self.tasks), self.iteration * self.tasks_per_step
        drawn = []
        for place in range(start, start + self.tasks_per_step):
            order = list(range(size))
            Random(f"{self.seed}-{place // size}").shuffle(order)
            drawn.append(self.tasks[order[place % size]])
        return drawn

"""The models of online training: the policy that is updated, the reference and the critic. In one process they are
whole; on ranks, each process has its part of them, and all do the same."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from agentrl.algorithms.policy_gradient import PolicyGradient
from agentrl.algorithms.ppo import PPO
from agentrl.models.policy import Policy
from agentrl.online.critic import CriticTrainer
from agentrl.online.recorded import Recorded
from agentrl.training.backend import Backend, OneProcess
from agentrl.training.export import export
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs
from agentrl.training.step import Trainer
from agentrl.training.token_record import TokenRecord

Scores = dict[str, list[np.ndarray]]
"""What the models say of each token of some rows, [rows][tokens], by what said it: ``reference`` and ``proximal``
policy give log-probs, the critic gives ``values``. What the algorithm does not need is left out."""


class Models:
    """What is trained, and what it is compared with. ``updates`` is how many optimiser steps an iteration has,
    ``steps`` how many there are in all. ``again`` loads what ``policy`` is before training once more; without it, it is
    copied. With ``record_tokens``, ``seen`` is what the last update saw of its tokens, a row for each of its rows
    (:class:`agentrl.training.token_record.TokenRecord`), if it took a step."""

    seen: pa.Table | None = None

    def __init__(
        self,
        policy: Policy,
        algorithm: PolicyGradient,
        optimizer: OptimizerConfig,
        steps: int,
        seed: int,
        updates: int = 1,
        backend: Callable[[torch.nn.Module, OptimizerConfig | None], Backend] = OneProcess,
        again: Callable[[], Policy] | None = None,
        record_tokens: bool = False,
    ) -> None:
        self.policy, self.algorithm, self.updates = policy, algorithm, updates
        self.micro_tokens = optimizer.micro_tokens
        policy.prepare(optimizer.precision)
        again = again or (lambda: replace(policy, model=copy.deepcopy(policy.model)))
        self.reference: tuple[Policy, Backend] | None = None
        if algorithm.kl and not optimizer.lora:  # with adapters, the reference is the policy without them
            other = again().prepare(optimizer.precision)
            other.model.requires_grad_(False)
            self.reference = other, backend(other.model, None)
        self.critic = None
        if isinstance(algorithm, PPO):
            torch.manual_seed(seed)
            self.critic = CriticTrainer(again().prepare(optimizer.precision), algorithm.critic, optimizer, backend)
        self.trainer = Trainer(policy, algorithm, optimizer, steps, backend, seed)
        if record_tokens:
            self.trainer.seen = TokenRecord()

    @property
    def done(self) -> int:
        """Optimiser steps that were taken."""
        return self.trainer.done

    def scores(self, rows: TrainingRows) -> Scores:
        """What the models say of rows."""
        scores: Scores = {}
        if self.algorithm.kl:
            scores["reference"] = self._reference(rows.unrouted())  # routes are those of the policy
        if self.algorithm.off_policy:
            scores["proximal"] = batch_logprobs(self.policy, rows, self.micro_tokens, self.trainer.backend)
        if self.critic:
            scores["values"] = self.critic.values(rows)
        return scores

    def _reference(self, rows: TrainingRows) -> list[np.ndarray]:
        if self.reference:
            policy, backend = self.reference
            return batch_logprobs(policy, rows, self.micro_tokens, backend)
        with _without_adapters(self.policy.model):
            return batch_logprobs(self.policy, rows, self.micro_tokens, self.trainer.backend)

    def anchored(self, parts: Sequence[TrainingRows]) -> list[TrainingRows]:
        """The rows of optimiser steps with log-probs of the policy as it is; see
        :meth:`agentrl.training.step.Trainer.anchored`."""
        return [self.trainer.anchored(part) for part in parts]

    def update(self, made: Recorded) -> dict[str, float]:
        """Take the steps over what was recorded. Returns their metrics, as means over optimiser steps."""
        metrics = {}
        if self.critic and made.targets is not None:
            metrics.update(self.critic.step(made.targets))
        history, seen = [], []
        for index, (_, part) in enumerate(made.parts, made.iteration * self.updates):
            history.append(self.trainer.step(part, made.lr_scale, index))
            if self.trainer.seen:
                seen.append(self.trainer.seen.table(len(part), self.trainer.backend))
        self.seen = pa.concat_tables(seen) if seen else None
        if history:
            metrics.update(
                {name: sum(metrics_of_step[name] for metrics_of_step in history) / len(history) for name in history[0]}
            )
        return metrics

    def export(self, folder: Path) -> None:
        """Write the policy as a model folder. Training may go on."""
        export(self.policy, self.trainer.backend, folder)

    def save(self, path: Path, progress: dict[str, Any]) -> None:
        """Write a checkpoint of the models, and the caller's ``progress``."""
        self.trainer.save(path, progress, self.critic.backend if self.critic else None)

    def load(self, path: Path) -> dict[str, Any] | None:
        """Go back to a checkpoint, and return the ``progress`` in it. If there is none, None."""
        return self.trainer.load(path, self.critic.backend if self.critic else None)


@contextmanager
def _without_adapters(model: torch.nn.Module) -> Iterator[None]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trained:  # switching adapters off and on changes what asks for gradients
            parameter.requires_grad_(True)

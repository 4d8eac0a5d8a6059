"""One optimiser step over training rows, by any algorithm, in one process or spread over ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.base import Objective
from agentrl.models.policy import Policy
from agentrl.training.backend import OneProcess
from agentrl.training.batch import Batch, TrainingError, collate, micro_batches, units
from agentrl.training.lora import add_lora
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.packing import can_pack, packed
from agentrl.training.probe import needs_plain_pass
from agentrl.training.rows import TrainingRows, nested

Metrics = dict[str, float]


class Backend(Protocol):
    """What differs between one process and many ranks. Rank ``rank`` of ``world`` computes every ``world``-th micro
    batch. ``model`` is what is set to training mode. ``keeps_weights`` is true if a step that is refused leaves the
    weights as they were."""

    rank: int
    world: int
    device: torch.device
    model: torch.nn.Module
    keeps_weights: bool

    def forward(self, batch: Batch, config: OptimizerConfig) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a batch, both [rows, tokens]."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of a loss, summed over ranks. ``last`` is true for the last micro batch of a step."""
        ...

    def total(self, metrics: Metrics) -> Metrics:
        """Metrics summed over ranks."""
        ...

    def update(self, lr: float, config: OptimizerConfig) -> float:
        """Clip the gradients, take the optimiser step and forget the gradients. Returns their norm before clipping."""
        ...

    def discard(self) -> None:
        """Forget the gradients."""
        ...

    def save(self, path: Path, progress: dict[str, Any]) -> None:
        """Write a checkpoint: ``progress``, weights and optimiser."""
        ...

    def load(self, path: Path) -> dict[str, Any] | None:
        """Go back to a checkpoint and return its ``progress``; None if there is no checkpoint."""
        ...


class Trainer:
    """Updates ``policy`` in place to minimise ``objective`` over ``total`` optimiser steps. ``seed`` decides what
    adapters begin with."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        config: OptimizerConfig,
        total: int,
        backend: Callable[[Policy, OptimizerConfig], Backend] = OneProcess,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.config = config
        self.total = total
        self.done = 0
        policy.prepare(config.precision)
        plain = needs_plain_pass(policy)
        if config.lora:
            add_lora(policy, config.lora, seed)
        if config.gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.packs = can_pack(policy.model) and not plain
        self.backend = backend(policy, config)

    def step(self, rows: TrainingRows, lr_scale: float = 1.0, place: int | None = None) -> Metrics:
        """One optimiser step over all ``rows``. Gradients accumulate over micro batches, which changes no result.
        ``place`` is that of the step in the schedule of the learning rate, if steps before it were left out.

        Raises TrainingError on every rank if no token can be trained on, or if the loss or the gradient norm is not
        finite. The policy is then unchanged, unless the backend says that it does not keep its weights.
        """
        metrics = self.gradients(rows)
        lr = self.config.lr_at(self.done if place is None else place, self.total) * lr_scale
        norm = self.backend.update(lr, self.config) if math.isfinite(metrics["loss"]) else math.nan
        if not math.isfinite(norm):
            self.backend.discard()
            raise TrainingError(
                f"step {self.done}: loss {metrics['loss']}, gradient norm {norm}; lower lr, or look for broken rows "
                f"among {rows.ids()[:5]}",
                rows,
            )
        self.done += 1
        return {**metrics, "grad_norm": norm, "lr": lr}

    def gradients(self, rows: TrainingRows) -> Metrics:
        """Compute the gradients of one step over ``rows``, leave them on the parameters, and return the metrics.

        Raises TrainingError if no token can be trained on.
        """
        self.backend.model.train()
        _without_noise(self.policy.model)
        parts = list(micro_batches(rows, units(rows), self.config.micro_tokens))
        rank, world = self.backend.rank, self.backend.world
        rounds = math.ceil(len(parts) / world)
        mine = [collate(rows.take(part), self.packs) for part in parts[rank::world]]
        # All ranks must take part in every round: a rank without a micro batch left computes one that does not count.
        spare = [] if len(mine) == rounds else [collate(rows.take(parts[0][:2]), self.packs)]
        sums = self._step_sums(mine, spare)
        count, n_tokens = sums["count"], sums["tokens"]
        if count <= 0 or n_tokens == 0:
            raise TrainingError(f"no token to train on in rows {rows.ids()[:5]}; check their masks")
        totals: Metrics = {"loss": 0.0, "entropy": 0.0}
        with packed(self.policy.model, self.packs):
            baseline = (
                self._baseline(mine, spare) / len(rows)
                if self.objective.needs_baseline
                else self.objective.over_step(sums)
            )
            for place, batch in enumerate(self._on_device(mine + spare)):
                share = float(place < len(mine))
                logprobs, entropy = self.backend.forward(batch, self.config)
                total, parted = self.objective.loss(logprobs, entropy, batch, baseline)
                self.backend.backward(total / count * share, last=place == rounds - 1)
                for name, value in {"loss": total.item(), **parted}.items():
                    per = n_tokens if self.objective.metrics_by_token and name != "loss" else count
                    totals[name] = totals.get(name, 0.0) + value / per * share
                totals["entropy"] += entropy.detach().sum().item() / n_tokens * share
        return {**self.backend.total(totals), "tokens": n_tokens}

    def _step_sums(self, mine: Sequence[Batch], spare: Sequence[Batch]) -> Metrics:
        """``count``, trained ``tokens`` and the objective's own sums over the whole step, on all ranks. Every rank
        names the same sums, also one that has nothing but a spare batch."""
        totals: Metrics = {}
        for place, batch in enumerate([*mine, *spare]):
            own = self.objective.step_sums(batch)
            for name, value in {"count": self.objective.count(batch), "tokens": float(batch.mask.sum()), **own}.items():
                totals[name] = totals.get(name, 0.0) + value * (place < len(mine))
        return self.backend.total(totals)

    @torch.no_grad()
    def _baseline(self, mine: Sequence[Batch], spare: Sequence[Batch]) -> float:
        """Sum over the rows of the step of the objective's log-ratio of policy to reference."""
        total = 0.0
        for place, batch in enumerate(self._on_device([*mine, *spare])):
            logprobs, _ = self.backend.forward(batch, self.config)
            if place < len(mine):
                total += self.objective.logratio(logprobs, batch).sum().item()
        return self.backend.total({"baseline": total})["baseline"]

    @torch.no_grad()
    def anchored(self, rows: TrainingRows) -> TrainingRows:
        """The rows, in order, with log-probs of the policy as it is, from the very passes that :meth:`gradients` makes
        over them. A pass over other batches, or the sampler's, differs by rounding: in bfloat16 by more than the
        bounds of some ratios."""
        _without_noise(self.policy.model)
        offsets, _ = rows.lists("input_ids")
        found = np.zeros(offsets[-1], np.float32)
        with packed(self.policy.model, self.packs):
            for part in micro_batches(rows, units(rows), self.config.micro_tokens):
                batch = collate(rows.take(part), self.packs).to(self.backend.device)
                logprobs, _ = self.backend.forward(batch, self.config)
                for row, values in zip(part, logprobs.float().cpu().numpy(), strict=True):
                    found[offsets[row] : offsets[row + 1]] = values[: offsets[row + 1] - offsets[row]]
        table = rows.table()
        place = table.schema.get_field_index("logprobs")
        return TrainingRows.of_table(table.set_column(place, "logprobs", nested(offsets, found, "logprobs")))

    def _on_device(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield batch.to(self.backend.device)

    def save(self, path: Path, progress: dict[str, Any]) -> None:
        """Write a checkpoint from which :meth:`load` goes on as if nothing had happened; ``progress`` is the caller's
        part of it."""
        self.backend.save(path, {**progress, "done": self.done})

    def load(self, path: Path) -> dict[str, Any] | None:
        """Go back to the newest checkpoint that can be read, and return its ``progress``. If there is none, nothing is
        changed, and None is returned."""
        progress = self.backend.load(path)
        if progress is not None:
            self.done = progress["done"]
        return progress


def _without_noise(model: torch.nn.Module) -> None:
    """Switch off dropout and router noise, so that the policy that is trained is the one that sampled.

    Layers that compute their activations again in the backward pass ask for training mode: theirs alone is set.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)

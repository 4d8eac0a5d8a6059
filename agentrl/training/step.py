"""One optimiser step over training rows, by any algorithm, in one process or spread over ranks."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.base import Objective
from agentrl.engines.routes import checkpoint_contexts, route_shape
from agentrl.models.policy import Policy
from agentrl.training.backend import Backend, OneProcess
from agentrl.training.batch import Batch, TrainingError, collate, micro_batches, units
from agentrl.training.logprobs import token_logprobs
from agentrl.training.lora import add_lora
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.packing import packed
from agentrl.training.probe import packs, plain_pass
from agentrl.training.rows import TrainingRows, nested
from agentrl.training.scoring import Passes
from agentrl.training.token_record import TokenRecord

if TYPE_CHECKING:
    from agentrl.training.reward_model import RewardNet

Metrics = dict[str, float]


class Trainer:
    """Updates ``policy`` in place to minimise ``objective`` over ``total`` optimiser steps. ``seed`` decides what
    adapters begin with. With a ``scorer``, whose backbone is the policy's model, its head is updated too, and the
    objective sees its logits in the place of log-probs."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        config: OptimizerConfig,
        total: int,
        backend: Callable[[torch.nn.Module, OptimizerConfig], Backend] = OneProcess,
        seed: int = 0,
        scorer: "RewardNet | None" = None,
    ) -> None:
        self.policy = policy
        self.scorer = scorer
        self.objective = objective
        self.config = config
        self.total = total
        self.done = 0
        self.micro_tokens = config.micro_tokens
        policy.prepare(config.precision)
        if config.lora:
            add_lora(policy, config.lora, seed)
        self.routes = route_shape(policy.model)
        if config.gradient_checkpointing:
            routed = {"context_fn": checkpoint_contexts(policy.model)} if self.routes else {}
            policy.model.gradient_checkpointing_enable({"use_reentrant": False, **routed})
        trained = torch.nn.ModuleList([policy.model, scorer.head]) if scorer else policy.model
        self.backend = backend(trained, config)
        self.plain = plain_pass(policy, self.backend)
        self.packs = packs(policy.model, self.backend, self.plain)
        self.seen: TokenRecord | None = None
        """What the last step saw of its tokens, if it is set to keep that."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a batch on the backend's device, both [rows, tokens]."""
        return self.backend.run(partial(self._forward, batch))

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.scorer:
            logits = self.scorer.logits(batch)
            return logits, torch.zeros_like(logits)
        with self.policy.autocast():
            pass_over = (batch.input_ids, batch.scored, batch.packing, self.plain, batch.routes)
            return token_logprobs(self.policy.model, *pass_over)

    def step(self, rows: TrainingRows, lr_scale: float = 1.0, index: int | None = None) -> Metrics:
        """One optimiser step over all ``rows``. Gradients accumulate over micro batches, which changes no result.
        ``place`` is that of the step in the schedule of the learning rate, if steps before it were left out.

        Raises TrainingError on every rank if no token can be trained on, or if the loss or the gradient norm is not
        finite. The policy is then unchanged, unless the backend says that it does not keep its weights.
        """
        metrics = self.gradients(rows)
        lr = self.config.lr_at(self.done if index is None else index, self.total) * lr_scale
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
        """Compute the gradients of one step over ``rows``, leave them on the parameters, and return the metrics. If
        memory does not suffice in one process, micro batches are halved from then on, with a warning.

        Raises TrainingError if no token can be trained on, or if micro batches cannot be smaller, and OutOfMemoryError
        on ranks, which have to begin again together.
        """
        while True:
            try:
                return self._gradients(rows)
            except torch.OutOfMemoryError as error:
                self.backend.discard()
                why = str(error).partition("\n")[0][:160]
                if sum(1 for _ in micro_batches(rows, units(rows), self.micro_tokens)) == len(units(rows)):
                    raise TrainingError(
                        f"step {self.done}: one row alone does not fit into memory ({why}); set "
                        "optimizer.gradient_checkpointing, shard the model (deepspeed.zero: 3), split rows over ranks "
                        "(deepspeed.sequence_parallel), or use shorter rows",
                        rows,
                    ) from None
                if self.backend.world > 1:  # the other ranks wait for this one
                    raise
                self.micro_tokens //= 2
                warnings.warn(
                    f"step {self.done} ran out of memory ({why}); micro batches have {self.micro_tokens} tokens from "
                    "now on, which changes no result: set optimizer.micro_tokens to it",
                    stacklevel=2,
                )

    def _gradients(self, rows: TrainingRows) -> Metrics:
        _without_noise(self.policy.model)
        parts = list(micro_batches(rows, units(rows), self.micro_tokens))
        first, shares = self.backend.share, self.backend.shares
        rounds = math.ceil(len(parts) / shares)
        positions = parts[first::shares]
        collated = partial(collate, packing=self.packs, sequence=self.backend.sequence, shape=self.routes)
        batches = [collated(rows.take(part)) for part in positions]
        # All ranks must take part in every round: a rank without a micro batch left computes one that does not count.
        spare = [] if len(batches) == rounds else [collated(rows.take(parts[0][:2]))]
        sums = self._step_sums(batches, spare)
        count, n_tokens = sums["count"], sums["tokens"]
        ce_tokens = sums.get("ce_tokens", 0.0)
        if (count <= 0 or n_tokens == 0) and not ce_tokens:
            raise TrainingError(f"no token to train on in rows {rows.ids()[:5]}; check their masks")
        count, per_token = count or 1.0, n_tokens or 1.0  # one stream may be empty
        totals: Metrics = {"loss": 0.0, "entropy": 0.0}
        if self.seen:
            self.seen.clear()
        with packed(self.policy.model, self.packs):
            baseline = (
                self._baseline(batches, spare) / len(rows)
                if self.objective.needs_baseline
                else self.objective.over_step(sums)
            )
            for index, batch in enumerate(self._on_device(batches + spare)):
                share = float(index < len(batches))
                logprobs, entropy = self.forward(batch)
                own, own_entropy = _of_mask(batch, logprobs, entropy)
                total, parted = self.objective.loss(own, own_entropy, batch, baseline)
                loss = total / count
                if batch.ce_weights is not None:
                    ce = -(batch.ce_weights * logprobs).sum() / max(1.0, ce_tokens)
                    loss = loss + ce
                    for name in ("loss", "ce_loss"):
                        totals[name] = totals.get(name, 0.0) + ce.item() * share
                self.backend.backward(loss * share, last=index == rounds - 1)
                for name, value in {"loss": total.item(), **parted}.items():
                    per = per_token if self.objective.metrics_by_token and name != "loss" else count
                    totals[name] = totals.get(name, 0.0) + value / per * share
                totals["entropy"] += own_entropy.detach().sum().item() / per_token * share
                if self.seen and share:
                    self.seen.add(positions[index], batch.mask, own, own_entropy)
                del logprobs, entropy, own, own_entropy, loss, total  # what no gradient went through holds its pass
        counted: Metrics = {name: sums[name] for name in ("tokens", "ce_tokens") if name in sums}
        return {**self.backend.total(totals), **counted}

    def _step_sums(self, batches: Sequence[Batch], spare: Sequence[Batch]) -> Metrics:
        """``count``, trained ``tokens``, those of the second stream if there is one, and the objective's own sums over
        the whole step, on all ranks. Every rank names the same sums, also one that has nothing but a spare batch."""
        totals: Metrics = {}
        for index, batch in enumerate([*batches, *spare]):
            own = self.objective.step_sums(batch)
            if batch.ce_weights is not None:
                own = {**own, "ce_tokens": float((batch.ce_weights != 0).sum())}
            for name, value in {"count": self.objective.count(batch), "tokens": float(batch.mask.sum()), **own}.items():
                totals[name] = totals.get(name, 0.0) + value * (index < len(batches))
        return self.backend.total(totals)

    @torch.no_grad()
    def _baseline(self, own: Sequence[Batch], spare: Sequence[Batch]) -> float:
        """Sum over the rows of the step of the objective's log-ratio of policy to reference."""
        total = 0.0
        for index, batch in enumerate(self._on_device([*own, *spare])):
            logprobs, _ = self.forward(batch)
            if index < len(own):
                total += self.objective.logratio(logprobs, batch).sum().item()
        return self.backend.total({"baseline": total})["baseline"]

    def anchored(self, rows: TrainingRows) -> TrainingRows:
        """The rows, in order, with log-probs of the policy as it is, from the very passes that :meth:`gradients` makes
        over them. A pass over other batches, or the sampler's, differs by rounding: in bfloat16 by more than the
        bounds of some ratios."""
        _without_noise(self.policy.model)
        passes = Passes(self.backend, self.policy.model, self.micro_tokens, self.packs, self.routes)
        logprobs = passes.by_row(rows, units(rows), lambda batch: self._forward(batch)[0])
        table, offsets = rows.table(), rows.lists("input_ids")[0]
        index = table.schema.get_field_index("logprobs")
        column = nested(offsets, np.concatenate(logprobs), "logprobs")
        return TrainingRows.of_table(table.set_column(index, "logprobs", column))

    def _on_device(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield batch.to(self.backend.device)

    def save(self, path: Path, progress: dict[str, Any], beside: Backend | None = None) -> None:
        """Write a checkpoint from which :meth:`load` goes on as if nothing had happened; ``progress`` is the caller's
        part of it, and ``beside`` a model that is trained with this one."""
        self.backend.save(path, {**progress, "done": self.done}, beside)

    def load(self, path: Path, beside: Backend | None = None) -> dict[str, Any] | None:
        """Go back to the newest checkpoint that can be read, and return its ``progress``. If there is none, nothing is
        changed, and None is returned."""
        progress = self.backend.load(path, beside)
        if progress is not None:
            self.done = progress["done"]
        return progress


def _of_mask(batch: Batch, *values: Tensor) -> Iterator[Tensor]:
    """What the objective sees of values of tokens: 0 outside its own stream."""
    return (
        values_of_mask if batch.ce_weights is None else values_of_mask.masked_fill(~batch.mask, 0.0)
        for values_of_mask in values
    )


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

"""The one training loop. It reads tokens, masks and per-token weights, and does not know algorithms' names."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.batch import collate, micro_batches, units
from agentrl.logprobs import token_logprobs
from agentrl.objectives import DPO, GRPO, SFT
from agentrl.optimizer import OptimizerConfig
from agentrl.policy import Policy
from schemas.training import TrainingRow

Metrics = dict[str, float]


class TrainingError(ValueError):
    """Data or a loss that cannot be trained on. Names the rows."""


class Trainer:
    """Updates ``policy`` in place to minimise ``objective`` over ``total`` optimiser steps."""

    def __init__(self, policy: Policy, objective: SFT | DPO | GRPO, config: OptimizerConfig, total: int) -> None:
        self.policy = policy
        self.objective = objective
        self.config = config
        self.total = total
        self.done = 0
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def step(self, rows: Sequence[TrainingRow]) -> Metrics:
        """One optimiser step over all ``rows``; gradients accumulate over micro batches without changing the result.

        Raises TrainingError, with the policy unchanged, where nothing can be trained on or the loss is not finite.
        """
        model = self.policy.model.train()
        batches = [collate(part).to(model.device) for part in micro_batches(units(rows), self.config.micro_tokens)]
        count = sum(self.objective.count(batch) for batch in batches)
        n_tokens = sum(int(batch.mask.sum()) for batch in batches)
        if count <= 0 or n_tokens == 0:
            raise TrainingError(f"no token to train on in rows {[row.row_id for row in rows][:5]}; check their masks")
        totals: Metrics = {"loss": 0.0, "entropy": 0.0}
        for batch in batches:
            logprobs, entropy = token_logprobs(model, batch.input_ids, batch.mask)
            total, sums = self.objective.loss(logprobs, batch)
            loss = total / count
            loss.backward()
            for name, value in {"loss": loss.item(), **{key: value / count for key, value in sums.items()}}.items():
                totals[name] = totals.get(name, 0.0) + value
            totals["entropy"] += entropy.sum().item() / n_tokens
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm).item()
        if not math.isfinite(totals["loss"]) or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.done}: loss {totals['loss']}, gradient norm {norm}; lower lr, or look for broken rows "
                f"among {[row.row_id for row in rows][:5]}"
            )
        lr = self.config.lr_at(self.done, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return {**totals, "grad_norm": norm, "lr": lr, "tokens": float(n_tokens)}

    def state(self) -> dict[str, Any]:
        """Everything that :meth:`restore` needs to go on as if nothing had happened."""
        return {"done": self.done, "model": self.policy.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        self.policy.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def epochs(rows: Sequence[TrainingRow], batch_units: int, seed: int) -> Iterator[list[TrainingRow]]:
    """Batches of ``batch_units`` units without end: each epoch is a fresh seeded order, and holds every unit once. What
    an epoch leaves over begins the next batch."""
    groups = units(rows)
    pending: list[list[TrainingRow]] = []
    epoch = 0
    while True:
        order = list(groups)
        random.Random(f"{seed}-{epoch}").shuffle(order)
        pending += order
        while len(pending) >= batch_units:
            yield [row for group in pending[:batch_units] for row in group]
            pending = pending[batch_units:]
        epoch += 1


def fit(
    trainer: Trainer,
    rows: Sequence[TrainingRow],
    batch_units: int,
    seed: int,
    checkpoint: Path,
    on_step: Callable[[Metrics], None],
    checkpoint_every: int = 100,
) -> list[Metrics]:
    """Train to the end of the trainer's schedule and return the metrics of every step.

    A checkpoint at ``checkpoint`` is resumed from: the curve is that of an undisturbed run.
    """
    history: list[Metrics] = []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        trainer.restore(saved["trainer"])
        history = saved["history"]
    for number, batch in enumerate(epochs(rows, batch_units, seed)):
        if number >= trainer.total:
            break
        if number < trainer.done:
            continue
        history.append({"step": float(number), **trainer.step(batch)})
        on_step(history[-1])
        if trainer.done % checkpoint_every == 0 and trainer.done < trainer.total:
            save_checkpoint(checkpoint, {"trainer": trainer.state(), "history": history})
    return history


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write atomically: a kill leaves the last checkpoint whole."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


@torch.inference_mode()
def reference_logprobs(policy: Policy, rows: Sequence[TrainingRow], micro_tokens: int = 8192) -> list[TrainingRow]:
    """The rows, in order, with ``ref_logprobs`` under ``policy`` filled in where their mask is true."""
    model = policy.model.eval()
    filled: dict[int, list[float]] = {}
    singles = [[row] for row in rows]
    for part in micro_batches(singles, micro_tokens):
        batch = collate(part).to(model.device)
        logprobs, _ = token_logprobs(model, batch.input_ids, batch.mask)
        for row, values in zip(part, logprobs.cpu(), strict=True):
            filled[id(row)] = values[: len(row.input_ids)].tolist()
    return [row.model_copy(update={"ref_logprobs": filled[id(row)]}) for row in rows]

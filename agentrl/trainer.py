"""The one training loop. It reads tokens, masks and per-token weights, and does not know algorithms' names."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from agentrl.batch import Batch, TrainingError, check_rows, collate, micro_batches, units
from agentrl.checkpoint import load_checkpoint, save_checkpoint
from agentrl.logprobs import token_logprobs
from agentrl.lora import add_lora
from agentrl.objectives import AnyObjective
from agentrl.optimizer import OptimizerConfig
from agentrl.packing import can_pack, packed
from agentrl.policy import Policy
from schemas.training import TRAINING_SCHEMA, TrainingRow

Metrics = dict[str, float]

__all__ = ["Metrics", "Trainer", "TrainingError", "epochs", "fit", "reference_logprobs"]


class Trainer:
    """Updates ``policy`` in place to minimise ``objective`` over ``total`` optimiser steps."""

    def __init__(self, policy: Policy, objective: AnyObjective, config: OptimizerConfig, total: int) -> None:
        self.policy = policy
        self.objective = objective
        self.config = config
        self.total = total
        self.done = 0
        if config.lora:
            add_lora(policy, config.lora)
        if config.gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.packs = can_pack(policy.model)
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def step(self, rows: Sequence[TrainingRow], lr_scale: float = 1.0) -> Metrics:
        """One optimiser step over all ``rows``; gradients accumulate over micro batches without changing the result.

        Raises TrainingError, with the policy unchanged, where nothing can be trained on or the loss is not finite.
        """
        norm, totals = self.gradients(rows)
        if not math.isfinite(totals["loss"]) or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.done}: loss {totals['loss']}, gradient norm {norm}; lower lr, or look for broken rows "
                f"among {[row.row_id for row in rows][:5]}",
                rows,
            )
        lr = self.config.lr_at(self.done, self.total) * lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return {**totals, "grad_norm": norm, "lr": lr}

    def gradients(self, rows: Sequence[TrainingRow]) -> tuple[float, Metrics]:
        """Gradients of one step over ``rows``, clipped, left on the parameters; their norm before, and metrics.

        Raises TrainingError where nothing can be trained on.
        """
        model = self.policy.model.train()
        parts = micro_batches(units(rows), self.config.micro_tokens)
        batches = [collate(part, self.packs).to(model.device) for part in parts]
        count = sum(self.objective.count(batch) for batch in batches)
        n_tokens = sum(int(batch.mask.sum()) for batch in batches)
        if count <= 0 or n_tokens == 0:
            raise TrainingError(f"no token to train on in rows {[row.row_id for row in rows][:5]}; check their masks")
        totals: Metrics = {"loss": 0.0, "entropy": 0.0}
        with packed(model, self.packs):
            baseline = self._baseline(batches) if self.objective.needs_baseline else 0.0
            for batch in batches:
                with self._autocast():
                    logprobs, entropy = token_logprobs(model, batch.input_ids, batch.mask, batch.packing)
                total, sums = self.objective.loss(logprobs, entropy, batch, baseline)
                (total / count).backward()
                for name, value in {"loss": total.item(), **sums}.items():
                    totals[name] = totals.get(name, 0.0) + value / count
                totals["entropy"] += entropy.detach().sum().item() / n_tokens
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm).item()
        return norm, {**totals, "tokens": float(n_tokens)}

    def _autocast(self) -> AbstractContextManager[Any]:
        bfloat16 = self.config.precision == "bfloat16"
        return torch.autocast(self.policy.model.device.type, torch.bfloat16, enabled=bfloat16)

    @torch.no_grad()
    def _baseline(self, batches: Sequence[Batch]) -> float:
        """Mean over the rows of the step of the log-ratio of policy to reference."""
        total, rows = 0.0, 0
        for batch in batches:
            with self._autocast():
                logprobs, _ = token_logprobs(self.policy.model, batch.input_ids, batch.mask, batch.packing)
            total += ((logprobs - batch.ref_logprobs) * batch.mask).sum().item()
            rows += len(batch.label)
        return total / rows

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

    A checkpoint at ``checkpoint`` is resumed from, or the one before it if that is damaged: the curve is that of an
    undisturbed run. Raises TrainingError before the first step where rows cannot be trained on, and where a loss is not
    finite; then the last good state is kept at ``checkpoint`` and the step's rows beside it, in
    ``failed_step.parquet``.
    """
    check_rows(rows, trainer.policy)
    history: list[Metrics] = []
    if saved := load_checkpoint(checkpoint):
        trainer.restore(saved["trainer"])
        history = saved["history"]
    for number, batch in enumerate(epochs(rows, batch_units, seed)):
        if number >= trainer.total:
            break
        if number < trainer.done:
            continue
        try:
            metrics = trainer.step(batch)
        except TrainingError as error:
            save_checkpoint(checkpoint, {"trainer": trainer.state(), "history": history})
            failed = save_rows(checkpoint.with_name("failed_step.parquet"), batch)
            raise TrainingError(
                f"{error}; the policy before it is kept at {checkpoint}, the rows at {failed}"
            ) from None
        history.append({"step": float(number), **metrics})
        on_step(history[-1])
        if trainer.done % checkpoint_every == 0 and trainer.done < trainer.total:
            save_checkpoint(checkpoint, {"trainer": trainer.state(), "history": history})
    return history


def row_table(rows: Sequence[TrainingRow]) -> pa.Table:
    """Training rows as an Arrow table, column by column: rows have thousands of tokens."""
    columns = {name: [getattr(row, name) for row in rows] for name in TRAINING_SCHEMA.names}
    return pa.table(columns, schema=TRAINING_SCHEMA)


def save_rows(path: Path, rows: Sequence[TrainingRow]) -> Path:
    """Write training rows as Parquet, and return ``path``."""
    pq.write_table(row_table(rows), path, compression="zstd")
    return path


def step_table(iteration: int, steps: Sequence[tuple[int, Sequence[TrainingRow]]]) -> pa.Table:
    """Training rows of one online iteration, each with it and with the number of its optimiser ``step``."""
    table = row_table([row for _, rows in steps for row in rows])
    numbers = [number for number, rows in steps for _ in rows]
    columns = {"iteration": [iteration] * len(numbers), "step": numbers}
    for place, (name, values) in enumerate(columns.items()):
        table = table.add_column(place, pa.field(name, pa.int32(), nullable=False), pa.array(values, pa.int32()))
    return table


@torch.no_grad()
def batch_logprobs(policy: Policy, rows: Sequence[TrainingRow], micro_tokens: int = 8192) -> list[list[float]]:
    """Log-probabilities under ``policy`` of each row's tokens, in order, 0 where the mask is false."""
    model = policy.model.eval()
    packs = can_pack(model)
    filled: dict[int, list[float]] = {}
    with packed(model, packs):
        for part in micro_batches([[row] for row in rows], micro_tokens):
            batch = collate(part, packs).to(model.device)
            logprobs: Tensor = token_logprobs(model, batch.input_ids, batch.mask, batch.packing)[0].cpu()
            for row, values in zip(part, logprobs.tolist(), strict=True):
                filled[id(row)] = values[: len(row.input_ids)]
    return [filled[id(row)] for row in rows]


def reference_logprobs(policy: Policy, rows: Sequence[TrainingRow], micro_tokens: int = 8192) -> list[TrainingRow]:
    """The rows, in order, with ``ref_logprobs`` under ``policy`` filled in where their mask is true.

    Raises TrainingError where its vocabulary is not that of the rows.
    """
    check_rows(rows, policy)
    values = batch_logprobs(policy, rows, micro_tokens)
    return [row.model_copy(update={"ref_logprobs": one}) for row, one in zip(rows, values, strict=True)]

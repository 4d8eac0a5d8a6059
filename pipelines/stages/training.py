"""What all training stages share: their common settings, the file of rows, and the job, here or on ranks."""

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import pyarrow as pa
from pydantic import Field, model_validator

from agentrl.algorithms.base import Objective
from agentrl.pipelines.handles import Model, Table
from agentrl.pipelines.parts.common import record_dialect
from agentrl.pipelines.stage import Context, StageConfig
from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.trackers import Tracker

if TYPE_CHECKING:
    from agentrl.models.policy import Policy, Speaker
    from agentrl.training.launch import Ranks
    from agentrl.training.rows import TrainingRows

Answer = TypeVar("Answer")

NO_ROWS = "the inputs hold no rows; look at what the stage before kept"


class Trained(NamedTuple):
    model: Model
    rows: Table
    metrics: Table


class TrainConfig(StageConfig):
    steps: int = Field(100, ge=1, description="optimiser steps")
    batch: int = Field(32, ge=1, description="sequences, or pairs, in one optimiser step")
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeed | None = Field(None, description="spread over processes; None trains in this one")
    track: list[Tracker] = Field([], description="also send metrics to these, if they are installed")

    @model_validator(mode="after")
    def _ranks_exchange_what_they_compute(self) -> "TrainConfig":
        if self.deepspeed:
            self.deepspeed.check(self.optimizer)
        return self


def meanwhile(work: Callable[[], Answer]) -> "Future[Answer]":
    """Start ``work`` in a thread, and return its result to come. Imports and models load while rows are read."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _with_weights(speaker: "Speaker") -> "Policy":
    from agentrl.models.policy import Policy

    assert isinstance(speaker, Policy)
    return speaker


def _start_ranks(config: DeepSpeed, folder: Path) -> "Ranks":
    from agentrl.training.launch import Ranks

    return Ranks(config, folder)


class Training:
    """The training of one stage. Processes of DeepSpeed start with it, so that they import what they need while rows
    are read; leaving the block ends them.

    with Training(context, config) as training:
        return training.fit(policy, objective, batches)
    """

    def __init__(self, context: Context, config: TrainConfig) -> None:
        self.context = context
        self.config = config
        self.job = context.scratch / "job"
        self.job.mkdir(exist_ok=True)
        self._ranks = _start_ranks(config.deepspeed, self.job) if config.deepspeed else None

    def __enter__(self) -> "Training":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks:
            self._ranks.close()

    def fit(
        self,
        policy: "Callable[[], Speaker]",
        objective: Objective,
        batches: Iterable[pa.RecordBatch],
        *,
        start: str | None = None,
        made_by: tuple[str, str] | None = None,
        lr_scale: float = 1.0,
        empty: str = NO_ROWS,
    ) -> Trained:
        """Write the rows as one file, as they come, and train on it. ``policy`` is asked for after that. Ranks load the
        model at ``start``, a folder or a name; then ``policy`` need not have weights. ``made_by`` is the tokenizer that
        the rows must be of, and one of them, if it is the ranks that compare it with the model's. ``empty`` says why,
        if there are no rows: then ValueError is raised."""
        from agentrl.training.rows import TrainingRows, write_rows
        from agentrl.training.trackers import track

        context, config = self.context, self.config
        optimizer = config.optimizer.model_copy(update={"lr": config.optimizer.lr * lr_scale})
        rows = TrainingRows.open(write_rows(self.job / "rows.arrow", batches))
        if not len(rows):
            raise ValueError(f"there is nothing to train on: {empty}")
        if "codec" in vars(policy()):  # it encoded rows, or was asked how
            record_dialect(context, policy())
        if "tokenizer" in vars(policy()):  # else nobody needed it here, and loading takes seconds
            context.keep_tokenizer(policy())
        name, folder = f"{context.stage}-{context.fingerprint[:8]}", context.folder / "tracking"
        with track(config.track, name, folder) as send, context.live() as live:
            report = self._report(live, send)
            if self._ranks:
                if start is None:
                    _with_weights(policy()).save(self.job / "start")
                history = self._ranks.run(self._job_file(objective, optimizer, start, made_by), report)
                context.metrics.update(self._ranks.dialect)
                return self._trained(
                    rows, history, lambda path: shutil.copytree(self.job / "model", path, dirs_exist_ok=True)
                )
            return self._fit_here(_with_weights(policy()), objective, optimizer, rows, report)

    def _fit_here(
        self,
        policy: "Policy",
        objective: Objective,
        optimizer: OptimizerConfig,
        rows: "TrainingRows",
        report: Callable[[dict[str, float]], None],
    ) -> Trained:
        from agentrl.training.loop import fit
        from agentrl.training.lora import merge_lora
        from agentrl.training.step import Trainer

        context, config = self.context, self.config
        trainer = Trainer(policy, objective, optimizer, config.steps, seed=context.seed)
        history = fit(trainer, rows, config.batch, context.seed, context.scratch / "checkpoint.pt", report)
        if optimizer.lora:
            merge_lora(policy)
        return self._trained(rows, history, policy.save)

    def _report(self, *listeners: Callable[[dict[str, float]], None]) -> Callable[[dict[str, float]], None]:
        """What is told of each step."""
        last = time.perf_counter()

        def report(metrics: dict[str, float]) -> None:
            nonlocal last
            now = time.perf_counter()
            speed = f"{metrics['tokens'] / (now - last):,.0f}"
            last = now
            for listener in listeners:
                listener(metrics)
            self.context.progress(
                int(metrics["step"]) + 1, self.config.steps, loss=round(metrics["loss"], 4), **{"tokens/s": speed}
            )

        return report

    def _job_file(
        self, objective: Objective, optimizer: OptimizerConfig, start: str | None, made_by: tuple[str, str] | None
    ) -> Path:
        """The job of the ranks. Its folder outlives a kill, with its checkpoints."""
        from agentrl.training.job import TrainingJob

        job = TrainingJob.model_validate(
            {
                "objective": objective,
                "optimizer": optimizer,
                "deepspeed": self.config.deepspeed,
                "steps": self.config.steps,
                "batch": self.config.batch,
                "seed": self.context.seed,
                "start": start,
                "made_by": made_by,
            }
        )
        return job.write(self.job)

    def _trained(
        self, rows: "TrainingRows", history: list[dict[str, float]], save: Callable[[Path], object]
    ) -> Trained:
        context = self.context
        context.metrics.update(rows=len(rows), first_loss=history[0]["loss"], last_loss=history[-1]["loss"])
        return Trained(
            context.model(save),
            context.table(pa.RecordBatchReader.from_batches(rows.schema, rows.batches), "rows"),
            context.table(pa.Table.from_pylist(history), "metrics"),
        )

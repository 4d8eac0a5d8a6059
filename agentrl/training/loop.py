"""The training loop: epochs over rows in seeded order, checkpoints, and what is kept of a step that failed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from agentrl.training.batch import TrainingError, check_lengths, check_rows, unit_starts
from agentrl.training.epochs import shuffled
from agentrl.training.rows import TrainingRows, save_rows
from agentrl.training.step import Metrics, Trainer


def epochs(rows: TrainingRows, batch_units: int, seed: int) -> Iterator[np.ndarray]:
    """Positions of the rows of batches, without end; see :func:`agentrl.training.epochs.shuffled`."""
    return shuffled(unit_starts(rows), batch_units, seed)


def fit(
    trainer: Trainer,
    rows: TrainingRows,
    batch_units: int,
    seed: int,
    checkpoint: Path,
    on_step: Callable[[Metrics], None],
    checkpoint_every: int = 100,
) -> list[Metrics]:
    """Train to the end of the trainer's schedule and return the metrics of every step. A step reads its own rows alone.

    Training goes on from a checkpoint at ``checkpoint``, or from the one before it if that is damaged: the curve is
    that of an undisturbed run.

    Raises TrainingError before the first step if rows cannot be trained on, or if all are longer than the model's
    context, and later if a loss is not finite. Then the rows of that step are kept beside ``checkpoint`` in
    ``failed_step.parquet``, and the last good state at ``checkpoint``.
    """
    check_rows(rows, trainer.policy, trainer.backend.rank, trainer.backend.world)
    check_lengths(rows, trainer.policy)
    saved = trainer.load(checkpoint)
    history: list[Metrics] = saved["history"] if saved else []
    for number, positions in enumerate(epochs(rows, batch_units, seed)):
        if number >= trainer.total:
            break
        if number < trainer.done:
            continue
        batch = rows.take(positions)
        try:
            metrics = trainer.step(batch)
        except TrainingError as error:
            raise _kept(trainer, history, checkpoint, batch, error) from None
        history.append({"step": float(number), **metrics})
        on_step(history[-1])
        if trainer.done % checkpoint_every == 0 and trainer.done < trainer.total:
            trainer.save(checkpoint, {"history": history})
    return history


def _kept(
    trainer: Trainer,
    history: list[Metrics],
    checkpoint: Path,
    batch: TrainingRows,
    error: TrainingError,
) -> TrainingError:
    """The error of a failed step, with the paths of its rows and of the last good state."""
    failed = checkpoint.with_name("failed_step.parquet")
    if trainer.backend.rank == 0:
        save_rows(failed, batch)
    if trainer.backend.keeps_weights:
        trainer.save(checkpoint, {"history": history})
        return TrainingError(f"{error}; the policy before it is kept at {checkpoint}, the rows at {failed}")
    return TrainingError(f"{error}; the last checkpoint is at {checkpoint}, the rows at {failed}")

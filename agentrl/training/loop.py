"""The training loop: epochs over rows in seeded order, checkpoints, and what is kept of a step that failed."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentrl.training.batch import TrainingError, check_rows, units
from agentrl.training.step import Metrics, Trainer
from agentrl.training.tables import save_rows
from schemas.training import TrainingRow


def epochs(rows: Sequence[TrainingRow], batch_units: int, seed: int) -> Iterator[list[TrainingRow]]:
    """Batches of ``batch_units`` units without end: each epoch is a fresh seeded order, and holds every unit once.
    Units left at the end of an epoch begin the next batch."""
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

    Training goes on from a checkpoint at ``checkpoint``, or from the one before it if that is damaged: the curve is
    that of an undisturbed run.

    Raises TrainingError before the first step if rows cannot be trained on, and later if a loss is not finite. Then the
    rows of that step are kept beside ``checkpoint`` in ``failed_step.parquet``, and the last good state at
    ``checkpoint``.
    """
    check_rows(rows, trainer.policy)
    saved = trainer.load(checkpoint)
    history: list[Metrics] = saved["history"] if saved else []
    for number, batch in enumerate(epochs(rows, batch_units, seed)):
        if number >= trainer.total:
            break
        if number < trainer.done:
            continue
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
    batch: Sequence[TrainingRow],
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

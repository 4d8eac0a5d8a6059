"""The training loop: epochs over rows in seeded order, checkpoints, and what remains of a step that failed."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentrl.training.batch import TrainingError, check_rows, units
from agentrl.training.checkpoint import load_checkpoint, save_checkpoint
from agentrl.training.step import Metrics, Trainer
from agentrl.training.tables import save_rows
from schemas.training import TrainingRow


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

    Training goes on from a checkpoint at ``checkpoint``, or from the one before it if that is damaged: the curve is
    that of an undisturbed run.

    Raises TrainingError before the first step if rows cannot be trained on, and later if a loss is not finite; then the
    last good state is kept at ``checkpoint`` and the step's rows beside it, in ``failed_step.parquet``.
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

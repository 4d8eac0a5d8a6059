"""The order in which training takes its rows. It follows from the units of the rows and a seed alone, so it can be
computed again, without torch."""

import random
from array import array
from collections.abc import Iterator

import numpy as np


def starts_of(unit: np.ndarray) -> np.ndarray:
    """The position of the first row of each unit, [units + 1], from the unit of each row, [rows]; the last one is the
    number of rows."""
    changes = np.flatnonzero(unit[1:] != unit[:-1]) + 1
    return np.concatenate([[0], changes, [len(unit)]]) if len(unit) else np.zeros(1, np.int64)


def shuffled(starts: np.ndarray, batch_units: int, seed: int) -> Iterator[np.ndarray]:
    """Positions of the rows of batches of ``batch_units`` units, without end: each epoch is a fresh seeded order, and
    holds every unit once. Units left at the end of an epoch begin the next batch. ``starts`` [units + 1] are those of
    :func:`starts_of`."""
    pending = array("q")
    epoch = 0
    while True:
        order = array("q", range(len(starts) - 1))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        pending += order
        used = 0
        while len(pending) - used >= batch_units:
            batch = pending[used : used + batch_units]
            yield np.concatenate([np.arange(starts[unit], starts[unit + 1]) for unit in batch])
            used += batch_units
        pending = pending[used:]
        epoch += 1

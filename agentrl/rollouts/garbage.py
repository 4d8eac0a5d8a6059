"""Garbage collection while many episodes are under way."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS, _GENERATIONS = 50_000, 20


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for circular garbage rarely, and not at what was there before. Rows and libraries are millions of
    objects without circles, and looking at them again and again takes a third of the time of rollouts."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, _GENERATIONS, _GENERATIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

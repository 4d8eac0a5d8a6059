"""Seeds of environments of other packages: tasks that are seeds, and episodes that share no random numbers."""

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

import numpy as np

from agentrl.schemas.task import Task

SEEDS = 2**20
"""Seeds of one draw of tasks; the next draw has others."""

_SHARED = Lock()


def seeded(name: str, env: str, prompt: str, tools: str, sizes: Mapping[str, int], seed: int) -> dict[str, list[Task]]:
    """Tasks of an environment, each a seed of one split alone, from a block that belongs to ``seed``. Raises ValueError
    if the block is too small."""
    if sum(sizes.values()) > SEEDS:
        raise ValueError(f"{sum(sizes.values())} tasks are more than the {SEEDS} seeds of one draw")
    first, splits = seed * SEEDS, {}
    for split, size in sizes.items():
        splits[split] = [
            Task(
                task_id=f"{name}-{number}", env=env, split=split, prompt=prompt, tools=tools, verifier="environment",
                metadata=json.dumps({"seed": number}),
            )
            for number in range(first, first + size)
        ]  # fmt: skip
        first += size
    return splits


class OwnChance:
    """An episode's own state of the generators that all of a process shares, ``random`` and NumPy's, for packages that
    draw from these: what other episodes draw meanwhile changes nothing."""

    def __init__(self, seed: int) -> None:
        self.state = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Draw from it within; one episode at a time."""
        with _SHARED:
            others = random.getstate(), np.random.get_state()
            random.setstate(self.state[0])
            np.random.set_state(self.state[1])
            try:
                yield
            finally:
                self.state = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])

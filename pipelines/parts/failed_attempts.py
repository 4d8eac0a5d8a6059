"""Attempts that failed by no doing of the policy and were made again: rows of their own, which no stage selects."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Self

from agentrl.pipelines.parts.row_files import read_rows, write_rows
from agentrl.pipelines.stage import Context
from agentrl.rollouts.segments import episode_of, name_of
from agentrl.schemas.trajectory import NOT_TRAINED, RETRIED, Trajectory, attempt_id

FAILED = 2_000_000_000
"""Shards from this number on are those of failed attempts."""

AT_ONCE = 64
"""Attempts that are appended together."""


class FailedAttempts:
    """Keeps the rows of failed attempts in the stage's scratch folder as they come, from any thread, and appends them
    to the buffer at the end, those of a killed run too. Each is called as the row that was made in its place, with the
    number of the attempt (:func:`agentrl.schemas.trajectory.attempt_id`)."""

    def __init__(self, context: Context) -> None:
        self._context, self._folder = context, context.scratch / "failed_attempts"
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        waiting = [path.stem for path in self._folder.glob("*.arrow")]
        names = {episode_of(name) for name in self._context.row_ids(failed=True)} | set(waiting)
        for episode, _, number in (name.rpartition("~") for name in names):
            self._numbers[episode] = max(self._numbers[episode], int(number))
        return self

    def __call__(self, rows: Sequence[Trajectory]) -> None:
        """Keep the rows of one attempt."""
        with self._lock:
            episode = rows[0].episode_id
            self._numbers[episode] += 1
            name = attempt_id(episode, self._numbers[episode])
        renamed = [
            row.model_copy(
                update={
                    "trajectory_id": name_of(name, row.segment),
                    "episode_id": name,
                    "tags": [RETRIED, NOT_TRAINED, *row.tags],
                }
            )
            for row in rows
        ]
        write_rows(self._folder / f"{name}.arrow", renamed)

    def __exit__(self, *_: object) -> None:
        known = set(self._context.row_ids(failed=True))
        files = sorted(self._folder.glob("*.arrow"))
        shard = FAILED
        for start in range(0, len(files), AT_ONCE):
            part = files[start : start + AT_ONCE]
            rows = [row for path in part for row in read_rows(path) if row.trajectory_id not in known]
            while self._context.has_shard(shard):
                shard += 1
            if rows:
                self._context.append(rows, shard)
            for path in part:
                path.unlink()

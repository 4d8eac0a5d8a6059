"""How far rollouts are, for whoever watches."""

import time
from collections.abc import Callable, Sequence

from agentrl.schemas.trajectory import Trajectory

_REPORT_S = 0.5

OnProgress = Callable[[int, int, dict[str, float | str]], None]
"""Told of episodes done, of how many, and with what numbers."""


class EpisodeReport:
    """Counts episodes, and tells of them now and then."""

    def __init__(self, total: int, tell: OnProgress | None) -> None:
        self.total, self.tell = total, tell
        self.done = self.tokens = self.scored = self.solved = 0
        self.started = self.told = time.monotonic()

    def __call__(self, rows: Sequence[Trajectory]) -> None:
        row = rows[0]
        self.done += 1
        self.tokens += sum(row.n_action_tokens for row in rows)
        self.scored += row.success is not None
        self.solved += bool(row.success)
        now = time.monotonic()
        if self.tell is None or (now - self.told < _REPORT_S and self.done < self.total):
            return
        self.told, seconds = now, max(1e-9, now - self.started)
        shown: dict[str, float | str] = {}
        if self.scored:
            shown["success"] = round(self.solved / self.scored, 3)
        shown["episodes/s"] = f"{self.done / seconds:,.1f}"
        if self.tokens:
            shown["tokens/s"] = f"{self.tokens / seconds:,.0f}"
        self.tell(self.done, self.total, shown)

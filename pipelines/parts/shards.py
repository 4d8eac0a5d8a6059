"""Shards of rollouts: what a killed run has made already, and what it has to make again."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from agentrl.pipelines.stage import Context
from agentrl.schemas.trajectory import Termination, Trajectory

Attempt = TypeVar("Attempt")


class Shards:
    """The rows of a stage, appended shard by shard. A row whose episode ended by ``infra_error`` says nothing of the
    policy, so it waits until everything else is done: a run that was killed, or that an engine ended, makes it again
    when it is resumed."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._known = set(context.row_ids())
        self._waiting: list[Trajectory] = []

    def missing(self, attempts: Mapping[str, Attempt]) -> dict[str, Attempt]:
        """Those of the attempts, by the ids of their rows, that the buffer lacks."""
        return {name: attempt for name, attempt in attempts.items() if name not in self._known}

    def append(self, rows: Sequence[Trajectory], shard: int) -> None:
        """Append the rows of a shard that did not end by ``infra_error``. Rows of a shard that is in the buffer already
        wait, since a shard is appended once."""
        lasting = [row for row in rows if row.termination is not Termination.INFRA_ERROR]
        if lasting and self.context.has_shard(shard):
            self._waiting += rows
            return
        if lasting:
            self.context.append(lasting, shard)
        self._waiting += [row for row in rows if row.termination is Termination.INFRA_ERROR]

    def finish(self, shard: int) -> None:
        """Append the rows that wait, as a shard of their own."""
        if self._waiting:
            self.context.append(self._waiting, shard)
            self._waiting = []

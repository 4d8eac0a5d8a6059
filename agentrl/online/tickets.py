"""Which tickets are under way, and which of their groups make the next batch.

A ticket is the n-th task of the endless sequence that a run draws from, and its rollouts are one group. A ticket that
is opened when ``v`` steps are done has the deadline ``v + max_staleness``: the last batch that may train on its group.
A batch takes whole groups in the order in which they came, but never one for which a ticket with an earlier deadline
would be late. It waits instead.

Nothing is ever dropped, and no deadline is missed. At most ``(ahead + 1) * size`` tickets are open. The batches up to a
new ticket's deadline have ``max_staleness * size`` places, which are at least as many if ``max_staleness > ahead``. So
there is a place in time for each open ticket, and a batch takes no group that would take the last such place of
another.
"""

from dataclasses import dataclass
from typing import Any


def check(ahead: int, max_staleness: int) -> None:
    """Raises ValueError if no order of groups keeps the bound. Neither ahead nor stale is synchronous training."""
    if max_staleness <= ahead and (ahead, max_staleness) != (0, 0):
        raise ValueError(
            f"max_staleness: {max_staleness} with ahead: {ahead} cannot be kept without dropping rollouts: a group "
            f"that is opened {ahead + 1} batches early may be that many versions old; set max_staleness to {ahead + 1} "
            "or more, or both to 0 for synchronous training"
        )


@dataclass(frozen=True)
class Taken:
    """The tickets of a batch in order: those whose groups ``fill`` it, and those ``idle`` that came beside them."""

    fill: list[int]
    idle: list[int]


class Tickets:
    """The tickets of a run of ``batches`` batches of ``size`` groups.

    ``spare`` is how many groups without a difference in reward a batch takes without being filled by them (dynamic
    sampling). ``open`` gives the deadline of each open ticket, ``next`` is the first ticket that was never opened.
    """

    def __init__(self, size: int, batches: int, ahead: int = 0, max_staleness: int = 0, spare: int = 0) -> None:
        check(ahead, max_staleness)
        self.size, self.batches, self.ahead, self.max_staleness, self.spare = size, batches, ahead, max_staleness, spare
        self.next = self.taken = self.steps = 0
        self.open: dict[int, int] = {}
        self._whole: dict[int, bool] = {}
        self._fill: list[int] = []
        self._idle: list[int] = []

    @property
    def overlaps(self) -> bool:
        """Whether tickets are opened before the step of the batch before them is done."""
        return self.max_staleness > 0

    def admit(self) -> list[int]:
        """Open the tickets that may begin now, and return them. No more are opened than the run trains on."""
        if self.taken > self.steps and not self.overlaps:
            return []
        room = (self.ahead + 1) * self.size - len(self.open) - (0 if self.overlaps else len(self._fill))
        needed = (self.batches - self.taken) * self.size - len(self._fill) - len(self.open)
        first, self.next = self.next, self.next + max(0, min(room, needed))
        new = list(range(first, self.next))
        self.open.update(dict.fromkeys(new, self.steps + self.max_staleness))
        return new

    def finish(self, ticket: int, useful: bool = True) -> None:
        """The group of an open ticket is whole. It is ``useful`` if its rewards differ."""
        if ticket not in self.open:
            raise ValueError(f"ticket {ticket} is not open")
        self._whole[ticket] = useful

    def take(self) -> Taken | None:
        """The next batch if its groups are there; otherwise None, and what can be taken already is kept for it."""
        while len(self._fill) < self.size and (ticket := self._takeable()) is not None:
            useful = self._whole.pop(ticket)
            (self._fill if self._fills(useful) else self._idle).append(ticket)
            del self.open[ticket]
        if len(self._fill) < self.size:
            return None
        batch = Taken(sorted(self._fill), sorted(self._idle))
        self._fill, self._idle = [], []
        self.taken += 1
        return batch

    def step(self) -> None:
        """The step over the batch that was taken last is done."""
        self.steps += 1

    def _fills(self, useful: bool) -> bool:
        return useful or len(self._idle) >= self.spare

    def _takeable(self) -> int | None:
        """The first whole group that the batch may take."""
        seats = self.size - len(self._fill)
        for ticket, useful in self._whole.items():
            if self._need(without=ticket) <= seats - self._fills(useful):
                return ticket
        return None

    def _need(self, without: int) -> int:
        """How many of the other open tickets this batch has to take: the most that are due by some batch beyond the
        places of the batches after this one up to it."""
        due = sorted(deadline for ticket, deadline in self.open.items() if ticket != without)
        counts = (count - (deadline - self.taken) * self.size for count, deadline in enumerate(due, 1))
        return max(counts, default=0)

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs, between two batches. Which groups are whole is not part of it."""
        return {"next": self.next, "taken": self.taken, "steps": self.steps, "open": sorted(self.open.items())}

    def restore(self, state: dict[str, Any]) -> None:
        self.next, self.taken, self.steps = state["next"], state["taken"], state["steps"]
        self.open = dict(state["open"])
        self._whole, self._fill, self._idle = {}, [], []

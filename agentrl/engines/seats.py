"""Which slot of the embedded engine's cache belongs to which session."""

from dataclasses import dataclass, field

from agentrl.engines.base import Session
from agentrl.engines.lanes import Row


@dataclass(eq=False)
class Seat:
    """A session and the slot that holds its cache. ``row`` is its turn under way, ``used`` when it last had one."""

    session: Session
    slot: int
    row: Row | None = None
    used: int = 0


@dataclass(eq=False)
class Seats:
    """Which slot belongs to which session. A seat without a turn under way may be taken by another session."""

    limit: int
    by_session: dict[Session, Seat] = field(default_factory=dict)
    by_root: dict[str, list[Seat]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    slots: int = 0

    def take(self, session: Session) -> Seat | None:
        """A seat for a session that has none; None if all have turns under way."""
        if self.free:
            slot = min(self.free)
            self.free.remove(slot)
        elif self.slots < self.limit:
            slot, self.slots = self.slots, self.slots + 1
        else:
            idle = [seat for seat in self.by_session.values() if seat.row is None]
            if not idle:
                return None
            oldest = min(idle, key=lambda seat: seat.used)
            self.leave(oldest.session)
            return self.take(session)
        seat = self.by_session[session] = Seat(session, slot)
        self.by_root.setdefault(session.root, []).append(seat)
        return seat

    def leave(self, session: Session) -> None:
        seat = self.by_session.pop(session, None)
        if seat is not None:
            self.free.append(seat.slot)
            self.by_root[session.root].remove(seat)
            if not self.by_root[session.root]:
                del self.by_root[session.root]
        if not self.by_session:  # what comes next is computed as by a new engine: the number of slots changes shapes
            self.free, self.slots = [], 0

    def gather(self) -> list[int]:
        """Renumber the used slots from 0 on; returns their old numbers in the new order."""
        seats = sorted(self.by_session.values(), key=lambda seat: seat.slot)
        order = [seat.slot for seat in seats]
        for slot, seat in enumerate(seats):
            seat.slot = slot
        self.free, self.slots = [], len(seats)
        return order

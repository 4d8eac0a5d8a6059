"""The deadline scheduler, in virtual time: whatever the latencies, no group is older than the bound, none is dropped,
and each ticket is in exactly one batch."""

import heapq
import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.online.tickets import Tickets, check


@dataclass
class Run:
    """A run in virtual time, driven as the online loop drives it: open, wait for a group, take; open, and step."""

    tickets: Tickets
    latency: random.Random
    useless: float
    step_time: float
    kills: float = 0.0
    now: float = 0.0
    opened: dict[int, int] = field(default_factory=dict)
    under_way: list[tuple[float, int]] = field(default_factory=list)
    batches: list[tuple[list[int], list[int]]] = field(default_factory=list)
    most_open: int = 0

    def open(self) -> None:
        for ticket in self.tickets.admit():
            assert ticket == len(self.opened), "tickets are opened in their order, and none twice"
            self.opened[ticket] = self.tickets.steps
            self.begin(ticket)
        self.most_open = max(self.most_open, len(self.tickets.open))

    def begin(self, ticket: int) -> None:
        takes = self.latency.choice([0.0, 1.0, self.latency.lognormvariate(0, 1.5), 50.0])
        heapq.heappush(self.under_way, (self.now + takes, ticket))

    def batch(self) -> None:
        while True:
            self.open()
            if taken := self.tickets.take():
                break
            self.open()
            assert self.under_way, "a batch waits, and nothing is under way"
            self.now, ticket = heapq.heappop(self.under_way)
            self.tickets.finish(ticket, self.latency.random() >= self.useless)
        for ticket in [*taken.fill, *taken.idle]:
            assert self.tickets.taken - 1 - self.opened[ticket] <= self.tickets.max_staleness
        self.batches.append((taken.fill, taken.idle))
        if self.latency.random() < self.kills:
            self.restart()
        self.open()
        self.now += self.step_time
        self.tickets.step()

    def restart(self) -> None:
        """Killed after a batch was recorded: what was whole is found whole, and the rest begins again."""
        state = self.tickets.state()
        whole = set(self.tickets.open) - {ticket for _, ticket in self.under_way}
        self.tickets.restore(state)
        self.under_way = [(self.now, ticket) for ticket in whole]
        heapq.heapify(self.under_way)
        for ticket in set(self.tickets.open) - whole:
            self.begin(ticket)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    ahead = draw(st.integers(0, 3))
    staleness = 0 if ahead == 0 and draw(st.booleans()) else draw(st.integers(ahead + 1, ahead + 4))
    size, batches = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    useless = draw(st.sampled_from([0.0, 0.3, 0.9]))
    spare = draw(st.integers(0, 2)) * size
    tickets = Tickets(size, batches, ahead, staleness, spare)
    latency = random.Random(draw(st.integers(0, 2**32)))
    return Run(tickets, latency, useless, draw(st.sampled_from([0.0, 0.5, 5.0])), draw(st.sampled_from([0.0, 0.3])))


@given(runs())
@settings(max_examples=200, deadline=None)
def test_whatever_the_latencies_nothing_is_late_and_nothing_is_dropped(run: Run) -> None:
    tickets = run.tickets
    for _ in range(tickets.batches):
        run.batch()
    seen = [ticket for fill, idle in run.batches for ticket in [*fill, *idle]]
    assert sorted(seen) == list(range(tickets.next)), "each ticket is in exactly one batch, and none is left"
    assert not tickets.open
    assert all(len(fill) == tickets.size for fill, _ in run.batches)
    assert all(len(idle) <= tickets.spare for _, idle in run.batches)
    assert run.most_open <= (tickets.ahead + 1) * tickets.size
    if not tickets.overlaps:
        order = [sorted([*fill, *idle]) for fill, idle in run.batches]
        assert order == [list(range(part[0], part[0] + len(part))) for part in order]


def test_a_batch_waits_for_what_would_be_late_and_for_nothing_else() -> None:
    tickets = Tickets(size=2, batches=9, ahead=1, max_staleness=2)
    assert tickets.admit() == [0, 1, 2, 3]
    for ticket in (3, 2):
        tickets.finish(ticket)
    taken = tickets.take()
    assert taken is not None
    assert taken.fill == [2, 3], "the first ones that are whole, since 0 and 1 have two batches more"
    assert tickets.admit() == [4, 5]
    tickets.step()
    for ticket in (4, 5):
        tickets.finish(ticket)
    # 0, 1, 4 and 5 are due by batch 2: two places in this batch and two in the next one
    taken = tickets.take()
    assert taken is not None
    assert taken.fill == [4, 5]
    tickets.admit()
    tickets.step()
    for ticket in (6, 7):
        tickets.finish(ticket)
    assert tickets.take() is None, "0 and 1 would be late"
    tickets.finish(0)
    assert tickets.take() is None
    tickets.finish(1)
    taken = tickets.take()
    assert taken is not None
    assert taken.fill == [0, 1]


def test_slow_tickets_are_trained_on_as_often_as_quick_ones() -> None:
    """The sixteenth that is slow is in the batches as often as it was drawn, and the run is faster than in step."""
    times = {}
    for ahead, staleness in ((0, 0), (0, 1), (1, 4)):
        run = Run(Tickets(8, 60, ahead, staleness), random.Random(0), 0.0, 0.5)
        slow = random.Random(1)
        run.begin = lambda ticket, run=run, slow=slow: heapq.heappush(  # type: ignore[method-assign]
            run.under_way, (run.now + slow.lognormvariate(1.1, 0.85), ticket)
        )
        for _ in range(60):
            run.batch()
        assert sorted(ticket for fill, _ in run.batches for ticket in fill) == list(range(480))
        times[ahead, staleness] = run.now
    assert times[0, 1] < times[0, 0]
    assert times[0, 0] / times[1, 4] > 1.8


def test_groups_without_a_difference_do_not_fill_a_batch_while_some_are_spare() -> None:
    tickets = Tickets(size=2, batches=2, spare=3)
    for ticket in tickets.admit():
        tickets.finish(ticket, useful=False)
    assert tickets.take() is None
    assert tickets.admit() == [2, 3]
    tickets.finish(2, useful=False)
    tickets.finish(3)
    assert tickets.take() is None
    assert tickets.admit() == [4]
    tickets.finish(4, useful=False)
    taken = tickets.take()
    assert taken is not None
    assert (taken.fill, taken.idle) == ([3, 4], [0, 1, 2]), "the fourth one fills"


@pytest.mark.parametrize(("ahead", "staleness"), [(0, 0), (0, 1), (1, 2), (3, 9)])
def test_settings_that_can_be_kept(ahead: int, staleness: int) -> None:
    check(ahead, staleness)


@pytest.mark.parametrize(("ahead", "staleness"), [(1, 0), (1, 1), (2, 2), (5, 1)])
def test_settings_that_cannot_be_kept_are_refused(ahead: int, staleness: int) -> None:
    with pytest.raises(ValueError, match=rf"max_staleness: {staleness} .*set max_staleness to {ahead + 1} or more"):
        check(ahead, staleness)


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, agentrl.online.tickets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

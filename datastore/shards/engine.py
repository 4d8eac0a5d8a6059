"""Running shards: tries, slow shards that are taken over, and shards that are set aside. What runs them, a pool, only
starts shards and says how they ended."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from agentrl.datastore.shards.shard import Ending, Shard, ShardError

TRIES = 3
"""How often a shard is tried that ends its process, or that cannot read or write a file."""
SLOW, SLOW_S = 4.0, 10.0
"""A shard is slow that takes so many times as long as half of those that are done, and so many seconds at least. It is
started once more if nothing else is left to start, and what ends first counts."""
POLL_S = 0.5

Tell = Callable[[int, int, str], None]
"""Called with how many shards are done, of how many, and what else there is to say."""


class Pool(Protocol):
    """Workers. ``room``: how many shards may be started now."""

    @property
    def room(self) -> int: ...

    def start(self, shards: Sequence[Shard]) -> list[int]:
        """Start shards. Gives a number for each."""

    def ended(self, timeout_s: float) -> list[tuple[int, Ending]]:
        """What ended since the last call, by the numbers; waits for it if there is nothing yet."""

    def stop(self, number: int) -> None:
        """Stop a shard, of which another copy is done."""

    def close(self) -> None:
        """End all workers."""


def run(shards: Sequence[Shard], pool: Pool, tell: Tell) -> None:
    """Run shards until all are done. Raises ShardError that names shard, worker and remedy: at once if a shard raised
    what it would raise again, and in the end if it ended its process each time. What was done stays done."""
    waiting, running = list(range(len(shards)))[::-1], dict[int, tuple[int, float]]()
    done, failed, took, aside = set[int](), Counter[int](), list[float](), dict[int, Ending]()
    while len(done) + len(aside) < len(shards):
        starting = [waiting.pop() for _ in range(min(len(waiting), pool.room))]
        if not starting and not waiting and pool.room:
            starting = _slow(running, took)[: pool.room]
        numbers = pool.start([shards[shard] for shard in starting])
        running |= {number: (shard, time.monotonic()) for number, shard in zip(numbers, starting, strict=True)}
        for number, outcome in pool.ended(POLL_S):
            shard, began = running.pop(number)
            if shard in done or shard in aside:
                continue
            if outcome.problem is None:
                done.add(shard)
                took.append(time.monotonic() - began)
                for copy in [other for other, (same, _) in running.items() if same == shard]:
                    pool.stop(copy)
            elif not (outcome.died or outcome.again):
                raise ShardError(f"shard {shards[shard].name!r} on {outcome.worker}: {outcome.problem}")
            elif failed[shard] + 1 < TRIES:
                failed[shard] += 1
                waiting.append(shard)
            else:
                aside[shard] = outcome
            told = f"{sum(failed.values())} tried again" if failed else ""
            tell(len(done), len(shards), told)
    if aside:
        raise ShardError(_set_aside(shards, aside))


def _slow(running: dict[int, tuple[int, float]], took: Sequence[float]) -> list[int]:
    """The shards that run for too long, and of which there is one copy."""
    if not took:
        return []
    copies = Counter(shard for shard, _ in running.values())
    limit = max(SLOW_S, SLOW * statistics.median(took))
    return [shard for shard, began in running.values() if copies[shard] == 1 and time.monotonic() - began > limit]


def _set_aside(shards: Sequence[Shard], aside: dict[int, Ending]) -> str:
    number, outcome = next(iter(aside.items()))
    more = f", and {len(aside) - 1} more" if len(aside) > 1 else ""
    ended = "ended its process" if outcome.died else "failed"
    return (
        f"shard {shards[number].name!r}{more} {ended} {TRIES} times and was set aside, at last on {outcome.worker}: "
        f"{outcome.problem}; the other {len(shards) - len(aside)} shards are done and stay done. Look at the rows that "
        "it names, or give workers more memory, and run again"
    )

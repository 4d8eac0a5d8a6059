"""Running shards: tries, slow shards that are taken over, and shards that are set aside. What runs them, a pool, only
starts shards and says how they ended."""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.datastore.shards.shard import Ending, Shard, ShardError
from agentrl.schemas.shards import ShardsNow, ShardTry, State

TRIES = 3
"""How often a shard is tried that ends its process, or that cannot read or write a file."""
SLOW, SLOW_S = 4.0, 10.0
"""A shard is slow that takes so many times as long as half of those that are done, and so many seconds at least. It is
started once more if nothing else is left to start, and what ends first counts."""
POLL_S = 0.5
SHOWN = 20
"""How many shards are told of by name."""

Tell = Callable[[int, int, ShardsNow], None]
"""Called with how many shards are done, of how many, and what the others do."""


class Pool(Protocol):
    """Workers. ``room``: how many shards may be started now."""

    @property
    def room(self) -> int: ...

    @property
    def working(self) -> Mapping[int, str]:
        """The worker of each shard that one has begun with, by the numbers."""

    @property
    def notice(self) -> str:
        """Why nothing goes on, if that is so and the pool knows it; else empty."""

    def start(self, shards: Sequence[Shard]) -> list[int]:
        """Start shards. Gives a number for each."""

    def ended(self, timeout_s: float) -> list[tuple[int, Ending]]:
        """What ended since the last call, by the numbers; waits for it if there is nothing yet."""

    def stop(self, number: int) -> None:
        """Stop a shard, of which another copy is done."""

    def close(self) -> None:
        """End all workers."""


@dataclass
class _Try:
    """A shard that was started, by its number among the shards; ``began``: when a worker began with it."""

    shard: int
    began: float | None = None
    worker: str = ""

    @property
    def seconds(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began


def run(shards: Sequence[Shard], pool: Pool, tell: Tell, what: str = "") -> None:
    """Run shards until all are done; ``what`` says what they do. Raises ShardError that names shard, worker and remedy:
    at once if a shard raised what it would raise again, and in the end if it ended its process each time. What was done
    stays done."""
    waiting, running = list(range(len(shards)))[::-1], dict[int, _Try]()
    done, failed, took, aside = set[int](), Counter[int](), list[float](), dict[int, Ending]()
    while len(done) + len(aside) < len(shards):
        starting = [waiting.pop() for _ in range(min(len(waiting), pool.room))]
        if not starting and not waiting and pool.room:
            starting = _alone(running, _slow(running, took))[: pool.room]
        numbers = pool.start([shards[shard] for shard in starting])
        running |= {number: _Try(shard) for number, shard in zip(numbers, starting, strict=True)}
        for number, worker in pool.working.items():
            if number in running and running[number].began is None:
                running[number].began, running[number].worker = time.monotonic(), worker
        for number, outcome in pool.ended(POLL_S):
            trial = running.pop(number, None)
            if trial is None or trial.shard in done or trial.shard in aside:  # a copy
                continue
            shard = trial.shard
            for warning in outcome.warnings:  # all are of this line, so that what several shards say is said once
                warnings.warn(warning, stacklevel=1)
            if outcome.problem is None:
                done.add(shard)
                took.append(trial.seconds)
                for copy in [other for other, copied in running.items() if copied.shard == shard]:
                    pool.stop(copy)
                    del running[copy]
            elif not (outcome.died or outcome.again):
                raise ShardError(f"shard {shards[shard].name!r} on {outcome.worker}: {outcome.problem}")
            elif failed[shard] + 1 < TRIES:
                failed[shard] += 1
                waiting.append(shard)
            else:
                aside[shard] = outcome
        now = _now(shards, running, set(_slow(running, took)), aside)
        told = now.model_copy(update={"what": what, "again": failed.total(), "notice": pool.notice})
        tell(len(done), len(shards), told)
    if aside:
        raise ShardError(_set_aside(shards, aside))


def _slow(running: Mapping[int, _Try], took: Sequence[float]) -> list[int]:
    """Numbers of those that run for too long."""
    if not took:
        return []
    limit = max(SLOW_S, SLOW * statistics.median(took))
    return [number for number, trial in running.items() if trial.seconds > limit]


def _alone(running: Mapping[int, _Try], numbers: Sequence[int]) -> list[int]:
    """The shards of these tries, of which there is no copy yet."""
    copies = Counter(trial.shard for trial in running.values())
    return [running[number].shard for number in numbers if copies[running[number].shard] == 1]


def _now(
    shards: Sequence[Shard], running: Mapping[int, _Try], slow: Collection[int], aside: Mapping[int, Ending]
) -> ShardsNow:
    tries = [
        ShardTry(shard=shards[shard].name, state="set aside", worker=ending.worker, problem=ending.problem or "")
        for shard, ending in aside.items()
    ]
    for number, trial in sorted(running.items(), key=lambda item: -item[1].seconds):
        state: State = "waiting" if trial.began is None else "slow" if number in slow else "running"
        seconds = None if trial.began is None else round(trial.seconds, 1)
        tries.append(ShardTry(shard=shards[trial.shard].name, state=state, worker=trial.worker, seconds=seconds))
    counts = Counter(each.state for each in tries)
    return ShardsNow(what="", counts=dict(counts), tries=tries[:SHOWN])


def _set_aside(shards: Sequence[Shard], aside: dict[int, Ending]) -> str:
    number, outcome = next(iter(aside.items()))
    more = f", and {len(aside) - 1} more" if len(aside) > 1 else ""
    ended = "ended its process" if outcome.died else "failed"
    remedy = (
        "Look at the rows that it names, or give workers more memory, and run again" if outcome.died else "Run again"
    )
    return (
        f"shard {shards[number].name!r}{more} {ended} {TRIES} times and was set aside, at last on {outcome.worker}: "
        f"{outcome.problem}; the other {len(shards) - len(aside)} shards are done and stay done. {remedy}"
    )

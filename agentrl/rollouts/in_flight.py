"""Episodes under way. More may be added at any time, and groups come out when they are whole."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from agentrl.engines.base import Sampling
from agentrl.environments.hosts import Host
from agentrl.rewards.component import Reward, with_rewards
from agentrl.rollouts.attempts import Attempt
from agentrl.rollouts.segments import shared, whole
from agentrl.schemas.trajectory import Trajectory

OnRows = Callable[[Sequence[Trajectory]], None]
"""Told of the rows of one episode: one, or its segments."""


@dataclass(frozen=True)
class NumberedAttempt:
    """An episode to play, whose first row is called ``name``. ``number`` orders episodes, ``seed`` is that of draws,
    and ``sampling`` takes the place of the runner's. The smallest ``deadline`` is served first."""

    attempt: Attempt
    name: str
    number: int
    seed: int
    sampling: Sampling | None = None
    deadline: int = 0


class Play(Protocol):
    async def __call__(self, job: NumberedAttempt) -> list[Trajectory]: ...


@dataclass
class _Group:
    """Jobs of a group by their numbers, those of them that are not made, and the rows of the others: of each job those
    of one episode."""

    jobs: dict[int, NumberedAttempt]
    missing: set[int]
    rows: dict[int, list[Trajectory]] = field(default_factory=dict)


class Flow:
    """Plays at most ``in_flight`` episodes at once, in the order in which they were added.

    ``rewards`` are added when all rows of a group with the same sampling are there, since some of them compare these.
    ``made`` is told, in a thread, of the rows of each episode before that; ``told`` after it. What goes wrong is raised
    by :meth:`groups`.
    """

    def __init__(
        self,
        play: Play,
        in_flight: int,
        rewards: Sequence[Reward],
        counts: Counter[str],
        host: Host,
        made: OnRows | None = None,
        on_told: OnRows | None = None,
    ) -> None:
        self._play, self._in_flight, self._rewards, self._counts, self._host = play, in_flight, rewards, counts, host
        self._on_made, self._on_told = made, on_told
        self._pending: deque[NumberedAttempt] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: dict[str, _Group] = {}
        self._whole: list[list[Trajectory]] = []
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    async def add(
        self, jobs: Sequence[NumberedAttempt], made: Mapping[str, list[Trajectory]] = MappingProxyType({})
    ) -> None:
        """Begin episodes. ``jobs`` are whole groups. Those of which ``made`` has the rows, by the name of the job and
        without rewards, are not played again."""
        for job in jobs:
            group = self._groups.setdefault(job.attempt.group_id, _Group({}, set()))
            group.jobs[job.number] = job
            group.missing.add(job.number)
        self._pending.extend(job for job in jobs if job.name not in made)
        for _ in range(min(len(self._pending), self._in_flight - len(self._tasks))):
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        for job in jobs:
            if job.name in made:
                await self._arrived(job, made[job.name])

    async def groups(self, all_of_them: bool = False) -> list[list[Trajectory]]:
        """The rows of groups that are whole and were not given yet, each in the order of its jobs, groups in the order
        in which they became whole. Waits for the first one, or for ``all_of_them``; none if nothing is under way."""
        while self._groups and (all_of_them or not self._whole):
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        groups, self._whole = self._whole, []
        return groups

    async def close(self) -> None:
        """Cancel what is under way."""
        self._pending.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._host.close()
        for reward in self._rewards:
            await reward.close()

    async def _work(self) -> None:
        while self._pending:
            job = self._pending.popleft()
            rows = await self._play(job)
            if self._on_made is not None:
                await asyncio.to_thread(self._on_made, rows)
            await self._arrived(job, rows)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._changed.set()

    async def _arrived(self, job: NumberedAttempt, rows: list[Trajectory]) -> None:
        group = self._groups[job.attempt.group_id]
        group.rows[job.number] = rows
        alike = [number for number, other_job in group.jobs.items() if other_job.sampling is job.sampling]
        finished = [job.number]
        if self._rewards:
            if any(number not in group.rows for number in alike):
                return
            finished = alike
            await self._reward(group, alike)
        for number in finished:
            group.missing.discard(number)
            if self._on_told is not None:
                self._on_told(group.rows[number])
        if not group.missing:
            del self._groups[job.attempt.group_id]
            self._whole.append([row for number in group.jobs for row in group.rows[number]])
            self._changed.set()

    async def _reward(self, group: _Group, numbers: Sequence[int]) -> None:
        episodes = [whole(group.rows[number]) for number in numbers]
        scored = await with_rewards(episodes, group.jobs[numbers[0]].attempt.task, self._rewards)
        lost = sum(
            row.reward is None and before.reward is not None for row, before in zip(scored, episodes, strict=True)
        )
        if lost:
            self._counts["ungraded"] += lost
        for number, row in zip(numbers, scored, strict=True):
            group.rows[number] = shared(group.rows[number], row)

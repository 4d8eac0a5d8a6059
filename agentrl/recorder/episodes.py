"""Recorded episodes: open ones, closed ones whose rows are to be stored, and those that a server before this one left.

A turn is in its episode's file before its answer ends, and rows reach the store after the episode is closed: a process
that is killed loses neither, and the next one goes on with both.
"""

import asyncio
import secrets
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from agentrl.recorder.episode import About, PostedReward, RecordedEpisode
from agentrl.recorder.tree import SampledTurn, Tree
from agentrl.schemas.trajectory import Trajectory

REMEMBERED = 4096
"""Closed episodes that are known, so that a client is told what became of its own."""

KEY = "ep-"
"""Keys of episodes begin with this."""

_AT_ONCE = 512  # episodes of one append


def new_key() -> str:
    return KEY + secrets.token_urlsafe(24)


class RowStore(Protocol):
    """Where rows go. Its methods are called in a thread."""

    def stored(self, recording: str) -> set[str]:
        """Ids of the rows of a recording that are there."""
        ...

    def keep(self, recording: str, rows: list[Trajectory]) -> None:
        """Append rows."""
        ...


@dataclass
class Episodes:
    """The episodes of one server. ``folder`` has their files, in one folder for each server that ever ran. ``policy``
    and ``tokenizer`` (its fingerprint) are columns of rows."""

    folder: Path
    store: RowStore
    policy: str
    tokenizer: str

    def __post_init__(self) -> None:
        self.recording = secrets.token_hex(4)
        self.opened: dict[str, RecordedEpisode] = {}
        self.closed: OrderedDict[str, RecordedEpisode] = OrderedDict()
        self.by_key: dict[str, RecordedEpisode] = {}
        self.unnamed: dict[bytes, list[SampledTurn]] = {}
        """Turns of conversations that nobody opened an episode for, by the digest of the conversation."""
        self.of_turn: dict[SampledTurn, RecordedEpisode] = {}
        self._finished: list[RecordedEpisode] = []
        self._part: list[RecordedEpisode] = []
        self._locks: list[FileLock] = []
        self._numbers = 0
        self._flushing = asyncio.Lock()

    async def start(self) -> list[str]:
        """Take over what servers that ended have left. Returns what is to be said about it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        said = []
        with FileLock(self.folder / "starting.lock"):
            for left in sorted(path for path in self.folder.iterdir() if path.is_dir()):
                if self._locked(left):
                    said += await self._taken_over(left)
            own = self.folder / self.recording
            own.mkdir()
            self._locked(own)
        return said

    def _locked(self, folder: Path) -> bool:
        lock = FileLock(folder / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return False
        self._locks.append(lock)
        return True

    async def _taken_over(self, folder: Path) -> list[str]:
        stored = await asyncio.to_thread(self.store.stored, folder.name)
        found = [one for path in sorted(folder.glob("*.jsonl")) if (one := RecordedEpisode.read(path)) is not None]
        opened = others = 0
        for episode in found:
            if episode.name in stored:
                episode.path.unlink()
            elif episode.closed:
                self._finished.append(episode)
            elif episode.tokenizer != self.tokenizer:
                others += 1
                self.close(episode, None, "its model is not served any more")
            else:
                opened += 1
                self._register(episode)
                for turn in episode.tree.turns:
                    self.add(episode, turn)
        said = {"go on": opened, "of another tokenizer are stored unscored": others}
        return [f"recording {folder.name}: {number} episodes {what}" for what, number in said.items() if number]

    async def stop(self) -> int:
        """Store what is finished. Returns the number of episodes that stay in their files."""
        await self.flush()
        for episode in self.opened.values():
            _end_sessions(episode)
        for lock in self._locks:
            folder = Path(lock.lock_file).parent
            empty = not any(folder.glob("*.jsonl"))
            if empty:
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
            if empty:
                folder.rmdir()
        return len(self.opened) + len(self._finished) + len(self._part)

    def open(self, about: About, key: str | None = None) -> RecordedEpisode:
        """A new episode, whose file exists from here on."""
        folder = self.folder / self.recording
        episode = RecordedEpisode(self.recording, self._numbers, about, self.policy, self.tokenizer, folder, key)
        self._numbers += 1
        episode.begin()
        self._register(episode)
        return episode

    def _register(self, episode: RecordedEpisode) -> None:
        self.opened[episode.name] = episode
        if episode.key:
            self.by_key[episode.key] = episode

    def add(self, episode: RecordedEpisode, turn: SampledTurn) -> None:
        """Make a turn of an episode's tree known to requests."""
        self.of_turn[turn] = episode
        if episode.key is None:
            self.unnamed.setdefault(turn.digest, []).append(turn)

    def close(self, episode: RecordedEpisode, outcome: PostedReward | None, why: str) -> list[str]:
        """No further turn is sampled. Returns the ids of the rows, which are stored by :meth:`flush`."""
        posted = outcome.model_dump() if outcome else None
        episode.write({"closed": why, "outcome": posted, "counts": dict(episode.counts)})
        episode.closed, episode.outcome, episode.why = True, outcome, why
        _end_sessions(episode)
        self.opened.pop(episode.name, None)
        for turn in episode.tree.turns:
            self.of_turn.pop(turn, None)
            if episode.key is None and turn in (same := self.unnamed.get(turn.digest, [])):
                same.remove(turn)
                if not same:
                    del self.unnamed[turn.digest]
        self.closed[episode.name] = episode
        if len(self.closed) > REMEMBERED:
            _, oldest = self.closed.popitem(last=False)
            self.by_key.pop(oldest.key or "", None)
        self._finished.append(episode)
        return [row.trajectory_id for row in episode.rows()]

    def close_idle(self, idle_s: float, busy: set[RecordedEpisode]) -> None:
        """Close episodes without a request for so long. Raises OSError if a disk fails."""
        now = time.time()
        for episode in list(self.opened.values()):
            if now - episode.last > idle_s and episode not in busy:
                self.close(episode, None, f"no request for {idle_s:g} s")

    def is_stored(self, name: str) -> bool:
        """Whether the rows of a closed episode are in the store."""
        return all(one.name != name for one in (*self._finished, *self._part))

    async def flush(self) -> None:
        """Store the rows of closed episodes. If that fails, they stay in their files, and it is tried again."""
        async with self._flushing:
            while self._part or self._finished:
                if not self._part:  # after a failure it is the same one, since it may have been stored
                    recording = self._finished[0].recording
                    self._part = [one for one in self._finished[:_AT_ONCE] if one.recording == recording]
                    self._finished = [one for one in self._finished if one not in self._part]
                try:
                    await asyncio.to_thread(self._store, self._part)
                except Exception as error:  # a store that is full, or cannot be reached, may recover
                    warnings.warn(f"{len(self._part)} recorded episodes cannot be stored yet: {error}", stacklevel=1)
                    return
                self._part = []

    def _store(self, episodes: Sequence[RecordedEpisode]) -> None:
        rows = [row for one in episodes for row in one.rows()]
        if rows:
            self.store.keep(episodes[0].recording, rows)
        for one in episodes:
            one.path.unlink(missing_ok=True)
            one.tree = Tree()  # of a closed episode only its name and its end are needed


def _end_sessions(episode: RecordedEpisode) -> None:
    for turn in episode.tree.turns:
        if turn.session is not None:
            turn.session.end()
            turn.session = None

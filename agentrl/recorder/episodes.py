"""Recorded episodes: open ones, closed ones whose rows are to be stored, and those that a server before this one left.

A turn is in its episode's file before its answer ends, and rows reach the store after the episode is closed: a process
that is killed loses neither, and the next one goes on with both. An episode whose file cannot be read, or whose rows
cannot be stored, is set aside alone; see :mod:`agentrl.recorder.aside`.
"""

import asyncio
import random
import secrets
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from agentrl.recorder.aside import SUFFIX, RowStore, UnstorableError, listed, set_aside
from agentrl.recorder.episode import About, DamagedRecordingError, PostedReward, RecordedEpisode
from agentrl.recorder.feedback import Place, PostedFeedback, of_rows, places
from agentrl.recorder.tree import SampledTurn, Tree
from agentrl.recorder.wire import ApiError
from agentrl.schemas.trajectory import Trajectory

REMEMBERED = 4096
"""Closed episodes that are known, so that a client is told what became of its own."""

KEY = "ep-"
"""Keys of episodes begin with this."""

_AT_ONCE = 512  # episodes of one append
_FAILURES = 8  # episodes that a store refuses one by one before it counts as failing


def new_key() -> str:
    return KEY + secrets.token_urlsafe(24)


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
        self.aside: dict[str, str] = {}
        """Why episodes of this server were set aside, by their names."""
        self._finished: list[RecordedEpisode] = []
        self._in_doubt = False
        """An append failed, and may have been done all the same."""
        self._locks: list[FileLock] = []
        self._numbers = 0
        self._flushing = asyncio.Lock()

    async def start(self) -> list[str]:
        """Take over what servers that ended have left. Returns what is to be said about it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        notes = []
        with FileLock(self.folder / "starting.lock"):
            for left in sorted(path for path in self.folder.iterdir() if path.is_dir()):
                if self._locked(left):
                    notes += await self._taken_over(left)
            own = self.folder / self.recording
            own.mkdir()
            self._locked(own)
        return notes

    def _locked(self, folder: Path) -> bool:
        lock = FileLock(folder / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return False
        self._locks.append(lock)
        return True

    async def _taken_over(self, folder: Path) -> list[str]:
        paths = sorted(folder.glob("*.jsonl"))
        stored = await asyncio.to_thread(self.store.stored, folder.name) if paths else set()
        opened = others = damaged = 0
        for path in paths:
            try:
                episode = RecordedEpisode.read(path)
            except (DamagedRecordingError, OSError) as error:
                damaged += self._set_aside(path, str(error))
                continue
            if episode is None:
                continue
            if episode.name in stored:
                episode.path.unlink()
            elif episode.closed:
                self._finished.append(episode)
            elif episode.tokenizer != self.tokenizer:
                others += 1
                self.close(episode, None, "its model is not served any more")
            else:
                opened += 1
                self.register(episode)
                for turn in episode.tree.turns:
                    self.add(episode, turn)
        before = sum(1 for _ in listed(folder.parent) if _.recording == folder.name) - damaged
        counts = {
            "go on": opened,
            "of another tokenizer are stored unscored": others,
            "are set aside, since their files cannot be read; see `agentrl recordings list`": damaged,
            "were set aside before; see `agentrl recordings list`": before,
        }
        return [f"recording {folder.name}: {number} episodes {what}" for what, number in counts.items() if number]

    async def stop(self) -> int:
        """Store what is finished. Returns the number of episodes that stay in their files."""
        await self.flush()
        for episode in self.opened.values():
            _end_sessions(episode)
        for lock in self._locks:
            folder = Path(lock.lock_file).parent
            empty = not any(folder.glob("*.jsonl")) and not any(folder.glob(f"*{SUFFIX}"))
            if empty:
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
            if empty:
                folder.rmdir()
        return len(self.opened) + len(self._finished)

    def open(self, about: About, key: str | None = None) -> RecordedEpisode:
        """A new episode, whose file exists from here on."""
        folder = self.folder / self.recording
        episode = RecordedEpisode(self.recording, self._numbers, about, self.policy, self.tokenizer, folder, key)
        self._numbers += 1
        episode.begin()
        self.register(episode)
        return episode

    def register(self, episode: RecordedEpisode) -> None:
        """Make an episode known to requests."""
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
        rows, turns = episode.row_ids(), places(episode.tree.turns)
        episode.write({"closed": why, "outcome": posted, "counts": dict(episode.counts)})
        episode.closed, episode.outcome, episode.why = True, outcome, why
        episode.placed = rows, turns
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
        return rows

    async def feedback(self, name: str, posted: PostedFeedback) -> int:
        """Keep what a user says of an episode, open or closed; it is on the disk, or in the store, when this returns.
        Returns the number of things that are said. Raises ApiError if there is no such episode or turn, and what the
        store raises if it fails."""
        episode = self.opened.get(name) or self.closed.get(name)
        rows, turns = await self._stored_rows(name) if episode is None else episode.placed
        if episode is not None and not episode.closed:
            rows, turns = episode.row_ids(), places(episode.tree.turns)
        if not rows:
            raise ApiError(409, f"episode {name} has no turn of which something could be said", "no_turn")
        if posted.turn is not None and posted.turn not in turns:
            known = ", ".join(map(str, sorted(turns))) or "not known any more; leave turn out"
            raise ApiError(404, f"episode {name} has no turn {posted.turn}; its turns are {known}", "turn_not_found")
        annotations = list(of_rows([posted], rows, turns))
        if episode is not None and not episode.closed:
            episode.say(posted)
        else:
            await asyncio.to_thread(self.store.annotate, annotations)
        return len(annotations)

    async def _stored_rows(self, name: str) -> tuple[list[str], dict[int, Place]]:
        """The rows of an episode that an earlier server stored. Which turns they have is not known any more."""
        recording = name.split("-")[1] if name.count("-") == 2 else ""
        ids = await asyncio.to_thread(self.store.stored, recording) if recording else set()
        if name not in ids:
            raise ApiError(404, f"there is no episode {name!r}", "episode_not_found")
        return [name], {}

    def close_idle(self, idle_s: float, busy: set[RecordedEpisode]) -> None:
        """Close episodes without a request for so long. Raises OSError if a disk fails."""
        now = time.time()
        for episode in list(self.opened.values()):
            if now - episode.last > idle_s and episode not in busy:
                self.close(episode, None, f"no request for {idle_s:g} s")

    def state(self, name: str) -> dict[str, str]:
        """What became of a closed episode."""
        if (reason := self.aside.get(name)) is not None:
            return {"state": "set_aside", "reason": reason}
        return {"state": "closed" if any(episode.name == name for episode in self._finished) else "stored"}

    async def flush(self) -> None:
        """Store the rows of closed episodes. If that fails, they stay in their files, and it is tried again; those that
        will never be stored are set aside."""
        async with self._flushing:
            while self._finished:
                recording = self._finished[0].recording
                part = [episode for episode in self._finished if episode.recording == recording][:_AT_ONCE]
                ended = await asyncio.to_thread(self._stored_of, part)
                self._finished = [episode for episode in self._finished if episode not in ended]
                if len(ended) < len(part):
                    return

    def _stored_of(self, part: Sequence[RecordedEpisode]) -> set[RecordedEpisode]:
        """Store episodes of one recording. Returns those that are stored, or set aside; others are to be tried
        again."""
        ended: set[RecordedEpisode] = set()
        try:
            if self._in_doubt:  # what is there already is not appended again
                there = self.store.stored(part[0].recording)
                ended.update(episode for episode in part if episode.name in there)
            self._in_doubt = True
            self._append([episode for episode in part if episode not in ended], ended)
            self._in_doubt = False
        except Exception as error:  # a store that is full, or cannot be reached, may recover
            warnings.warn(f"{len(part) - len(ended)} recorded episodes cannot be stored yet: {error}", stacklevel=1)
        for episode in ended:
            episode.path.unlink(missing_ok=True)
            episode.tree = Tree()  # of a closed episode only its name and its end are needed
        return ended

    def _append(self, episodes: Sequence[RecordedEpisode], ended: set[RecordedEpisode]) -> None:
        """Append the rows of episodes, together, or each alone if they are refused together. Those that are stored, or
        set aside, are added to ``ended``. Raises what the store raises if it takes none."""
        rows: dict[RecordedEpisode, list[Trajectory]] = {}
        for episode in episodes:
            try:
                rows[episode] = episode.rows()
            except Exception as error:  # a bug of ours is no reason to keep the others waiting
                self._end_aside(episode, f"its rows cannot be made: {type(error).__name__}: {error}", ended)
        try:
            if annotations := [each for episode in rows for each in episode.annotations()]:
                self.store.annotate(annotations)  # first: an episode whose rows are there is not looked at again
            if together := [row for own in rows.values() for row in own]:
                self.store.keep(episodes[0].recording, together)
            ended.update(rows)
        except Exception as error:
            if _of_the_disk(error):
                raise
            self._append_each(rows, self.store.stored(episodes[0].recording), ended)

    def _append_each(
        self, rows: dict[RecordedEpisode, list[Trajectory]], there: set[str], ended: set[RecordedEpisode]
    ) -> None:
        """Append episodes one by one, in any order. One that is refused while others are taken is at fault itself."""
        failed: dict[RecordedEpisode, Exception] = {}
        taken = 0
        for episode in random.sample(list(rows), len(rows)):
            try:
                if rows[episode] and episode.name not in there:
                    self.store.keep(episode.recording, rows[episode])
                    taken += 1
                ended.add(episode)
            except UnstorableError as error:
                self._end_aside(episode, str(error), ended)
            except Exception as error:
                failed[episode] = error
                if _of_the_disk(error) or (len(failed) == _FAILURES and not taken):
                    raise
        for episode, why in failed.items():
            if not taken:
                raise why
            self._end_aside(episode, f"the store takes others, and not this one: {why}", ended)

    def _end_aside(self, episode: RecordedEpisode, reason: str, ended: set[RecordedEpisode]) -> None:
        if self._set_aside(episode.path, reason):
            ended.add(episode)

    def _set_aside(self, path: Path, reason: str) -> bool:
        """Set an episode aside, and say so. Returns whether the disk let it."""
        try:
            aside = set_aside(path, reason)
        except OSError as error:
            warnings.warn(f"{path} cannot be set aside: {error}; {reason}", stacklevel=1)
            return False
        self.aside[aside.name] = aside.reason
        warnings.warn(
            f"episode {aside.name} is set aside: {reason}; `agentrl recordings show {aside.name}`", stacklevel=1
        )
        return True


def _of_the_disk(error: Exception) -> bool:
    """Whether an append failed for reasons that pass, such as a full disk or a network."""
    return isinstance(error, OSError) or isinstance(error.__cause__, OSError)


def _end_sessions(episode: RecordedEpisode) -> None:
    for turn in episode.tree.turns:
        if turn.session is not None:
            turn.session.end()
            turn.session = None

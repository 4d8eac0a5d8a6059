"""Recorded episodes that are set aside: their files cannot be read, or their rows cannot be stored. Each stays where it
was, as ``<number>.aside`` with its reason in ``<number>.why``, until it is released, or removed by hand."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.recorder.episode import STAGE, DamagedRecordingError, RecordedEpisode
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.trajectory import Trajectory, trajectory_id

SUFFIX = ".aside"
WHY = ".why"


class UnstorableError(ValueError):
    """Rows that no store takes as they are. Its text names row and field."""


class RowStore(Protocol):
    """Where rows go. Its methods are called in a thread."""

    def stored(self, recording: str) -> set[str]:
        """Ids of the rows of a recording that are there."""
        ...

    def keep(self, recording: str, rows: list[Trajectory]) -> None:
        """Append rows, all or none. Raises UnstorableError if it will never take them."""
        ...

    def annotate(self, annotations: list[Annotation]) -> None:
        """Append what users say of rows, durably. What is there already is not added again."""
        ...


@dataclass(frozen=True)
class SetAside:
    """An episode that was set aside, and why."""

    path: Path
    reason: str

    @property
    def recording(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        return trajectory_id(STAGE, self.recording, int(self.path.stem))


def set_aside(path: Path, reason: str) -> SetAside:
    """Take the file of an episode out of the way. Raises OSError if the disk fails."""
    path.with_suffix(WHY).write_text(reason, encoding="utf-8", errors="backslashreplace")
    aside = path.with_suffix(SUFFIX)
    os.replace(path, aside)
    return SetAside(aside, reason)


def listed(folder: Path) -> Iterator[SetAside]:
    """All episodes that are set aside below a folder of recordings."""
    for path in sorted(folder.glob(f"*/*{SUFFIX}")):
        reason = ""
        with contextlib.suppress(OSError):
            reason = path.with_suffix(WHY).read_text(encoding="utf-8", errors="replace")
        if path.stem.isdigit():
            yield SetAside(path, reason)


def whole(aside: SetAside) -> tuple[RecordedEpisode, int]:
    """The episode up to the first line that cannot be read, and the number of lines from there on; those are lost.

    Raises DamagedRecordingError if nothing of it can be read.
    """
    episode, damage = RecordedEpisode.before_damage(aside.path, aside.path.read_bytes())
    if episode is None:
        raise DamagedRecordingError(str(damage or "the file is empty"))
    return episode, damage.lines - damage.line + 1 if damage else 0


def release(aside: SetAside, store: RowStore) -> tuple[list[str], int]:
    """Store the rows of an episode after all, unscored if it was never closed. Returns their ids, and the number of
    lines that were lost, which the tag ``lost_lines`` counts too.

    Raises DamagedRecordingError if nothing of it can be read, and UnstorableError if its rows cannot be stored; then
    all stays as it is.
    """
    episode, lost = whole(aside)
    if lost:
        episode.counts["lost_lines"] = lost
    if not episode.closed:
        episode.why = "released"
    rows = episode.rows()
    if annotations := episode.annotations():
        store.annotate(annotations)
    if rows and episode.name not in store.stored(aside.recording):
        store.keep(aside.recording, rows)
    aside.path.unlink()
    aside.path.with_suffix(WHY).unlink(missing_ok=True)
    return [row.trajectory_id for row in rows], lost


def readable(aside: SetAside) -> dict[str, object]:
    """What can be read of an episode that is set aside, for people."""
    answer: dict[str, object] = {"id": aside.name, "reason": aside.reason, "file": str(aside.path)}
    try:
        episode, lost = whole(aside)
    except DamagedRecordingError as error:
        return {**answer, "readable": str(error)}
    outcome = json.loads(episode.outcome.model_dump_json()) if episode.outcome else None
    texts = [
        {"role": message.role.value, "content": message.content, "calls": [call.name for call in message.tool_calls]}
        for turn in episode.tree.turns
        for message in (*turn.heard, turn.message)
    ]
    about = episode.about.model_dump()
    return {
        **answer,
        "about": about,
        "outcome": outcome,
        "closed": episode.closed,
        "lost_lines": lost,
        "messages": texts,
    }

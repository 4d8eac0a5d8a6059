"""One recorded episode: its conversations, what it is about, what became of it, and its file on disk."""

import errno
import json
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentrl.engines.base import Turn
from agentrl.recorder.feedback import Place, PostedFeedback, of_rows, places
from agentrl.recorder.lines import Line, lines
from agentrl.recorder.tree import SampledTurn, Tree, received
from agentrl.recorder.wire import MOST
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.json_text import shown, writer
from agentrl.schemas.trajectory import (
    NOT_TRAINED,
    Message,
    RewardComponent,
    Role,
    Span,
    Termination,
    Trajectory,
    seconds_of_messages,
    trajectory_id,
)

STAGE = "recorded"
"""``stage`` and ``source`` of recorded rows, and the beginning of their ids."""

_LINE = writer(ensure_ascii=False)

UNSCORED = "unscored"
"""Tag of rows whose episode was closed without a reward."""

MOST_NAMES = 256
LONGEST_NAME = 1000
"""Characters of texts that people filter by. The log of the store repeats the least and the greatest of each file."""
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Word = Annotated[str, Field(max_length=LONGEST_NAME)]


class About(BaseModel):
    """What an episode is about, in the columns of its rows. ``task_id`` None is a digest of how the episode begins, so
    that episodes of one prompt are of one task. ``group_id`` None groups the rows of a task that one server recorded
    under one version of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task_id: Name | None = None
    group_id: Name | None = None
    sample_index: int = Field(0, ge=0, le=MOST)
    env: Name = "recorded"
    split: Word = "train"
    level: int = Field(0, ge=0, le=MOST)
    prompt: str | None = None
    tags: list[Word] = Field([], max_length=MOST_NAMES)


class PostedReward(BaseModel):
    """What became of an episode. ``success`` None is whether the reward is above 0. ``components`` explain the
    reward."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reward: float
    success: bool | None = None
    components: dict[Word, float] = Field({}, max_length=MOST_NAMES)

    @field_validator("reward", "components")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        if not all(map(math.isfinite, value.values() if isinstance(value, dict) else [value])):
            raise ValueError("must be a finite number")
        return value


class DamagedRecordingError(ValueError):
    """The file of an episode cannot be read."""


class Damage(NamedTuple):
    """The first ``line`` of so many ``lines`` that cannot be read, counted from 1."""

    line: int
    lines: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line} of {self.lines} cannot be read: {self.reason}"


@dataclass(eq=False)
class RecordedEpisode:
    """``name`` is its id. ``key`` is the client's, None if nobody opened the episode. ``turns`` counts those that were
    asked for. ``closed`` says that no further turn is sampled; without an ``outcome`` it is unscored, and ``why`` says
    how it came to that. ``folder`` has the file; without one there is no file."""

    recording: str
    number: int
    about: About
    policy: str
    tokenizer: str
    folder: Path | None
    key: str | None = None
    created: float = field(default_factory=time.time)
    last: float = field(default_factory=time.time)
    turns: int = 0
    tree: Tree = field(default_factory=Tree)
    counts: Counter[str] = field(default_factory=Counter)
    closed: bool = False
    why: str = ""
    outcome: PostedReward | None = None
    feedback: list[PostedFeedback] = field(default_factory=list)
    placed: tuple[list[str], dict[int, Place]] = field(default_factory=lambda: ([], {}))
    """Ids of the rows, and where each turn is in them; known from the end of the episode on."""

    @cached_property
    def name(self) -> str:
        return trajectory_id(STAGE, self.recording, self.number)

    # -- the file: a line for each thing that happened

    @cached_property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.number:06d}.jsonl"

    def begin(self) -> None:
        head = {
            "recording": self.recording,
            "number": self.number,
            "about": self.about.model_dump(),
            "policy": self.policy,
            "tokenizer": self.tokenizer,
            "key": self.key,
            "created": self.created,
        }
        self.write({"episode": head})

    def write(self, line: dict[str, Any], durable: bool = False) -> None:
        """Append a line. It outlives the process from here on, and if it is ``durable`` the machine."""
        if self.folder is None:
            return
        data = _LINE(line).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if (written := os.write(file, data)) < len(data):
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            if durable:
                os.fsync(file)
                _sync_name(self.path)
        finally:
            os.close(file)

    @classmethod
    def read(cls, path: Path) -> "RecordedEpisode | None":
        """The episode as its file has it; None if not even its first line was written. A last line without its end is
        cut off: it was being written when the server ended. Raises DamagedRecordingError if a line cannot be read."""
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        episode, damage = cls.before_damage(path, whole)
        if damage:
            raise DamagedRecordingError(str(damage))
        return episode

    @classmethod
    def before_damage(cls, path: Path, data: bytes) -> "tuple[RecordedEpisode | None, Damage | None]":
        """The episode up to the first line that cannot be read, None without a first line, and that line."""
        lines = data.splitlines()
        episode: RecordedEpisode | None = None
        by_number: dict[int, SampledTurn] = {}
        for number, line in enumerate(lines):
            try:
                happened = json.loads(line.decode())
                if episode is None:
                    head = happened["episode"]
                    episode = cls(folder=path.parent, **{**head, "about": About(**head["about"])})
                    if episode.path.stem != path.stem:
                        raise ValueError(f"it is episode {episode.number}, in the file of another")
                else:
                    episode._replay(happened, by_number)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                return episode if number else None, Damage(number + 1, len(lines), _reason(error))
            if episode.closed:
                break  # a turn that was under way then was never answered
        if episode is not None:
            episode.last = path.stat().st_mtime
        return episode, None

    def _replay(self, line: dict[str, Any], by_number: dict[int, SampledTurn]) -> None:
        """Take over what a line says. ``by_number`` has the turns of earlier lines."""
        if "turn" in line:
            turn = _turn_of(line["turn"], by_number)
            counts = Counter(line["counts"])
            by_number[turn.number] = turn
            self.tree.add(turn)
            self.turns, self.counts = max(self.turns, turn.number + 1), counts
        elif "delivered" in line:
            by_number[line["delivered"]].delivered = line["is"]
        elif "feedback" in line:
            self.feedback.append(PostedFeedback(**line["feedback"]))
        elif "closed" in line:
            counts, outcome = Counter(line["counts"]), line["outcome"]
            self.outcome = PostedReward(**outcome) if outcome else None
            self.closed, self.why, self.counts = True, line["closed"], counts

    def say(self, posted: PostedFeedback) -> None:
        """Keep what a user says. It is on the disk from here on."""
        if any(known.id == posted.id for known in self.feedback):
            return
        self.write({"feedback": posted.model_dump(mode="json")}, durable=True)
        self.feedback.append(posted)

    def annotations(self) -> list[Annotation]:
        """What users said, about the rows of :meth:`rows`."""
        ids = self.row_ids() if self.feedback else []
        return list(of_rows(self.feedback, ids, places(self.tree.turns))) if ids else []

    def sampled(self, turn: SampledTurn) -> None:
        """Write a turn and the counts so far."""
        if self.folder is None:
            return
        self.write({"turn": _line_of(turn), "counts": dict(self.counts)})

    # -- rows

    def row_ids(self) -> list[str]:
        """The ids of :meth:`rows`."""
        return [self._row_id(number) for number, _ in enumerate(lines(self.tree.turns))]

    def _row_id(self, number: int) -> str:
        return f"{self.name}-{number}" if number else self.name

    def rows(self) -> list[Trajectory]:
        """A row for each line of the tree, each sampled token in exactly one of them."""
        counts = Counter(self.counts)
        counts["undelivered"] = len(self.tree.turns) - len(received(self.tree.turns))
        every = list(lines(self.tree.turns))
        begins = next((line.turns[0] for line in every if line.agent == "main"), None)
        task_id = self.about.task_id or (f"{self.about.env}-{begins.beginning[:12]}" if begins else self.about.env)
        rows: list[Trajectory] = []
        for line in every:
            rows.append(self._row(line, rows, task_id, counts))
        return rows

    def _row(self, line: Line, earlier: list[Trajectory], task_id: str, counts: Counter[str]) -> Trajectory:
        turns = line.turns
        free = [turn for turn in line.own if not turn.constrained]
        sampling = (free or line.own)[0].sampling
        session, fork_at = line.session()
        messages = session.messages
        first, last, outcome = turns[0], turns[-1], self.outcome if line.trained else None
        sampled = len(turns)
        written = sum(message.role is Role.ASSISTANT for message in messages) - sampled
        counted = counts + Counter(written_turns=written)
        counted["sampling_changed"] = sum(turn.sampling != sampling for turn in free)
        counted["constrained"] = len(line.own) - len(free)
        version = next((span.version for turn in free or line.own for span in turn.turn.spans), 0)
        components = outcome.components if outcome else {}
        if outcome and not components:
            components = {"reward": outcome.reward}
        prompt = next((message.content for message in first.heard if message.role is Role.USER), "")
        scored = outcome is not None
        return Trajectory(
            trajectory_id=self._row_id(len(earlier)),
            episode_id=self.name,
            segment=len(earlier),
            agent=line.agent,
            task_id=task_id,
            group_id=self.about.group_id or f"{STAGE}-{self.recording}-{version}-{task_id}",
            sample_index=self.about.sample_index,
            parent_id=earlier[line.parent].trajectory_id if line.parent is not None else None,
            fork_at=fork_at,
            source=STAGE,
            env=self.about.env,
            split=self.about.split,
            level=self.about.level,
            prompt=self.about.prompt if self.about.prompt is not None else prompt,
            stage=STAGE,
            fingerprint=self.recording,
            run_id=self.recording,
            policy=self.policy,
            policy_version=version,
            created_at=datetime.fromtimestamp(self.created, UTC),
            sampling=sampling,
            reward=outcome.reward if outcome else None,
            success=(outcome.reward > 0 if outcome.success is None else outcome.success) if outcome else None,
            termination=_termination(last, scored),
            reward_components=[RewardComponent(name=name, value=value) for name, value in components.items()],
            tags=[
                *self.about.tags,
                *(f"{name}:{number}" for name, number in sorted(counted.items()) if number),
                *([f"kind:{line.kind}"] if line.kind != "turn" else []),
                *([] if line.trained and free else [NOT_TRAINED]),
                *([] if self.outcome else [UNSCORED, f"closed: {self.why}"]),
            ],
            n_steps=sampled,
            n_tokens=len(session.ids),
            n_action_tokens=sum(session.mask),
            n_tool_calls=sum(len(turn.message.tool_calls) for turn in turns),
            n_tool_errors=sum(message.error is True for message in messages),
            messages=messages,
            message_seconds=seconds_of_messages(session.seconds, len(messages)),
            tools=first.tools,
            tokenizer=self.tokenizer,
            input_ids=session.ids,
            action_mask=session.mask,
            logprobs=session.logprobs,
            spans=session.spans,
        )


def _sync_name(path: Path) -> None:
    """Make the name of a file durable."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _reason(error: Exception) -> str:
    """What is wrong, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))} is {str(first['input'])[:60]!r}: {first['msg']}"
    reason = f"lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return shown(reason.splitlines()[0][:300])


def _termination(last: SampledTurn, scored: bool) -> Termination:
    if last.turn.stop == "length":
        return Termination.MAX_TOKENS
    if last.turn.stop == "cut":
        return Termination.TIME_LIMIT
    return Termination.ANSWERED if scored or not last.message.tool_calls else Termination.CANCELLED


def _line_of(turn: SampledTurn) -> dict[str, Any]:
    return {
        "number": turn.number,
        "parent": turn.parent.number if turn.parent else None,
        "heard": [message.model_dump(mode="json", exclude_defaults=True) for message in turn.heard],
        "heard_ids": turn.heard_ids,
        "ids": turn.turn.ids,
        "logprobs": turn.turn.logprobs,
        "spans": [span.model_dump() for span in turn.turn.spans],
        "stop": turn.turn.stop,
        "message": turn.message.model_dump(mode="json", exclude_defaults=True),
        "call_ids": turn.call_ids,
        "digest": turn.digest.hex(),
        "tools": None if turn.parent and turn.parent.tools == turn.tools else turn.tools,  # many kB, with every turn
        "sampling": turn.sampling,
        "instructed": turn.instructed,
        "agent": turn.agent,
        "kind": turn.kind,
        "constrained": turn.constrained,
        "delivered": turn.delivered,
        "seconds": turn.seconds,
    }


def _turn_of(line: dict[str, Any], known: dict[int, SampledTurn]) -> SampledTurn:
    spans = [Span(**span) for span in line.pop("spans")]
    sampled = Turn(line.pop("ids"), line.pop("logprobs"), spans, line.pop("stop"))
    parent, tools = line.pop("parent"), line.pop("tools")
    return SampledTurn(
        turn=sampled,
        parent=None if parent is None else known[parent],
        tools=known[parent].tools if tools is None else tools,
        heard=[Message(**message) for message in line.pop("heard")],
        message=Message(**line.pop("message")),
        digest=bytes.fromhex(line.pop("digest")),
        **line,
    )

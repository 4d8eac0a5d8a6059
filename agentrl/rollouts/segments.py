"""Episodes of several rows. If the context is compressed in the middle of an episode, it goes on as a new segment,
which is a row of its own: the tokens that the engine saw. Rows of one episode share its outcome, and count as one
attempt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.engines.base import Session
from agentrl.schemas.trajectory import Message, Role, Trajectory

SUMMARY = "summary"
"""Name of the message that asks a policy to sum up what it knows."""


@dataclass(frozen=True)
class Segment:
    """What one row of an episode has: a session, and the counts of what happened in it."""

    session: Session
    steps: int
    tool_calls: int
    tool_errors: int


def name_of(episode: str, segment: int) -> str:
    """The id of a row: that of the episode, and from the second segment on a point and the segment's number."""
    return f"{episode}.{segment}" if segment else episode


def episode_of(trajectory_id: str) -> str:
    """The name of the episode that a row of :func:`name_of` is of."""
    stem, _, segment = trajectory_id.rpartition(".")
    return stem if stem and segment.isdigit() and "-" not in segment else trajectory_id


def firsts(rows: Iterable[Trajectory]) -> list[Trajectory]:
    """One row of each episode, which has the outcome of all."""
    return [row for row in rows if row.segment == 0]


def by_episode(rows: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The rows of each episode and agent, in the order of their segments; episodes in the order of their first rows."""
    found: dict[tuple[str, str], list[Trajectory]] = {}
    for row in rows:
        found.setdefault((row.episode_id or row.trajectory_id, row.agent), []).append(row)
    return [sorted(each, key=lambda row: row.segment) for each in found.values()]


def numbered(rows: Sequence[Trajectory], groups: Sequence[str]) -> np.ndarray:
    """The number of the episode of each row, [rows], in the order of their first rows. Rows of other groups or with
    other rewards are not of one episode."""
    numbers: dict[tuple[str, str, float | None], int] = {}
    keys = [(row.episode_id or row.trajectory_id, group, row.reward) for row, group in zip(rows, groups, strict=True)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def whole(rows: Sequence[Trajectory]) -> Trajectory:
    """An episode as one row, for what looks at conversations and counts: the messages without what was repeated or
    asked for the sake of compression, and the sums of the counts. It has no tokens unless the episode is one row."""
    if len(rows) == 1:
        return rows[0]
    counts = ("n_steps", "n_tokens", "n_action_tokens", "n_tool_calls", "n_tool_errors")
    bare = {"token_start": None, "token_end": None}
    messages = [one.model_copy(update=bare) for row in rows for one in _own_messages(row)]
    return rows[0].model_copy(
        update={
            **{name: sum(getattr(row, name) for row in rows) for name in counts},
            "messages": messages,
            "input_ids": [],
            "action_mask": [],
            "logprobs": [],
            "spans": [],
        }
    )


def shared(rows: Sequence[Trajectory], graded: Trajectory) -> list[Trajectory]:
    """The rows of an episode with what graders made of the :func:`whole` of it."""
    outcome = {name: getattr(graded, name) for name in ("reward", "reward_components", "tags")}
    return [row.model_copy(update=outcome) for row in rows]


def _own_messages(row: Trajectory) -> list[Message]:
    """The messages of a segment: of later ones those from their first own turn on; none that ask for a summary or give
    one."""
    asked = (number for number, one in enumerate(row.messages) if one.name == SUMMARY and one.role is Role.USER)
    messages = row.messages[: next(asked, len(row.messages))]
    if row.segment == 0:
        return messages
    sampled = row.action_mask.index(True) if True in row.action_mask else row.n_tokens
    own = (n for n, one in enumerate(messages) if one.role is Role.ASSISTANT and (one.token_start or 0) >= sampled)
    return messages[next(own, len(messages)) :]

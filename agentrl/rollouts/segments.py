"""Episodes of several rows. If the context is compressed in the middle of an episode, it goes on as a new segment,
which is a row of its own: the tokens that the engine saw. Rows of one episode share its outcome, and count as one
attempt."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentrl.engines.base import Session
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Speaker

SUMMARY = "summary"
"""Name of the message that asks a policy to sum up what it knows."""


@dataclass(frozen=True)
class Segment:
    """What one row of an episode has: a session, and the counts of what happened in it. The first ``fork_at`` tokens
    are those of the earlier row number ``parent``, or without any, that row's ``agent`` called this one. What is not
    ``trained`` is no part of the work, and has no reward. ``continues`` says that it goes on from the row that the
    attempt does, if that goes on from one. ``speaker`` is the policy's side of who acted, if it is another one than the
    rollouts' policy."""

    session: Session
    steps: int
    tool_calls: int
    tool_errors: int
    agent: str = "main"
    parent: int | None = None
    fork_at: int = 0
    trained: bool = True
    tags: tuple[str, ...] = ()
    continues: bool = True
    speaker: "Speaker | None" = None


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
    by_id: dict[tuple[str, str], list[Trajectory]] = {}
    for row in rows:
        by_id.setdefault((row.episode_id or row.trajectory_id, row.agent), []).append(row)
    return [sorted(each, key=lambda row: row.segment) for each in by_id.values()]


def by_attempt(rows: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The rows of each episode, of all its agents, in the order of their segments; episodes in the order of their first
    rows."""
    by_id: dict[str, list[Trajectory]] = {}
    for row in rows:
        by_id.setdefault(row.episode_id or row.trajectory_id, []).append(row)
    return [sorted(each, key=lambda row: row.segment) for each in by_id.values()]


def numbered(
    episodes: Sequence[Hashable],
    groups: Sequence[str],
    rewards: Sequence[float | None],
    credit: str,
    name: Callable[[int], str],
) -> np.ndarray:
    """The number of the attempt that each row is of, [rows], in the order of their first rows. An attempt is what an
    episode has in one group, the rows of several segments and agents alike: it has one reward, and counts once in the
    statistics of its group.

    Raises ValueError that gives the ``name`` of a row's episode if an attempt has several rewards, or if an episode is
    in several groups and ``credit`` is joint.
    """
    numbers: dict[Hashable, int] = {}
    if len(numbers.fromkeys(episodes)) == len(episodes):
        return np.arange(len(episodes))
    numbers_of_rows = np.zeros(len(episodes), np.int64)
    first: list[int] = []
    group_of: dict[Hashable, str] = {}
    for row, (episode, group) in enumerate(zip(episodes, groups, strict=True)):
        numbers_of_rows[row] = number = numbers.setdefault((episode, group), len(numbers))
        if number == len(first):
            first.append(row)
        if rewards[row] != rewards[first[number]]:
            remedy = "" if credit == "agent" else "; if its agents have rewards of their own, set credit: agent"
            raise ValueError(
                f"credit: {credit}, and rows of the episode {name(row)} have several rewards in one group, "
                f"{rewards[first[number]]} and {rewards[row]}, but an attempt has one{remedy}"
            )
        if credit == "joint" and group_of.setdefault(episode, group) != group:
            raise ValueError(
                f"credit: joint, and rows of the episode {name(row)} are of several groups, {group_of[episode]!r} and "
                f"{group!r}; give them one group_id"
            )
    return numbers_of_rows


def whole(rows: Sequence[Trajectory]) -> Trajectory:
    """An episode as one row, for what looks at conversations and counts: the messages without what was repeated or
    asked for the sake of compression, and the sums of the counts. It has no tokens unless the episode is one row."""
    if len(rows) == 1:
        return rows[0]
    rows = [row for row in rows if row.segment == 0 or NOT_TRAINED not in row.tags]
    counts = ("n_steps", "n_tokens", "n_action_tokens", "n_tool_calls", "n_tool_errors")
    bare = {"token_start": None, "token_end": None}
    messages = [message.model_copy(update=bare) for row in rows for message in _own_messages(row)]
    return rows[0].model_copy(
        update={
            **{name: sum(getattr(row, name) for row in rows) for name in counts},
            "messages": messages,
            "message_seconds": None,
            "input_ids": [],
            "action_mask": [],
            "logprobs": [],
            "spans": [],
        }
    )


def shared(rows: Sequence[Trajectory], graded: Trajectory) -> list[Trajectory]:
    """The rows of an episode with what graders made of the :func:`whole` of it. What is no part of the work stays as it
    is."""
    outcome = {name: getattr(graded, name) for name in ("reward", "reward_components")}
    new = [tag for tag in graded.tags if tag not in rows[0].tags]
    return [
        row if NOT_TRAINED in row.tags else row.model_copy(update={**outcome, "tags": [*row.tags, *new]})
        for row in rows
    ]


def _own_messages(row: Trajectory) -> list[Message]:
    """The messages of a segment: of later ones those from their first own turn on; none that ask for a summary or give
    one."""
    asked = (
        number for number, message in enumerate(row.messages) if message.name == SUMMARY and message.role is Role.USER
    )
    messages = row.messages[: next(asked, len(row.messages))]
    if row.segment == 0:
        return messages
    sampled = row.action_mask.index(True) if True in row.action_mask else row.n_tokens
    own = (
        n
        for n, message in enumerate(messages)
        if message.role is Role.ASSISTANT and (message.token_start or 0) >= sampled
    )
    return messages[next(own, len(messages)) :]

"""Continuations of stored rows: from one of its turns on, an episode is played again, with new samples.

A continuation is a row of its own. It holds the tokens of its parent up to the turn (``fork_at``), which are not
trained on again: the mask is false before the fork, so that each sampled token is true in exactly one row.
Continuations of one state of one task are a group, which group estimators compare. The parent is none of them: it was
chosen for its outcome, and a mean over it would be biased.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.advantages.turns import acting, turn_spans
from agentrl.environments.base import Environment
from agentrl.rollouts.attempts import Attempt, Prefix
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import REPLACED, Role, Termination, Trajectory


@dataclass(frozen=True)
class ForkPoint:
    """A state that a row of ``task`` was in: its tokens so far. Equal states of one task have one ``name``. ``hint`` is
    the template of what the row was shown after the opening of its task, if it was shown something."""

    name: str
    task: Task
    prefix: Prefix
    hint: str = ""


def node_name(task_id: str, ids: Sequence[int]) -> str:
    """The name of a state: a digest of the task and the tokens before the next turn."""
    content = task_id.encode() + b"\0" + np.asarray(ids, np.int32).tobytes()
    return f"node-{hashlib.blake2b(content, digest_size=12).hexdigest()}"


def node(row: Trajectory, turn: int, task: Task, hint: str = "") -> ForkPoint:
    """The state of a row before its turn number ``turn``, from 0. A row that was cut after an observation has a state
    after its last turn too.

    Raises ValueError if the row has no tokens, or its messages do not say where turns begin, or it has no such turn.
    """
    turns = acting(row.messages)
    if turn == len(turns) and row.termination is Termination.CANCELLED and row.messages[-1].role is not Role.ASSISTANT:
        prefix = Prefix(row.trajectory_id, row.messages, row.input_ids)
        return ForkPoint(node_name(task.task_id, row.input_ids), task, prefix, hint)
    if not 0 <= turn < len(turns):
        raise ValueError(f"{row.trajectory_id} has {len(turns)} turns, so it cannot be continued from turn {turn}")
    start = turns[turn].token_start
    if start is None or not row.input_ids:
        raise ValueError(
            f"{row.trajectory_id} does not say where its turns lie in its tokens, so it cannot be continued; "
            "continue rows that this engine sampled, or text, which is tokenised"
        )
    number = next(index for index, message in enumerate(row.messages) if message is turns[turn])
    ids = row.input_ids[:start]
    return ForkPoint(node_name(task.task_id, ids), task, Prefix(row.trajectory_id, row.messages[:number], ids), hint)


def text_node(row: Trajectory, turn: int, task: Task) -> ForkPoint:
    """As :func:`node`, for an engine without token ids: the conversation alone, of a row with tokens or without."""
    turns = acting(row.messages)
    if not 0 <= turn < len(turns):
        raise ValueError(f"{row.trajectory_id} has {len(turns)} turns, so it cannot be continued from turn {turn}")
    number = next(index for index, message in enumerate(row.messages) if message is turns[turn])
    bare = {"token_start": None, "token_end": None}
    messages = [message.model_copy(update=bare) for message in row.messages[:number]]
    text = "\0".join(message.model_dump_json() for message in messages)
    return ForkPoint(node_name(task.task_id, list(text.encode())), task, Prefix(row.trajectory_id, messages, []))


def attempts(
    nodes: Iterable[ForkPoint], samples: int, name: Callable[[int], str], first: int = 0, index: int = 0
) -> dict[str, Attempt]:
    """``samples`` attempts at each node, by the ids that ``name`` gives to their numbers, which begin at ``first``.
    ``index`` is the number of the first one in the group of its node."""
    return {
        name(first + number * samples + sample): Attempt(
            point.task, index + sample, point.hint, point.name, point.prefix
        )
        for number, point in enumerate(nodes)
        for sample in range(samples)
    }


def check_replayable(environments: Mapping[str, Environment]) -> None:
    """Raise ValueError that names an environment whose stored episodes cannot be made again."""
    for name, environment in environments.items():
        if not getattr(environment, "replayable", False):
            raise ValueError(
                f"rows of environment {name!r} cannot be continued: it may answer the same messages otherwise, and a "
                "stored row holds no snapshot of it. Draw its random numbers from the task (or switch them off in its "
                "settings, as slip of rooms), and set replayable = True"
            )


def check_continuation(row: Trajectory, prefix: Prefix) -> None:
    """Check what every continuation keeps to: it begins with the tokens of its parent up to the beginning of a turn,
    and none of them is trained on.

    Raises ValueError that names the row and what is broken.
    """
    broken = ""
    if row.parent_id != prefix.parent or row.fork_at != len(prefix.ids):
        broken = f"is of parent {row.parent_id} up to token {row.fork_at}, not {prefix.parent} up to {len(prefix.ids)}"
    elif list(row.input_ids[: row.fork_at]) != list(prefix.ids):
        broken = "does not begin with the tokens of its parent"
    elif any(row.action_mask[: row.fork_at]):
        broken = "is trained on tokens of its parent"
    elif row.n_tokens > row.fork_at and row.fork_at not in {
        start for start, _ in turn_spans(row.messages, row.action_mask)
    }:
        broken = f"does not go on with a turn at token {row.fork_at}"
    if broken:
        raise ValueError(f"{row.trajectory_id} {broken}; this is an error of the engine or the dialect, report it")


def held_back(row: Trajectory, start: int, end: int) -> Trajectory:
    """A row that is not trained on its tokens from ``start`` to ``end``, which its policy did not sample."""
    mask, logprobs = list(row.action_mask), list(row.logprobs)
    mask[start:end], logprobs[start:end] = [False] * (end - start), [float("nan")] * (end - start)
    return row.model_copy(
        update={
            "action_mask": mask,
            "logprobs": logprobs,
            "n_action_tokens": sum(mask),
            "tags": [*row.tags, REPLACED],
        }
    )

"""Splices (Agent-R: Yuan et al. 2025, arXiv 2501.11425): a failed row up to a mistake, a turn that takes it back, and
what a success at the same task did from there on.

    failed:   [ go left -> cave   go right -> attic ]   go left -> cave  "here"
    success:                                            go tunnel -> mill  go left -> vault  "here"
    spliced:  [ go left -> cave   go right -> attic ]   "That was wrong." go tunnel -> mill  go left -> vault  "here"

Both rows have to have been in one state there. Whether they were is not guessed: the spliced row is made again in a new
episode, which must answer it word for word, and score it as a success.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agentrl.advantages.turns import acting
from agentrl.chat.codec import ChatCodec
from agentrl.environments.base import MAX_STEPS
from agentrl.pipelines.parts.selected import SPLICED
from agentrl.rollouts.continuations import node
from agentrl.rollouts.reopen import moved
from agentrl.rollouts.verification import ReplayVerifier
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Trajectory

SUCCESS = "success:"
"""How the tag of a spliced row begins that names the success."""


@dataclass(frozen=True)
class Joint:
    """The failed row is kept up to its turn number ``kept``, and the success goes on with its turn number ``then``.
    Both count from 0. ``alike`` says that both rows saw the same last."""

    kept: int
    then: int
    alike: bool


def joints(failed: Trajectory, success: Trajectory) -> list[Joint]:
    """Where two rows of one task may have been in one state, the earliest first: after observations that are equal, or
    where the two parted, if the failed row's calls since then changed nothing.

    The failed row took more turns to come there than the success, so there is a mistake to take back; and the success
    goes on with a call, because the turn that takes a mistake back must not be an answer.
    """
    failed_turns, other = _turns(failed), _turns(success)
    both = zip(failed_turns, other, strict=False)
    parted = next(
        (number for number, (a, b) in enumerate(both) if a.done != b.done), min(len(failed_turns), len(other))
    )
    joints_seen = []
    for kept in range(parted + 1, len(failed_turns)):
        alike = [then for then in range(len(other))[1:kept] if other[then].seen == failed_turns[kept].seen]
        joints_seen += [Joint(kept, then, True) for then in reversed(alike)]
        joints_seen += [Joint(kept, parted, False)] if parted not in alike else []
    return [joint for joint in joints_seen if joint.then < len(other) and other[joint.then].calls]


@dataclass(frozen=True)
class _Turn:
    """What was done in a turn, whether that was a call, and what was seen before it."""

    done: tuple[Any, ...]
    calls: bool
    seen: list[tuple[Role, str]]


def _turns(row: Trajectory) -> list[_Turn]:
    """The turns of a row."""
    own = {id(message) for message in acting(row.messages)}
    turns: list[_Turn] = []
    seen: list[tuple[Role, str]] = []
    for message in row.messages:
        if id(message) in own:
            calls = tuple((call.name, call.arguments) for call in message.tool_calls)
            turns.append(_Turn(calls or (message.content,), bool(calls), seen))
            seen = []
        else:
            seen.append((message.role, message.content))
    return turns


def spliced(
    failed: Trajectory, success: Trajectory, joint: Joint, task: Task, revision: str, codec: ChatCodec, name: str
) -> Trajectory:
    """The row, called ``name``: the failed row's tokens before the joint, on which it is not trained; then the turn of
    the success after the joint, written anew with ``revision`` before it; and from the end of this turn on the tokens
    and the mask of the success.

    Its parent is the failed row. Its outcome is that of the success, and so is ``n_tool_errors``. Its log-probabilities
    are NaN, since no policy sampled these tokens after that beginning.

    Raises ValueError if a row does not say where its turns lie, if the dialect leaves the revision out, or if the
    success's turn has no end token, so that what follows it belongs to no other turn.
    """
    start = node(failed, joint.kept, task)
    spliced_turn = acting(success.messages)[joint.then]
    number = next(index for index, message in enumerate(success.messages) if message is spliced_turn)
    end = spliced_turn.token_end
    if end is None or spliced_turn.token_start is None:
        raise ValueError(f"{success.trajectory_id} does not say where its turns lie in its tokens")
    content = " ".join(filter(None, [revision, spliced_turn.content]))
    following = success.messages[number + 1 :]
    answers = list(takewhile(lambda message: message.role is Role.TOOL, following))
    before = list(takewhile(lambda message: message.role is not Role.ASSISTANT, reversed(start.prefix.messages)))[::-1]
    ids = codec.assistant(spliced_turn.model_copy(update={"content": content}), answers, before)
    if (kept := codec.parse(ids, start.prefix.ids, failed.tools).message.content) != content.strip():
        raise ValueError(f"the dialect {codec.dialect} does not write {content!r} before a call: {kept!r} reads back")
    if ids[-1:] != success.input_ids[end - 1 : end]:
        raise ValueError(f"{success.trajectory_id} has a turn that ends otherwise than turns that are written")
    begin = len(start.prefix.ids)
    written = spliced_turn.model_copy(update={"content": content, "token_start": begin, "token_end": begin + len(ids)})
    shift = begin + len(ids) - end
    input_ids = [*start.prefix.ids, *ids, *success.input_ids[end:]]
    mask = [False] * begin + [True] * len(ids) + success.action_mask[end:]
    return success.model_copy(
        update={
            "trajectory_id": name,
            "episode_id": name,
            "group_id": start.name,
            "sample_index": 0,
            "parent_id": failed.trajectory_id,
            "fork_at": begin,
            "source": SPLICED,
            "tags": [f"{SUCCESS}{success.trajectory_id}"],
            "n_steps": len(acting(success.messages)) - joint.then,
            "n_tokens": len(input_ids),
            "n_action_tokens": sum(mask),
            "n_tool_calls": sum(len(message.tool_calls) for message in success.messages[number:]),
            "messages": [*start.prefix.messages, written, *(moved(message, shift) for message in following)],
            "message_seconds": None,
            "tools": failed.tools,
            "input_ids": input_ids,
            "action_mask": mask,
            "logprobs": [float("nan")] * len(mask),
            "spans": [],
        }
    )


class Splicer:
    """Joins failed rows with successes at the same task, if an environment of ``verifier`` proves the result, after at
    most ``tries`` replays of each failed row. ``drops`` counts the failed rows that nothing was made of, by reason."""

    def __init__(self, verifier: ReplayVerifier, codec: ChatCodec, tries: int) -> None:
        self.verifier, self.codec, self.tries = verifier, codec, tries
        self.drops: Counter[str] = Counter()

    async def of(
        self, failed: Trajectory, successes: Sequence[Trajectory], task: Task, revision: str, name: str
    ) -> Trajectory | None:
        """The failed row, spliced at the earliest joint that is proved; joints at which both rows saw the same are
        tried first."""
        environment = self.verifier.environments[task.env]
        allowed: int = getattr(environment, "max_steps", None) or MAX_STEPS
        candidates = [(joint, row) for row in _distinct(successes) for joint in joints(failed, row)]
        fitting = [
            (joint, row, left)
            for joint, row in candidates
            if joint.kept + (left := len(_turns(row)) - joint.then) <= allowed
        ]
        fitting.sort(key=lambda candidate: (not candidate[0].alike, candidate[0].kept, candidate[2]))
        for joint, success, _ in fitting[: self.tries]:
            try:
                row = spliced(failed, success, joint, task, revision, self.codec, name)
            except ValueError:
                self.drops["not_written"] += 1
                return None
            if solved := await self.verifier.solved(row, task):
                return row.model_copy(
                    update={
                        "env_version": environment.version,
                        "reward": solved.score.reward,
                        "success": True,
                        "reward_components": list(solved.score.components),
                        "final_state": json.dumps(solved.score.state),
                    }
                )
        self.drops["unproved" if fitting else "too_many_turns" if candidates else "no_common_state"] += 1
        return None


def _distinct(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """One of the rows that did the same."""
    return list({tuple(turn.done for turn in _turns(row)): row for row in reversed(rows)}.values())[::-1]

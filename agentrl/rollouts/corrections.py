"""Corrections of a student's rows by an adviser (DAgger: Ross et al. 2011): what an expert says in the states that the
student came to. A corrected row is trained on the adviser's tokens alone.

Episodes advise (:class:`agentrl.environments.base.Advised`), so their environment must know what to do from wherever
the student has led it, and it must be replayable.
"""

import json
from collections.abc import Sequence
from typing import Any

from agentrl.advantages.turns import acting
from agentrl.chat.codec import ChatCodec, spanned
from agentrl.environments.base import MAX_STEPS, Environment, Episode, Score
from agentrl.environments.forks import rebuild
from agentrl.environments.scripted import adviser
from agentrl.rollouts.continuations import ForkPoint, node
from agentrl.rollouts.episodes import DIVERGED
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

SOURCE = "corrected"
ADVISER = "expert"
"""How rows name an environment's own adviser."""


class _Line:
    """A row that grows: the student's tokens so far, and then the adviser's."""

    def __init__(self, start: ForkPoint, codec: ChatCodec, tools: str) -> None:
        self.codec, self.tools = codec, tools
        self.messages, self.ids = list(start.prefix.messages), list(start.prefix.ids)
        self.mask = [False] * len(self.ids)
        self.steps = self.calls = self.errors = 0

    def say(self, message: Message) -> None:
        self._append([message], self.codec.assistant(message), True)
        self.steps += 1
        self.calls += len(message.tool_calls)

    def hear(self, messages: list[Message]) -> None:
        start = self.messages[-1].token_start or 0
        self._append(messages, self.codec.observations(messages, self.ids[:start], self.ids[start:], self.tools), False)

    def _append(self, messages: Sequence[Message], ids: Sequence[int], acts: bool) -> None:
        self.messages += spanned(messages, len(self.ids), len(self.ids) + len(ids))
        self.ids += ids
        self.mask += [acts] * len(ids)


async def labelled(
    environment: Environment, row: Trajectory, task: Task, turns: Sequence[int], names: Sequence[str], codec: ChatCodec
) -> list[Trajectory]:
    """What the adviser would say at these turns of a row, in place of the student: a row for each, called by its name,
    that ends with the adviser's turn. It is not executed, so it has no reward.

    Raises DivergedError if the environment answers otherwise than it did, and NoExpertError if it has no adviser.
    """
    if not turns:
        return []
    advised: list[Message] = []

    def ask(episode: Episode) -> None:
        advised.append(adviser(environment, episode).advise())

    last = node(row, max(turns), task)
    episode = await rebuild(environment, task, last.prefix.messages, ask)
    try:
        ask(episode)
    finally:
        await episode.close()
    corrected = []
    for turn, name in zip(turns, names, strict=True):
        start = node(row, turn, task)
        line = _Line(start, codec, row.tools)
        line.say(advised[sum(message.role is Role.ASSISTANT for message in start.prefix.messages)])
        corrected.append(_corrected(name, start, line, row, environment, Termination.CANCELLED, None))
    return corrected


async def switched(
    environment: Environment, row: Trajectory, task: Task, turn: int, name: str, codec: ChatCodec, max_tokens: int
) -> Trajectory:
    """A row that begins as the student's up to a turn, from which on the adviser acts to the end.

    Raises as :func:`labelled` does.
    """
    start = node(row, turn, task)
    line = _Line(start, codec, row.tools)
    episode = await rebuild(environment, task, start.prefix.messages)
    try:
        termination = await _act(environment, episode, line, start.prefix.turns, max_tokens)
        score = await episode.score()
    finally:
        await episode.close()
    return _corrected(name, start, line, row, environment, termination, score)


async def _act(environment: Environment, episode: Episode, line: _Line, done: int, max_tokens: int) -> Termination:
    """Let the adviser act until the end, or a limit of messages or tokens."""
    expert = adviser(environment, episode)
    allowed: int = getattr(environment, "max_steps", None) or MAX_STEPS
    for left in range(allowed - done - 1, -1, -1):
        message = expert.advise()
        line.say(message)
        if not left and message.tool_calls:
            return Termination.MAX_STEPS
        step = await episode.step(message)
        line.messages[-1] = line.messages[-1].model_copy(update={"reward": step.reward})
        line.errors += step.info.get("tool_errors", 0)
        if step.done or not step.messages:
            line.messages += step.messages
            return Termination.ANSWERED
        if len(line.ids) >= max_tokens:
            return Termination.MAX_TOKENS
        line.hear(step.messages)
    return Termination.MAX_STEPS


def _corrected(
    name: str,
    start: ForkPoint,
    line: _Line,
    row: Trajectory,
    environment: Environment,
    termination: Termination,
    score: Score | None,
) -> Trajectory:
    return corrected_row(
        row,
        name,
        line.ids,
        line.mask,
        group_id=start.name,
        fork_at=len(start.prefix.ids),
        env_version=environment.version,
        policy=ADVISER,
        reward=score.reward if score else None,
        success=score.success if score else None,
        termination=termination,
        reward_components=list(score.components) if score else [],
        n_steps=line.steps,
        n_tool_calls=line.calls,
        n_tool_errors=line.errors,
        messages=line.messages,
        final_state=json.dumps(score.state if score else None),
    )


def corrected_row(
    row: Trajectory, name: str, ids: Sequence[int], mask: Sequence[bool], *, group_id: str, **fields: Any
) -> Trajectory:
    """A row that corrects ``row``, at the same task. Somebody else says the tokens of ``mask``, so none has a
    log-prob."""
    return Trajectory(
        trajectory_id=name,
        episode_id=name,
        group_id=group_id,
        parent_id=row.trajectory_id,
        source=SOURCE,
        task_id=row.task_id,
        env=row.env,
        split=row.split,
        level=row.level,
        prompt=row.prompt,
        tools=row.tools,
        tokenizer=row.tokenizer,
        input_ids=list(ids),
        action_mask=list(mask),
        logprobs=[float("nan")] * len(ids),
        n_tokens=len(ids),
        n_action_tokens=sum(mask),
        **fields,
    )


def taught(row: Trajectory, teacher: str, label: bool) -> Trajectory | None:
    """A continuation by a ``teacher`` as a corrected row: its tokens are not the student's draws, so they have no
    log-probs. As a ``label`` it ends with the teacher's first turn, of which nobody says how it went. None if the
    episode could not be made again, or the teacher said nothing."""
    turns = [message for message in acting(row.messages) if (message.token_start or 0) >= row.fork_at]
    if DIVERGED in row.tags or not turns or not any(row.action_mask):
        return None
    update: dict[str, object] = {"policy": teacher, "spans": [], "logprobs": [float("nan")] * len(row.input_ids)}
    if label:
        end, number = turns[0].token_end, row.messages.index(turns[0]) + 1
        mask = row.action_mask[:end]
        update |= {
            "messages": [*row.messages[: number - 1], turns[0].model_copy(update={"reward": None})],
            "message_seconds": row.message_seconds and row.message_seconds[:number],
            "input_ids": row.input_ids[:end],
            "action_mask": mask,
            "logprobs": [float("nan")] * len(mask),
            "n_tokens": len(mask),
            "n_action_tokens": sum(mask),
            "n_steps": 1,
            "n_tool_calls": len(turns[0].tool_calls),
            "n_tool_errors": 0,
            "reward": None,
            "success": None,
            "reward_components": [],
            "final_state": "null",
            "termination": Termination.CANCELLED,
        }
    return row.model_copy(update=update)


def advised_alone(row: Trajectory, spans: Sequence[tuple[int, int]]) -> Trajectory:
    """A row in which student and adviser took turns, trained on the adviser's turns, at ``spans``, alone."""
    mask = [False] * len(row.input_ids)
    for begin, end in spans:
        mask[begin:end] = [True] * (end - begin)
    own = {begin for begin, _ in spans}
    return row.model_copy(
        update={
            "action_mask": mask,
            "logprobs": [float("nan")] * len(mask),
            "spans": [],
            "n_action_tokens": sum(mask),
            "n_steps": sum(message.token_start in own for message in acting(row.messages)),
            "policy": f"{ADVISER} and {row.policy}",
        }
    )

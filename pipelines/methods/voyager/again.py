"""Rows of successes made again with skills in place of their calls: which skills solve what their calls solved."""

import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentrl.engines.blocking import blocking
from agentrl.environments.base import Score
from agentrl.environments.scripted import Played, Turns, play
from agentrl.environments.skilled import Skill, Skilled, with_tools
from agentrl.pipelines.methods.voyager.induce import Induced, shape, unbroken
from agentrl.pipelines.parts.stored_tasks import KnownTasks
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Trajectory

SOURCE = "skilled"


@dataclass(frozen=True)
class MadeAgain:
    """Rows that are solved again with skills in place of their calls; which tasks each skill was used in that were
    ``solved``, and ``failed`` ones, by its name; and the tracebacks of environments that failed."""

    rows: list[Trajectory]
    solved: dict[str, set[str]]
    failed: dict[str, set[str]]
    errors: list[str]


def env_of(base: str, skills: Iterable[Skill]) -> str:
    """How tasks name an environment with skills."""
    code = [skill.model_dump(mode="json", exclude_unset=True) for skill in skills]
    return "skilled" + json.dumps({"env": base, "skills": code}, sort_keys=True, ensure_ascii=False)


def verified(
    base: str,
    rows: Sequence[Trajectory],
    library: Sequence[Skill],
    tried: Sequence[Induced],
    support: int,
    known: KnownTasks,
    tell: Callable[[int, int], None],
) -> tuple[MadeAgain, list[Induced], MadeAgain]:
    """The rows made again with all skills that are ``tried``; the skills that ``support`` tasks are solved with, if no
    others are used; and the rows made again with these."""
    first = again = blocking(made_again(base, rows, library, tried, known, tell))
    kept = list(tried)
    while few := {skill.skill.name for skill in kept if len(again.solved[skill.skill.name]) < support}:
        kept = [skill for skill in kept if skill.skill.name not in few]
        again = blocking(made_again(base, rows, library, kept, known, tell))
    return first, kept, again


async def made_again(
    base: str,
    rows: Sequence[Trajectory],
    library: Sequence[Skill],
    tried: Sequence[Induced],
    known: KnownTasks,
    tell: Callable[[int, int], None],
) -> MadeAgain:
    """Each row in a new episode of its task, with skills in place of the calls that they do. ``tell`` is told how many
    are done, of how many."""
    skills = [*library, *(skill.skill for skill in tried)]
    skilled, env, names = Skilled(base, skills), env_of(base, skills), [skill.skill.name for skill in tried]
    again = MadeAgain([], {name: set() for name in names}, {name: set() for name in names}, [])
    try:
        for number, row in enumerate(rows, 1):
            task = with_tools(known.of(row), skills).model_copy(update={"env": env})
            turns, used = with_skills(row, tried)
            try:
                made = await _solved(skilled, row, task, turns)
            except Exception as error:  # of the environment: it ends this episode alone
                made = None
                again.errors.append("".join(traceback.format_exception(error)))
            for name in used:
                (again.solved if made else again.failed)[name].add(row.task_id)
            again.rows.extend([made] if made else [])
            tell(number, len(rows))
    finally:
        await skilled.close()
    return again


async def _solved(skilled: Skilled, row: Trajectory, task: Task, turns: Sequence[Message]) -> Trajectory | None:
    """The row of an episode in which these turns are said; None if it is no success."""
    episode = await skilled.reset(task)
    try:
        played = await play(episode, _say(turns), max(skilled.max_steps, len(turns)))
        score, opening = await episode.score(), list(episode.opening)
    finally:
        await episode.close()
    return _row(row, task, opening, episode.tools, played, score) if score and score.success else None


def with_skills(row: Trajectory, tried: Sequence[Induced]) -> tuple[list[Message], set[str]]:
    """The assistant messages of a row, with calls of skills in place of what these do, and the names of those skills.
    From each turn on the longest skill is taken, and among equals the first."""
    by_shape = {each.shape: each for each in reversed(tried)}
    calls: dict[int, Message] = {}
    skipped, used = set[int](), set[str]()
    for turns in unbroken(row):
        start = 0
        while start < len(turns):
            for length in range(len(turns) - start, 1, -1):
                key, run = shape(row, turns[start : start + length])
                if (skill := by_shape.get(key)) and (call := skill.call(run)):
                    content = row.messages[turns[start].number].content
                    calls[turns[start].number] = Message(role=Role.ASSISTANT, content=content, tool_calls=[call])
                    skipped |= {turn.number for turn in turns[start + 1 : start + length]}
                    used.add(skill.skill.name)
                    start += length - 1
                    break
            start += 1
    bare = {"token_start": None, "token_end": None, "reward": None}
    turns_left = [
        calls.get(number) or message.model_copy(update=bare)
        for number, message in enumerate(row.messages)
        if message.role is Role.ASSISTANT and number not in skipped
    ]
    return turns_left, used


def _say(turns: Sequence[Message]) -> Turns:
    for turn in turns:  # noqa: UP028  (answers are sent to a generator, and a list takes none)
        yield turn
    yield Message(role=Role.ASSISTANT, content="")  # the row ended here, and this episode did not


def _row(row: Trajectory, task: Task, opening: list[Message], tools: str, played: Played, score: Score) -> Trajectory:
    """A row of text, of a task with skills."""
    messages = [*opening, *played.messages]
    return Trajectory(
        trajectory_id=row.trajectory_id,
        episode_id=row.trajectory_id,
        task_id=task.task_id,
        group_id=task.task_id,
        parent_id=row.trajectory_id,
        source=SOURCE,
        env=task.env,
        env_version=f"{row.env_version.removesuffix('+skills')}+skills",
        split=task.split,
        level=task.level,
        prompt=task.prompt,
        policy=row.policy,
        reward=score.reward,
        success=score.success,
        termination=played.termination,
        reward_components=list(score.components),
        n_steps=sum(message.role is Role.ASSISTANT for message in messages),
        n_tool_calls=sum(len(message.tool_calls) for message in messages),
        n_tool_errors=played.info["tool_errors"],
        messages=messages,
        tools=tools,
        final_state=json.dumps(score.state),
    )

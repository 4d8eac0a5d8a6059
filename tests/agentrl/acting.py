"""Turns in an episode, as tests write them: text is said, a mapping calls a tool."""

from typing import Any

from agentrl.engines.blocking import blocking
from agentrl.schemas.task import Task


def act(environment: Any, task: Task, *turns: Any) -> tuple[list[Any], Any]:
    """The steps that answer the turns, and the score."""

    async def go() -> tuple[list[Any], Any]:
        episode = await environment.reset(task)
        messages = (episode.saying(turn) if isinstance(turn, str) else episode.calling(**turn) for turn in turns)
        return [await episode.step(message) for message in messages], await episode.score()

    return blocking(go())

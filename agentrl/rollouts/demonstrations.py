"""Demonstrations: trajectories of an environment's scripted expert. They have text and no tokens, because the
tokenizer depends on the model that will be trained on them."""

import json
from collections.abc import Generator
from random import Random
from typing import cast

from agentrl.engines.blocking import blocking
from agentrl.environments.adapted import protocol
from agentrl.environments.base import Demonstrator, Environment, Episode
from agentrl.environments.hosts import Threads
from agentrl.rollouts.rationalize import with_hint
from schemas.task import Task
from schemas.trajectory import Message, Role, Termination, Trajectory


def demonstrate(
    environment: Environment, task: Task, noise: float, seed: int, trajectory_id: str, hint: str = ""
) -> Trajectory:
    """One attempt of the expert at ``task``. ``noise`` is its probability of an error at each turn; ``hint`` is a
    template for :func:`agentrl.rollouts.rationalize.with_hint`.

    Raises ValueError if the environment has no scripted expert.
    """
    if not hasattr(environment, "demonstrate"):
        raise ValueError(
            f"env {environment.name!r} has no scripted expert; give it demonstrate(), or import trajectories"
        )
    turns = cast(Demonstrator, environment).demonstrate(task, noise, Random(f"{seed}-{task.task_id}"))
    return blocking(_demonstrated(environment, task, turns, noise, trajectory_id, hint))


async def _demonstrated(
    environment: Environment,
    task: Task,
    turns: Generator[Message, list[Message], None],
    noise: float,
    trajectory_id: str,
    hint: str,
) -> Trajectory:
    host = Threads(1)
    episode = await protocol(environment, host).reset(task)
    try:
        said, errors = await _act(episode, turns)
        score = await episode.score()
    finally:
        await episode.close()
        await host.close()
    opening = with_hint(list(episode.opening), task, hint) if hint else list(episode.opening)
    return Trajectory(
        trajectory_id=trajectory_id,
        episode_id=trajectory_id,
        task_id=task.task_id,
        group_id=task.task_id,
        source="expert",
        env=task.env,
        env_version=environment.version,
        split=task.split,
        level=task.level,
        prompt=task.prompt,
        policy="expert",
        sampling=json.dumps({"noise": noise}),
        tags=["hinted"] if hint else [],
        reward=score.reward if score else None,
        success=score.success if score else None,
        termination=Termination.ANSWERED,
        reward_components=list(score.components) if score else [],
        n_steps=sum(message.role is Role.ASSISTANT for message in said),
        n_tool_calls=sum(len(message.tool_calls) for message in said),
        n_tool_errors=errors,
        messages=opening + said,
        tools=episode.tools,
        final_state=json.dumps(score.state if score else None),
    )


async def _act(episode: Episode, turns: Generator[Message, list[Message], None]) -> tuple[list[Message], int]:
    """The messages of the expert and of the environment, and the number of calls that were refused."""
    said: list[Message] = []
    errors = 0
    message = next(turns)
    while True:
        step = await episode.step(message)
        said += [message, *step.messages]
        errors += step.info.get("tool_errors", 0)
        if step.done or not step.messages:
            return said, errors
        message = turns.send(step.messages)

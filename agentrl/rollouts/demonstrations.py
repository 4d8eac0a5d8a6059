"""Demonstrations: trajectories of an environment's scripted expert. They have text and no tokens, because the
tokenizer depends on the model that will be trained on them."""

import json
from collections.abc import Generator
from random import Random
from typing import cast

from agentrl.environments.base import Demonstrator, Environment, Episode, Observation, answer_calls
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
    expert = cast(Demonstrator, environment)
    episode = environment.episode(task)
    opening = with_hint(episode.opening(), task, hint) if hint else episode.opening()
    turns = expert.demonstrate(task, noise, Random(f"{seed}-{task.task_id}"))
    said, errors = _act(episode, turns)
    score = episode.score(said[-1].content)
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
        reward=score.reward,
        success=score.success,
        termination=Termination.ANSWERED,
        reward_components=list(score.components),
        n_steps=sum(message.role is Role.ASSISTANT for message in said),
        n_tool_calls=sum(len(message.tool_calls) for message in said),
        n_tool_errors=errors,
        messages=opening + said,
        tools=task.tools,
        final_state=json.dumps(episode.state()),
    )


def _act(episode: Episode, turns: Generator[Message, list[Observation], None]) -> tuple[list[Message], int]:
    """The messages of the expert and the tools up to the expert's answer, and the number of calls that were refused."""
    said: list[Message] = []
    errors = 0
    message = next(turns)
    while message.tool_calls:
        answers, observations = answer_calls(episode, message)
        said += [message, *answers]
        errors += sum(observation.error for observation in observations)
        message = turns.send(observations)
    return [*said, message], errors

"""Demonstrations: trajectories of an environment's scripted expert. They have text and no tokens: the tokenizer is the
choice of whoever trains on them."""

import json
from random import Random
from typing import cast

from agentrl.environments.base import Demonstrator, Environment, Observation
from agentrl.rationalize import with_hint
from schemas.task import Task
from schemas.trajectory import Message, Role, Termination, Trajectory


def demonstrate(
    environment: Environment, task: Task, noise: float, seed: int, trajectory_id: str, hint: str = ""
) -> Trajectory:
    """One attempt of the expert at ``task``. ``noise`` is its probability of an error at each turn; ``hint`` is a
    template for :func:`agentrl.rationalize.with_hint`.

    Raises ValueError where the environment has no scripted expert.
    """
    if not hasattr(environment, "demonstrate"):
        raise ValueError(
            f"env {environment.name!r} has no scripted expert; give it demonstrate(), or import trajectories"
        )
    expert = cast(Demonstrator, environment)
    episode = environment.episode(task)
    messages = with_hint(episode.opening(), task, hint) if hint else episode.opening()
    turns = expert.demonstrate(task, noise, Random(f"{seed}-{task.task_id}"))
    message = next(turns)
    calls = errors = steps = 0
    while True:
        messages.append(message)
        steps += 1
        if not message.tool_calls:
            break
        observations: list[Observation] = [episode.call(call) for call in message.tool_calls]
        calls += len(observations)
        errors += sum(observation.error for observation in observations)
        messages += [
            Message(role=Role.TOOL, content=observation.content, tool_call_id=call.id, name=call.name)
            for call, observation in zip(message.tool_calls, observations, strict=True)
        ]
        message = turns.send(observations)
    score = episode.score(message.content)
    return Trajectory(
        trajectory_id=trajectory_id,
        episode_id=trajectory_id,
        task_id=task.task_id,
        group_id=task.task_id,
        source="expert",
        env=environment.name,
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
        n_steps=steps,
        n_tool_calls=calls,
        n_tool_errors=errors,
        messages=messages,
        tools=task.tools,
        final_state=json.dumps(episode.state()),
    )

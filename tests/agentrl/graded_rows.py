"""Rows to grade, and what a component gives for them."""

import asyncio
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from agentrl.rewards import Components, Rewards
from agentrl.rewards.component import Reward
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rewards: Components = []


class Added(BaseModel):
    rewards: Rewards = []


def reward(type: str, **settings: Any) -> Reward:
    return Config(rewards=[{"type": type, **settings}]).rewards[0]


TASK = Task(task_id="t", env="shop", split="train", prompt="capital of France?", ground_truth='"Paris"')
TOOLS = json.dumps([{"type": "function", "function": {"name": name}} for name in ("find", "send")])


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=json.dumps(arguments))


def row(answer: str | None = "Paris", *calls: ToolCall, **columns: Any) -> Trajectory:
    messages = [Message(role=Role.USER, content="capital of France?")]
    for call in calls:
        messages += [Message(role=Role.ASSISTANT, tool_calls=[call]), Message(role=Role.TOOL, content="ok")]
    if answer is not None:
        messages.append(Message(role=Role.ASSISTANT, content=answer))
    columns = {"reward": 1.0, "success": True, "termination": Termination.ANSWERED, "tools": TOOLS, **columns}
    name = columns.pop("trajectory_id", "r")
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="model", env="shop", split="train",
        prompt="capital of France?", messages=messages, **columns,
    )  # fmt: skip


def grade(reward: Reward, rollout: Trajectory, task: Task = TASK) -> tuple[float | None, dict[str, float]]:
    [result] = asyncio.run(reward.grades([rollout], task))
    return result.value, dict(result.details)


def value(reward: Reward, rollout: Trajectory, task: Task = TASK) -> float | None:
    return grade(reward, rollout, task)[0]


def values(reward: Reward, rollouts: list[Trajectory], task: Task = TASK) -> list[float | None]:
    return [result.value for result in asyncio.run(reward.grades(rollouts, task))]


def with_truth(truth: Any, **metadata: Any) -> Task:
    return TASK.model_copy(update={"ground_truth": json.dumps(truth), "metadata": json.dumps(metadata)})

"""``my_shop``: questions such as "3 apple and 2 pear?", answered by asking a tool for each price and adding up."""

import json
from collections.abc import Generator
from random import Random
from typing import Annotated, Any

from pydantic import Field

from agentrl.environments.base import Observation, Score
from agentrl.rewards.answers import exact_match
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall


class Basket:
    """One attempt at one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.prices: dict[str, int] = json.loads(task.metadata)["prices"]
        self.asked: list[str] = []

    def opening(self) -> list[Message]:
        return [Message(role=Role.USER, content=self.task.prompt)]

    def call(self, call: ToolCall) -> Observation:
        arguments = call.parsed()
        item = arguments.get("item") if isinstance(arguments, dict) else None
        if call.name != "price" or item not in self.prices:
            return Observation("there is no such price", error=True)
        self.asked.append(item)
        return Observation(str(self.prices[item]))

    def score(self, answer: str | None) -> Score:
        right = answer is not None and exact_match(answer, json.loads(self.task.ground_truth))
        thrift = 1.0 if len(self.asked) <= 2 else 0.0
        components = (
            RewardComponent(name="right", value=float(right)),
            RewardComponent(name="thrift", value=thrift, weight=0.1),
        )
        return Score(right, components)

    def state(self) -> dict[str, Any]:
        return {"asked": self.asked}


class Shop:
    """The parameters of ``__init__`` are the settings of the environment in a pipeline file."""

    name = "shop"
    version = "1"
    max_steps = 4
    items = ("apple", "pear", "plum", "fig")
    tools = [  # noqa: RUF012
        {
            "type": "function",
            "function": {
                "name": "price",
                "description": "The price of one item. Add up, then reply with the sum alone.",
                "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
            },
        }
    ]

    def __init__(self, dearest: Annotated[int, Field(ge=1, description="highest price")] = 9) -> None:
        self.dearest = dearest

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Tasks for each split. The question of each is drawn once, so splits share none."""
        random = Random(f"shop-{seed}")
        seen: set[str] = set()
        return {split: [self._task(split, n, random, seen) for n in range(size)] for split, size in sizes.items()}

    def episode(self, task: Task) -> Basket:
        return Basket(task)

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """A scripted expert, which adds up wrongly with probability ``noise``. An environment needs none."""
        total = 0
        for number, (item, count) in enumerate(json.loads(task.metadata)["basket"].items()):
            call = ToolCall(id=f"call_{number}", name="price", arguments=json.dumps({"item": item}))
            [answer] = yield Message(role=Role.ASSISTANT, tool_calls=[call])
            total += count * int(answer.content)
        yield Message(role=Role.ASSISTANT, content=str(total + (random.random() < noise)))

    def _task(self, split: str, number: int, random: Random, seen: set[str]) -> Task:
        while True:
            first, second = random.sample(self.items, 2)
            basket = {first: random.randint(1, 9), second: random.randint(1, 9)}
            prompt = " and ".join(f"{count} {item}" for item, count in basket.items()) + "?"
            if prompt not in seen:
                seen.add(prompt)
                break
        prices = {item: random.randint(1, self.dearest) for item in self.items}
        return Task(
            task_id=f"shop-{split}-{number:04d}",
            env=self.name,
            split=split,
            prompt=prompt,
            tools=json.dumps(self.tools),
            ground_truth=json.dumps(str(sum(count * prices[item] for item, count in basket.items()))),
            metadata=json.dumps({"basket": basket, "prices": prices}),
        )

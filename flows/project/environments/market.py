"""An environment: what two items cost together. The agent asks a tool for each price, and adds up."""

import json
from collections.abc import Generator
from random import Random

from agentrl import Message, RewardComponent, Role, Score, Task, ToolCall, tool

ITEMS = ("apple", "pear", "plum", "fig", "date", "lime")


class Purchase:
    """One attempt at one task. Methods under ``@tool`` are what the agent may call."""

    def __init__(self, task: Task) -> None:
        self.prices: dict[str, int] = json.loads(task.metadata)
        self.answer: str = json.loads(task.ground_truth)

    @tool
    def price(self, item: str) -> str:
        """The price of one item."""
        return str(self.prices[item]) if item in self.prices else f"there is no {item}"

    def score(self, answer: str | None) -> Score:
        right = answer is not None and answer.strip() == self.answer
        return Score(right, (RewardComponent(name="right", value=float(right)),))


class Market:
    """The parameters of ``__init__`` are settings in the pipeline file; change ``version`` when behaviour changes."""

    name = "market"
    version = "1"
    max_steps = 4

    def __init__(self, dearest: int = 4) -> None:
        self.dearest = dearest

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Tasks for each split. No question is drawn twice, so splits share none."""
        random, seen = Random(seed), set[str]()
        return {split: [self._task(split, random, seen) for _ in range(size)] for split, size in sizes.items()}

    def episode(self, task: Task) -> Purchase:
        return Purchase(task)

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """A scripted expert, wrong with probability ``noise``. An environment need not have one."""
        total = 0
        for number, item in enumerate(task.prompt.removesuffix("?").split(" and ")):
            call = ToolCall(id=f"call_{number}", name="price", arguments=json.dumps({"item": item}))
            [answer] = yield Message(role=Role.ASSISTANT, tool_calls=[call])
            total += int(answer.content)
        yield Message(role=Role.ASSISTANT, content=str(total + (random.random() < noise)))

    def _task(self, split: str, random: Random, seen: set[str]) -> Task:
        while True:
            items = random.sample(ITEMS, 2)
            prices = {item: random.randint(1, self.dearest) for item in ITEMS}
            key = f"{items} {[prices[item] for item in items]}"
            if key not in seen:
                seen.add(key)
                break
        return Task(
            task_id=f"market-{split}-{len(seen):05d}",
            env=self.name,
            split=split,
            prompt=f"{items[0]} and {items[1]}?",
            ground_truth=json.dumps(str(sum(prices[item] for item in items))),
            metadata=json.dumps(prices),
        )

"""``reasoning_gym``: questions of the package reasoning-gym, answered in words and scored by its own verifiers. A task
keeps the place of its question, which is drawn again for a score: not all that verifiers read is JSON."""

import json
import warnings
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Annotated, Any

from pydantic import Field

from agentrl.environments.base import Observation, Score
from agentrl.environments.scripted import NoExpertError
from agentrl.environments.task_splits import Draft, draw
from agentrl.schemas.installation import install_hint
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

SEEDS = 2**16  # questions of a seed; the package draws n of seed s from s + n: neighbours would share theirs
SOLVED = 0.99  # verifiers give parts of a point to wrong answers too


@cache
def _dataset(family: str, config: str, seed: int) -> Any:
    try:
        import reasoning_gym

        return reasoning_gym.create_dataset(family, size=SEEDS, seed=seed * SEEDS, **json.loads(config))
    except ImportError:
        raise ValueError(f"environment reasoning_gym needs its package; {install_hint('reasoning-gym')}") from None
    except (ValueError, TypeError, AssertionError) as error:  # unknown names, and values that it asserts
        raise ValueError(f"reasoning_gym refuses family {family!r} with config {config}: {error}") from None


class ReasoningGym:
    """``prompt`` is a template of the question and of what the metadata of the package says about it."""

    name, version, max_steps, replayable = "reasoning_gym", "1", 1, True

    def __init__(
        self,
        family: Annotated[str, Field(description="name of a dataset of the package, such as chain_sum", min_length=1)],
        config: Annotated[dict[str, Any], Field(description="settings of the family")] = {},  # noqa: B006
        prompt: Annotated[str, Field(description="what is asked, such as {expression} of metadata")] = "{question}",
        shots: Annotated[int, Field(ge=0, description="solved questions shown before; they are in no split")] = 0,
    ) -> None:
        self.family, self.config, self.prompt = family, json.dumps(config, sort_keys=True), prompt
        shown = [self.entry(0, SEEDS - 1 - number) for number in range(shots)]
        self.shown = {self.asked(entry): str(entry["answer"]) for entry in shown}

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Questions, none of them twice; a warning counts those left out. Raises ValueError if there are too few."""
        drawn: list[int] = []

        def drafts(level: int, random: Random) -> Iterator[Draft]:
            for number in range(SEEDS):
                drawn.append(number)
                entry = self.entry(seed, number)
                if (asked := self.asked(entry)) not in self.shown:
                    yield Draft(asked, str(entry["answer"]), {"seed": seed, "place": number})

        def finish(draft: Draft, name: str, split: str, level: int) -> Task:
            return draft.task(name, self.name, split, level, "[]", "environment")

        variant = f"{self.family}{json.dumps({'config': self.config, 'prompt': self.prompt})}"
        splits = draw(variant, sizes, seed, {1: 1.0}, drafts, finish)
        if left_out := len(drawn) - sum(sizes.values()):
            warnings.warn(f"{left_out} of {len(drawn)} questions came before, and are left out", stacklevel=2)
        return splits

    def episode(self, task: Task) -> "Question":
        return Question(self, task)

    def demonstrate(self, task: Task, noise: float, random: Random) -> Iterator[Message]:
        """The answer, or with probability ``noise`` that of another question."""
        of = json.loads(task.metadata)
        entry = self.entry(of["seed"], random.randrange(SEEDS) if random.random() < noise else of["place"])
        if entry["answer"] is None:
            raise NoExpertError(f"{self.family} checks answers, and knows none to show; sample them from a teacher")
        yield Message(role=Role.ASSISTANT, content=str(entry["answer"]))

    def dataset(self, seed: int) -> Any:
        return _dataset(self.family, self.config, seed)

    def entry(self, seed: int, number: int) -> dict[str, Any]:
        return dict(self.dataset(seed)[number])

    def asked(self, entry: dict[str, Any]) -> str:
        known = {**entry["metadata"], "question": entry["question"]}
        try:
            return self.prompt.format(**known)
        except LookupError as error:
            raise ValueError(f"prompt {self.prompt!r} wants {error}; there are {', '.join(sorted(known))}") from None


class Question:
    """One answer to one question, after solved ones."""

    def __init__(self, gym: ReasoningGym, task: Task) -> None:
        self.gym, self.task, self.of = gym, task, json.loads(task.metadata)

    def opening(self) -> list[Message]:
        texts = [text for shown in self.gym.shown.items() for text in shown]
        roles = (Role.USER, Role.ASSISTANT)
        return [Message(role=roles[n % 2], content=text) for n, text in enumerate([*texts, self.task.prompt])]

    def call(self, call: ToolCall) -> Observation:
        return Observation("there is no tool; say the answer alone", error=True)

    def score(self, answer: str | None) -> Score:
        """Raises RuntimeError if the package draws another question than the task's."""
        entry = self.gym.entry(self.of["seed"], self.of["place"])
        if self.gym.asked(entry) != self.task.prompt:
            raise RuntimeError(f"another version of reasoning_gym, or chance, draws another {self.task.task_id}")
        return Score(self.gym.dataset(self.of["seed"]).score_answer((answer or "").strip(), entry) >= SOLVED)

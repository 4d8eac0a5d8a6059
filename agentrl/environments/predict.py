"""The environment ``predict``: what will be answered to an action (RWML, arXiv 2602.05842)? A task shows what happened
before and the action; the policy says the next observation. Tasks are made of rollouts, by the stage ``tasks.predict``.
"""

import asyncio
import json
from collections.abc import Callable, Generator
from random import Random
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from agentrl.environments.base import Score, Step
from agentrl.rewards.answers import normalized, truths
from agentrl.schemas.annotations import External
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role


def rouge_l(answer: str, right: str) -> float:
    """The harmonic mean of precision and recall of the longest common subsequence of normalised words (ROUGE-L: Lin
    2004, section 3.2, with beta 1)."""
    words, other = normalized(answer).split(), normalized(right).split()
    if not words or not other:
        return float(words == other)
    longest = [0] * (len(other) + 1)
    for word in words:
        before = 0
        for index, other_word in enumerate(other, 1):
            kept = longest[index]
            longest[index] = before + 1 if word == other_word else max(longest[index], longest[index - 1])
            before = kept
    return 2 * longest[-1] / (len(words) + len(other))


class Embedding:
    """Cosine similarity of the vectors of a sentence-transformers model, at least 0. The model is loaded when it is
    first used.

    Raises ValueError if the package or the model is missing.
    """

    def __init__(self, model: str) -> None:
        self.name = model
        self._model: Any = None

    def __call__(self, answer: str, right: str) -> float:
        if self._model is None:
            self._model = _loaded(self.name)
        first, other = np.asarray(self._model.encode([answer, right]), dtype=np.float64)
        length = np.linalg.norm(first) * np.linalg.norm(other)
        return max(0.0, float(first @ other / length)) if length else float(answer == right)


def _loaded(name: str) -> Any:
    from agentrl.schemas.installation import install_hint

    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ValueError(f"similarity: embedding needs sentence-transformers; {install_hint('retrieval')}") from None
    try:
        return SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"no sentence-transformers model at {name!r}: {str(error).splitlines()[0]}") from None


class PredictEpisode:
    """One prediction. It is right if it is like one of the observations that followed: 1[similarity >= 1 - tau]."""

    def __init__(self, environment: "Predict", task: Task) -> None:
        self.environment, self.task = environment, task
        self.opening = [Message(role=Role.USER, content=task.prompt)]
        self.tools = "[]"
        self.said: str | None = None

    async def step(self, message: Message) -> Step:
        self.said = message.content
        return Step(done=True)

    async def score(self) -> Score:
        prediction, similar = self.said, 0.0
        if prediction is not None:
            of = self.environment.similarity
            similar = await asyncio.to_thread(lambda: max(of(prediction, right) for right in truths(self.task)))
        success = prediction is not None and similar >= 1 - self.environment.tau - 1e-9
        state = {"said": prediction, "similarity": similar}
        return Score(success, (RewardComponent(name="predicted", value=float(success)),), state)

    async def close(self) -> None:
        pass


class Predict:
    """The environment; see the module's docstring."""

    name = "predict"
    version = "1"
    max_steps = 1
    replayable = True

    def __init__(
        self,
        tau: Annotated[
            float, Field(ge=0, lt=1, description="how far a prediction may be from what was observed, in similarity")
        ] = 0.2,
        similarity: Annotated[
            Literal["rouge", "embedding"], Field(description="ROUGE-L over words, or the cosine of embeddings")
        ] = "rouge",
        model: Annotated[
            Annotated[str, External("model")] | None,
            Field(description="a sentence-transformers folder or name, for similarity: embedding"),
        ] = None,
    ) -> None:
        if (similarity == "embedding") != (model is not None):
            raise ValueError(
                "predict: similarity embedding needs model, a sentence-transformers folder or name; rouge takes none"
            )
        self.tau = tau
        self.similarity: Callable[[str, str], float] = rouge_l if model is None else Embedding(model)

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        raise ValueError("tasks of predict are made of rollouts; use the stage tasks.predict, not tasks.generate")

    async def reset(self, task: Task) -> PredictEpisode:
        return PredictEpisode(self, task)

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """What was observed, or with probability ``noise`` nothing."""
        right = json.loads(task.ground_truth)
        prediction = "" if random.random() < noise else truths(task)[0] if right else ""
        yield Message(role=Role.ASSISTANT, content=prediction)

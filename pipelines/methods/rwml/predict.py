"""The stage that makes tasks of predicting what environments answer."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from pydantic import Field, model_validator

from agentrl.datastore.search.experience import render
from agentrl.environments import EnvironmentChoice
from agentrl.pipelines.handles import Tasks, Trajectories
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Trajectory

ASKED = "Result?"
"""How a prompt ends."""

USUAL = 0.5
"""Share of the answers of a tool from which on one of them is no surprise."""


class Predictions(NamedTuple):
    train: Tasks
    heldout: Tasks


class PredictConfig(StageConfig):
    env: EnvironmentChoice = Field(
        "predict", validate_default=True, description="what scores predictions: predict, with tau and similarity"
    )
    turns: int | None = Field(None, ge=0, description="turns before the action that are shown; None: all")
    observation_chars: int = Field(2000, ge=1, description="longer observations are left out")
    easy: float = Field(
        0.2,
        ge=0,
        le=1,
        description="share that is kept of triples whose observation stands in what is shown, or is the tool's usual "
        "answer",
    )
    heldout: float = Field(0.1, ge=0, lt=1, description="share of the tasks whose triples are kept for measuring")

    @model_validator(mode="after")
    def _env_can_be_made(self) -> "PredictConfig":
        self.env.make()
        return self


@dataclass(frozen=True)
class _Triple:
    """What happened before and the action, as a prompt, and what was observed."""

    row: Trajectory
    turn: int
    prompt: str
    observation: str
    tools: tuple[str, ...]

    @property
    def stands_there(self) -> bool:
        """Whether the observation can be copied from the prompt."""
        return re.search(rf"(?<!\w){re.escape(self.observation)}(?!\w)", self.prompt) is not None


@stage("tasks.predict", version=1)
def predict(context: Context, config: PredictConfig, trajectories: list[Trajectories]) -> Predictions:
    """World-model tasks (RWML): of each turn with calls, "history and action, then which observation?". Triples that
    are easy are thinned, equal ones come once, and one prompt with several observations has all of them as right
    answers. Rows of other splits than train are refused."""
    random = Random(f"predict-{context.seed}")
    counts: Counter[str] = Counter()
    triples = list(_all(trajectories, config, counts))
    usual = _usual(triples)
    asked: dict[str, list[_Triple]] = {}
    for triple in triples:
        if triple.stands_there or (triple.tools, triple.observation) in usual:
            counts["easy"] += 1
            if random.random() >= config.easy:
                continue
            counts["easy_kept"] += 1
        of_prompt = asked.setdefault(triple.prompt, [])
        counts["doubled"] += any(known_triple.observation == triple.observation for known_triple in of_prompt)
        of_prompt.append(triple)
    tasks: dict[str, list[Task]] = {"train": [], "heldout": []}
    measured = _measured({triples[0].row.task_id for triples in asked.values()}, config.heldout, context.seed)
    for of_prompt in asked.values():
        split = "heldout" if of_prompt[0].row.task_id in measured else "train"
        tasks[split].append(_task(of_prompt, str(config.env), split))
    every = [*tasks["train"], *tasks["heldout"]]
    counts["ambiguous"] = sum(isinstance(json.loads(task.ground_truth), list) for task in every)
    context.metrics.update(triples=len(triples), **{name: len(both) for name, both in tasks.items()})
    context.metrics.update({name: counts[name] for name in _COUNTED})
    if not tasks["train"]:
        raise ValueError(
            f"no triple is left of {len(triples)}: the rows call no tools, or all they answer is easy; give rows of an "
            "agent that calls tools, or raise easy"
        )
    return Predictions(*(context.tasks(both, name) for name, both in tasks.items()))


_COUNTED = ("easy", "easy_kept", "doubled", "ambiguous", "too_long", "not_trained")
"""What the metrics count of triples, and of rows that are not trained on."""


def _measured(sources: set[str], share: float, seed: int) -> set[str]:
    """So many of the tasks as ``share`` says, drawn by their ids: at least one, if there are two and a share."""
    drawn = sorted(sources, key=lambda name: (Random(f"{seed}-{name}").random(), name))
    return set(drawn[: max(1, round(share * len(drawn)))] if share and len(drawn) > 1 else [])


def _all(given: Sequence[Trajectories], config: PredictConfig, counts: Counter[str]) -> Iterator[_Triple]:
    for row in rows_of(given):
        if row.split != "train":
            raise ValueError(
                f"{row.trajectory_id} is of split {row.split}, and nothing is made of rows of tasks that policies "
                "are measured on; choose rows with trajectories.select, where: split = 'train'"
            )
        if NOT_TRAINED in row.tags:
            counts["not_trained"] += 1
            continue
        yield from _of(row, config, counts)


def _of(row: Trajectory, config: PredictConfig, counts: Counter[str]) -> Iterator[_Triple]:
    """The triples of a row: of each assistant message that calls tools, and what these answered."""
    turn_numbers = [number for number, message in enumerate(row.messages) if message.role is Role.ASSISTANT]
    for turn, number in enumerate(turn_numbers):
        action = row.messages[number]
        answers = []
        for message in row.messages[number + 1 :]:
            if message.role is not Role.TOOL:
                break
            answers.append(message.content)
        observation = "\n".join(answers).strip()
        if not action.tool_calls or not observation:
            continue
        if len(observation) > config.observation_chars:
            counts["too_long"] += 1
            continue
        first = turn_numbers[0] if config.turns is None else turn_numbers[max(0, turn - config.turns)]
        shown: list[Message] = [*row.messages[: turn_numbers[0]], *row.messages[first : number + 1]]
        prompt = f"{render(row.model_copy(update={'messages': shown}))}\n{ASKED}"
        yield _Triple(row, turn, prompt, observation, tuple(call.name for call in action.tool_calls))


def _usual(triples: Sequence[_Triple]) -> set[tuple[tuple[str, ...], str]]:
    """Tools, and what they answer more often than all else together."""
    of_tools = Counter(triple.tools for triple in triples)
    of_both = Counter((triple.tools, triple.observation) for triple in triples)
    return {both for both, times in of_both.items() if times > max(1, USUAL * of_tools[both[0]])}


def _task(triples: Sequence[_Triple], env: str, split: str) -> Task:
    first = triples[0]
    right = list(dict.fromkeys(triple.observation for triple in triples))
    digest = blake2b(json.dumps([first.prompt, right]).encode(), digest_size=8).hexdigest()
    return Task(
        task_id=f"predict-{digest}",
        env=env,
        split=split,
        level=first.row.level,
        prompt=first.prompt,
        verifier="similarity",
        ground_truth=json.dumps(right[0] if len(right) == 1 else right, ensure_ascii=False),
        metadata=json.dumps({"made_from": first.row.trajectory_id, "turn": first.turn, "task_id": first.row.task_id}),
    )

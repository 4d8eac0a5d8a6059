"""What a class of one's own returns by mistake is refused or said, with what to return instead."""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Literal

import pytest

from agentrl.environments.adapted import Plain
from agentrl.environments.base import Observation, Score
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall

CALL = ToolCall(id="c", name="turn", arguments="{}")


class Attempt:
    """One attempt whose methods return what ``RETURNS`` says."""

    def __init__(self, **returns: Any) -> None:
        for name, value in returns.items():
            setattr(self, name, lambda *arguments, value=value: value)


class Dial:
    """Tasks are numbered in each split, if ``numbered`` says how."""

    name, version = "dial", "1"
    returned: Any = None
    number: Callable[[str, int], str] = staticmethod("{}-{}".format)
    few = 100

    def tasks(self, sizes: dict[str, int], seed: int) -> Any:
        if self.returned is not None:
            return self.returned
        return {split: [self.task(split, n) for n in range(min(size, self.few))] for split, size in sizes.items()}

    def episode(self, task: Task) -> Attempt:
        return Attempt(score=True)

    def task(self, split: str, number: int) -> Task:
        name = type(self).number(split, number)
        return Task(task_id=name, env="dial", split="train", prompt=f"turn to {split} {number}")


class Raising(Dial):
    """Its tool raises, or its score if ``where`` says so."""

    tools = [{"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}}}]  # noqa: RUF012

    def __init__(self, where: Literal["call", "score"] = "call") -> None:
        self.where = where

    def task(self, split: str, number: int) -> Task:
        return super().task(split, number).model_copy(update={"tools": json.dumps(self.tools)})

    def episode(self, task: Task) -> Any:
        return Broken(self.where)

    def demonstrate(self, task: Task, noise: float, random: Random) -> Iterator[Message]:
        yield Message(role=Role.ASSISTANT, tool_calls=[CALL])
        yield Message(role=Role.ASSISTANT, content="done")


class Broken:
    def __init__(self, where: str) -> None:
        self.where = where

    def call(self, call: ToolCall) -> str:
        if self.where == "call":
            raise KeyError("dial")
        return "turned"

    def score(self, answer: str | None) -> Score:
        if self.where == "score":
            raise ZeroDivisionError("no turns")
        return Score(False)


class Listed(Dial):
    returned = [Task(task_id="1", env="dial", split="train", prompt="turn")]  # noqa: RUF012


class OtherSplits(Dial):
    returned = {"test": []}  # noqa: RUF012


class Texts(Dial):
    returned = {"train": ["turn"]}  # noqa: RUF012


class SameIds(Dial):
    number = staticmethod(lambda split, number: str(number))


class Leaking(Dial):
    few = 3

    def task(self, split: str, number: int) -> Task:
        return super().task(split, number).model_copy(update={"prompt": f"turn to {number}"})


def plain(**returns: Any) -> Plain:
    class Environment:
        def episode(self, task: Task) -> Attempt:
            return Attempt(**returns)

    return Plain(Environment(), Task(task_id="1", env="dial", split="train", prompt="turn to 3"), 1000)


@pytest.mark.parametrize(
    ("score", "reward", "success"),
    [
        (True, 1.0, True),
        (0.25, 0.25, True),
        (Score(True), 1.0, True),
        (Score(False), 0.0, False),
        (Score(True, [RewardComponent(name="a", value=0.5)]), 0.5, True),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_scores_that_are_taken(score: Any, reward: float, success: bool) -> None:
    logprobs = plain(score=score).score("answer")
    assert logprobs is not None
    assert (logprobs.reward, logprobs.success) == (reward, success)
    assert isinstance(logprobs.components, tuple)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ({"reward": 1.0}, r"score\(\) of Attempt returned {'reward': 1.0}; return a Score, a number, or None"),
        ((1.0, True), r"score\(\) of Attempt returned \(1.0, True\); return a Score"),
        ("right", r"score\(\) of Attempt returned 'right'; return a Score"),
        (float("nan"), "the reward is nan; values and weights of components are finite numbers"),
    ],
    ids=str,
)
def test_scores_that_are_refused(score: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        plain(score=score).score("answer")


def test_components_that_are_no_components_are_refused() -> None:
    with pytest.raises(TypeError, match=r"components are RewardComponent\(name=.*not \['right'\]"):
        Score(True, {"right": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "text"),
    [("moved", "moved"), ({"at": 3}, '{"at": 3}'), (3, "3"), (Observation("no", error=True), "no")],
    ids=str,
)
def test_a_call_may_return_what_a_typed_tool_may(returned: Any, text: str) -> None:
    """A text that a plain ``call`` returned was an error of the tool, and the policy learned that every call fails."""
    seen, _ = plain(call=returned).call(CALL)
    assert (seen.content, seen.error) == (text, returned == Observation("no", error=True))


def test_what_an_episode_opens_with() -> None:
    for opening in ("turn it", [Message(role=Role.USER, content="turn it")]):
        [message] = plain(opening=opening).begin().opening
        assert (message.role, message.content) == (Role.USER, "turn it")
    with pytest.raises(TypeError, match=r"opening\(\) of Attempt returned \['turn it'\]; return a list of Message, or"):
        plain(opening=["turn it"]).begin()
    assert json.loads(plain(opening="turn it").begin().tools) == []


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("Listed", r"returned a list; return a dict of a list of Task for each of train, dev, heldout"),
        ("OtherSplits", r"returned the splits test; return a dict"),
        ("Texts", r"returned 'turn' as a task; return lists of agentrl\.schemas\.task\.Task"),
        ("SameIds", r"4 ids of tasks of .*SameIds are those of several tasks, such as '0'.*in all splits"),
    ],
)
def test_tasks_that_are_refused(harness: Harness, env: str, message: str) -> None:
    sizes = {"train": 4, "dev": 2, "heldout": 4}
    with pytest.raises((TypeError, ValueError), match=message):
        harness.run(generate, {"env": {"type": f"{__name__}:{env}"}, **sizes})


def test_tasks_that_are_missing_or_in_two_splits_are_said(harness: Harness) -> None:
    sizes = {"train": 4, "dev": 2, "heldout": 3}
    with pytest.warns(UserWarning, match="Leaking") as caught:
        harness.run(generate, {"env": {"type": f"{__name__}:Leaking"}, **sizes})
    texts = [str(text.message) for text in caught]
    assert [text for text in texts if text.startswith("2 of 2 dev tasks of") and "of another split too" in text]
    assert [text for text in texts if text.startswith("3 of 3 heldout tasks of")]
    assert [text for text in texts if text.endswith("Leaking has 3 train tasks; 4 were asked for")]
    assert len(texts) == 3


def test_demonstrations_whose_tools_raise_or_that_all_fail_are_said(harness: Harness) -> None:
    tasks = harness.run(generate, {"env": {"type": f"{__name__}:Raising"}, "train": 3, "dev": 0, "heldout": 0})["train"]
    with pytest.warns(UserWarning, match="demonstrations") as caught:
        rows = harness.run(synthesize, tasks=tasks)["trajectories"].read()
    texts = [str(text.message) for text in caught]
    assert texts[0].startswith("tools raised in 3 of 3 demonstrations, and the expert read")
    assert f"; the first: {rows[0].trajectory_id} (`agentrl buffer show" in texts[0]
    assert texts[1].startswith("none of 3 demonstrations succeeded: check demonstrate() of the environment")
    assert rows[0].tags == ["tool_exceptions:1"]
    assert rows[0].messages[2].content == "turn failed: KeyError: 'dial'"


def test_an_environment_that_raises_in_rollouts_is_said_with_its_error(harness: Harness) -> None:
    """Every episode ended in ``env_error``, and the output of the run said nothing."""
    env = {"type": f"{__name__}:Raising", "where": "score"}
    tasks = harness.run(generate, {"env": env, "train": 3, "dev": 0, "heldout": 0})["train"]
    spoken = [demonstrate(Raising(), task, 0.0, 0, "t").messages for task in tasks.read()]
    model = harness.model(tiny_policy(spoken, 0, TinySize(context=128)).save)
    text = r"^env_errors 6: the environment raised, .*; the first is \S+: ZeroDivisionError: no turns$"
    with pytest.warns(UserWarning, match=text):
        made = harness.run(sample, {"samples": 2}, model=model, tasks=tasks)
    assert made.metrics["env_errors"] == 6


def test_the_split_of_a_task_is_that_under_which_it_was_returned(harness: Harness) -> None:
    made = harness.run(generate, {"env": {"type": f"{__name__}:Dial"}, "train": 2, "dev": 1, "heldout": 2})
    for split in ("train", "dev", "heldout"):
        assert {task.split for task in made[split].read()} == {split}


@pytest.fixture
def harness(tmp_path: Any) -> Harness:
    return Harness(tmp_path)

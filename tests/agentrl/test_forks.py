"""Episodes whose state is kept, gone back to or made again, in an environment of a folder outside the repository."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from architectures import lookup_tasks
from faulty_shop import task
from test_episodes import answers, play, policy, runner

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.adapted import protocol
from agentrl.environments.base import Episode, cut
from agentrl.environments.forks import DivergedError, fork, rebuild
from agentrl.environments.hosts import Host, Processes, Threads
from agentrl.models.policy import Policy
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall

__all__ = ["policy"]

CELLAR = '''
import random
import time

from agentrl.environments.base import Observation
from agentrl.environments.tools import tool


class Visit:
    """Bottles are taken from a shelf. A user asks for more, twice."""

    def __init__(self, task):
        self.left, self.asked = {"red": 2, "white": 1}, 0

    @tool
    def take(self, item: str) -> Observation:
        """Take a bottle."""
        if not self.left.get(item):
            return Observation("none left", error=True, reward=-1.0)
        self.left[item] -= 1
        return Observation(f"{self.left[item]} left", reward=0.5)

    @tool
    def leave(self) -> Observation:
        """Leave the cellar."""
        return Observation("bye", done=True)

    @tool
    def hang(self) -> str:
        """Never returns."""
        while True:
            time.sleep(0.05)

    def user(self, said):
        self.asked += 1
        return f"another one? {self.asked}" if self.asked < 3 else None

    def score(self, answer):
        return 3 - sum(self.left.values())

    def state(self):
        return {"left": self.left, "asked": self.asked}


class Kept(Visit):
    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)


class Cellar:
    name, version, visit = "cellar", "1", Visit

    def tasks(self, sizes, seed):
        return {}

    def episode(self, task):
        return self.visit(task)


class KeptCellar(Cellar):
    visit = Kept


class ReplayableCellar(Cellar):
    replayable = True


class SlowCellar(KeptCellar):
    def episode(self, task):
        time.sleep(1.5)
        return self.visit(task)


class Moody(Visit):
    @tool
    def take(self, item: str) -> str:
        """Take a bottle."""
        return str(random.random())


class MoodyCellar(ReplayableCellar):
    """Says that it is replayable, and is not."""

    visit = Moody
'''


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_cellar.py").write_text(CELLAR)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_cellar", None)


@contextlib.asynccontextmanager
async def host(processes: int) -> Any:
    where: Host = Processes(processes) if processes else Threads()
    try:
        yield where
    finally:
        await where.close()


def call(item: str, number: int = 0, name: str = "take") -> Message:
    arguments = json.dumps({"item": item})
    return Message(role=Role.ASSISTANT, tool_calls=[ToolCall(id=f"call_{number}", name=name, arguments=arguments)])


async def say(episode: Episode, messages: list[Message], *text: Message) -> list[Message]:
    """The conversation after these messages and their answers."""
    for message in text:
        step = await episode.step(message)
        messages = [*messages, message, *step.messages]
    return messages


async def left(episode: Episode) -> dict[str, int]:
    score = await episode.score()
    assert score is not None
    return score.state["left"]


@pytest.mark.parametrize("processes", [0, 3])
@pytest.mark.parametrize("name", ["KeptCellar", "ReplayableCellar"])
def test_a_fork_begins_in_the_state_of_its_parent_and_goes_its_own_way(name: str, processes: int) -> None:
    async def go() -> None:
        async with host(processes) as where:
            cellar = protocol(load_environment(f"my_cellar:{name}"), where)
            parent = await cellar.reset(task("wine"))
            messages = await say(parent, list(parent.opening), call("red"), Message(role=Role.ASSISTANT, content="so"))
            child = await fork(cellar, task("wine"), parent, messages)
            assert await left(child) == await left(parent) == {"red": 1, "white": 1}
            of_parent = await say(parent, messages, call("white", 1), Message(role=Role.ASSISTANT, content="and?"))
            assert [message.content for message in of_parent[-4:]] == ["", "0 left", "and?", "another one? 2"]
            assert (await left(parent), await left(child)) == ({"red": 1, "white": 0}, {"red": 1, "white": 1})
            grandchild = await fork(cellar, task("wine"), child, messages)
            await say(grandchild, messages, call("red", 1))
            assert (await left(child), await left(grandchild)) == ({"red": 1, "white": 1}, {"red": 0, "white": 1})
            for episode in (parent, child, grandchild):
                await episode.close()

    blocking(go())


@pytest.mark.parametrize("processes", [0, 2])
def test_what_cannot_be_made_again_is_refused(processes: int) -> None:
    async def go() -> None:
        async with host(processes) as where:
            plain = protocol(load_environment("my_cellar:Cellar"), where)
            episode = await plain.reset(task("wine"))
            with pytest.raises(ValueError, match=r"'cellar' cannot be made again: give them snapshot\(\) and restore"):
                await fork(plain, task("wine"), episode, episode.opening)
            await episode.close()
            moody = protocol(load_environment("my_cellar:MoodyCellar"), where)
            episode = await moody.reset(task("wine"))
            messages = await say(episode, list(episode.opening), call("red"))
            with pytest.raises(DivergedError, match="= True, but the answer to message 1 of task shop-0"):
                await fork(moody, task("wine"), episode, messages)
            with pytest.raises(DivergedError, match="the opening of task shop-0"):
                await rebuild(moody, task("beer"), messages)
            await episode.close()

    blocking(go())


def test_a_stage_that_relies_on_replays_tries_one_and_refuses_what_only_claims_to_be_replayable(policy: Policy) -> None:
    moody = load_environment("my_cellar:MoodyCellar")
    with pytest.raises(DivergedError, match=r"'cellar' says replayable = True.*take replayable away"):
        play(runner(policy, moody, processes=2), *["take red,leave"] * 4)
    rows = play(runner(policy, moody), *["take red,leave"] * 4)
    assert {row.termination for row in rows} == {Termination.ANSWERED}, "threads need no replay"
    kept = runner(policy, load_environment("my_cellar:ReplayableCellar"), processes=2)
    assert len(play(kept, *["take red,leave"] * 4)) == 4


@pytest.mark.parametrize("name", ["KeptCellar", "ReplayableCellar", "SlowCellar"])
def test_an_episode_goes_on_in_a_new_process_as_it_was(policy: Policy, name: str) -> None:
    acts = runner(policy, load_environment(f"my_cellar:{name}"), tool_s=1.0, processes=1)
    [row] = play(acts, "take red,so,hang,take red,take white,take white,leave")
    assert answers(row) == [
        "1 left",
        "hang took longer than 1 s and was stopped",
        "0 left",
        "0 left",
        "none left",
        "bye",
    ]
    assert json.loads(row.final_state) == {"left": {"red": 0, "white": 0}, "asked": 1}
    assert row.tags == ["tool_timeouts:1"]


def test_a_replay_that_diverges_in_a_new_process_ends_its_episode_alone(policy: Policy) -> None:
    acts = runner(policy, load_environment("my_cellar:MoodyCellar"), tool_s=1.0, processes=2)
    [row] = play(acts, "take red,hang,leave")
    assert row.termination is Termination.ENV_ERROR
    assert "says replayable = True, but call take of task shop-0 was" in row.tags[-1]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_plain_class_has_user_turns_rewards_of_steps_and_tools_that_end(policy: Policy, processes: int) -> None:
    acts = runner(policy, load_environment("my_cellar:Cellar"), processes=processes)
    talked, left_ = play(acts, "take red,take blue,a,b,c,d", "leave,take red")
    assert [message.content for message in talked.messages if message.role is Role.USER][1:] == [
        "another one? 1", "another one? 2",
    ]  # fmt: skip
    rewards = [message.reward for message in talked.messages if message.role is Role.ASSISTANT]
    assert rewards == [0.5, -1.0, None, None, None]
    assert (talked.n_tool_errors, talked.termination) == (1, Termination.ANSWERED)
    assert [message.content for message in left_.messages if message.role is Role.TOOL] == ["bye"]
    assert (left_.n_steps, left_.termination) == (1, Termination.ANSWERED)


def test_lookup_can_be_made_again() -> None:
    [entry] = lookup_tasks(1)
    lookup = load_environment("lookup")
    metadata = json.loads(entry.metadata)
    arguments = json.dumps({"who": metadata["start"], "rel": metadata["relations"][0]})
    asked = Message(role=Role.ASSISTANT, tool_calls=[ToolCall(id="c", name="find", arguments=arguments)])

    async def go() -> None:
        episode = await lookup.reset(entry)
        messages = await say(episode, list(episode.opening), asked)
        again = await fork(lookup, entry, episode, messages)
        assert await again.score() == await episode.score()

    asyncio.run(go())


@pytest.mark.parametrize("length", [0, 99, 100, 101, 5000])
def test_a_text_is_cut_once_and_says_how_long_it_was(length: int) -> None:
    text = "x" * length
    short = cut(text, 100)
    assert short == text if length <= 100 else short.endswith(f"\n[cut here: the whole has {length} characters]")
    assert len(short) == min(length, 100)
    assert cut(short, 100) is short


def test_observations_of_both_kinds_of_environment_are_cut_alike(policy: Policy) -> None:
    from faulty_shop import Broken, Shop

    [adapted] = play(runner(policy, Shop(), observation_chars=100), "flood")
    [own] = play(runner(policy, Broken(), observation_chars=100), "shout,bye", env="broken")
    texts = [answers(adapted)[0], own.messages[2].content]
    assert texts == [cut("x" * 50_000_000, 100), cut("y" * 150, 100)]
    assert [row.tags for row in (adapted, own)] == [["observations_cut:1"]] * 2

"""What every family of tasks keeps: disjoint splits, an expert that solves all, tools that refuse politely."""

import asyncio
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.environments import ENVIRONMENT, ENVIRONMENTS, load_environment
from agentrl.environments.family import Family
from agentrl.environments.forks import fork, rebuild
from agentrl.environments.scripted import Played, at_random, expert, play
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

NEED_FILES = {"repository"}
FAMILIES = [name for name in ENVIRONMENTS if name not in NEED_FILES and issubclass(ENVIRONMENT.find(name), Family)]
IN_SANDBOX = {"code"}
"""Their tools start processes."""
SIZES = {"train": 40, "heldout": 20}

every_family = pytest.mark.parametrize("name", FAMILIES)


def played(environment: Any, task: Task, random: Random, noise: float | None = None) -> tuple[Any, Played]:
    """The episode after a scripted policy: the expert, or the senseless one if there is no noise."""

    async def go() -> tuple[Any, Played]:
        episode = await environment.reset(task)
        turns = at_random(episode, random) if noise is None else expert(environment, episode, task, noise, random)
        return episode, await play(episode, turns, environment.max_steps)

    return asyncio.run(go())


def solved(environment: Any, tasks: list[Task], noise: float | None = None) -> float:
    episodes = [played(environment, task, Random(n), noise)[0] for n, task in enumerate(tasks)]
    return sum(asyncio.run(episode.score()).success for episode in episodes) / len(tasks)


@every_family
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), other=st.integers(0, 2**32), train=st.integers(0, 40), heldout=st.integers(1, 20))
def test_no_task_comes_twice_and_two_draws_share_no_id(
    name: str, seed: int, other: int, train: int, heldout: int
) -> None:
    environment = load_environment(name)
    splits = environment.tasks({"train": train, "heldout": heldout}, seed)
    tasks = [task for rows in splits.values() for task in rows]
    assert [len(rows) for rows in splits.values()] == [train, heldout]
    assert len({task.task_id for task in tasks}) == len({(task.prompt, task.metadata) for task in tasks}) == len(tasks)
    assert all(task.split == split for split, rows in splits.items() for task in rows)
    assert environment.tasks({"train": train, "heldout": heldout}, seed) == splits
    different = {"train": train, "heldout": heldout + (seed == other)}
    ids = {task.task_id for rows in environment.tasks(different, other).values() for task in rows}
    assert not ids & {task.task_id for task in tasks}


@every_family
def test_levels_are_those_asked_for(name: str) -> None:
    first = min(load_environment(name).levels)
    rows = load_environment(f'{name}{{"levels": [{first}]}}').tasks(SIZES, 0)["train"]
    assert {task.level for task in rows} == {first}
    with pytest.raises(ValueError, match="has no level 99"):
        load_environment(f'{name}{{"levels": [99]}}')


@every_family
def test_the_expert_solves_all_and_a_random_policy_next_to_nothing(name: str) -> None:
    environment = load_environment(name)
    tasks = environment.tasks({"train": 10 if name in IN_SANDBOX else 120}, 5)["train"]
    whole = sum(environment.levels.values())
    assert {task.level for task in tasks} >= {level for level, n in environment.levels.items() if n > whole / 100}
    assert solved(environment, tasks, noise=0.0) == 1.0
    assert solved(environment, tasks) < 0.05
    assert solved(environment, tasks, noise=0.9) < 0.9


@every_family
def test_the_expert_still_solves_most_after_faults(name: str) -> None:
    environment = load_environment(f'{name}{{"faults": {{"rate_limit": 0.05, "server_error": 0.05}}}}')
    tasks = 12 if name in IN_SANDBOX else 60
    rows = [demonstrate(environment, task, 0.0, 0, "t") for task in environment.tasks({"train": tasks}, 5)["train"]]
    assert sum(row.success for row in rows) > 0.6 * len(rows)
    texts = [message.content for row in rows for message in row.messages if message.role is Role.TOOL]
    assert any(text.startswith("429 too many requests; retry-after: ") for text in texts)
    assert sum(row.n_tool_errors for row in rows) == sum(text[:3] in ("429", "500", "502", "503") for text in texts) > 0


@every_family
def test_wrong_calls_are_answered_counted_and_change_nothing(name: str) -> None:
    environment = load_environment(name)
    for task in environment.tasks({"train": 5}, 2)["train"]:
        function = json.loads(task.tools)[0]["function"]
        calls = [
            ToolCall(id="a", name="no_such_tool", arguments="{}"),
            ToolCall(id="b", name=function["name"], arguments="[1]"),
            ToolCall(id="c", name=function["name"], arguments='{"no_such_argument": 1}'),
            ToolCall.model_construct(id="d", name=function["name"], arguments='{"broken'),
        ]

        async def go(task: Task = task, calls: list[ToolCall] = calls) -> None:
            episode = await environment.reset(task)
            step = await episode.step(Message(role=Role.ASSISTANT, tool_calls=calls))
            assert [message.tool_call_id for message in step.messages] == ["a", "b", "c", "d"]
            assert step.info["tool_errors"] == 4
            assert "no_such_tool; there are " in step.messages[0].content
            assert "no_such_argument" in step.messages[2].content
            assert not step.done
            await play(episode, expert(environment, episode, task, 0.0, Random(0)), environment.max_steps)
            assert (await episode.score()).success

        asyncio.run(go())


@every_family
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_episodes_fork_and_are_made_again(name: str, seed: int) -> None:
    """From any state that a random policy reaches, a fork and a replay go on as the episode itself does."""
    environment = load_environment(name)
    random = Random(seed)
    [task] = environment.tasks({"train": 1}, seed)["train"]

    async def go() -> None:
        episode = await environment.reset(task)
        seen = await play(episode, at_random(episode, random), random.randint(1, 4))
        if seen.termination == "answered":
            return
        whole = [*episode.opening, *seen.messages]
        last = max(n for n, message in enumerate(whole) if message.role is Role.ASSISTANT)
        before = whole if last + 1 < len(whole) else whole[:last]
        others = [await fork(environment, task, episode, before), await rebuild(environment, task, before)]
        turn = episode.advise()
        assert [other.advise() for other in others] == [turn, turn]
        steps = [await item.step(turn) for item in (others[0], episode, others[1])]
        assert steps[0] == steps[1] == steps[2]
        scores = [await item.score() for item in (others[0], episode, others[1])]
        assert scores[0] == scores[1] == scores[2]

    asyncio.run(go())


@every_family
def test_made_tasks_are_other_tasks_that_an_expert_solves(name: str) -> None:
    environment: Any = load_environment(name)
    tasks = environment.tasks({"train": 20}, 3)["train"]
    made = []
    if hasattr(environment, "vary"):
        made += [new for n, task in enumerate(tasks) if (new := environment.vary(task, Random(n)))]
    if hasattr(environment, "achieved"):
        rows = [demonstrate(environment, task, 0.8, 1, "t") for task in tasks]
        made += [new for row, task in zip(rows, tasks, strict=True) for new in environment.achieved(row, task)]
    if not made:
        pytest.skip(f"{name} makes no tasks of others")
    assert all(task.split == "train" and "+" in task.task_id for task in made)
    assert solved(environment, made, noise=0.0) == 1.0

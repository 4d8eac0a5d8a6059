"""``rooms``: the map, exact values, and what a walk has achieved."""

import asyncio
import json
from random import Random

import pytest

from agentrl.environments import load_environment
from agentrl.environments.rooms.environment import Rooms, RoomsConfig
from agentrl.environments.rooms.house import DOORS, house
from agentrl.environments.rooms.values import ANSWER, values
from agentrl.environments.scripted import play
from agentrl.rollouts.demonstrations import demonstrate, optimal_steps
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role

UNIFORM = {"left": 0.25, "right": 0.25, "tunnel": 0.25, ANSWER: 0.25}


def test_the_house_is_the_one_of_the_benchmark() -> None:
    pairs = house(48).pairs()
    assert sum(pairs.values()) == 48 * 47 == 2256
    assert (min(pairs), max(pairs)) == (1, 8)
    assert sum(far * count for far, count in pairs.items()) / 2256 == pytest.approx(3.74, abs=0.01)
    assert len(set(house(48).names)) == 48


def test_every_pair_is_a_task_and_there_are_no_more() -> None:
    splits = Rooms().tasks({"train": 1500, "dev": 256, "heldout": 500}, 0)
    assert len({task.prompt for rows in splits.values() for task in rows}) == 2256
    shares = [sum(task.level == 4 for task in rows) / len(rows) for rows in splits.values()]
    assert max(shares) - min(shares) < 0.02, "splits have the same levels"
    with pytest.raises(ValueError, match="ask for more of level"):
        Rooms().tasks({"train": 2257}, 0)


def tabular(episode: object, chances: dict[str, float], random: Random):
    while True:
        [action] = random.choices(list(chances), list(chances.values()))
        yield episode.saying("here") if action == ANSWER else episode.calling("go", door=action)


@pytest.mark.parametrize("slip", [0.0, 0.5])
def test_values_are_what_rollouts_estimate(slip: float) -> None:
    environment = Rooms(RoomsConfig(slip=slip))
    chances = {"left": 0.1, "right": 0.3, "tunnel": 0.4, ANSWER: 0.2}
    task = next(task for task in environment.tasks({"train": 50}, 0)["train"] if task.level == 1)
    start, goal = json.loads(task.metadata)["start"], json.loads(task.metadata)["goal"]
    exact = values(environment.house, goal, lambda room, goal: chances, environment.max_steps, slip)
    value = exact[environment.max_steps][environment.house.numbers[start]]
    random = Random(1)
    runs = 4000

    async def go() -> int:
        won = 0
        for _ in range(runs):
            episode = await environment.reset(task)
            await play(episode, tabular(episode, chances, random), environment.max_steps)
            won += (await episode.score()).success
        return won

    assert asyncio.run(go()) / runs == pytest.approx(value, abs=4 * (value * (1 - value) / runs) ** 0.5)


def test_values_by_hand() -> None:
    home = house(48)
    goal = home.names[7]
    follow = values(home, goal, lambda room, goal: expert_chances(room, goal), 12)
    ahead = home.distances(7)
    for left, row in enumerate(follow):
        assert row == [float(left > far) for far in ahead], "a shortest way of n doors needs n + 1 messages"
    once = values(home, goal, lambda room, goal: UNIFORM, 1)[1]
    assert once == [0.25 * (room == 7) for room in range(48)]
    with pytest.raises(ValueError, match="must add up to 1"):
        values(home, goal, lambda room, goal: {"left": 0.5}, 1)
    with pytest.raises(ValueError, match="takes \\['up'\\]"):
        values(home, goal, lambda room, goal: {"up": 1.0}, 1)


def expert_chances(room: str, goal: str) -> dict[str, float]:
    home = house(48)
    if room == goal:
        return {ANSWER: 1.0}
    return {home.shortest(home.numbers[room], home.numbers[goal]): 1.0}


def walk(environment: Rooms, task: Task, *doors: str):
    async def go():
        episode = await environment.reset(task)
        steps = [await episode.step(episode.calling("go", door=door)) for door in doors]
        steps.append(await episode.step(Message(role=Role.ASSISTANT, content="here")))
        return steps, await episode.score()

    return asyncio.run(go())


def test_a_walk_is_rewarded_by_how_much_nearer_it_comes() -> None:
    environment = Rooms()
    task = next(task for task in environment.tasks({"train": 100}, 0)["train"] if task.level == 2)
    home, where = environment.house, json.loads(task.metadata)
    room, goal = home.numbers[where["start"]], home.numbers[where["goal"]]
    first = home.shortest(room, goal)
    second = home.shortest(home.leads[room][DOORS.index(first)], goal)
    steps, score = walk(environment, task, first, second)
    assert [step.reward for step in steps] == [0.5, 0.5, None]
    assert (score.success, score.reward, score.state["subgoals"]) == (True, 1.0, [0, 1])
    _, halfway = walk(environment, task, first)
    assert (halfway.success, halfway.state["subgoals"]) == (False, [0, None])


def test_a_walk_that_failed_has_solved_the_task_of_where_it_ended() -> None:
    environment = Rooms()
    failed = [
        (row, task)
        for number, task in enumerate(environment.tasks({"train": 60}, 0)["train"])
        if not (row := demonstrate(environment, task, 0.9, number, "t")).success and row.n_tool_calls
    ]
    assert len(failed) > 20
    kept = 0
    for row, task in failed:
        for new in environment.achieved(row, task):
            doors = [call.parsed()["door"] for message in row.messages for call in message.tool_calls]
            kept += walk(environment, new, *doors)[1].success
            assert (
                new.level
                == environment.house.distances(environment.house.numbers[json.loads(new.ground_truth)])[
                    environment.house.numbers[json.loads(task.metadata)["start"]]
                ]
            )
    assert kept > 15


def test_signs_name_the_rooms_behind_the_doors() -> None:
    environment = Rooms(RoomsConfig(signs=True, levels=[2]))
    home = environment.house
    for task in environment.tasks({"train": 40}, 0)["train"]:
        where = json.loads(task.metadata)
        begin = f"{where['start']} to {where['goal']}? You are in "
        assert task.prompt.startswith(begin)
        seen = task.prompt.removeprefix(begin)
        row = demonstrate(environment, task, 0.0, 0, "t")
        for message in row.messages[1:-1]:
            if message.role is Role.ASSISTANT:
                [call] = message.tool_calls
                door = call.parsed()["door"]
                signs = dict(reversed(sign.split()) for sign in seen.split(". ")[1].split(", "))
                assert signs == {
                    door: home.names[home.leads[home.numbers[room_of(seen)]][n]] for n, door in enumerate(DOORS)
                }
            else:
                assert room_of(message.content) == signs[door]
                seen = message.content
        assert [new.level for new in environment.achieved(row, task)] == [1, 2]
        assert all(" You are in " in new.prompt for new in environment.achieved(row, task))


def test_an_expert_that_speaks_names_each_room_before_its_door() -> None:
    quiet, spoken = Rooms(), Rooms(RoomsConfig(spoken=True))
    tasks = spoken.tasks({"train": 40}, 0)["train"]
    assert tasks == quiet.tasks({"train": 40}, 0)["train"]
    for task in tasks:
        row = demonstrate(spoken, task, 0.3, 0, "t")
        texts = [message.content for message in row.messages if message.role is Role.ASSISTANT and message.tool_calls]
        heard = [message.content for message in row.messages if message.role is Role.TOOL]
        assert [f"{room}." for room in heard] == texts[: len(heard)]


def room_of(seen: str) -> str:
    return seen.split(". ")[0]


def test_slipping_rooms_cannot_be_made_again() -> None:
    assert load_environment("rooms").replayable
    assert not load_environment('rooms{"slip": 0.2}').replayable


def test_the_optimum_of_a_task_is_its_distance_and_the_answer() -> None:
    for task in Rooms().tasks({"train": 20}, 0)["train"]:
        assert optimal_steps(Rooms(), task) == task.level + 1

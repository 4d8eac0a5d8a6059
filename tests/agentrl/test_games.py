"""Games and worlds of other packages: MiniGrid, textarena and ScienceWorld, against the packages themselves.

`make test-adapters` installs them in an environment of its own, since a requirement of textarena is under GPL.
"""

import asyncio
import json
from random import Random
from typing import Any

import pytest
from scripted_engine import play

from agentrl.environments import load_environment
from agentrl.environments.adapted import protocol
from agentrl.environments.adapters.gymnasium import GymnasiumEnvironment
from agentrl.environments.adapters.seeds import OwnChance, seeded
from agentrl.environments.hosts import Threads
from agentrl.environments.scripted import NoExpertError, expert
from agentrl.environments.scripted import play as played
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination

SIZES = {"train": 6, "dev": 2, "heldout": 3}


def load(name: str, **settings: Any) -> Any:
    return load_environment(f"{name}{json.dumps(settings)}")


def demonstrated(environment: Any, task: Task, noise: float = 0.0) -> tuple[list[Message], Any]:
    """What the expert says and hears, and the score."""

    async def run() -> tuple[list[Message], Any]:
        adapted = protocol(environment, Threads())
        episode = await adapted.reset(task)
        turns = expert(environment, episode, task, noise, Random(7))
        row = await played(episode, turns, environment.max_steps)
        turns.close()
        return row.messages, await episode.score()

    return asyncio.run(run())


def solved_by_the_expert(environment: Any, noise: float = 0.0) -> int:
    return sum(demonstrated(environment, task, noise)[1].success for task in environment.tasks(SIZES, 0)["train"])


def test_seeds_are_in_one_split_and_in_one_draw() -> None:
    drawn = [seeded("x", "x", "go", "[]", SIZES, seed) for seed in (0, 1)]
    ids = [task.task_id for splits in drawn for tasks in splits.values() for task in tasks]
    assert len(ids) == len(set(ids)) == 22
    with pytest.raises(ValueError, match="1048577 tasks are more than the 1048576 seeds of one draw"):
        seeded("x", "x", "go", "[]", {"train": 2**20 + 1}, 0)


def test_an_episode_draws_what_it_would_draw_alone() -> None:
    import random

    import numpy as np

    def drawn(chance: OwnChance) -> tuple[float, float]:
        with chance():
            return random.random(), np.random.random()

    alone = OwnChance(3)
    expected = [drawn(alone) for _ in range(3)]
    ours, theirs, before = OwnChance(3), OwnChance(4), random.getstate()
    mixed = [(drawn(ours), drawn(theirs))[0] for _ in range(3)]
    assert mixed == expected
    assert random.getstate() == before
    with pytest.raises(KeyError), ours():
        raise KeyError
    assert random.getstate() == before, "also after a failure"


def test_a_world_that_gymnasium_does_not_know_is_refused_in_one_line() -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match=r"gymnasium refuses 'FrozenLak-v1' with options {}: .*doesn't exist"):
        GymnasiumEnvironment("FrozenLak-v1").tasks({"train": 1}, 0)
    with pytest.raises(ValueError, match=r"gymnasium refuses 'FrozenLake-v1' with options \{'ice': 1\}: .*'ice'"):
        GymnasiumEnvironment("FrozenLake-v1", {"ice": 1}).tasks({"train": 1}, 0)


@pytest.mark.adapters
class TestMiniGrid:
    def test_the_bot_solves_a_world_that_is_told_in_words(self) -> None:
        environment = load("minigrid", id="BabyAI-UnlockPickup-v0")
        splits = environment.tasks(SIZES, 0)
        messages, score = demonstrated(environment, splits["train"][0])
        assert score.success
        [reward] = [part.value for part in score.components]
        assert 0.1 <= reward < 1, "less for each step"
        seen = [message.content for message in messages if message.role is Role.TOOL]
        assert seen[0].startswith("Mission: pick up the ")
        assert "You see a locked " in seen[0] + seen[1] + seen[2]
        assert any(line.startswith("You carry a") and line.endswith("key.") for line in "\n".join(seen).split("\n"))
        assert solved_by_the_expert(environment) == 6
        assert solved_by_the_expert(environment, noise=0.1) >= 4, "after a mistake the bot plans again"

    def test_places_are_told_from_where_the_agent_stands(self) -> None:
        environment = load("minigrid", id="MiniGrid-Empty-5x5-v0")
        [task] = environment.tasks({"train": 1}, 0)["train"]
        way = ["forward", "forward", "right", "forward", "forward"]
        [row] = play(environment, task, *({"act": {"action": action}} for action in way))
        assert (row.success, row.n_steps, row.n_tool_errors) == (True, 5, 0)
        assert row.messages[0].content.endswith(
            "Mission: get to the green goal square.\nYou see a wall 1 step left.\nYou see a wall 3 steps right.\n"
            "You see a wall 3 steps forward.\nYou see a green goal 2 steps forward and 2 steps right.\n"
            "You carry nothing."
        )
        [row] = play(environment, task, {"act": {"action": "jump"}}, "enough")
        assert (row.success, row.reward, row.n_tool_errors) == (False, 0.0, 1)
        assert row.messages[2].content == "no action 'jump'; there are left, right, forward, pickup, drop, toggle, done"

    def test_equal_seeds_begin_alike(self) -> None:
        environment = load("minigrid", id="BabyAI-GoToLocal-v0")
        first, second = environment.tasks(SIZES, 1)["train"][:2]
        begun = [play(environment, task, "stop")[0].messages[0].content for task in (first, first, second)]
        assert begun[0] == begun[1] != begun[2]

    def test_without_a_bot_there_is_no_expert(self) -> None:
        environment = load("minigrid", id="MiniGrid-Empty-5x5-v0")
        with pytest.raises(NoExpertError, match="has no expert: the package has a bot for BabyAI's levels alone"):
            demonstrated(environment, environment.tasks({"train": 1}, 0)["train"][0])


@pytest.mark.adapters
class TestTextArena:
    def test_a_game_is_a_conversation(self) -> None:
        environment = load("textarena", id="GuessTheNumber-v0")
        [task] = environment.tasks({"train": 1}, 0)["train"]
        [row] = play(environment, task, "[10]", "ten", "[3]", "eleven", "twelve")
        texts = [(message.role.value, message.content) for message in row.messages]
        assert texts[0][0] == "user"
        assert "the number between 1 and 20 within 10 turns" in texts[0][1]
        assert texts[1:3] == [("assistant", "[10]"), ("user", "The target number is higher.")]
        assert "You attempted an invalid move" in texts[4][1]
        assert texts[-1][1].startswith("Invalid Move: "), "the second invalid move ends the game, and says so"
        assert (row.success, row.termination, row.tools) == (False, Termination.ANSWERED, "[]")
        assert 0 < row.reward < 1, "parts of a point for being near"
        assert json.loads(row.final_state)["turns"] == 5

    def test_the_expert_bisects(self) -> None:
        environment = load("textarena", id="GuessTheNumber-v0-hardcore")
        messages, score = demonstrated(environment, environment.tasks(SIZES, 0)["train"][0])
        assert score.success
        assert messages[0].content == "[25]"
        assert solved_by_the_expert(environment) == 6

    def test_games_beside_each_other_draw_their_own_numbers(self) -> None:
        environment = load("textarena", id="2048-v0")
        tasks = environment.tasks(SIZES, 0)["train"]
        moves = ["[left]", "[down]", "[right]", "[down]"] * 4
        alone = [[m.content for m in play(environment, task, *moves)[0].messages] for task in tasks[:2]]
        games = [environment.episode(task) for task in tasks[:2]]
        told: list[list[str]] = [[], []]
        for move in moves[:6]:
            for game, texts in zip(games, told, strict=True):
                texts.append(game.user(move).content)
        assert told == [texts[2:14:2] for texts in alone]

    @pytest.mark.parametrize(
        ("game", "message"),
        [
            (
                "TicTacToe-v0",
                "cannot play 'TicTacToe-v0' with one player: AssertionError: The number of",
            ),
            ("GuessANumber-v0", "ValueError: Environment GuessANumber-v0-raw not found"),
        ],
    )
    def test_what_cannot_be_played_is_refused_in_one_line(self, game: str, message: str) -> None:
        with pytest.raises(ValueError, match=message) as raised:
            load("textarena", id=game).tasks({"train": 1}, 0)
        assert "\n" not in str(raised.value)

    def test_other_games_have_no_expert(self) -> None:
        environment = load("textarena", id="FrozenLake-v0")
        with pytest.raises(NoExpertError, match="GuessTheNumber alone has one"):
            demonstrated(environment, environment.tasks({"train": 1}, 0)["train"][0])


@pytest.mark.adapters
class TestScienceWorld:
    def test_the_way_of_the_package_solves_its_task(self) -> None:
        environment = load("scienceworld", task="find-living-thing")
        splits = environment.tasks({"train": 3, "dev": 2, "heldout": 2}, 0)
        ids = [task.task_id for tasks in splits.values() for task in tasks]
        assert len(set(ids)) == 7
        task = splits["train"][0]
        messages, score = demonstrated(environment, task)
        assert (score.success, score.reward, score.state["score"]) == (True, 1.0, 1.0)
        rewards = [message.reward for message in messages if message.role is Role.ASSISTANT]
        assert rewards[-1] > 0
        assert sum(rewards) == pytest.approx(1 - 0.08, abs=0.1), "what the first look earns is no one's"

    def test_worlds_beside_each_other_are_their_own(self) -> None:
        environment = load("scienceworld", task="find-living-thing")
        [task] = environment.tasks({"train": 1}, 0)["train"]
        turns = [{"act": {"action": text}} for text in ("look around", "inventory", "fly to the moon")]
        rows = play(environment, task, *turns, "done", number=8)
        texts = [[message.content for message in row.messages] for row in rows]
        assert all(other == texts[0] for other in texts)
        assert texts[0][0].startswith("Your task is to find a(n) living thing.")
        assert texts[0][4].startswith("In your inventory, you see:")
        assert texts[0][6] == "No known action matches that input."
        assert (rows[0].success, rows[0].n_tool_errors) == (False, 1)
        [row] = play(environment, task, {"act": {"action": 3}}, {"jump": {}}, "done")
        assert row.n_tool_errors == 2

    def test_what_the_package_does_not_know_is_refused_in_one_line(self) -> None:
        with pytest.raises(ValueError, match="scienceworld has no task 'find-gold'; it has boil, "):
            load("scienceworld", task="find-gold").tasks({"train": 1}, 0)
        with pytest.raises(ValueError, match="scienceworld has no simplification 'hard'"):
            load("scienceworld", task="boil", simplification="hard").tasks({"train": 1}, 0)
        with pytest.raises(ValueError, match="train: 99 tasks are asked for, and boil has 14"):
            load("scienceworld", task="boil").tasks({"train": 99}, 0)

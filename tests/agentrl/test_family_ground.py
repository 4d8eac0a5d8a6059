"""The ground of families: typed tools, drawing, faults."""

import json
from collections import Counter
from random import Random
from typing import Annotated, Any, Literal

import pytest
from architectures import qwen
from faulty_shop import Speaker, task
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from agentrl.engines.base import Sampling
from agentrl.environments import ENVIRONMENT, load_environment
from agentrl.environments.base import Observation, Score
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.faults import Faults
from agentrl.environments.scripted import random_turn
from agentrl.environments.task_splits import Draft, draw, spread
from agentrl.environments.tools import ToolError, answer, offered, schemas, tool
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall


class Desk:
    @tool
    def book(
        self, room: Literal["red", "blue"], hours: Annotated[int, Field(ge=1, le=8)], guests: list[str] | None = None
    ) -> dict[str, object]:
        """Book a room.

        Rooms have doors: two each.

        room: its colour,
            as on the door
        hours: how long
        """
        return {"room": room, "hours": hours, "guests": guests}

    @tool
    def cancel(self, number: int) -> str:
        """Cancel a booking."""
        if number > 3:
            raise ToolError(f"there is no booking {number}")
        return "cancelled"

    @tool
    def say(self) -> Observation:
        """Nothing."""
        return Observation("no", error=True)


def ask(name: str, arguments: str) -> Observation:
    return answer(Desk(), ToolCall.model_construct(id="c", name=name, arguments=arguments))


def test_signature_and_docstring_give_the_schema() -> None:
    book, cancel, _ = [schema["function"] for schema in json.loads(schemas(Desk()))]
    assert book["description"] == "Book a room.\n\nRooms have doors: two each."
    assert book["parameters"]["properties"] == {
        "room": {"enum": ["red", "blue"], "type": "string", "description": "its colour, as on the door"},
        "hours": {"minimum": 1, "maximum": 8, "type": "integer", "description": "how long"},
        "guests": {"anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}], "default": None},
    }
    assert book["parameters"]["required"] == ["room", "hours"]
    assert cancel["description"] == "Cancel a booking."


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("book", '{"room": "red", "hours": 2}', '{"room": "red", "hours": 2, "guests": null}'),
        ("book", '{"room": "green", "hours": 9}', "book: room: Input should be 'red' or 'blue'; hours: "),
        ("book", '{"room": "red"}', "book: hours: Field required"),
        ("book", '{"room": "red", "hours": 1, "when": 3}', "book: when: Extra inputs are not permitted"),
        ("book", '{"room": "red", ', "book: the arguments are no JSON"),
        ("book", "[" * 200 + "]" * 200, "book: the arguments are no JSON: is nested 200 levels deep"),
        ("book", '"red"', "book takes an object of arguments"),
        ("cancel", '{"number": 9}', "there is no booking 9"),
        ("say", "{}", "no"),
        ("borrow", "{}", "no tool borrow; there are book, cancel, say"),
    ],
)
def test_arguments_are_checked(name: str, arguments: str, message: str) -> None:
    seen = ask(name, arguments)
    assert seen.content.startswith(message)
    assert seen.error == (not arguments.endswith("2}"))


def test_a_parameter_without_a_name_is_refused() -> None:
    class Loose:
        @tool
        def call(self, *anything: int) -> str:
            return ""

    with pytest.raises(TypeError, match=r"tool call takes \*anything: int"):
        offered(Loose)


@given(st.dictionaries(st.integers(1, 8), st.floats(0.01, 1), min_size=1), st.integers(0, 300))
def test_levels_are_spread_in_their_shares(shares: dict[int, float], size: int) -> None:
    levels = spread(shares, size)
    assert len(levels) == size
    for level, share in shares.items():
        assert abs(levels.count(level) - size * share / sum(shares.values())) < 1


def words(level: int, random: Random):
    while True:
        yield Draft(f"{level}-{random.randrange(50)}")


def finish(draft: Draft, task_id: str, split: str, level: int) -> Task:
    return draft.task(task_id, "words", split, level, "[]", "exact_match")


def test_a_draw_ends_if_there_are_no_more_tasks() -> None:
    splits = draw("words", {"train": 60, "heldout": 40}, 0, {1: 0.5, 2: 0.5}, words, finish)
    assert len({task.prompt for rows in splits.values() for task in rows}) == 100
    with pytest.raises(ValueError, match="heldout: 102 tasks of words ask for more of level"):
        draw("words", {"train": 60, "heldout": 42}, 0, {1: 0.5, 2: 0.5}, words, finish)


def test_faults_come_as_often_as_they_should_and_always_at_the_same_calls() -> None:
    faults = Faults(rate_limit=0.1, server_error=0.2, timeout=0.1, truncated=0.1)
    drawn = [faults.draw("task", number) for number in range(4000)]
    assert drawn == [faults.draw("task", number) for number in range(4000)]
    assert drawn[:50] != [faults.draw("other", number) for number in range(50)]
    result = Counter(drawn)
    for name, share in {"rate_limit": 0.1, "server_error": 0.2, "timeout": 0.1, "truncated": 0.1, None: 0.5}.items():
        assert result[name] / 4000 == pytest.approx(share, abs=0.025)
    assert Faults().draw("task", 0) is None
    with pytest.raises(ValidationError, match="all faults together are 1"):
        Faults(timeout=0.6, server_error=0.6)


def test_a_truncated_answer_says_so() -> None:
    seen = Faults.cut(Observation("abcdefghij"))
    assert seen == Observation("abcde\n[truncated; ask again for all of it]")


@given(st.integers())
def test_random_turns_fit_the_schema(seed: int) -> None:
    class Shown:
        opening = [Message(role=Role.USER, content="book 3 for Ann")]  # noqa: RUF012
        tools = schemas(Desk())

    turn = random_turn(Shown(), Random(seed))
    for call in turn.tool_calls:
        assert set(call.parsed()) <= {"room", "hours", "guests", "number"}


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "code", "sandbox": "unsafe"},
        {"type": "code", "sandbox": {"type": "docker", "image": "mine", "limits": {"cpu_s": 3}}},
        {"type": "math", "tool": "python", "sandbox": {"type": "bubblewrap", "limits": {"memory_mb": 99}}},
        {"type": "rooms", "size": 99, "faults": {"timeout": 0.1}},
        {"type": "service", "customer": {"engine": {"type": "openai", "model": "m", "api_key": "${KEY}"}}},
    ],
)
def test_the_name_in_a_row_gives_the_same_environment(settings: dict[str, object]) -> None:
    read = ENVIRONMENT.read(settings)
    again = load_environment(str(read))
    assert again.config == read.make().config
    assert str(ENVIRONMENT.read(str(read))) == str(read)
    assert again.config != load_environment(str(settings["type"])).config


class StallEpisode(ToolEpisode[Any]):
    @tool
    def price(self, item: str) -> int:
        """The price of an item."""
        return len(item)

    def outcome(self) -> Score:
        return Score(self.answer == "done", ())


class Stall(Family):
    name, version, max_steps = "stall", "1", 20
    levels = {1: 1.0}  # noqa: RUF012
    episode = StallEpisode

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__(config)


def test_faults_are_observations_and_counted_in_the_row() -> None:
    policy, faults = qwen(), Faults(server_error=0.3, truncated=0.2)
    stall = Stall(FamilyConfig(faults=faults))
    asked = task(",".join(["price fig"] * 15), "stall").model_copy(update={"tools": stall.tools})
    room = Sampling(max_turn_tokens=400, max_tokens=6000)
    [row] = RolloutRunner(policy, Speaker(policy.codec, 0), stall, room).run([Attempt(asked)], 0, ["r-0"])
    drawn = [faults.draw(asked.task_id, number) for number in range(15)]
    assert 0 < drawn.count("server_error") < 15
    assert (row.n_tool_calls, row.n_tool_errors) == (15, drawn.count("server_error"))
    assert row.tags == [f"faults:{15 - drawn.count(None)}"]
    answers = [message.content for message in row.messages if message.role is Role.TOOL]
    assert [text == "3" for text in answers] == [fault != "server_error" for fault in drawn]
    assert row.success

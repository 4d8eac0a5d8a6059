"""A curriculum opens levels when they are learned, draws each task of a level in turn, and goes on after a kill."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.online.curriculum import Curriculum, CurriculumConfig, EveryTask

LEVELS = [1] * 10 + [2] * 6 + [4] * 4
"""Levels of tasks need not be next to each other."""

ONE_AT_A_TIME = CurriculumConfig(start=(1.0,), gate=0.7, window=64, easier=0.0)


def test_a_scripted_table_of_successes_opens_levels_at_known_iterations() -> None:
    """Eight groups of eight an iteration. Of 64 rollouts, 52 are the first number whose interval begins above 0.7."""
    table = {1: [48, 52], 2: [40, 51, 56], 4: [51, 52]}
    levels, shares = [], []
    curriculum = Curriculum(ONE_AT_A_TIME, LEVELS, 0)
    for iteration in range(8):
        tickets = range(8 * iteration, 8 * iteration + 8)
        drawn = {LEVELS[curriculum.of(ticket)] for ticket in tickets}
        levels.append(drawn)
        shares.append(curriculum.shares())
        if iteration == 7:
            break
        [level] = drawn
        successes = table[level].pop(0)
        for ticket in tickets:
            right = successes // 8 + (ticket % 8 < successes % 8)
            curriculum.learn(ticket, [position < right for position in range(8)])
    assert levels[:7] == [{1}, {1}, {2}, {2}, {2}, {4}, {4}]
    assert levels[7] == {1, 2, 4}
    assert shares[7] == dict.fromkeys((1, 2, 4), pytest.approx(1 / 3))


def test_luck_opens_nothing() -> None:
    """All of eight succeed, or 75 % of a long window: the share is above the gate, the lower end is not."""
    for successes in ([True] * 8, [True, True, True, False] * 16):
        curriculum = Curriculum(ONE_AT_A_TIME, LEVELS, 0)
        curriculum.of(0)
        curriculum.learn(0, successes)
        assert curriculum.level == 1
    curriculum = Curriculum(ONE_AT_A_TIME, LEVELS, 0)
    curriculum.of(0)
    curriculum.learn(0, [True] * 16)
    assert curriculum.level == 2


def test_shares_by_hand() -> None:
    config = CurriculumConfig(start=(0.8, 0.2), easier=0.15, final=(0.5, 0.3, 0.2))
    curriculum = Curriculum(config, LEVELS, 0)
    matches = []
    for at in range(4):
        curriculum.at = at
        matches.append(curriculum.shares())
    assert matches == [
        {1: 0.8, 2: 0.2},
        {1: 0.15, 2: pytest.approx(0.68), 4: pytest.approx(0.17)},
        {1: 0.075, 2: 0.075, 4: pytest.approx(0.85)},
        {1: 0.5, 2: 0.3, 4: 0.2},
    ]
    drawn = Counter(LEVELS[curriculum.of(ticket)] for ticket in range(4000))
    assert [drawn[level] / 4000 for level in (1, 2, 4)] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_each_task_of_a_level_comes_once_before_any_comes_again() -> None:
    curriculum = Curriculum(ONE_AT_A_TIME, LEVELS, 3)
    assert sorted(curriculum.of(ticket) for ticket in range(10)) == list(range(10))
    assert sorted(curriculum.of(ticket) for ticket in range(10, 20)) == list(range(10))
    assert [curriculum.of(ticket) for ticket in range(10)] != list(range(10))


def test_tasks_outside_the_band_sit_out_by_a_scripted_table() -> None:
    """Of four tasks one always fails and one always succeeds: each rests for two turns, and is then tried again. A task
    whose rate comes back into the band rests no more."""
    config = CurriculumConfig(start=(1.0,), band=(0.2, 0.8), rest=2)
    curriculum = Curriculum(config, [1] * 4, 0)
    rates = {0: 0, 1: 8, 2: 4, 3: 2}
    blocks = [[0] * 4 for _ in range(3)]
    for ticket in range(12):
        task = curriculum.of(ticket)
        blocks[min(2, ticket // 4)][task] += 1
        if ticket == 9:
            rates[0] = 4
        curriculum.learn(ticket, [position < rates[task] for position in range(8)])
    assert blocks[0] == [1, 1, 1, 1], "nothing is known at first"
    assert blocks[1][0] == blocks[1][1] == 0, "two turns of the level pass"
    assert blocks[1][2] == blocks[1][3] == 2
    assert blocks[2] == [1, 1, 1, 1]
    assert curriculum.state()["rests"] == [(1, 2)]
    assert curriculum.level == 1


def test_tasks_that_all_rest_are_drawn_all_the_same() -> None:
    curriculum = Curriculum(CurriculumConfig(start=(1.0,), band=(0.2, 0.8), rest=3), [1, 1, 1], 0)
    for ticket in range(9):
        curriculum.of(ticket)
        curriculum.learn(ticket, [False] * 8)
    assert len(curriculum.state()["rests"]) == 3


def test_a_warm_up_draws_no_higher_level() -> None:
    """Three iterations of four tickets stay at levels 1 and 2, although level 2 is learned in the first one."""
    config = CurriculumConfig(start=(0.5, 0.5), gate=0.05, window=8, easier=0.1, warmup=(3, 2))
    curriculum = Curriculum(config, LEVELS, 0, size=4)
    drawn = []
    for ticket in range(60):
        drawn.append(LEVELS[curriculum.of(ticket)])
        curriculum.learn(ticket, [True] * 8)
    assert set(drawn[:12]) == {1, 2}
    assert curriculum.at == 3
    assert 4 in drawn[12:]
    only = Curriculum(CurriculumConfig(start=(1.0,), warmup=(3, 1)), LEVELS, 0, size=4)
    only.at = 2
    assert {LEVELS[only.of(ticket)] for ticket in range(12)} == {1}, "what is open lies above the warm-up"
    with pytest.raises(ValueError, match=r"draws no level above 1, and the lowest of the tasks is 2; raise its level"):
        Curriculum(CurriculumConfig(warmup=(3, 1)), [2, 3], 0)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=30),
    st.integers(0, 29),
    st.sampled_from([{}, {"band": (0.2, 0.8), "rest": 1, "warmup": (2, 1)}]),
)
def test_a_restored_curriculum_draws_what_the_other_one_draws(
    outcomes: list[list[bool]], kill: int, more: dict[str, Any]
) -> None:
    config = CurriculumConfig(start=(0.6, 0.4), gate=0.3, window=16, easier=0.2, **more)
    whole, killed = Curriculum(config, LEVELS, 1), Curriculum(config, LEVELS, 1)
    for ticket, successes in enumerate(outcomes):
        if ticket == kill:
            state = json.loads(json.dumps(killed.state()))
            killed = Curriculum(config, LEVELS, 1)
            killed.restore(state)
        assert {item.of(ticket) for item in (whole, killed)} == {whole.of(ticket)}
        for item in (whole, killed):
            item.of(ticket + 1)  # under way
            item.learn(ticket, successes)
        assert whole.state() == killed.state()


def test_a_ticket_of_which_there_are_rollouts_keeps_its_task() -> None:
    curriculum = Curriculum(ONE_AT_A_TIME, LEVELS, 0)
    curriculum.take(0, 17)
    assert curriculum.of(0) == 17
    assert curriculum.is_drawn(0)
    assert not curriculum.is_drawn(1)


def test_without_a_curriculum_every_task_comes_in_turn() -> None:
    draws = EveryTask(5, 0)
    first = [draws.of(ticket) for ticket in range(10)]
    assert sorted(first[:5]) == sorted(first[5:]) == list(range(5))
    assert first == [EveryTask(5, 0).of(ticket) for ticket in range(10)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"start": [0.5, 0.2]}, "add up to 0.7"),
        ({"final": [1.5, -0.5]}, "shares are not negative"),
        ({"start": [0, 1]}, "the first share is 0"),
        ({"gate": 1.0}, "less than 1"),
        ({"band": [0.8, 0.2]}, "the lower one first, such as"),
        ({"rest": 3}, "rest is for tasks outside of a band, and there is none"),
        ({"warmup": [0, 1]}, "with at least one iteration"),
    ],
)
def test_shares_that_cannot_be_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CurriculumConfig.model_validate(config)


def test_settings_are_written_and_read_again() -> None:
    for config in (CurriculumConfig(), CurriculumConfig(band=(0.2, 0.8), rest=1, warmup=(3, 1))):
        assert CurriculumConfig.model_validate(config.model_dump()) == config


def test_final_shares_are_those_of_the_levels_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"draw.final has 2 shares, and the tasks have 3 levels \(1, 2, 4\)"):
        Curriculum(CurriculumConfig(final=(0.5, 0.5)), LEVELS, 0)

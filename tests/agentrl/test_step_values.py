"""Values of states by hand, and the search for the turn at which a row was lost."""

import math
from collections.abc import Callable
from random import Random

import pytest

from agentrl.advantages.turns import progress_weights
from agentrl.pipelines.methods.slicing.estimates import StateValue, at_the_end, estimate, first_fall
from agentrl.schemas.step_value import StepValue
from agentrl.training.weights import without_losses


def test_three_hops_that_succeed_with_probability_seven_tenths_each() -> None:
    """v = .343, .49, .7 before the three turns: exact shares of 1,000 continuations."""
    for hops, share in ((3, 343), (2, 490), (1, 700)):
        result = estimate([1.0] * share + [0.0] * (1000 - share), [hops] * 1000)
        assert result.value == pytest.approx(0.7**hops)
        assert result.low < 0.7**hops < result.high
        assert result.n == 1000


def test_discounts_hard_labels_and_rewards_beyond_one() -> None:
    assert estimate([1.0, 1.0, 0.0, 0.0], [1, 3, 2, 2], gamma=0.5).value == pytest.approx((0.5 + 0.125) / 4)
    assert estimate([0.0, 0.25], [1, 1], hard=True) == StateValue(1.0, 2, 1.0, 1.0)
    assert estimate([0.0, 0.0], [1, 1], hard=True).value == 0.0
    mean, n, low, high = estimate([1.0, 3.0], [1, 1])
    assert (mean, n) == (2.0, 2)
    assert (high - mean) == pytest.approx(mean - low) == pytest.approx(1.959964 * math.sqrt(2) / math.sqrt(2))
    assert at_the_end(0.5) == StateValue(0.5, 1, 0.5, 0.5)


def search(turns: int, reward: float, value: Callable[[int], float]) -> tuple[int | None, list[int]]:
    """What a search finds, and the boundaries that it asked for."""
    looking, asked = first_fall(turns, reward), list[int]()
    boundary = next(looking)
    while True:
        asked.append(boundary)
        try:
            boundary = looking.send(value(boundary))
        except StopIteration as end:
            return end.value, asked


@pytest.mark.parametrize("turns", range(1, 20))
def test_bisection_finds_the_turn_that_lost(turns: int) -> None:
    for lost in range(turns):
        result, asked = search(turns, 0.0, lambda boundary, lost=lost: 0.8 if boundary <= lost else 0.1)
        assert result == lost
        assert len(asked) == len(set(asked)) <= 2 + math.ceil(math.log2(turns))


def test_a_planted_error_is_found_within_five_evaluations_in_95_percent_of_rows() -> None:
    """Turn 6 of 9, values from eight continuations each."""
    random, right = Random(0), 0

    def noisy(boundary: int) -> float:
        chance = 0.8 if boundary <= 6 else 0.05
        return sum(random.random() < chance for _ in range(8)) / 8

    for _ in range(400):
        result, asked = search(9, 0.0, noisy)
        right += result == 6 and len(asked) <= 5
    assert right / 400 >= 0.95


def test_a_value_that_recovers_is_not_the_turn_that_lost() -> None:
    values = [1.0, 1.0, 0.2, 1.0, 1.0, 0.1, 0.1, 0.0, 0.0]
    result, _ = search(8, 0.0, values.__getitem__)
    assert result == 4
    dip = [1.0, 1.0, 1.0, 1.0, 0.2, 1.0, 1.0, 0.1, 0.0]  # bisection looks at the dip first
    assert search(8, 0.0, dip.__getitem__)[0] == 6


def test_nothing_is_blamed_if_nothing_was_lost() -> None:
    assert search(5, 1.0, lambda _: 0.5) == (None, [0])
    assert search(5, 0.0, lambda _: 0.0) == (None, [0])


def step(turn: int, start: int, end: int, v: float, q: float, high: float) -> StepValue:
    fields = {"trajectory_id": "a", "n": 8, "low": 0.0, "by": "continuation", "policy": "p"}
    return StepValue(turn=turn, token_start=start, token_end=end, v=v, q=q, high=high, **fields)


def test_what_turns_add_is_their_advantage_and_turns_that_lose_are_not_copied() -> None:
    steps = [step(0, 1, 3, 0.5, 0.75, 0.9), step(2, 5, 6, 0.75, 0.0, 0.3)]
    assert progress_weights(7, steps) == [0, 0.25, 0.25, 0, 0, -0.75, 0]
    assert without_losses([1.0] * 7, steps).tolist() == [1, 1, 1, 1, 1, 0, 1]

"""Measures of scores as ranks and as probabilities."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.statistics.calibration import auc, auc_within, brier, calibration, ece


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=30))
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[int, bool]]) -> None:
    scores, outcomes = [score / 4 for score, _ in rows], [outcome for _, outcome in rows]
    pairs = [*product([score for score, won in rows if won], [score for score, won in rows if not won])]
    counted = [1.0 if high > low else 0.5 if high == low else 0.0 for high, low in pairs]
    expected = sum(counted) / len(counted) if counted else None
    assert auc(scores, outcomes) == (None if expected is None else pytest.approx(expected))


def test_auc_within_groups_is_blind_to_easy_groups() -> None:
    """Scores that say only which task is easy are at one half in each."""
    scores, outcomes = [0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.5], [True, True, False, True, False, False, True]
    tasks = ["easy"] * 3 + ["hard"] * 3 + ["solved"]
    assert auc(scores[:6], outcomes[:6]) == pytest.approx((2 * (2 + 0.5) + 0.5 * 2) / 9)
    assert auc_within(scores, outcomes, tasks) == [0.5, 0.5]


def test_calibration_by_hand() -> None:
    scores, outcomes = [0.05, 0.15, 0.12, 1.0, 0.95], [0.0, 1.0, 0.0, 1.0, 1.0]
    squares = [0.05**2, 0.85**2, 0.12**2, 0.0, 0.05**2]
    assert brier(scores, outcomes) == pytest.approx(sum(squares) / 5)
    assert brier([0.6] * 5, outcomes) == pytest.approx(0.6 * 0.4), "that of the base rate is the variance"
    bins = calibration(scores, outcomes)
    assert [(row.low, row.rows) for row in bins] == [(0.0, 1), (0.1, 2), (0.9, 2)]
    assert [row.score for row in bins] == pytest.approx([0.05, 0.135, 0.975])
    assert [row.outcome for row in bins] == [0.0, 0.5, 1.0]
    assert ece(bins) == pytest.approx((0.05 + 2 * (0.5 - 0.135) + 2 * 0.025) / 5)

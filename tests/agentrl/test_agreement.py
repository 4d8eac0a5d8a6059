"""Agreement of raters, against numbers computed by hand and published ones."""

import pytest

from agentrl.statistics.agreement import alpha, alpha_with_interval, kappa, kappa_with_interval

KRIPPENDORFF = """
1 2 3 3 2 1 4 1 2 . . .
1 2 3 3 2 2 4 1 2 5 . 3
. 3 3 3 2 3 4 2 2 5 1 .
1 2 3 3 2 4 4 1 2 5 1 .
"""
"""Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability", C: four observers, twelve units."""


def units() -> list[list[int]]:
    observers = [line.split() for line in KRIPPENDORFF.strip().splitlines()]
    return [[int(answer) for answer in unit if answer != "."] for unit in zip(*observers, strict=True)]


def test_kappa_by_hand() -> None:
    cells = {("yes", "yes"): 20, ("yes", "no"): 5, ("no", "yes"): 10, ("no", "no"): 15}
    assert kappa(cells) == pytest.approx((0.7 - 0.5) / 0.5)  # chance: 25/50 * 30/50 + 25/50 * 20/50
    three = {("a", "a"): 2, ("b", "b"): 1, ("c", "c"): 1, ("a", "b"): 1, ("c", "a"): 1}
    assert kappa(three) == pytest.approx((4 / 6 - 13 / 36) / (1 - 13 / 36))  # 3*3 + 1*2 + 2*1 of 36
    assert kappa({("a", "a"): 3}) is None
    assert kappa({}) is None
    assert kappa({(True, False): 1, (False, True): 1}) == pytest.approx(-1)


def test_alpha_is_the_published_one() -> None:
    assert alpha(units()) == pytest.approx(0.743, abs=5e-4)
    assert alpha(units(), numbers=True) == pytest.approx(0.849, abs=5e-4)


def test_alpha_by_hand() -> None:
    # values a a a b: observed 2 of 4 pairable values differ, 1/2; expected 2 * 3 * 1 / (4 * 3) = 1/2
    assert alpha([["a", "a"], ["a", "b"]]) == pytest.approx(0)
    assert alpha([["a", "a"], ["b", "b"]]) == 1
    assert alpha([["a", "a"], ["a", "a"], ["b"]]) is None
    assert alpha([]) is None


def test_intervals_hold_the_value_and_narrow_with_more_units() -> None:
    few, many = alpha_with_interval(units()), alpha_with_interval(units() * 20)
    assert few["low"] < few["value"] < few["high"] <= 1
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 2
    assert (few["units"], many["units"]) == (11, 220)
    assert alpha_with_interval(units()) == few  # the seed says which samples
    pairs = [("up", "up")] * 20 + [("up", "down")] * 5 + [("down", "up")] * 10 + [("down", "down")] * 15
    of_two = kappa_with_interval(pairs)
    assert of_two["value"] == pytest.approx(0.4)
    assert of_two["low"] < 0.4 < of_two["high"]
    assert of_two["agreed"] == 0.7
    # the standard error of kappa is 0.128 here (Fleiss, Cohen and Everitt 1969)
    assert of_two["high"] - of_two["low"] == pytest.approx(2 * 1.96 * 0.128, rel=0.1)
    assert kappa_with_interval([])["value"] is None
    assert alpha_with_interval([["a", "a"]])["low"] is None

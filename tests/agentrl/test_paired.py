"""Bootstrap means and paired differences, against closed forms."""

from math import sqrt

import numpy as np
import pytest

from agentrl.statistics import paired
from agentrl.statistics.paired import difference, pooled


def run(outcomes: list[float], first: int = 0) -> dict[int, float]:
    return dict(enumerate(outcomes, first))


def test_the_interval_of_one_run_is_that_of_a_mean() -> None:
    random = np.random.default_rng(0)
    outcomes = random.integers(0, 2, 400).astype(float)
    result = pooled([run(outcomes.tolist())])
    error = outcomes.std() / sqrt(400)
    assert result.mean == pytest.approx(outcomes.mean())
    assert (result.low, result.high) == pytest.approx(
        (result.mean - 1.96 * error, result.mean + 1.96 * error), abs=0.25 * error
    )


def test_seeds_that_differ_widen_the_interval_of_their_mean() -> None:
    same = pooled([run([1.0, 0.0] * 50)] * 4)
    differ = pooled([run([float(share > position / 100) for position in range(100)]) for share in (0.2, 0.4, 0.6, 0.8)])
    assert same.mean == differ.mean == 0.5
    assert differ.high - differ.low > 1.5 * (same.high - same.low)


def test_runs_of_other_tasks_are_pooled_too() -> None:
    result = pooled([run([1.0] * 30), run([0.0] * 10, first=100)])
    assert result.mean == 0.75
    assert result.low <= 0.75 <= result.high


def test_pairing_by_task_sees_what_two_intervals_cannot() -> None:
    random = np.random.default_rng(1)
    before = (random.random(300) < 0.5).astype(float)
    after = before.copy()
    after[np.flatnonzero(before == 0)[:15]] = 1.0  # 15 tasks gained, none lost
    result = difference([run(before.tolist())], [run(after.tolist())])
    assert (result.mean, result.gained, result.lost, result.tasks) == (pytest.approx(0.05), 15, 0, 300)
    assert result.shown
    error = (after - before).std() / sqrt(300)
    assert (result.high - result.low) == pytest.approx(2 * 1.96 * error, rel=0.15)
    apart = [pooled([run(item.tolist())]) for item in (before, after)]
    assert apart[0].high > apart[1].low, "the intervals of both overlap"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "tasks", "shown"), [(1, 1, False), (4, 16, False), (4, 100, False), (6, 100, True)]
)
def test_few_tasks_that_changed_show_nothing_whatever_the_interval_says(changed: int, tasks: int, shown: bool) -> None:
    result = difference([dict.fromkeys(range(tasks), 0.0)], [{n: float(n < changed) for n in range(tasks)}])
    assert result.gained == changed
    assert result.shown == shown


def test_no_difference_is_not_shown_in_95_of_100_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage: two policies of equal skill, tasks of different difficulty."""
    monkeypatch.setattr(paired, "RESAMPLES", 1000)  # of 4000: whether an interval leaves out 0 hardly depends on it
    random = np.random.default_rng(2)
    false_alarms = 0
    for _ in range(100):
        skill = random.random(200)
        a, b = ((random.random(200) < skill).astype(float).tolist() for _ in range(2))
        false_alarms += difference([run(a)], [run(b)]).shown
    assert false_alarms <= 12  # 5 expected; 12 or more have a probability below 0.5 %


def test_only_shared_tasks_are_paired_and_the_rest_is_counted() -> None:
    result = difference([run([1.0, 0.0, 1.0])], [run([1.0, 1.0], first=1)])
    assert (result.tasks, result.unshared, result.gained, result.lost) == (2, 1, 1, 0)
    with pytest.raises(ValueError, match="share no task"):
        difference([run([1.0])], [run([1.0], first=5)])

"""The words for arms of benchmarks, from planted outcomes."""

import json

import pytest

from benchmarks.arms import Arm, Solved, Spent, gain, learned, measured, table

TASKS = 256


def solved(share: float, sampled: float | None = None) -> Solved:
    """Solves the first of the tasks, as many as this share, at its best temperature."""
    best = {str(n): float(n < share * TASKS) for n in range(TASKS)}
    plain = best if sampled is None else {str(n): float(n < sampled * TASKS) for n in range(TASKS)}
    return Solved(plain, best, best, 0.3)


def arms(**shares: float | Solved) -> dict[str, Arm]:
    made = {}
    for name, share in shares.items():
        made[name] = Arm(name)
        for _ in range(2):
            made[name].add(share if isinstance(share, Solved) else solved(share), Spent(sampled=100))
    return made


@pytest.mark.parametrize(
    ("warm", "baseline", "method", "message", "met"),
    [
        (0.2, 0.6, 0.8, "adds (target", True),
        (0.2, 0.6, 0.6, "none (target", False),
        (0.2, 0.2, 0.2, "cannot tell (the baseline itself gains nothing)", False),
        (0.2, 0.6, 0.4, "worse (target", False),
        (0.6, 0.2, 0.4, "cannot tell (baseline is worse than warm, and this no better)", False),
    ],
)
def test_a_method_has_a_word(
    warm: float, baseline: float, method: float, message: str, met: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    result = arms(warm=warm, baseline=baseline, method=method)
    assert gain("this", result, "baseline", "method") is met
    printed = capsys.readouterr().out
    assert f"over baseline, each at its best temperature: {message}" in printed
    assert "this: 1.00 of the sampled tokens of baseline (target within 15%): met" in printed


def test_a_method_that_costs_more_does_not_meet_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    result = arms(warm=0.2, baseline=0.6, method=0.8)
    result["method"].costs[0] = Spent(sampled=200)
    assert not gain("this", result, "baseline", "method")
    assert "this: 1.50 of the sampled tokens of baseline (target within 15%): MISSED" in capsys.readouterr().out


def test_without_a_start_nothing_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    gain("this", arms(rollouts=0.6, search=0.6), "rollouts", "search")
    assert "cannot tell (the baseline itself gains nothing)" in capsys.readouterr().out


def test_the_table_tells_learning_from_sharpening(capsys: pytest.CaptureFixture[str]) -> None:
    result = arms(warm=solved(0.6, sampled=0.3), sharper=solved(0.6, sampled=0.6), better=solved(0.8, sampled=0.4))
    words = {name: learned(result, "warm", arm) for name, arm in result.items()}
    assert words == {"warm": "-", "sharper": "sharpens", "better": "adds"}
    table(result)
    assert "0.602 at 0.3" in capsys.readouterr().out


def test_the_temperature_is_chosen_on_dev_tasks_alone() -> None:
    asked = []

    def play(tasks: list[str], temperature: float) -> dict[str, float]:
        asked.append((tasks[0], temperature))
        return {task: float(temperature == 0.6 if task == "dev" else temperature == 0) for task in tasks}

    result = measured(play, ["dev"], ["judged"])
    assert result == Solved({"judged": 0.0}, {"judged": 1.0}, {"judged": 0.0}, 0.6)
    assert asked[4:] == [("judged", 1.0), ("judged", 0.0), ("judged", 0.6)]


def test_an_arm_is_kept_and_restored() -> None:
    [arm], again = arms(warm=0.2).values(), Arm("warm")
    again.restored(json.loads(json.dumps(arm.kept())))
    again.restored(json.loads(json.dumps([{"t": 1.0}, vars(Spent(calls=2))])))
    assert again.solved == [arm.solved[-1], {"t": 1.0}]
    assert again.spent == Spent(sampled=100, calls=2)

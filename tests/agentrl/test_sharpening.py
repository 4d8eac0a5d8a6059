"""The words for what training did, from planted counts."""

import pytest

from agentrl.statistics.paired import Difference, mcnemar
from agentrl.statistics.sharpening import MARGIN, Learned, judged, over_baseline, paired, said_p


def of(gained: int, lost: int, tasks: int) -> Difference:
    """The difference if these tasks went from failure to success, and back."""
    before = {n: float(gained <= n < gained + lost) for n in range(tasks)}
    after = {n: float(n < gained) for n in range(tasks)}
    return paired([before], [after])


@pytest.mark.parametrize(
    ("best", "sampled", "word"),
    [
        ((37, 0, 256), (40, 10, 256), Learned.ADDS),
        ((8, 5, 64), (12, 2, 64), Learned.SHARPENS),  # as GRPO on SmolLM2
        ((13, 14, 256), (30, 10, 256), Learned.SHARPENS),
        ((5, 34, 256), (40, 10, 256), Learned.WORSE),
        ((13, 14, 256), (10, 40, 256), Learned.WORSE),
        ((13, 14, 256), (20, 18, 256), Learned.NONE),
        ((0, 0, 256), (1, 1, 256), Learned.NONE),
        ((3, 1, 16), (2, 1, 16), Learned.CANNOT_TELL),
        ((0, 0, 16), (0, 0, 16), Learned.CANNOT_TELL),
    ],
)
def test_the_word_for_planted_counts(best: tuple[int, int, int], sampled: tuple[int, int, int], word: Learned) -> None:
    assert judged(of(*best), of(*sampled)).word is word


def test_a_word_that_needs_a_reason_has_one() -> None:
    assert judged(None, of(12, 2, 64)).why == "the control was not run"
    result = judged(of(3, 1, 16), of(2, 1, 16))
    assert result.why.startswith("16 tasks are too few: a gain of up to ")
    assert result.why.endswith(" points is not excluded")
    assert judged(of(13, 14, 256), of(10, 40, 256)).why.startswith("at temperature 1")


def test_nothing_is_gained_only_where_the_baseline_gains() -> None:
    null, gains, nothing = of(13, 14, 256), of(60, 5, 256), of(9, 8, 256)
    assert over_baseline(null, gains).word is Learned.NONE
    assert over_baseline(null, nothing).word is Learned.CANNOT_TELL
    assert over_baseline(null, None).why == "the baseline itself gains nothing"
    assert over_baseline(of(60, 5, 256), nothing).word is Learned.ADDS, "what gains, gains"
    assert over_baseline(of(5, 60, 256), nothing).word is Learned.WORSE
    assert over_baseline(of(4, 2, 24), gains).word is Learned.CANNOT_TELL, "too few tasks"


def test_pairs_are_counted_over_runs_and_tasks() -> None:
    before, after = dict.fromkeys(range(10), 0.0), {n: float(n < 6) for n in range(10)}
    result = paired([before, before], [after, before])
    assert (result.gained, result.lost, result.tasks) == (6, 0, 10)
    assert result.p == pytest.approx(mcnemar(6, 0))
    assert result.mean == pytest.approx(0.3)
    assert result.low <= 0, "one of two seeds gained nothing"
    half = paired([before], [dict.fromkeys(range(10), 0.5)])
    assert half.p == pytest.approx(2 / 2**10), "outcomes of several attempts: the randomization test"
    with pytest.raises(ValueError, match=r"zip\(\)"):
        paired([before], [])


def test_a_p_is_never_said_to_be_0() -> None:
    assert (said_p(0.0131), said_p(1.9e-6), said_p(0.0), said_p(1e-30)) == (
        "p = 0.013", "p = 1.9e-06", "p < 1e-15", "p < 1e-15"
    )  # fmt: skip
    assert MARGIN == 0.1

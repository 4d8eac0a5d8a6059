"""How often at least one, or each, of k attempts at a task succeeds, estimated from n attempts."""

from collections.abc import Sequence
from math import comb
from statistics import fmean

from agentrl.statistics.intervals import wilson_of_means


def pass_at(attempts: int, successes: int, k: int) -> float:
    """pass@k: the probability that at least one of ``k`` attempts succeeds, 1 - C(n - c, k) / C(n, k), without bias
    (Chen et al. 2021, equation 1). ``k`` is at most ``attempts``."""
    return 1 - comb(attempts - successes, k) / comb(attempts, k)


def pass_all(attempts: int, successes: int, k: int) -> float:
    """pass^k: the probability that all of ``k`` attempts succeed, C(c, k) / C(n, k) (tau-bench: Yao et al. 2024)."""
    return comb(successes, k) / comb(attempts, k)


def doubled(most: int) -> list[int]:
    """1, 2, 4, ... up to ``most``, and that itself."""
    return sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most} - {0})


def pass_rates(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """``pass@k`` and ``pass^k`` as means over tasks, each with its (attempts, successes): for k 1, 2, 4, ... up to the
    attempts that every task has, and for those themselves."""
    most = min((attempts for attempts, _ in counts), default=0)
    ks = doubled(most)
    rates = {f"pass@{k}": fmean(pass_at(*count, k) for count in counts) for k in ks}
    return rates | {f"pass^{k}": fmean(pass_all(*count, k) for count in counts) for k in ks}


def pass_intervals(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """:func:`pass_rates`, and for each rate ``low of ...`` and ``high of ...``, its 95 % interval
    (:func:`agentrl.statistics.intervals.wilson_of_means`): k attempts are one draw."""
    intervals: dict[str, float] = {}
    for name, rate in pass_rates(counts).items():
        each = [pass_of(name, *count) for count in counts]
        draws = sum(attempts // k_of(name) for attempts, _ in counts)
        low, high = wilson_of_means(each, draws)
        intervals |= {name: rate, f"low of {name}": low, f"high of {name}": high}
    return intervals


def k_of(name: str) -> int:
    """The k of ``pass@k`` or ``pass^k``."""
    return int(name[len("pass@") :])


def pass_of(name: str, attempts: int, successes: int) -> float:
    """``pass@k`` or ``pass^k``, by its name, of one task."""
    return (pass_at if name.startswith("pass@") else pass_all)(attempts, successes, k_of(name))

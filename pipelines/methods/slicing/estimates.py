"""What a state is worth, estimated from continuations (Math-Shepherd: Wang et al. 2023), and the search for the turn at
which a row was lost.

States are boundaries between turns: boundary ``b`` of a row of ``T`` turns lies before its turn ``b``, and boundary
``T`` is its end. In an environment that is replayable, ``v`` of turn ``t`` is the value of boundary ``t``, and ``q``
that of boundary ``t + 1``.
"""

from collections.abc import Generator, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from agentrl.statistics.intervals import wilson


class StateValue(NamedTuple):
    """The value of a state from ``n`` continuations, with its 95 % interval."""

    value: float
    n: int
    low: float
    high: float


def estimate(rewards: Sequence[float], turns: Sequence[int], gamma: float = 1.0, hard: bool = False) -> StateValue:
    """The value of a state from the ``rewards`` of its continuations, which took so many ``turns`` each: the mean of
    ``gamma ** turns * reward``, or with ``hard`` 1 if any reward is above 0, else 0 (Math-Shepherd's hard label).

    The interval is Wilson's if all rewards are in [0, 1], of which it holds the mean at least as often as of successes;
    otherwise it is normal. A hard label has none: it is its own bounds.
    """
    if hard:
        label = float(max(rewards) > 0)
        return StateValue(label, len(rewards), label, label)
    values = [gamma**length * reward for reward, length in zip(rewards, turns, strict=True)]
    mean, number = fmean(values), len(values)
    if all(0 <= value <= 1 for value in values):
        return StateValue(mean, number, *wilson(sum(values), number))
    spread = 1.959964 * stdev(values) / number**0.5 if number > 1 else 0.0
    return StateValue(mean, number, mean - spread, mean + spread)


def at_the_end(reward: float) -> StateValue:
    """The value of the end of a row, which is known."""
    return StateValue(reward, 1, reward, reward)


def first_fall(turns: int, reward: float) -> Generator[int, float, int | None]:
    """The turn at which a row of so many ``turns``, with this ``reward``, was lost: the value before it is at least
    half of that at the beginning, the value after it is lower, and stays so a turn later. Yields the boundaries whose
    values it needs, about log2 of the turns, and is sent them. None if the beginning has no value, or none was lost.

    Values are not monotone. If the value has recovered a turn later, the search goes on behind that.
    """
    half = (yield 0) / 2
    if reward >= half:
        return None
    known = {turns: reward}
    low, high = 0, turns
    while True:
        while high - low > 1:
            middle = (low + high) // 2
            if middle not in known:
                known[middle] = yield middle
            low, high = (low, middle) if known[middle] < half else (middle, high)
        after = min(high + 1, turns)
        if after not in known:
            known[after] = yield after
        if known[after] < half:
            return low
        low, high = after, turns

"""Which task an online run draws next: every task in turn, or tasks of the levels that a curriculum has opened.

The curriculum is that of a co-pilot's recipe, made precise: the level that is being learned and the next ones have the
shares ``start``, easier levels share ``easier``, and a level is learned if the lower end of the Wilson interval of its
success reaches the gate. A share alone would open it by luck. When all levels are learned, they have the shares
``final``.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from random import Random
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentrl.schemas.annotations import ADDED
from agentrl.statistics.intervals import wilson

RESTS = 2
"""Turns that a task sits out if nothing else is set."""


class CurriculumConfig(BaseModel):
    """When levels open, and how much of each is drawn. Shares are those of tasks, in the order of their levels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: tuple[float, ...] = Field(
        (0.8, 0.2), min_length=1, description="shares of the level that is being learned, and of those after it"
    )
    gate: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="success from which on a level is learned: of its Wilson 95 % interval, the lower end",
    )
    window: int = Field(256, ge=1, description="newest scored rollouts of a level that its success is measured on")
    easier: float = Field(0.15, ge=0, lt=1, description="share of all levels before the one that is being learned")
    final: tuple[float, ...] | None = Field(
        None, description="shares of all levels when the last one is learned; None: equal ones"
    )

    band: Annotated[tuple[float, float] | None, ADDED] = Field(
        None,
        description="pass rates between which a task teaches, as in [0.2, 0.8]; one whose last group lies outside sits "
        "out its next `rest` turns; None: every task of a level comes in turn",
    )
    rest: Annotated[int, ADDED] = Field(RESTS, ge=1, description="for band: turns that a task sits out")
    warmup: Annotated[tuple[int, int] | None, ADDED] = Field(
        None,
        description="[iterations, level]: so many iterations draw no level above this one, whatever was learned; None: "
        "no warm-up",
    )

    @field_validator("band")
    @classmethod
    def _is_a_band(cls, band: tuple[float, float] | None) -> tuple[float, float] | None:
        if band is not None and not 0 <= band[0] < band[1] <= 1:
            raise ValueError(
                f"band {list(band)} is two pass rates from 0 to 1, the lower one first, such as [0.2, 0.8]"
            )
        return band

    @field_validator("warmup")
    @classmethod
    def _is_a_warmup(cls, warmup: tuple[int, int] | None) -> tuple[int, int] | None:
        if warmup is not None and warmup[0] < 1:
            raise ValueError(f"warmup {list(warmup)} is [iterations, level], with at least one iteration")
        return warmup

    @model_validator(mode="after")
    def _rests_from_a_band(self) -> "CurriculumConfig":
        if self.band is None and self.rest != RESTS:
            raise ValueError("rest is for tasks outside of a band, and there is none; set band: [0.2, 0.8]")
        return self

    @field_validator("start", "final")
    @classmethod
    def _are_shares(cls, shares: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if shares is not None and (min(shares) < 0 or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(f"shares are not negative, and add up to 1; {list(shares)} add up to {sum(shares):g}")
        if shares is not None and not shares[0]:
            raise ValueError("the first share is 0, so that level would never be learned")
        return shares


class Draws(Protocol):
    """Gives each ticket its task, by its place in the list of tasks."""

    def of(self, ticket: int) -> int:
        """The task of a ticket: always the same, as long as the ticket is open."""
        ...


class EveryTask:
    """An endless sequence of seeded permutations of ``size`` tasks: each is drawn once before any is drawn again."""

    def __init__(self, size: int, seed: object) -> None:
        self.size, self.seed = size, seed
        self._orders: dict[int, list[int]] = {}

    def of(self, ticket: int) -> int:
        block, offset = divmod(ticket, self.size)
        if block not in self._orders:
            self._orders = {number: order for number, order in self._orders.items() if number >= block - 1}
            order = self._orders[block] = list(range(self.size))
            Random(f"{self.seed}-{block}").shuffle(order)
        return self._orders[block][offset]


class Curriculum:
    """Draws tasks of ``levels`` [tasks]; within a level each task is drawn once before any is drawn again.

    A ticket gets its task when it is asked for first, from what was :meth:`learned <learn>` until then.

    An iteration has ``size`` tickets, by which a warm-up is counted.

    Raises ValueError if ``final`` has another number of shares than there are levels, or if a warm-up leaves none.
    """

    def __init__(self, config: CurriculumConfig, levels: Sequence[int], seed: int, size: int = 1) -> None:
        self.config, self.seed = config, seed
        self.levels = sorted(set(levels))
        if config.warmup is not None and config.warmup[1] < self.levels[0]:
            raise ValueError(
                f"draw.warmup draws no level above {config.warmup[1]}, and the lowest of the tasks is "
                f"{self.levels[0]}; raise its level"
            )
        self._warm = config.warmup[0] * size if config.warmup else 0
        if config.final is not None and len(config.final) != len(self.levels):
            raise ValueError(
                f"draw.final has {len(config.final)} shares, and the tasks have {len(self.levels)} levels "
                f"({', '.join(map(str, self.levels))}); give one share for each"
            )
        self.level_of = list(levels)
        self._places = {
            level: [n for n, level_of_task in enumerate(levels) if level_of_task == level] for level in self.levels
        }
        self._orders = {level: EveryTask(len(self._places[level]), f"{seed}-{level}") for level in self.levels}
        self._drawn = dict.fromkeys(self.levels, 0)
        self._outcomes = {level: deque[bool](maxlen=config.window) for level in self.levels}
        self._open: dict[int, int] = {}
        self._rests: dict[int, int] = {}
        self.at = 0
        """How many levels are learned: the place of the one that is being learned."""

    @property
    def level(self) -> int:
        """The level that is being learned; the last one if all are."""
        return self.levels[min(self.at, len(self.levels) - 1)]

    def shares(self) -> dict[int, float]:
        """What is drawn now: level -> share."""
        config, number = self.config, len(self.levels)
        if self.at == number:
            return dict(zip(self.levels, config.final or [1 / number] * number, strict=True))
        easier = config.easier if self.at else 0.0
        shares = dict.fromkeys(self.levels[: self.at], easier / max(1, self.at))
        ahead = list(zip(self.levels[self.at :], config.start, strict=False))
        whole = sum(share for _, share in ahead)
        return shares | {level: (1 - easier) * share / whole for level, share in ahead}

    def of(self, ticket: int) -> int:
        if ticket not in self._open:
            shares = self._warmed(self.shares(), ticket)
            [level] = Random(f"{self.seed}-level-{ticket}").choices(list(shares), list(shares.values()))
            self._open[ticket] = self._next(level)
        return self._open[ticket]

    def _warmed(self, shares: dict[int, float], ticket: int) -> dict[int, float]:
        """Shares in a warm-up: those of its levels, or if nothing of them is drawn otherwise, equal ones."""
        if self.config.warmup is None or ticket >= self._warm:
            return shares
        within = {level: shares.get(level, 0.0) for level in self.levels if level <= self.config.warmup[1]}
        return within if any(within.values()) else dict.fromkeys(within, 1.0)

    def _next(self, level: int) -> int:
        """The next task of a level in turn that does not rest. If all do, their turns pass until one has rested."""
        places = self._places[level]
        for _ in range(len(places) * (1 + self.config.rest) if self._rests else 1):
            task = places[self._orders[level].of(self._drawn[level])]
            self._drawn[level] += 1
            if not self._rests.get(task):
                break
            self._rests[task] -= 1
            if not self._rests[task]:
                del self._rests[task]
        return task

    def _rest(self, task: int, successes: Sequence[bool]) -> None:
        """Let a task sit out if its pass rate is not in the band."""
        if self.config.band is None or not successes:
            return
        rate, (low, high) = sum(successes) / len(successes), self.config.band
        if low <= rate <= high:
            self._rests.pop(task, None)
        else:
            self._rests[task] = self.config.rest

    def is_drawn(self, ticket: int) -> bool:
        return ticket in self._open

    def take(self, ticket: int, task: int) -> None:
        """Give a ticket the task of which a log has rollouts already."""
        self._drawn[self.level_of[task]] += 1
        self._open[ticket] = task

    def learn(self, ticket: int, successes: Iterable[bool]) -> None:
        """Take the outcomes of a ticket's rollouts into account, and close it."""
        task, results = self._open.pop(ticket), list(successes)
        self._rest(task, results)
        self._outcomes[self.level_of[task]].extend(results)
        while self.at < len(self.levels) and self._is_learned(self.levels[self.at]):
            self.at += 1

    def _is_learned(self, level: int) -> bool:
        outcomes = self._outcomes[level]
        return wilson(sum(outcomes), len(outcomes))[0] >= self.config.gate

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs, in JSON's types."""
        outcomes = {
            str(level): "".join(str(int(success)) for success in results) for level, results in self._outcomes.items()
        }
        drawn = {str(level): number for level, number in self._drawn.items()}
        rests = {"rests": sorted(self._rests.items())} if self.config.band else {}
        return {"at": self.at, "drawn": drawn, "outcomes": outcomes, "open": sorted(self._open.items()), **rests}

    def restore(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self._drawn = {level: state["drawn"][str(level)] for level in self.levels}
        for level in self.levels:
            self._outcomes[level] = deque((digit == "1" for digit in state["outcomes"][str(level)]), self.config.window)
        self._open = dict(state["open"])
        self._rests = dict(state.get("rests", ()))

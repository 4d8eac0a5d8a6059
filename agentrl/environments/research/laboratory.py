"""The laboratory: a simulator that runs experiments, and papers about it, of which some are wrong.

A measurement is a function of the settings, which each dataset has of its own, plus noise that depends on the seed. So
what is best is known exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from agentrl.environments.bm25 import Index

FACTORS: Mapping[str, tuple[int, ...]] = {
    "batch": (8, 16, 32, 64),
    "depth": (2, 4, 6, 12),
    "dropout": (0, 10, 20, 40),
    "groups": (4, 7, 14, 28),
    "rank": (1, 5, 9, 18),
    "warmup": (50, 100, 300, 900),
}
"""Factor -> the values that can be tried, in order. Dropout is in percent."""
TERMS: Mapping[str, str] = {
    "depth": "stack", "batch": "bundle", "rank": "bottleneck", "dropout": "mask", "warmup": "ramp",
    "groups": "partition",
}  # fmt: skip
"""Factor -> what people who do not know the papers call it, in the order in which an expert lacks these terms."""
STEMS = ("alma", "brill", "corto", "delta")
NOISE = 0.2
"""Greatest deviation of a measurement. Means of different values lie at least five times as far apart."""


@dataclass(frozen=True)
class Paper:
    """``best`` is the value that it claims."""

    number: str
    dataset: str
    factor: str
    best: int

    @property
    def title(self) -> str:
        return f"On {self.factor} for {self.dataset}"

    @property
    def text(self) -> str:
        finding = f"accuracy on {self.dataset} is highest at {self.factor} {self.best}"
        return f"[{self.number}] {self.title}. We find that {finding}."


@dataclass(frozen=True)
class Laboratory:
    """``means``: dataset -> factor -> value -> what it adds to the accuracy. ``heavy``: dataset -> a factor and a value
    that run out of memory unless ``batch`` is 8. ``about``: (dataset, factor) -> its paper."""

    means: Mapping[str, Mapping[str, Mapping[int, float]]]
    heavy: Mapping[str, tuple[str, int]]
    papers: Mapping[str, Paper]
    about: Mapping[tuple[str, str], Paper]
    index: Index

    def accuracy(self, dataset: str, settings: Mapping[str, int], seed: int) -> float:
        """The accuracy in percent, with one decimal place."""
        effect = sum(self.means[dataset][factor][value] for factor, value in settings.items())
        noise = Random(f"{dataset}-{sorted(settings.items())}-{seed}").uniform(-NOISE, NOISE)
        return round(50 + effect + noise, 1)

    def fails(self, dataset: str, settings: Mapping[str, int]) -> bool:
        """Whether an experiment runs out of memory."""
        factor, value = self.heavy[dataset]
        return settings.get(factor) == value and settings.get("batch", 8) != 8

    def best(self, dataset: str, factor: str, values: tuple[int, ...]) -> int:
        """The value with the highest accuracy."""
        return max(values, key=lambda value: self.means[dataset][factor][value])


@lru_cache(maxsize=4)
def laboratory(size: int, world: int) -> Laboratory:
    """The laboratory of ``size`` datasets and that number; it is made once."""
    random = Random(f"research-1-{size}-{world}")
    datasets = [f"{STEMS[number % len(STEMS)]}-{number // len(STEMS) + 1}" for number in range(size)]
    steps = [float(step) for step in range(0, 20, 2)]
    means = {
        dataset: {
            factor: dict(zip(values, random.sample(steps, len(values)), strict=True))
            for factor, values in FACTORS.items()
        }
        for dataset in datasets
    }
    heavy = {}
    papers: dict[str, Paper] = {}
    for dataset in datasets:
        factor = random.choice([name for name in FACTORS if name != "batch"])
        heavy[dataset] = (factor, FACTORS[factor][-1])
        for factor, values in FACTORS.items():
            right = max(values, key=lambda value: means[dataset][factor][value])
            wrong = random.choice([value for value in values if value != right])
            number = f"P{len(papers) + 1}"
            papers[number] = Paper(number, dataset, factor, right if random.random() < 0.6 else wrong)
    about = {(paper.dataset, paper.factor): paper for paper in papers.values()}
    return Laboratory(means, heavy, papers, about, Index({number: paper.title for number, paper in papers.items()}))

"""The environment ``research``: a question, papers, a laboratory and a report.

The reward is 0.30 quality, 0.30 correctness, 0.15 novelty, 0.15 efficiency and 0.10 format, all of them computed. A
report that is worth 0.4 or less, or has an invented number or citation, is no success. Steps are rewarded by +0.1 for
an experiment that worked and -0.05 for an error, 0.3 altogether at most.
"""

import json
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any, Literal

from pydantic import Field

from agentrl.environments.base import Observation, Score
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.research import report
from agentrl.environments.research.laboratory import FACTORS, TERMS, Paper, laboratory
from agentrl.environments.task_splits import Draft
from agentrl.environments.tools import ToolError, tool
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, ToolCall, Trajectory

RETRIES = 3
"""How often an experiment that failed may be tried again."""
WORKED, FAILED, MOST = 0.1, -0.05, 0.3
LEAST = 0.4
WEIGHTS = {"quality": 0.30, "correctness": 0.30, "novelty": 0.15, "efficiency": 0.15, "format": 0.10}
SHAPES = {1: (0, 0), 2: (2, 1), 3: (3, 1), 4: (4, 1), 5: (4, 2)}
"""Level -> how many values are compared, with how many seeds each; level 1 asks what the literature says."""

Section = Literal["introduction", "method", "results", "conclusion"]


class ResearchConfig(FamilyConfig):
    size: int = Field(200, ge=4, le=20_000, description="datasets of the laboratory")
    world: int = Field(0, ge=0, description="another number is another laboratory, with other papers")
    shown: int = Field(5, ge=1, le=50, description="papers that a search shows")
    unknown: int = Field(
        0,
        ge=0,
        le=len(TERMS),
        description=f"factors, of {len(TERMS)}, for which questions have terms of their own; where values do not give "
        "it away, the scripted expert takes each for one of these factors at random",
    )


class ResearchEpisode(ToolEpisode["Research"]):
    """One study. ``log`` are the experiments that worked, by their numbers; ``hypothesis`` is that of the last plan."""

    def __init__(self, family: "Research", task: Task) -> None:
        super().__init__(family, task)
        metadata: dict[str, Any] = json.loads(task.metadata)
        self.dataset: str = metadata["dataset"]
        self.factor: str = metadata["factor"]
        self.values: list[int] = metadata["values"]
        self.seeds: int = metadata["seeds"]
        self.right = int(json.loads(task.ground_truth))
        self.paper = family.lab.about[self.dataset, self.factor]
        self.found: set[str] = set()
        self.was_read: set[str] = set()
        self.hypothesis: int | None = None
        self.log: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, int] = {}
        self.measured: set[str] = set()
        self.analysed: int | None = None
        self.sections: dict[str, str] = {}
        self.submitted = False
        self.shaped = 0.0
        self.reached: dict[str, int] = {}

    @tool
    def search(self, query: str) -> str:
        """Search the titles of papers; returns the first ones.

        query: words of the title
        """
        numbers = self.family.lab.index.search(query)
        first = numbers[: self.family.config.shown]
        self.found.update(first)
        shown = [f"{number} {self.family.lab.papers[number].title}" for number in first]
        return "\n".join([f"{len(shown)} of {len(numbers)}", *shown]) if shown else "no papers"

    @tool
    def read(self, paper: str) -> str:
        """Read a paper.

        paper: its number, as in P12
        """
        paper_read = self.family.lab.papers.get(paper)
        if paper_read is None:
            raise ToolError(f"there is no paper {paper!r}")
        self.was_read.add(paper)
        if paper_read == self.paper:
            self._reach("read")
        return paper_read.text

    @tool
    def plan(self, hypothesis: int) -> str:
        """State, or revise, which value you expect to be best. Experiments need a plan.

        hypothesis: the value
        """
        self.hypothesis = hypothesis
        return f"the hypothesis is {hypothesis}"

    @tool
    def run_experiment(self, dataset: str, settings: dict[str, int], seed: int = 0) -> Observation:
        """Run an experiment; returns its number and the accuracy in percent.

        settings: values of factors, as in {"depth": 4}
        seed: repetitions need different ones
        """
        if self.hypothesis is None:
            raise ToolError("there is no plan; state a hypothesis first")
        if dataset not in self.family.lab.means:
            raise ToolError(f"there is no dataset {dataset!r}")
        for factor, value in settings.items():
            if value not in FACTORS.get(factor, ()):
                raise ToolError(f"{factor} {value} cannot be tried; there are {FACTORS.get(factor, tuple(FACTORS))}")
        if not settings:
            raise ToolError("give at least one setting")
        key = json.dumps([dataset, settings, seed], sort_keys=True)
        if self.failures.get(key, 0) > RETRIES:
            raise ToolError(f"this has failed {RETRIES + 1} times; change the settings")
        if self.family.lab.fails(dataset, settings):
            self.failures[key] = self.failures.get(key, 0) + 1
            raise ToolError("out of memory; batch 8 needs less")
        accuracy = f"{self.family.lab.accuracy(dataset, settings, seed):.1f}"
        known = any(experiment["key"] == key for experiment in self.log.values())
        number = f"E{len(self.log) + 1}"
        self.log[number] = {
            "key": key, "dataset": dataset, "settings": settings, "seed": seed, "accuracy": float(accuracy),
        }  # fmt: skip
        self.measured.add(accuracy)
        if not known:
            self._shape(WORKED)
        if not self._missing():
            self._reach("measured")
        return Observation(f"{number}: accuracy {accuracy}")

    @tool
    def analyse(self, factor: str) -> str:
        """Mean accuracy for each value of a factor, over the experiments on the dataset of the question."""
        means = self._means(factor)
        if not means:
            raise ToolError(f"no experiment on {self.dataset} has set {factor}")
        self.measured.update(means.values())
        best = max(means, key=lambda value: (float(means[value]), -value))
        if factor == self.factor:
            self.analysed = best
        shown = ", ".join(f"{value}: {mean}" for value, mean in means.items())
        if best == self.hypothesis:
            return f"{shown}; best {best}"
        return f"{shown}; best {best}; this contradicts the hypothesis {self.hypothesis}, revise the plan"

    @tool
    def write(self, section: Section, text: str) -> str:
        """Write a section of the report. Cite papers as [P12]."""
        self.sections[section] = text
        return f"{section} has {len(text.split())} words"

    @tool
    def submit(self) -> str:
        """Hand the report in. This ends the study."""
        if self.analysed is not None and self.analysed != self.hypothesis:
            raise ToolError("the analysis contradicts the hypothesis; revise the plan first")
        against = self._contradicted()
        if against and against.number not in report.citations(self.sections.get("conclusion", "")):
            raise ToolError(f"the conclusion contradicts {against.number}, which was read; cite it there")
        self.submitted = self.done = True
        self._reach("submitted")
        return "submitted"

    def observed(self, call: ToolCall, seen: Observation) -> None:
        if seen.error:
            self._shape(FAILED)

    def outcome(self) -> Score:
        sections = self.sections
        invented = report.invented_numbers(sections, self.measured) | report.invented_citations(sections, self.was_read)
        right = report.concluded(sections, FACTORS[self.factor]) == {self.right}
        runs = self._runs(self.factor)
        means = set(self._means(self.factor).values())
        quality = [
            bool(report.citations(sections.get("introduction", "")) & {self.paper.number}),
            all(word in sections.get("method", "") for word in (self.dataset, self.factor)),
            not self.values or (bool(means) and means <= report.numbers(sections.get("results", ""))),
            right,
        ]
        grounded = not self._missing() if self.values else self.paper.number in self.was_read
        parts = {
            "quality": sum(quality) / len(quality),
            "correctness": float(right and not invented and grounded),
            "novelty": float(grounded),
            "efficiency": max(0.0, 1 - self.calls / 100),
            "format": float(all(sections.get(name, "").strip() for name in report.SECTIONS)),
        }
        parts = {name: value * self.submitted for name, value in parts.items()}
        reward = sum(WEIGHTS[name] * value for name, value in parts.items())
        success = self.submitted and parts["correctness"] == 1 and reward > LEAST
        subgoals = ["read", "measured", "submitted"] if self.values else ["read", "submitted"]
        state = {
            "report": sections,
            "experiments": len(self.log),
            "compared": {value: [mean, len(runs[value])] for value, mean in self._means(self.factor).items()},
            "read": sorted(self.was_read),
            "violations": sorted(invented),
            "subgoals": [self.reached.get(name) for name in subgoals],
        }
        components = [RewardComponent(name=name, value=value, weight=WEIGHTS[name]) for name, value in parts.items()]
        return Score(success, tuple(components), state)

    def advise(self) -> Message:
        """Literature, plan, experiments, analysis, report."""
        paper = self._understood()
        if paper.number not in self.was_read:
            if paper.number in self.found:
                return self.calling("read", paper=paper.number)
            return self.calling("search", query=f"{paper.factor} {paper.dataset}")
        if self.values:
            if self.hypothesis is None:
                return self.calling("plan", hypothesis=paper.best)
            for value, seed in self._missing():
                return self.calling("run_experiment", **self._experiment(value, seed))
            if self.analysed is None:
                return self.calling("analyse", factor=self.factor)
            if self.analysed != self.hypothesis:
                return self.calling("plan", hypothesis=self.analysed)
        for section, text in self._written(paper).items():
            if self.sections.get(section) != text:
                return self.calling("write", section=section, text=text)
        return self.calling("submit")

    def stray(self, random: Random) -> Message:
        if random.random() < 0.4:
            return self.calling("submit")
        if random.random() < 0.5:
            value = random.choice(self.values or FACTORS[self.factor])
            text = f"The best {self.factor} is {value}, with an accuracy of {random.randint(50, 90)}.5."
            return self.calling("write", section="conclusion", text=text)
        return self.calling("search", query=random.choice(list(FACTORS)))

    def _experiment(self, value: int, seed: int) -> dict[str, Any]:
        settings = {self.factor: value}
        if self.factor != "batch":
            settings["batch"] = 8
        return {"dataset": self.dataset, "settings": settings, "seed": seed}

    def _runs(self, factor: str) -> dict[int, dict[int, float]]:
        """Value -> seed -> accuracy, of the experiments on the dataset that differ in nothing else. If there are
        several such series, of the longest."""
        series: dict[str, dict[int, dict[int, float]]] = {}
        for experiment in self.log.values():
            if experiment["dataset"] == self.dataset and factor in experiment["settings"]:
                rest = json.dumps(
                    {name: value for name, value in experiment["settings"].items() if name != factor}, sort_keys=True
                )
                values = series.setdefault(rest, {})
                values.setdefault(experiment["settings"][factor], {})[experiment["seed"]] = experiment["accuracy"]
        return max(series.values(), key=lambda values: sum(map(len, values.values())), default={})

    def _missing(self) -> list[tuple[int, int]]:
        """(value, seed) of the experiments that the question still needs."""
        runs = self._runs(self.factor)
        missing: list[tuple[int, int]] = []
        for value in self.values:
            there = runs.get(value, {})
            free = (seed for seed in count() if seed not in there)
            missing += [(value, seed) for seed, _ in zip(free, range(self.seeds - len(there)), strict=False)]
        return missing

    def _means(self, factor: str) -> dict[int, str]:
        """Value -> mean accuracy with one decimal place."""
        return {value: f"{sum(seeds.values()) / len(seeds):.1f}" for value, seeds in sorted(self._runs(factor).items())}

    def _results(self) -> str:
        return (
            ", ".join(f"{value}: {mean}" for value, mean in self._means(self.factor).items()) or "as the paper reports"
        )

    def _understood(self) -> Paper:
        """The paper on what the expert takes the question for. The values of a comparison say what it is about."""
        unknown = self.family.unknown
        if self.values or self.factor not in unknown:
            return self.paper
        return self.family.lab.about[self.dataset, Random(self.task.task_id).choice(unknown)]

    def _written(self, paper: Paper) -> dict[str, str]:
        """The report of the expert, by the paper that it takes to be on the question."""
        cited, best = f"[{paper.number}]", self.right if self.values else paper.best
        return {
            "introduction": f"Earlier work is {cited}.",
            "method": f"{'We vary' if self.values else 'We read about'} {paper.factor} on {self.dataset}.",
            "results": self._results(),
            "conclusion": f"The best {paper.factor} is {best}, {'as' if paper.best == best else 'against'} {cited}.",
        }

    def _contradicted(self) -> Paper | None:
        """The paper on the question, if it was read and the conclusion names another value."""
        named = report.concluded(self.sections, FACTORS[self.factor])
        against = self.paper.number in self.was_read and named and self.paper.best not in named
        return self.paper if against else None

    def _shape(self, reward: float) -> None:
        """Reward a step, as far as the cap allows."""
        after = max(-MOST, min(MOST, self.shaped + reward))
        self.earn(after - self.shaped)
        self.shaped = after

    def _reach(self, subgoal: str) -> None:
        self.reached.setdefault(subgoal, self.calls - 1)


class Research(Family):
    """The environment; see the module's docstring."""

    name = "research"
    version = "2"
    max_steps = 40
    levels = {1: 0.2, 2: 0.2, 3: 0.2, 4: 0.2, 5: 0.2}  # noqa: RUF012
    episode = ResearchEpisode
    config: ResearchConfig
    of_no_task = frozenset({"faults", "shown"})

    def __init__(self, config: ResearchConfig = ResearchConfig()) -> None:  # noqa: B008  (frozen)
        super().__init__(config)
        self.lab = laboratory(config.size, config.world)
        self.datasets = list(self.lab.means)
        self.unknown = list(TERMS)[: config.unknown]
        """Factors whose terms the expert does not know."""

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        compared, seeds = SHAPES[level]
        while True:
            dataset, factor = random.choice(self.datasets), random.choice(list(FACTORS))
            yield self._draft(dataset, factor, sorted(random.sample(FACTORS[factor], compared)), seeds)

    def achieved(self, row: Trajectory, task: Task) -> list[Task]:
        """What a report that was handed in does answer: what the literature says, and the comparison of the values
        that its conclusion beats among those that were measured alike. The task itself is none of them."""
        state = json.loads(row.final_state)
        metadata: dict[str, Any] = json.loads(task.metadata)
        dataset, factor = metadata["dataset"], metadata["factor"]
        if not state or state["subgoals"][-1] is None or state["violations"]:
            return []
        named = report.concluded(state["report"], FACTORS[factor])
        if len(named) != 1:
            return []
        [value] = named
        paper = self.lab.about[dataset, factor]
        drafts = []
        if paper.number in state["read"] and paper.best == value:
            drafts.append((1, self._draft(dataset, factor, [], 0)))
        compared = {int(other): (float(mean), seeds) for other, (mean, seeds) in state["compared"].items()}
        beaten = sorted(other for other in compared if value in compared and compared[other][0] <= compared[value][0])
        alike = min((compared[other][1] for other in beaten), default=0)
        levels = [level for level, (many, seeds) in SHAPES.items() if many == len(beaten) > 0 and seeds <= alike]
        for level in levels[-1:]:
            drafts.append((level, self._draft(dataset, factor, beaten, SHAPES[level][1])))
        return [self.derived(task, draft, level) for level, draft in drafts if draft.prompt != task.prompt]

    def vary(self, task: Task, random: Random) -> Task:
        """The same comparison on another dataset."""
        metadata: dict[str, Any] = json.loads(task.metadata)
        dataset = random.choice([dataset_name for dataset_name in self.datasets if dataset_name != metadata["dataset"]])
        draft = self._draft(dataset, metadata["factor"], metadata["values"], metadata["seeds"])
        return self.derived(task, draft, task.level)

    def _draft(self, dataset: str, factor: str, values: list[int], seeds: int) -> Draft:
        metadata = {"dataset": dataset, "factor": factor, "values": values, "seeds": seeds}
        term = TERMS[factor] if factor in self.unknown else factor
        asked = f"gives the highest accuracy on {dataset}?"
        if not values:
            claimed = self.lab.about[dataset, factor].best
            prompt = f"According to the literature, which {term} {asked} Hand in a report."
            return Draft(prompt, claimed, metadata)
        choice = ", ".join(map(str, values))
        repeated = "" if seeds == 1 else f", over {seeds} seeds each"
        prompt = f"Which {term} of {choice} {asked} Find out by experiments{repeated}, and hand in a report."
        return Draft(prompt, self.lab.best(dataset, factor, tuple(values)), metadata)

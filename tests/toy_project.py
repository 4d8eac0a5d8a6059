"""A project of trivial stages in a folder of its own, as a user would have one."""

import itertools
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.load import ResolvedPipeline, load
from agentrl.pipelines.plan.plan import Plan, Selection, make_plan
from agentrl.pipelines.run.execute import Outcome, job_of, perform

STAGES = '''
"""Stages that count, add and fail."""

import os
import time
import warnings
from typing import Annotated, Any, NamedTuple

import pyarrow as pa

from {package}.maths import total
from agentrl.pipelines.handles import Model, Table, Trajectories
from agentrl.pipelines.stage import Context, External, Secret, StageConfig, stage


class Numbers(StageConfig):
    n: int = 3
    factor: float = 1.0
    names: dict[str, int] = {{}}
    log_every: int = 1


@stage("toy.numbers", version=1)
def numbers(context: Context, config: Numbers) -> Table:
    return context.table(pa.table({{"x": [config.factor * number for number in range(config.n)]}}))


class Sum(StageConfig):
    power: int = 1


class Sums(NamedTuple):
    sums: Table
    counts: Table


@stage("toy.sum", version=1)
def add(context: Context, config: Sum, tables: list[Table], extra: Table | None = None) -> Sums:
    values = [total(table.table()["x"].to_pylist()) ** config.power for table in tables]
    context.metrics["total"] = sum(values)
    table = context.table(pa.table({{"x": values}}), "sums")
    return Sums(table, context.table(pa.table({{"n": [len(values)]}}), "counts"))


class Trouble(StageConfig):
    error: str = ""
    warning: str = ""
    sleep: float = 0.0
    marker: str = ""


@stage("toy.trouble", version=1)
def trouble(context: Context, config: Trouble, table: Table) -> Table:
    for number in range(int(config.sleep * 20)):
        time.sleep(0.05)
        context.progress(number + 1, int(config.sleep * 20))
    if config.marker and not os.path.exists(config.marker):
        open(config.marker, "w").close()
        raise RuntimeError("the first try fails")
    if config.warning:
        warnings.warn(config.warning, stacklevel=2)
    if config.error:
        raise ValueError(config.error)
    return context.table(table.table())


class Outside(StageConfig):
    tokenizer: Annotated[str, External("tokenizer")] | None = None
    base: Annotated[str | None, External("model")] = None
    key: Secret | None = None


@stage("toy.outside", version=1)
def outside(context: Context, config: Outside, table: Table) -> Table:
    return context.table(table.table())


class Loose(StageConfig):
    anything: Any = None


@stage("toy.loose", version=1)
def loose(context: Context, config: Loose, model: Model | None = None) -> Table:
    return context.table(pa.table({{"x": [1.0]}}))
'''

MATHS = '''
"""Sums."""

from {package} import deeper


def total(values: list[float]) -> float:
    """Add up."""
    return deeper.plus(values)


def unused(values: list[float]) -> float:
    return values[0]
'''

DEEPER = """
def plus(values: list[float]) -> float:
    result = 0.0  # start here
    for value in values:
        result = _step(result, value)
    return result


def _step(a: float, b: float) -> float:
    return a + b
"""

_numbers = itertools.count()


@dataclass
class Project:
    """``folder`` holds the package ``package`` and pipeline files; ``store`` is next to it."""

    folder: Path
    package: str
    reused: set[str] = field(default_factory=set)

    @property
    def store(self) -> str:
        return str(self.folder / "store")

    @property
    def catalog(self) -> Catalog:
        return Catalog(self.store)

    def source(self, name: str) -> Path:
        return self.folder / self.package / f"{name}.py"

    def edit(self, name: str, old: str, new: str) -> None:
        text = self.source(name).read_text()
        assert old in text
        self.source(name).write_text(text.replace(old, new))

    def write(self, text: str, name: str = "pipeline.yaml") -> Path:
        """A pipeline file; ``toy:x`` stands for a stage of this project."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text).replace("toy:", f"{self.package}.stages:"))
        return path

    def load(self, text: str | None = None, **options: Any) -> ResolvedPipeline:
        path = self.write(text) if text is not None else self.folder / "pipeline.yaml"
        return load(str(path), **options)

    def plan(self, text: str | None = None, selection: Selection | None = None, **options: Any) -> Plan:
        return make_plan(self.load(text, **options), self.catalog, self.store, selection)

    def run(self, text: str | None = None, selection: Selection | None = None, **options: Any) -> dict[str, Outcome]:
        """Run what the plan says, in this process. What came out as before is in ``reused``, and not in the answer."""
        plan = self.plan(text, selection, **options)
        outcomes = {step.name: perform(job_of(step, plan, "test-run")) for step in plan.to_run}
        self.reused = {name for name, outcome in outcomes.items() if outcome.reused}
        return {name: outcome for name, outcome in outcomes.items() if not outcome.reused}


def make_project(folder: Path) -> Project:
    package = f"toyproject{next(_numbers)}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    for name, text in (("stages", STAGES), ("maths", MATHS), ("deeper", DEEPER)):
        (folder / package / f"{name}.py").write_text(text.format(package=package))
    return Project(folder, package)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    made = make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield made
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == made.package]:
        del sys.modules[name]

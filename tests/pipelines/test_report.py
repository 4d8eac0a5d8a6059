"""The report tells of each evaluation what it measured."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

from agentrl.pipelines.handles import Table
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.report import training_report


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def evaluated(harness: Harness, success: float, tasks: int = 10, split: str = "heldout", policy: str = "warm") -> Table:
    """Results of ``tasks``, of which this share was solved."""
    told = {"policy": policy, "split": split, "env": "", "level": -1, "tasks": tasks, "attempts": tasks}
    told |= {"success": success, "low": 0.0, "high": 1.0, "tokens": 9.0, "tool_errors": 0.0, "format_errors": 0.0}
    decodings = {"sampled": 1.0, "greedy": 0.0}
    rows = [{**told, "decoding": name, "temperature": temperature} for name, temperature in decodings.items()]
    return harness.table(pa.Table.from_pylist(rows))


def told(harness: Harness, *evaluations: Table) -> list[tuple[str, str]]:
    """What policies are called in the first table, and their success at temperature 1."""
    report = harness.run(training_report, evaluations=list(evaluations))["report"]
    lines = (report.path / "report.md").read_text().partition("## ")[0].splitlines()
    return [match.groups() for line in lines if (match := re.match(r"\| (\S.*?) \| (\d\.\d+) \(", line))]  # type: ignore[misc]


def test_one_policy_on_several_sets_of_tasks_is_told_of_each(harness: Harness) -> None:
    first, other = evaluated(harness, 0.2), evaluated(harness, 0.9)
    names = [f"warm \\(given\\-{number}\\)" for number in (1, 2)]
    assert told(harness, first, other) == [(names[0], "0.200"), (names[1], "0.900")]


def test_numbers_and_splits_of_tasks_that_are_not_those_of_the_heading_are_named(harness: Harness) -> None:
    tables = [evaluated(harness, 0.2), evaluated(harness, 0.9, 30), evaluated(harness, 0.5, split="compositional")]
    tables.append(evaluated(harness, 0.7, 30, policy="grpo"))
    assert told(harness, *tables) == [
        ("warm", "0.200"),
        ("warm, 30 heldout", "0.900"),
        ("warm, compositional", "0.500"),
        ("grpo, 30 heldout", "0.700"),
    ]

"""The table of systems names nothing that does not exist."""

import re
from pathlib import Path

import pytest

from agentrl.algorithms import ALGORITHMS
from agentrl.environments import ENVIRONMENTS
from agentrl.pipelines.file.document import find
from agentrl.pipelines.file.library import STAGES
from agentrl.rewards import REWARDS

PAGE = Path(__file__).parents[2] / "docs/explanations/systems.md"
CODE = re.findall(r"`([^`]+)`", PAGE.read_text())
ROOMS = {name.partition(".")[0] for name in STAGES}
TABLES = {"algorithm": ALGORITHMS, "env": ENVIRONMENTS, "reward": REWARDS}


def test_each_stage_exists() -> None:
    named = {code for code in CODE if re.fullmatch(rf"({'|'.join(ROOMS)})\.\w+", code)}
    assert named - set(STAGES) == set()
    assert len(named) > 25


@pytest.mark.parametrize("kind", TABLES)
def test_each_algorithm_environment_and_reward_exists(kind: str) -> None:
    named = {code.removeprefix(f"{kind} ") for code in CODE if code.startswith(f"{kind} ")}
    assert named - set(TABLES[kind]) == set()
    assert len(named) > 7


def test_each_pipeline_file_exists() -> None:
    named = set(re.findall(r"files? `([\w/-]+)`", PAGE.read_text())) | {code for code in CODE if "methods/" in code}
    assert len(named) > 25
    for name in named:
        assert find(name).is_file(), name


def test_each_row_has_as_many_cells_as_its_table_and_says_where_or_why_not() -> None:
    width = 0
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if not cells:
            width = 0
            continue
        width = width or len(cells)
        assert len(cells) == width, line
        assert all(cells[:2]), line


def test_each_method_of_the_library_is_named() -> None:
    folders = {path.parent.name for path in (PAGE.parents[2] / "pipelines/methods").glob("*/pipeline.yaml")}
    page = PAGE.read_text()
    assert {name for name in folders if f"`methods/{name}`" not in page} <= {"distill", "echo", "splice", "tree-grpo"}

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from datastore import TrajectoryBuffer
from datastore.errors import StoreError
from flows.commands.buffer import app
from tests.datastore.conftest import FP, Make

runner = CliRunner()


@pytest.fixture
def filled(tmp_path: Path, make: Make) -> str:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(i) for i in range(8)], stage="rollout", fingerprint=FP, run_id="r1")
    buffer.append(
        [make(i, "expert", "fedcba9876543210") for i in range(4)], stage="expert", fingerprint="fedcba9876543210"
    )
    return str(tmp_path)


def ask(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments), env={"COLUMNS": "120"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_query(filled: str) -> None:
    sql = "select stage, count(*) as n, avg(success) as rate from trajectories group by stage order by n"
    text = ask("query", sql, "--store", filled)
    assert [line.split() for line in text.splitlines()] == [
        ["stage", "n", "rate"],
        ["expert", "4", "0.5"],
        ["rollout", "8", "0.5"],
    ]
    assert json.loads(ask("query", sql, "--store", filled, "--json"))[1] == {"stage": "rollout", "n": 8, "rate": 0.5}
    assert json.loads(ask("query", sql, "--store", filled, "--at", "1", "--json")) == [
        {"stage": "rollout", "n": 8, "rate": 0.5}
    ]
    assert "6 more rows" in ask("query", "select * from trajectories", "--store", filled, "--limit", "6")


def test_show(filled: str) -> None:
    text = ask("show", "rollout-01234567-000003", "--store", filled, "--tokens")
    for part in (
        "boss of Ann 3?",
        "find(",
        'who="Ann"',
        "look it up",
        "trained on 4 of 4",
        "6 of 12 trained on",
        "✓ success",
    ):
        assert part in text
    assert "trained on 0 of 2" in text  # the observation
    row = json.loads(ask("show", "rollout-01234567-000003", "--store", filled, "--json"))
    assert row["input_ids"][0] == 3
    with pytest.raises(StoreError, match="did you mean rollout-01234567-000"):
        ask("show", "rollout-01234567-00099", "--store", filled)


def test_stats_and_history(filled: str) -> None:
    found = json.loads(ask("stats", "--store", filled, "--json"))
    assert {row["stage"]: row["rows"] for row in found["stages"]} == {"rollout": 8, "expert": 4}
    assert (found["rows"], found["tokens"], found["files"]) == (12, 144, 2)
    assert "rollout" in ask("stats", "--store", filled)
    commits = json.loads(ask("history", "--store", filled, "--json"))
    assert [(one["version"], one["stage"], one["rows"]) for one in commits] == [
        (2, "expert", 4),
        (1, "rollout", 8),
        (0, None, None),
    ]
    assert "expert" in ask("history", "--store", filled)


def test_an_absent_store_is_an_error_and_stays_absent(tmp_path: Path) -> None:
    for command in (["stats"], ["history"], ["query", "select 1 from trajectories"], ["show", "x"]):
        with pytest.raises(StoreError, match="no trajectory buffer"):
            ask(*command, "--store", str(tmp_path / "none"))
    assert not os.path.exists(tmp_path / "none")

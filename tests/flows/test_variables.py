"""A run whose secrets are not set ends before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.flows import cli

PIPELINE = """
name: asks
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 2, dev: 0, heldout: 0}}
  one: {uses: trajectories.sample, inputs: {tasks: tasks.train}, with: {sampling: {max_turn_tokens: 9}, engine: ENGINE}}
  two:
    uses: trajectories.sample
    inputs: {tasks: tasks.train}
    with: {sampling: {max_turn_tokens: 9}, engine: ENGINE, samples: 2}
    execution: {env: {TEACHER: "set for this stage"}}
"""
ENGINE = "{type: openai, model: teacher, base_url: 'http://127.0.0.1:1/v1', retries: 0, api_key: KEY}"


def test_missing_variables_are_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("TEACHER", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("asks.yaml").write_text(PIPELINE.replace("ENGINE", ENGINE).replace("KEY}", "'${TEACHER}'}"))
    assert cli.call(["run", "asks.yaml", "--store", "store"]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(
        "error: stage one: with.engine.api_key: environment variable TEACHER is not set; export it"
    )
    assert "stage two" not in printed
    assert not list(Path("store").glob("artifacts/*/*"))
    assert cli.call(["run", "asks.yaml", "--store", "store", "--only", "tasks"]) == 0, "other stages need no key"

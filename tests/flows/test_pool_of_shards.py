"""A run whose shards a work pool would run, without a server that could have one."""

import pytest
from toy_project import Project

from agentrl.flows.run import obstacles

CHOSEN = """
    name: p
    execution: {engine: {type: prefect, pool: cpus}}
    stages:
      a: {uses: trajectories.select, with: {version: 1, rules: [{rule: exact_duplicates}]}}
      b: {uses: "toy:numbers"}
"""


def test_a_work_pool_needs_a_server_that_keeps_running(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prefect")
    monkeypatch.setenv("PREFECT_HOME", str(project.folder))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    [told] = [text for text in obstacles(project.plan(CHOSEN), False) if "work pools" in text]
    assert told.startswith("error: work pools run shards of stages: a (cpus); that needs a Prefect server with workers")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert not [text for text in obstacles(project.plan(CHOSEN), False) if "work pools" in text]

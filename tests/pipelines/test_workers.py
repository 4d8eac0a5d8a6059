"""Which process a stage gets."""

from dataclasses import replace
from pathlib import Path

import pytest
from toy_project import Project

from agentrl.pipelines.plan.plan import Selection
from agentrl.pipelines.run.execute import job_of
from agentrl.pipelines.run.worker import THREADS, Workers

PIPELINE = """
    name: p
    stages:
      a: {uses: "toy:numbers", with: {n: 5}}
      t: {uses: "toy:trouble", inputs: {table: a}}
"""
TELL = """
    import os
    import torch

    with open('workers', 'a') as file:
        print(os.getppid(), torch.get_num_threads(), os.environ.get('OMP_NUM_THREADS'), file=file)
"""


@pytest.mark.slow
@pytest.mark.ci
def test_a_process_is_used_again_for_another_number_of_threads_and_for_no_other_variable(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    project.edit("stages", "    for number in range(int", TELL + "    for number in range(int")
    project.run(PIPELINE, Selection(only=("a",)))
    plan = project.plan(PIPELINE)
    job = replace(job_of(plan.steps["t"], plan, "test-run"), forced=True)
    workers = Workers(lambda *_: None)
    try:
        for env in ({THREADS: "2"}, {THREADS: "1"}, {THREADS: "2"}, {THREADS: "2", "MODE": "b"}, {THREADS: "0"}, {}):
            workers.run(job, project.folder / "log", env)
    finally:
        workers.close()
    processes, threads, variables = zip(*map(str.split, Path("workers").read_text().splitlines()), strict=True)
    assert threads[:4] == ("2", "1", "2", "2")
    assert variables == ("2", "1", "2", "2", "0", "None")
    assert processes[0] == processes[1] == processes[2]
    assert len(set(processes[2:])) == 4, "variables that a running process cannot take over, or a number that is none"

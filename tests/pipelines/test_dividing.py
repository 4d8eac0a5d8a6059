"""``execution.engine``: what it takes, that it changes no fingerprint, and that it runs the shards of a stage."""

from pathlib import Path
from typing import Any

import pytest
from toy_project import Project

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.shards import engines
from agentrl.datastore.shards.local import LocalProcesses
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan.fingerprint import fingerprint
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.select import SelectConfig, select
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.shards import ShardsNow

CHOSEN = """
    name: p
    stages:
      a: {uses: trajectories.select, with: {version: 1, rules: [{rule: exact_duplicates}]}}
"""


def prints(project: Project, text: str) -> list[str]:
    return [fingerprint(step.ingredients) for step in project.plan(text).steps.values()]


def test_what_runs_shards_changes_no_fingerprint(project: Project) -> None:
    before = prints(project, CHOSEN)
    engine = "engine: {type: processes, workers: 3, shards: 7, memory_gib: 2, folder: /shared}"
    assert prints(project, CHOSEN + f"        execution: {{{engine}}}\n".replace("        ", "    ", 1)) == before
    assert prints(project, CHOSEN.replace(" a: {", f" a: {{execution: {{{engine}}}, ")) == before


def test_a_stage_without_shards_takes_no_engine_of_its_own(project: Project) -> None:
    toy = 'name: p\nstages: {a: {uses: "toy:numbers", execution: {engine: {type: processes}}}}'
    with pytest.raises(SpecError, match=r"a\.execution\.engine: stage toy.numbers has no shards; leave engine out"):
        project.plan(toy)
    project.plan('name: p\nexecution: {engine: {type: processes}}\nstages: {a: {uses: "toy:numbers"}}')
    with pytest.raises(SpecError, match=r"engine\.type"):
        project.plan(CHOSEN.replace(" a: {", " a: {execution: {engine: {type: dask}}, "))


def test_the_stage_runs_its_shards_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.datastore import TrajectoryBuffer
    from agentrl.schemas.trajectory import Message, Role, Trajectory

    def row(number: int) -> Trajectory:
        messages = [Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, content=f"a {number % 3}")]
        return Trajectory(
            trajectory_id=f"r-{number}", episode_id=str(number), task_id="t", source="model", env="e", split="train",
            prompt="q", reward=1.0, success=True, termination="answered", messages=messages,
        )  # fmt: skip

    buffer = TrajectoryBuffer(tmp_path / "store")
    buffer.append([row(number) for number in range(6)], stage="s", fingerprint="f")
    pools: list[LocalProcesses] = []

    def pool(workers: int, gpus: int | None) -> LocalProcesses:
        pools.append(LocalProcesses(workers, gpus))
        return pools[-1]

    monkeypatch.setattr(engines, "LocalProcesses", pool)
    told: list[Any] = []
    work = Catalog(tmp_path / "store").scratch("clean", "c" * 32)
    (tmp_path / "out").mkdir()

    def progress(done: int, total: int | None = None, **metrics: float | int | str | ShardsNow) -> None:
        told.append((done, total, str(metrics.get("shards"))))

    context = Context("clean", "c" * 32, "r", 0, buffer, tmp_path / "out", work, progress)
    context.engine = ShardEngine(type="processes", workers=1)
    config = SelectConfig.model_validate({"version": buffer.version, "rules": [{"rule": "exact_duplicates"}]})
    outputs = select(context, config)
    assert len(outputs["trajectories"].ids()) == 3
    assert len(pools) == 1
    assert pools[0].pids == [], "its processes ended"
    assert (1, 1, "digest-question-actions-1") in told
    assert not (work / "shards").exists()

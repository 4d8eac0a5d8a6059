from pathlib import Path

import pyarrow.parquet as pq
from store_rows import build

from datastore import TrajectoryBuffer
from pipelines.handles import Tasks
from pipelines.stage import Context
from pipelines.stages.curate import CurateConfig, curate
from schemas.arrow import to_table
from schemas.task import TASK_SCHEMA, Task

RULES = [
    {"rule": "decontaminate", "ngram": 4},
    {"rule": "group", "where": "pass_rate between 0.2 and 0.8"},
    {"rule": "keep", "what": "correct", "n": 1},
]


def test_the_stage_narrows_its_inputs_and_reports_the_funnel(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    buffer.append([build(i) for i in range(16)], stage="rollout", fingerprint="f")
    for name in ("all", "run", "dry"):
        (tmp_path / name).mkdir()

    def context(name: str) -> Context:
        return Context("clean", "c" * 32, "r", 0, buffer, tmp_path / name, tmp_path / name)

    rows = context("all").select([build(i).trajectory_id for i in range(12)])
    held_out = [Task(task_id="h", env="lookup", split="heldout", prompt="boss of Ann 5?")]
    path = tmp_path / "tasks.parquet"
    pq.write_table(to_table(held_out, TASK_SCHEMA), path)
    tasks = Tasks(path, "tasks", "heldout", "x")

    outputs = curate(
        context("run"), CurateConfig.model_validate({"rules": RULES}), trajectories=[rows], heldout=[tasks]
    )
    assert outputs["trajectories"].ids() == [build(i).trajectory_id for i in (1, 7, 9)]  # 5 is held out
    funnel = outputs["funnel"].table().to_pylist()
    assert [(level["before"], level["after"]) for level in funnel] == [(12, 11), (11, 11), (11, 3)]
    assert funnel[0]["dropped_examples"] == [build(5).trajectory_id]

    config = CurateConfig.model_validate({"rules": RULES, "dry_run": True})
    dry = curate(context("dry"), config, trajectories=[rows], heldout=[tasks])
    assert dry["trajectories"].ids() == rows.ids()
    assert dry["funnel"].table().to_pylist() == funnel

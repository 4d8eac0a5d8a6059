import warnings
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.pipelines.handles import Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agentq.pairs import agentq
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.curate import CurateConfig, curate
from agentrl.pipelines.stages.select import select
from agentrl.schemas.arrow import to_table
from agentrl.schemas.task import TASK_SCHEMA, Task

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
    dropped = pq.ParquetFile(outputs["dropped"].path)
    assert dropped.metadata.num_row_groups == 2, "each rule's rows are written when it has dropped them"
    first, last = funnel[0]["rule"], funnel[2]["rule"]
    assert dropped.read().to_pylist() == [
        {"trajectory_id": build(i).trajectory_id, "rule": first if i == 5 else last, "source_id": None}
        for i in (5, *sorted(set(range(12)) - {1, 5, 7, 9}))
    ]

    config = CurateConfig.model_validate({"rules": RULES, "dry_run": True})
    dry = curate(context("dry"), config, trajectories=[rows], heldout=[tasks])
    assert dry["trajectories"].ids() == rows.ids()
    assert dry["funnel"].table().to_pylist() == funnel
    assert dry["dropped"].table() == outputs["dropped"].table()


def test_what_keeps_no_row_says_so_with_its_counts(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    rows = harness.trajectories([build(number) for number in range(6)])
    version = {"version": harness.buffer.version}
    with pytest.warns(UserWarning, match=r"^made no trajectories: before 6$"):
        harness.run(select, {**version, "rules": [{"rule": "filter", "where": "reward > 5"}]}, trajectories=[rows])
    with pytest.warns(UserWarning, match=r"^made no trajectories: all its counts are 0$"):
        nothing = harness.run(select, {**version, "where": "reward > 5"}, trajectories=[rows])["trajectories"]
    with pytest.warns(UserWarning, match=r"^made no pairs: "):
        harness.run(agentq, trajectories=[nothing])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harness.run(select, version, trajectories=[rows])


def test_rows_of_other_splits_are_left_out_and_counted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    rows = [build(i, split="heldout" if i % 3 == 0 else "train") for i in range(9)]
    rows[3].source_id = "their-id"
    given = harness.trajectories(rows)
    train = [row.trajectory_id for row in rows if row.split == "train"]
    rules = [{"rule": "keep", "what": "all"}]
    for made in (
        harness.run(curate, {"rules": rules}, trajectories=[given]),
        harness.run(select, {"version": harness.buffer.version, "rules": rules}),
        harness.run(select, {"version": harness.buffer.version, "where": "level >= 0 or true"}, trajectories=[given]),
    ):
        assert made["trajectories"].ids() == train
        assert made.metrics["other_splits"] == 3
        first = made["funnel"].table().to_pylist()[0]
        assert (first["rule"], first["before"], first["after"]) == ("split train", 9, 6)
        others = [row.trajectory_id for row in rows if row.split != "train"]
        dropped = {"trajectory_id": others, "rule": ["split train"] * 3, "source_id": [None, "their-id", None]}
        assert made["dropped"].table().to_pydict() == dropped
    for stage in (curate, select):
        config = {"rules": rules, "split": None} | ({"version": harness.buffer.version} if stage is select else {})
        made = harness.run(stage, config, trajectories=[given])
        assert made["trajectories"].ids() == [row.trajectory_id for row in rows]
        assert made["funnel"].table().num_rows == 1
        assert made["dropped"].table().num_rows == 0
        assert made.metrics["other_splits"] == 0
    quoted = harness.run(select, {"version": harness.buffer.version, "split": "it's"})
    assert quoted["trajectories"].ids() == []

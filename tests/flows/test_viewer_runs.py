"""Two runs side by side, and what a pipeline's stages are configured with."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from viewer_store import EVAL, WARM, Browser, make_store, publish, record_run, row

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.app import application, opening
from agentrl.flows.viewer.guard import Door
from agentrl.pipelines.handles import SELECTION_SCHEMA
from agentrl.schemas.manifest import Kind

FIRST, SECOND, OTHER = "20260102-120000-aaaa", "20260103-120000-bbbb", "20260104-120000-cccc"
THERE = "20260105-120000-dddd"
OLD, NEW = "8" * 32, "9" * 32


def measured(store: Path, fingerprint: str, tasks: range, solved: set[int], config: dict[str, Any]) -> None:
    rows = [
        row(
            number,
            trajectory_id=f"score-{fingerprint[:8]}-{number:06d}",
            task_id=f"t{number}",
            success=number in solved,
        )
        for number in tasks
    ]
    TrajectoryBuffer(store).append(rows, stage="score", fingerprint=fingerprint)
    chosen = [{"trajectory_id": entry.trajectory_id, "weight": 1.0} for entry in rows]
    outputs = {"trajectories": (Kind.TRAJECTORIES, pa.Table.from_pylist(chosen, schema=SELECTION_SCHEMA))}
    publish(Catalog(store), "score", fingerprint, "trajectories.sample", outputs, config=config)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "store"
    make_store(folder)
    measured(folder, OLD, range(5), {0, 1}, {"samples": 4, "engine": {"type": "transformers"}, "token": "sk-secret"})
    measured(
        folder, NEW, range(1, 6), {1, 2, 3}, {"samples": 8, "engine": {"type": "transformers"}, "token": "sk-secret"}
    )
    for run, fingerprint in ((FIRST, OLD), (SECOND, NEW)):
        stages = {
            "warm": {"status": "cached", "fingerprint": WARM, "reasons": []},
            "score": {"status": "ran", "fingerprint": fingerprint, "reasons": []},
        }
        more = {"eval": {"status": "ran", "fingerprint": EVAL, "reasons": []}} if run == SECOND else {}
        record_run(
            folder, run, stages={**stages, **more}, state="completed", started_at=f"{run[:4]}-01-02 12:00:00+00:00"
        )
    record_run(folder, OTHER, pipeline="other", stages={}, state="completed")
    return folder


def test_a_run_is_compared_with_the_one_of_its_pipeline_before_it(browser: Browser) -> None:
    answer = browser.json("/api/runs/compare", b=SECOND)
    assert (answer["a"]["run_id"], answer["b"]["run_id"]) == (FIRST, SECOND)
    assert (answer["same"], [stage["stage"] for stage in answer["stages"]]) == (["warm"], ["score", "eval"])
    score, only = answer["stages"]
    assert score["ingredients"] == ["config samples: 4 -> 8"]
    assert only["only_in"] == SECOND
    [changed] = score["changed"]
    assert (changed["a_artifact"], changed["b_artifact"]) == ("score/88888888", "score/99999999")
    assert (changed["a"], changed["b"], changed["shared"]) == (5, 5, 0)
    assert (changed["tasks"], changed["differing"], changed["only_a"], changed["only_b"]) == (4, 2, 1, 1)
    assert [
        (example["task_id"], example["a_solved"], example["a_n"], example["b_solved"], example["b_n"])
        for example in changed["examples"]
    ] == [
        ("t2", 0, 1, 1, 1),
        ("t3", 0, 1, 1, 1),
    ]
    assert browser.ask("/api/rows", among=changed["a_artifact"]).headers["x-total"] == "5"


def test_a_run_of_another_store_is_compared_by_its_name(store: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(store, tmp_path / "store"))
    make_store(tmp_path / "other")
    measured(tmp_path / "other", "7" * 32, range(2, 7), {2, 5}, {"samples": 4})
    for folder, run, made, tasks in ((store, OTHER, "5" * 32, "tests"), (tmp_path / "other", THERE, "6" * 32, "more")):
        edges = {"tasks": [("tasks", tasks, "0" * 32)]}
        publish(Catalog(folder), "test", made, "evaluate.policy", {}, edges)
        score = {"status": "ran", "fingerprint": NEW if folder == store else "7" * 32, "reasons": []}
        stages = {"score": score, "test": {"status": "ran", "fingerprint": made, "reasons": []}}
        record_run(folder, run, pipeline="other", stages=stages, state="completed")
    readers: dict[str, Any] = {}
    for name, folder in (("here", store), ("there", tmp_path / "other")):
        readers[name] = opening(str(folder), None, readers)
    browser = Browser(store)
    browser.app = application(readers["here"], Door("127.0.0.1", 8322), stores=list(readers), name="here")
    answer = browser.json("/api/runs/compare", a=f"there:{THERE}", b=OTHER)
    assert (answer["a"]["run_id"], answer["b"]["run_id"]) == (f"there:{THERE}", OTHER)
    assert {f"there:{THERE}", OTHER} < {run["run_id"] for run in answer["runs"]}
    score, test = answer["stages"]
    assert "config samples: 4 -> 8" in score["ingredients"]
    [changed] = score["changed"]
    assert (changed["a_artifact"], changed["b_artifact"]) == ("there:score/77777777", "score/99999999")
    assert (changed["tasks"], changed["only_a"], changed["only_b"]) == (4, 1, 1)
    assert [example["task_id"] for example in changed["examples"]] == ["t3", "t5"]
    assert (test["other_tasks"], test["changed"], score["other_tasks"]) == (True, [], False)
    assert browser.json("/api/runs/compare", 404, a="there:none", b=OTHER)["field"] == "a"
    metrics = pa.table({"step": [0, 1], "loss": [1.0, 0.5]})
    publish(Catalog(tmp_path / "other"), "rl", "4" * 32, "train.grpo", {"metrics": (Kind.TABLE, metrics)})
    assert browser.json("/api/training")["stages"] == []
    assert [stage["artifact"] for stage in browser.json("/api/training", beside=True)["stages"]] == [
        "there:rl/44444444"
    ]
    assert browser.arrow("/api/training/metrics", artifact="there:rl/44444444").equals(metrics)
    assert browser.json("/api/training/metrics", 404, artifact="rl/44444444")["field"] == "artifact"


def test_without_names_the_newest_run_is_shown(browser: Browser) -> None:
    answer = browser.json("/api/runs/compare")
    assert answer["b"]["run_id"] == OTHER
    assert answer["a"] is None, "no run of this pipeline is before it"
    assert [run["run_id"] for run in answer["runs"]] == [OTHER, SECOND, FIRST]
    assert answer["stages"] == []
    assert browser.json("/api/runs/compare", a=FIRST, b=FIRST)["same"] == ["warm", "score"]
    assert browser.json("/api/runs/compare", 404, a="none")["field"] == "a"
    assert browser.json("/api/runs/compare", 404, b="2026")["field"] == "b"


def test_a_store_without_runs(tmp_path: Path) -> None:
    answer = Browser(tmp_path).json("/api/runs/compare")
    assert (answer["runs"], answer["a"], answer["b"], answer["version"]) == ([], None, None, None)


def test_the_settings_of_a_pipeline_are_those_of_its_newest_run(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "sk-secret")
    answer = {
        setting["name"]: setting["value"] for setting in browser.json("/api/settings", pipeline="sums")["settings"]
    }
    assert answer == {"score.samples": "8", "score.engine.type": '"transformers"', "score.token": '"***"'}
    assert browser.json("/api/settings", 404, pipeline="sum")["field"] == "pipeline"
    assert browser.json("/api/settings", 400)["field"] == "pipeline"

"""The first page: the graph, runs with the ends of their logs, results, and plans that are made safely."""

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from toy_project import Project
from viewer_store import GRPO, WARM, Browser, make_store, record_run

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows import cli
from agentrl.flows.viewer import processes
from agentrl.flows.viewer.pages import graph, overview
from agentrl.flows.viewer.pages.compare import sentence
from agentrl.flows.viewer.pages.overview import WhatIf
from agentrl.flows.viewer.pages.run import log_of, log_tail, not_run_again, progress_of, stopped_at
from agentrl.flows.viewer.reader import StoreReader
from agentrl.statistics.paired import Difference

RUN = "20260101-120000-abcd"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "store"
    make_store(folder)
    record_run(folder)
    (folder / "logs" / RUN).mkdir(parents=True)
    (folder / "logs" / RUN / "eval.log").write_text("".join(f"line {number}\n" for number in range(100)))
    return folder


def test_the_page_holds_graph_runs_and_results(store: Path) -> None:
    answer = Browser(store).json("/api/overview")
    assert (answer["version"], answer["rows"], answer["pipeline"]) == (3, 24, "sums")
    assert answer["pipelines"] == ["sums"]
    assert "is not in this folder" in answer["problem"]
    by_name = {stage["stage"]: stage for stage in answer["stages"]}
    assert by_name["warm"]["status"] == by_name["grpo"]["status"] == "cached"
    assert by_name["grpo"]["artifact"] == f"grpo/{GRPO[:8]}"
    assert by_name["grpo"]["inputs"] == [{"stage": "warm", "reason": None}]
    assert (by_name["warm"]["x"], by_name["grpo"]["x"]) == (0, 1)
    assert by_name["eval"]["status"] == "failed"
    [run] = answer["runs"]
    assert (run["state"], run["failed_stage"], run["seconds"]) == ("failed", "eval", 60.0)
    assert run["log_tail"].splitlines() == [f"line {number}" for number in range(80, 100)]
    assert run["go_on"].startswith("agentrl run")


def test_a_stage_that_was_stopped_looks_so_until_it_is_done() -> None:
    stages = [
        {"stage": name, "uses": "", "status": status, "reasons": ["never ran"], "fingerprint": "", "inputs": {}}
        | {"duration_s": None}
        for name, status in (("a", "run"), ("b", "cached"), ("c", "run"))
    ]
    ended = {name: {"status": "failed", "cause": "no memory"} for name in ("a", "b", "c")}
    boxes = graph.boxes(stages, frozenset({"c"}), ended)
    assert [(box.status, box.reason) for box in boxes] == [
        ("failed", "no memory; never ran"),
        ("cached", "never ran"),
        ("running", "no memory; never ran"),
    ]


def _run(state: str, pipeline: str = "p", **stages: str) -> dict[str, Any]:
    return {
        "run_id": f"{state} {pipeline}",
        "pipeline": pipeline,
        "state": state,
        "stages": {name: {"status": status} for name, status in stages.items()},
    }


def test_runs_that_stopped_are_named_until_one_of_their_pipeline_is_completed() -> None:
    runs = [_run("killed", a="ran", b="killed"), _run("failed", "q", a="failed"), _run("completed"), _run("failed")]
    named = [(run.run_id, run.stage, run.state) for run in not_run_again(runs)]
    assert named == [("killed p", "b", "killed"), ("failed q", "a", "failed")]
    assert list(not_run_again([_run("cancelled"), _run("running")])) == []
    assert stopped_at(_run("failed", a="cancelled", b="failed")) == "b"
    assert stopped_at(_run("completed", a="ran")) is None


def test_what_a_strange_record_says_of_progress_is_not_believed() -> None:
    told = progress_of({"progress": {"done": 3, "total": 10, "left_s": 7.5}})
    assert told is not None
    assert (told.done, told.total, told.left_s) == (3, 10, 7.5)
    for strange in (None, {}, [], "3", {"done": "many"}, {"done": 1, "total": 2, "left_s": None, "more": 1}):
        assert progress_of({"progress": strange}) is None


@pytest.mark.parametrize(
    ("contrast", "says"),
    [
        (Difference(0.25, 0.1, 0.4, 40, 12, 2, 0, 0.013), "b is better than a: +25.0 points of success"),
        (Difference(-0.25, -0.4, -0.1, 40, 2, 12, 0, 1e-20), "b is worse than a: −25.0 points of success"),
        (Difference(0.25, 0.1, 0.4, 8, 2, 0, 0, 0.5), "b is not shown to be better or worse than a: +25.0 points"),
    ],
)
def test_a_sentence_says_whether_a_policy_is_better_and_how_sure_that_is(contrast: Difference, says: str) -> None:
    text = sentence("b", "a", contrast, greedy=False)
    assert text.startswith(says)
    assert f"{contrast.gained} gained, {contrast.lost} lost" in text
    assert "p = 0 " not in text
    assert "p = 0.0)" not in text


def test_another_pipeline_is_asked_for_by_name(store: Path) -> None:
    browser = Browser(store)
    assert browser.json("/api/overview", pipeline="sums")["pipeline"] == "sums"
    refused = browser.json("/api/overview", 404, pipeline="sum")
    assert refused["allowed"] == ["sums"]
    assert "did you mean 'sums'" in refused["error"]


@pytest.mark.parametrize("run_id", ["..", "../..", "/etc", ".", "", "20260101", f"{RUN}/", f"{RUN}/../{RUN}", "\0"])
def test_logs_are_looked_up_below_the_folder_of_logs(store: Path, run_id: str) -> None:
    assert log_tail(log_of(Catalog(store), run_id, "eval")) == ""


def test_no_log_leads_out_of_the_store(tmp_path: Path) -> None:
    """A store that came from others may hold links, and names that climb."""
    store = tmp_path / "store"
    logs = store / "logs" / RUN
    logs.mkdir(parents=True)
    (tmp_path / "secret.log").write_text("a secret")
    (logs / "link.log").symlink_to(tmp_path / "secret.log")
    (store / "logs" / "away").symlink_to(tmp_path)
    catalog = Catalog(store)
    for run_id, stage in ((RUN, "link"), (RUN, "../../../secret"), ("away", "secret"), (RUN, str(tmp_path / "secret"))):
        assert log_tail(log_of(catalog, run_id, stage)) == "", stage
    log = str(tmp_path / "secret.log")
    stages = {"a": {"status": "failed", "fingerprint": "", "reasons": [], "cause": "x", "log": log}}
    record_run(store, stages=stages)
    assert Browser(store).json("/api/overview")["runs"][0]["log_tail"] == ""


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("agentrl run evil.yaml", "{store}/evil.yaml"),
        ("agentrl run /etc/evil.yaml", "/etc/evil.yaml"),
        ("agentrl run x.yaml", "{folder}/../x.yaml"),
        ("agentrl run link.yaml", "{folder}/link.yaml"),
        ("agentrl run --store x", "--help"),
        ("rm -rf quickstart", ""),
        ("agentrl run 'broken", "\0"),
        ("", ""),
    ],
)
def test_no_pipeline_of_a_strange_store_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, file: str
) -> None:
    folder = tmp_path / "project"
    store = folder / "store"
    store.mkdir(parents=True)
    (store / "evil.yaml").write_text("name: evil")
    (tmp_path / "x.yaml").write_text("name: x")
    (folder / "link.yaml").symlink_to(tmp_path / "x.yaml")
    monkeypatch.chdir(folder)
    run = {"command": command, "file": file.format(store=store, folder=folder)}
    arguments, problem = graph.plan_arguments(run, Catalog(store), str(store))
    assert arguments == []
    assert problem is not None


def test_pipelines_of_this_folder_and_of_the_library_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("name: mine")
    catalog = Catalog(tmp_path / "store")
    run = {
        "command": "agentrl run mine.yaml --profile cluster --set a.b=1 --until x",
        "file": str(tmp_path / "mine.yaml"),
    }
    arguments, problem = graph.plan_arguments(run, catalog, "store")
    assert problem is None
    assert arguments == [
        *("plan", str(tmp_path / "mine.yaml"), "--profile=cluster", "--set=a.b=1", "--store", "store", "--json")
    ]
    run = {"command": "agentrl run quickstart", "file": "/elsewhere/quickstart.yaml"}
    assert graph.plan_arguments(run, catalog, "store")[0][:2] == ["plan", "quickstart"]


def test_a_what_if_names_a_pipeline_that_ran(store: Path) -> None:
    browser = Browser(store)
    answer = browser.json("/api/plan", pipeline="sums", set=["dpo.beta=0.3", "grpo.samples=4"])
    assert answer["settings"] == ["dpo.beta=0.3", "grpo.samples=4"]
    assert "is not in this folder" in answer["problem"]
    assert browser.json("/api/plan", 404, pipeline="sum")["field"] == "pipeline"
    assert browser.json("/api/plan", 400, pipeline="sums", set="beta")["field"] == "set"
    assert browser.json("/api/plan", 400, pipeline="sums", set=["a=1"] * 17)["field"] == "set"


def drawn(reads: dict[str, list[str]]) -> dict[str, tuple[int, int]]:
    return graph.layout(reads)


def test_every_edge_points_to_the_right_and_no_two_stages_share_a_place() -> None:
    reads = {
        "tasks": [],
        "expert": ["tasks"],
        "warm": ["expert"],
        "sample": ["warm", "tasks"],
        "pairs": ["sample"],
        "dpo": ["pairs", "warm"],
        "eval_warm": ["warm", "tasks"],
        "eval_dpo": ["dpo", "tasks"],
        "report": ["eval_warm", "eval_dpo"],
        "alone": [],
    }
    places = drawn(reads)
    assert len(set(places.values())) == len(reads)
    assert all(places[item][0] < places[name][0] for name, above in reads.items() for item in above)
    assert places["tasks"] == (0, 0)
    assert places["expert"] == (1, 0)
    assert drawn({}) == {}
    assert drawn({"a": ["missing"]}) == {"a": (0, 0)}


def test_reasons_stand_on_the_edge_that_caused_them() -> None:
    common: dict[str, Any] = {"uses": "toy", "fingerprint": None, "duration_s": None}
    stages = [
        {**common, "stage": "a", "status": "run", "reasons": ["config x: 1 -> 2"], "inputs": {}},
        {**common, "stage": "ab", "status": "cached", "reasons": [], "inputs": {}, "fingerprint": WARM},
        {
            **common,
            "stage": "c",
            "status": "run",
            "reasons": ["input a is made again", "seed 1 -> 2"],
            "inputs": {"tables": ["a.table", "ab.table", "a.other"]},
        },
    ]
    boxes = {box.stage: box for box in graph.boxes(stages, frozenset({"c"}))}
    assert [(input_.stage, input_.reason) for input_ in boxes["c"].inputs] == [
        ("a", "input a is made again"),
        ("ab", None),
    ]
    assert boxes["c"].status == "running"
    assert boxes["c"].reason == "input a is made again; seed 1 -> 2"
    assert boxes["ab"].artifact == f"ab/{WARM[:8]}"
    assert boxes["a"].artifact is None


@pytest.mark.slow
def test_the_plan_of_a_pipeline_that_ran_here(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command runs a pipeline, an edit changes a value, and the page says what would run, and why."""
    file = project.write(
        """
        name: toy
        stages:
          a: {uses: "toy:numbers", with: {n: 2}}
          b: {uses: "toy:add", inputs: {tables: a}}
        """
    )
    assert cli.call(["run", str(file), "--store", project.store]) == 0
    capsys.readouterr()
    run = json.loads(next((Path(project.store) / "runs").glob("*.json")).read_text())
    made = graph.planned(StoreReader(project.store), run, 60)
    assert made is not None
    assert [stage["status"] for stage in made.stages] == ["cached", "cached"]
    text = file.read_text()
    file.write_text(text.replace("n: 2", "n: 3"))
    reader = StoreReader(project.store)
    assert graph.planned(reader, run, 0) is None, "nobody waits for a plan"
    made = graph.planned(reader, run, 60)
    assert made is not None
    boxes = {box.stage: box for box in graph.boxes(made.stages)}
    assert boxes["a"].status == "run"
    assert boxes["a"].reason == "config n: 2 -> 3"
    assert boxes["b"].inputs[0].reason == "input a is made again"
    monkeypatch.setattr(overview, "PLAN_S", 60.0)
    reader = StoreReader(project.store)
    asked = overview.plan(reader, WhatIf(pipeline="toy", set=["b.power=2"]))
    assert {stage.stage: stage.status for stage in asked.stages} == {"a": "run", "b": "run"}
    assert "config power: 1 -> 2" in asked.stages[1].reason
    wrong = overview.plan(reader, WhatIf(pipeline="toy", set=["b.powr=2"]))
    assert "did you mean" in (wrong.problem or "")
    file.write_text(textwrap.dedent("name: toy\nstages: {a: {uses: nothing}}"))
    broken = graph.planned(StoreReader(project.store), run, 60)
    assert broken is not None
    assert "there is no stage 'nothing'" in (broken.problem or "")
    assert os.getcwd() == str(project.folder)


def test_an_answer_that_failed_is_not_shown_while_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [processes.Told({}, "too slow"), processes.Told({"stages": []})]
    monkeypatch.setattr(processes, "told_by", lambda arguments, patience: answers.pop(0))
    commands = processes.Commands(patience=5)
    assert commands.of(["plan"], 5) == processes.Told({}, "too slow")
    monkeypatch.setattr(processes, "FRESH_S", -1.0)
    assert commands.of(["plan"], 5) == processes.Told({"stages": []})


def test_a_command_that_takes_too_long_is_given_up() -> None:
    assert "was given up" in processes.told_by(["--help"], 0.01).problem
    assert "no such" in processes.told_by(["nothing"], 60).problem.lower()

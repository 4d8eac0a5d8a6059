"""The Python interface does what the command does: stores, pipelines in Python, plans, runs and results."""

import json
import os
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import polars as pl
import pytest
from toy_project import Project

import agentrl

ROOT = Path(__file__).parents[2]
PIPELINE = """
    name: toy
    stages:
      a: {uses: "toy:numbers", with: {n: 4}}
      b: {uses: "toy:add", inputs: {tables: a}}
"""


def test_public_names_are_few_and_exist() -> None:
    assert len(agentrl.__all__) <= 60
    for name in agentrl.__all__:
        assert getattr(agentrl, name) is not None
        assert name == "__version__" or getattr(agentrl, name).__doc__, name
    assert dir(agentrl) == sorted(agentrl.__all__)
    with pytest.raises(AttributeError, match=r"no public name 'Stor'; it has .*Store"):
        _ = agentrl.Stor  # type: ignore[attr-defined]


def test_an_import_costs_nothing() -> None:
    heavy = "{'torch', 'polars', 'pydantic', 'pyarrow', 'numpy', 'typer', 'rich', 'importlib.metadata'}"
    code = f"import sys; before = set(sys.modules); import agentrl; print(sorted({heavy} & set(sys.modules) - before))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


@pytest.fixture
def text(project: Project) -> str:
    return textwrap.dedent(PIPELINE.replace("toy:", f"{project.package}.stages:"))


def test_a_pipeline_is_planned_run_and_read(project: Project, text: str) -> None:
    (project.folder / "p.yaml").write_text(text)
    store = agentrl.Store(project.folder / "store")
    pipeline = agentrl.load(project.folder / "p.yaml", set={"stages.a.with.n": 5}, store=store)
    assert pipeline.stages == ["a", "b"]
    assert pipeline.plan().frame.select("stage", "status").rows() == [("a", "run"), ("b", "run")]
    assert "toy: 2 run" in pipeline._repr_html_()
    run = pipeline.run(only="a", progress=False)
    assert run.stage("a").frame()["x"].to_list() == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(LookupError, match="has no result of 'b'"):
        run.stage("b")
    run = pipeline.run(progress=False)
    assert run.state == "completed"
    assert run.stages.select("stage", "status").rows() == [("a", "cached"), ("b", "ran")]
    assert run.stage("b").summary == {"total": 10.0}
    assert run.stage("b").metrics.to_dicts() == [{"total": 10.0}]
    assert run.stage("b").outputs["output"].to_list() == ["sums", "counts"]
    with pytest.raises(KeyError, match="b has no output 'sum'; it has sums, counts"):
        run.stage("b").output("sum")
    again = pipeline.run(progress=False)
    assert (again.id, again.state, again.stage("b").fingerprint) == ("", "up to date", run.stage("b").fingerprint)
    assert run.id in store.runs()["run_id"].to_list()
    assert store.run(run.id).stage("b").summary == store.stage("b").summary == {"total": 10.0}
    first = store.runs()["run_id"].to_list()[-1]
    assert store.diff(first, run.id)["b"]
    assert store.lineage("b").to_json()["stage"] == "b"
    assert {artifact["stage"] for artifact in store.gc(keep_runs=0)["artifacts"]} == {"a", "b"}
    assert store.tag("b", "good").fingerprint == store.stage("good").fingerprint == run.stage("b").fingerprint
    with pytest.raises(ValueError, match="'no name' cannot name a tag"):
        store.tag("b", "no name")
    assert store.gc(keep_runs=0)["artifacts"] == []
    assert store.stage("a").fingerprint == run.stage("a").fingerprint, "a dry run removes nothing"
    for shown in (run, again, run.stage("b")):
        assert shown._repr_html_().startswith("<div")


def test_a_pipeline_written_in_python_is_that_of_its_file(project: Project, text: str, tmp_path: Path) -> None:
    stages = f"{project.package}.stages"
    spec = agentrl.PipelineSpec(
        name="toy",
        stages={
            "a": agentrl.StageSpec(uses=f"{stages}:numbers", with_={"n": 4}),
            "b": agentrl.StageSpec(uses=f"{stages}:add", inputs={"tables": "a"}),
        },
    )
    written = agentrl.Pipeline.of(spec, folder=project.folder, store=project.folder / "store")
    file = written.save(project.folder / "saved.yaml")
    with pytest.raises(FileExistsError):
        written.save(file)
    (project.folder / "p.yaml").write_text(text)
    plans = [
        pipeline.plan().frame
        for pipeline in (
            written,
            agentrl.load(file, store=project.folder / "store"),
            agentrl.load(project.folder / "p.yaml", store=project.folder / "store"),
        )
    ]
    assert plans[0].equals(plans[1])
    assert plans[0].equals(plans[2])


def test_what_is_wrong_with_a_pipeline_in_python_is_said_as_for_a_file(project: Project) -> None:
    stages = {"a": {"uses": f"{project.package}.stages:numbers", "with": {"m": 4}}, "b": {"uses": "train.sfd"}}
    with pytest.raises(agentrl.SpecError) as caught:
        agentrl.Pipeline.of({"name": "toy", "stages": stages}, folder=project.folder)
    message = str(caught.value)
    assert "stages.a.with.m" in message
    assert "did you mean 'train.sft'" in message


def test_a_stage_that_fails_raises(project: Project) -> None:
    numbers = {"uses": f"{project.package}.stages:numbers"}
    fails = {"uses": f"{project.package}.stages:trouble", "inputs": {"table": "a"}, "with": {"error": "no luck"}}
    spec = {"name": "toy", "stages": {"a": numbers, "c": fails}}
    pipeline = agentrl.Pipeline.of(spec, folder=project.folder, store=project.folder / "store")
    with pytest.raises(agentrl.StageError, match="no luck"):
        pipeline.run(progress=False)
    assert pipeline.plan().frame["status"].to_list() == ["cached", "run"]


def test_a_store_is_queried_curated_and_checked(tmp_path: Path) -> None:
    store = agentrl.Store(tmp_path / "store")
    lookup = {"uses": "tasks.generate", "with": {"env": "lookup", "train": 16, "dev": 1, "heldout": 1}}
    expert = {"uses": "trajectories.synthesize", "inputs": {"tasks": "tasks.train"}, "with": {"noise": 0.5}}
    spec = {"name": "p", "stages": {"tasks": lookup, "expert": expert}}
    agentrl.Pipeline.of(spec, folder=tmp_path, store=store).run(progress=False)
    successes = store.rows.filter(pl.col("success")).select(pl.len()).collect().item()
    assert 0 < successes < store.stats()["rows"]
    assert store.sql("select count(*) as n from trajectories")["n"].item() == store.stats()["rows"]
    row = store.row(store.rows.select("trajectory_id").first().collect().item())
    assert isinstance(row, agentrl.Trajectory)
    kept = store.curate([{"rule": "filter", "where": "success"}], name="good")
    assert kept.frame("funnel")["after"].to_list()[-1] == len(kept.frame("trajectories")) == successes
    assert store.select("wins", where="success").fingerprint == store.stage("wins").fingerprint
    assert len(store.sample(3, seed=1).frame("trajectories")) == 3
    with pytest.raises(agentrl.StoreError, match="rules does not hold rules"):
        store.curate([{"rule": "filtr"}])
    assert store.check().is_empty()
    assert store.history()["version"].to_list()[0] == store.buffer.version
    assert "Store(" in store._repr_html_()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project that ``agentrl init`` makes."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "agentrl.flows.cli", "init", "mine"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert "next: cd mine && agentrl run" in subprocess.check_output(command, env=env, text=True)
    again = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "nothing was written, since there already is" in again.stderr
    monkeypatch.chdir(tmp_path / "mine")
    for name in [name for name in sys.modules if name.partition(".")[0] == "environments"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "mine"


@pytest.mark.slow
@pytest.mark.ci
def test_a_project_that_was_made_passes_its_own_tests(made: Path) -> None:
    assert {".gitignore", ".github", "environments", "pipeline.yaml", "tests"} == {path.name for path in made.iterdir()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout


def test_the_viewer_is_shown_in_a_frame(tmp_path: Path) -> None:
    store = agentrl.Store(tmp_path / "store")
    (tmp_path / "store").mkdir()
    view = store.view(height=300)
    try:
        assert f'<iframe src="{view.url}" width="100%" height="300"' in view._repr_html_()
        with urllib.request.urlopen(view.url, timeout=30) as answer:
            policy = answer.headers["content-security-policy"]
        assert "frame-ancestors http://localhost:* http://127.0.0.1:*;" in policy
    finally:
        view.close()
    with pytest.raises(RuntimeError, match=r"did not start: .*there is no store"):
        agentrl.Store(tmp_path / "none").view()


def test_files_are_imported_and_joined(tmp_path: Path) -> None:
    chat = [
        {"id": str(n), "messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
        for n in range(3)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chat))
    (tmp_path / "labels.csv").write_text("id,reward,success\n0,1,true\n2,0,false\n9,1,true\n")
    store = agentrl.Store(tmp_path / "store")
    done = store.import_(tmp_path / "chats.jsonl", join=str(tmp_path / "labels.csv"), on="source_id=id", env="talk")
    assert done.rows == 3
    table = store.sql("select source_id, reward, success, env from trajectories order by source_id").rows()
    assert table == [("0", 1.0, True, "talk"), ("1", None, None, "talk"), ("2", 0.0, False, "talk")]
    written = store.export(tmp_path / "out.jsonl", "openai-chat", where="success")
    assert (written["rows"], written["loses"]) == (1, {"end": 1, "identity": 1, "reward": 1, "success": 1})
    assert store.changes(0).select("stage", "added", "removed").rows() == [("import", 3, 0)]
    assert store.quarantined().is_empty()
    assert len(store.experience("0??", embedder="embedded")) == 1, "the success; the task itself has another prompt"
    assert store.index("embedded").select("texts", "stale", "cut").rows() == [(3, 0, 0)]
    assert store.search("2?", 1, embedder="embedded", method="lexical")["prompt"].to_list() == ["2?"]
    assert store.forget(done.fingerprint, dry_run=True) == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'rewrad'"):
        store.import_(tmp_path / "chats.jsonl", rewrad="x")

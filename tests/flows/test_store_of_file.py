"""Which store a command uses that names none, and what validate finds."""

import json
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.flows import cli
from agentrl.pipelines.file.document import default_store, find

PIPELINE = """
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 2, dev: 0, heldout: 0}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder above that of the pipeline file ``proj/p.yaml``."""
    monkeypatch.delenv("AGENTRL_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("proj").mkdir()
    Path("proj/p.yaml").write_text(PIPELINE)
    return tmp_path


def said(capsys: Any, *arguments: str, code: int = 0) -> str:
    assert cli.call(list(arguments)) == code
    return " ".join("".join(capsys.readouterr()).split())


def test_the_store_belongs_to_the_folder_of_the_file(
    elsewhere: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "never ran p: 2 run; store proj/store" in said(capsys, "plan", "proj/p.yaml")
    assert "no run; store proj/store" in said(capsys, "status", "proj/p.yaml")
    blocked = said(capsys, "run", "proj/p.yaml", "--only", "expert", code=2)
    assert "input tasks is not cached (never ran); make it first in proj/store: agentrl run proj/p.yaml --u" in blocked
    assert not Path("proj/store").exists()
    said(capsys, "run", "proj/p.yaml", "--no-prefect", "--only", "tasks")
    assert Path("proj/store/runs").is_dir()
    assert not Path("store").exists()
    assert json.loads(said(capsys, "plan", "proj/p.yaml", "--json"))["counts"] == {
        "cached": 1, "run": 1, "blocked": 0, "skipped": 0
    }  # fmt: skip
    other = said(capsys, "run", "proj/p.yaml", "--only", "expert", "--store", "store", code=2)
    assert "not cached (never ran); make it first in store: agentrl run proj/p.yaml --store store" in other
    monkeypatch.setenv("AGENTRL_STORE", "named")
    assert "2 run; store named" in said(capsys, "plan", "proj/p.yaml")
    monkeypatch.delenv("AGENTRL_STORE")
    monkeypatch.chdir("proj")  # the same store from there
    assert "1 cached, 1 run; store store" in said(capsys, "plan", "p.yaml")


def test_python_finds_the_same_store(elsewhere: Path) -> None:
    assert agentrl.load("proj/p.yaml").store.path == "proj/store"
    assert agentrl.load(elsewhere / "proj" / "p.yaml").store.path == str(elsewhere / "proj" / "store")
    assert agentrl.load("proj/p.yaml", store="other").store.path == "other"
    assert agentrl.load("quickstart").store.path == "store"
    spec = {"name": "q", "stages": {"tasks": {"uses": "tasks.generate", "with": {"env": "lookup"}}}}
    assert agentrl.Pipeline.of(spec, folder="proj").store.path == "proj/store"
    assert "store proj/store" in agentrl.load("proj/p.yaml")._repr_html_()


@pytest.mark.parametrize("name", ["quickstart", "methods/dagger"])
def test_the_library_has_no_store_of_its_own(name: str) -> None:
    assert default_store(find(name)) == "store"


TRAINED = """
  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {MODEL}}}
"""


def write(*stages: str) -> str:
    Path("proj/p.yaml").write_text(PIPELINE + "".join(stages))
    return "proj/p.yaml"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (TRAINED.replace("MODEL", "path: nobody/none"), "stage warm: with.model.path: 'nobody/none' is neither a path"),
        (
            "  warm: {uses: train.sft, inputs: {trajectories: expert, model: warm/01234567}}\n",
            "warm/01234567 is not in",
        ),
        (TRAINED.replace("MODEL", "path: ."), "stage warm: with.model.path"),
    ],
)
def test_validate_finds_what_plan_finds(elsewhere: Path, capsys: Any, stage: str, message: str) -> None:
    file = write(stage)
    plan, checked = (said(capsys, command, file, code=2) for command in ("plan", "validate"))
    assert message in checked
    assert checked == plan
    document = json.loads(said(capsys, "validate", file, "--json", code=2))
    assert [message in problem["message"] for problem in document["problems"]] == [True]


ASKS = """
  ask:
    uses: trajectories.sample
    inputs: {tasks: tasks.train}
    with:
      sampling: {max_turn_tokens: 9}
      engine: {type: openai, model: m, base_url: 'http://127.0.0.1:1/v1', api_key: '${TEACHER}'}
  far:
    uses: train.sft
    inputs: {trajectories: expert}
    with: {model: {init: tiny}}
    execution: {gpus: 4096}
  pooled:
    uses: train.sft
    inputs: {trajectories: expert}
    with: {model: {init: tiny}}
    execution: {EXECUTION}
"""


def test_validate_says_what_a_run_here_lacks_and_what_it_cannot_know(
    elsewhere: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEACHER", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    file = write(ASKS.replace("EXECUTION", "pool: gpu"))
    document = json.loads(said(capsys, "validate", file, "--json"))
    assert document["ok"]
    assert document["store"] == "proj/store"
    key, gpus, pool = document["missing_here"]
    assert key.startswith("stage ask: with.engine.api_key: environment variable TEACHER is not set")
    assert gpus.startswith("stage far: execution.gpus is 4096, and this machine has")
    assert pool.startswith("stages run in work pools: pooled (gpu); that needs a Prefect server")
    assert document["unknown"] == ["stage pooled: packages, variables and GPUs of the workers of pool gpu"]
    text = said(capsys, "validate", file)
    assert "pipeline p is valid, 5 stages a run here is refused: stage ask" in text
    assert "not known here: stage pooled: packages" in text
    monkeypatch.setenv("TEACHER", "key")
    document = json.loads(said(capsys, "validate", write(ASKS.replace("EXECUTION", "")), "--json"))
    assert [reason.startswith("stage far") for reason in document["missing_here"]] == [True]
    assert document["unknown"] == []
    assert not Path("proj/store").exists()

"""Code beside a pipeline file: said when it is run for the first time, listed without running it."""

import json
import sys
from pathlib import Path

import pytest

from agentrl.flows import cli

STAGES = """
from pathlib import Path
Path("was-run").touch()
from agentrl.pipelines.handles import Table
from agentrl.pipelines.stage import Context, StageConfig, stage

class Config(StageConfig):
    env: str = ""

@stage("stranger.made", version=1)
def made(context: Context, config: Config, tables: list[Table] | None = None) -> Table:
    raise NotImplementedError
"""
PIPELINE = """
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup}}
  sweep: {uses: "stranger_stages.inner:made", matrix: {env: ["a", "stranger_env:Mine", "{x:y}", "os:path"]}}
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "theirs"
    (folder / "stranger_stages").mkdir(parents=True)
    (folder / "stranger_stages" / "__init__.py").touch()
    (folder / "stranger_stages" / "inner.py").write_text(STAGES)
    (folder / "stranger_env.py").write_text("from pathlib import Path\nPath('was-run').touch()")
    (folder / "p.yaml").write_text(PIPELINE)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_plan_without_code_lists_it_and_runs_none(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["plan", "theirs/p.yaml", "--no-code", "--json"]) == 0
    printed = capsys.readouterr()
    stages = {stage["stage"]: stage for stage in json.loads(printed.out)}
    code = [str(stranger / "stranger_stages" / name) for name in ("__init__.py", "inner.py")]
    assert stages["tasks"]["code"] == []
    own = [stage["code"] for name, stage in stages.items() if name != "tasks"]
    assert sorted(own) == sorted([code, code, code, [str(stranger / "stranger_env.py"), *code]])
    assert printed.err == ""
    assert cli.call(["plan", "theirs/p.yaml", "--no-code"]) == 0
    assert "5 stages, 3 files of your own; nothing was run" in capsys.readouterr().out
    assert cli.call(["plan", "theirs/p.yaml", "--no-code", "--set", "seed=x"]) == 2
    assert "--set seed: seed: Input should be a valid integer" in capsys.readouterr().err
    assert not Path("was-run").exists()


def test_that_code_is_run_is_said_once_for_a_folder(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        for name in [name for name in sys.modules if name.startswith("stranger_")]:
            del sys.modules[name]
        cli.call(["plan", "theirs/p.yaml", "--set", "stages.sweep.matrix.env=[a]", "--json"])
        output = capsys.readouterr()
        json.loads(output.out)
        texts.append(output.err)
    assert Path("was-run").exists()
    assert (
        texts[0].count(f"note: code in {stranger} is run, since a name points to its module stranger_stages.inner") == 1
    )
    assert "note" not in texts[1]

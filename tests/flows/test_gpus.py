"""GPUs that stages ask for: shown to them alone, waited for, refused if there are not so many. The driver is a script
that lists as many as a test needs."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_machines import fake_gpus

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.gpus import reserved, shortage
from agentrl.pipelines.file.machines import gpus_here
from agentrl.pipelines.handles import Table
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.pipelines.stages.train import SFTConfig
from agentrl.schemas.pipeline import Execution
from agentrl.training.job import DeepSpeed

ROOT = Path(__file__).parents[2]
STAGES = """
import os, time
import pyarrow as pa
from agentrl.pipelines.handles import Table
from agentrl.pipelines.stage import Context, StageConfig, stage


class Look(StageConfig):
    number: int = 0


@stage("look", version=1)
def look(context: Context, config: Look) -> Table:
    time.sleep(0.3)
    return context.table(pa.table({"gpus": [os.environ.get("CUDA_VISIBLE_DEVICES", "all")]}))
"""
SPEC = """
name: gpus
stages:
  a: {uses: "looks:look", with: {number: 1}, execution: {gpus: 2}}
  b: {uses: "looks:look", with: {number: 2}, execution: {gpus: 2}}
  c: {uses: "looks:look", with: {number: 3}, execution: {gpus: 4}}
"""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of this test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def agentrl(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "gpus.yaml", "--no-prefect", "--json", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_stages_see_the_gpus_that_they_asked_for_and_share_none(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(alone / "bin", 4, monkeypatch)
    (alone / "looks.py").write_text(STAGES)
    (alone / "gpus.yaml").write_text(SPEC)
    done = agentrl(alone, "--jobs", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, list[str]] = {}
    for name in "abc":
        catalog = Catalog(alone / "store")
        manifest = find_artifact(catalog, name)
        path = catalog.local(manifest, manifest.outputs["table"].path)
        seen[name] = Table(path, name, "table", manifest.fingerprint).table()["gpus"].to_pylist()[0].split(",")
    assert set(seen["a"]) | set(seen["b"]) == set("0123"), "they ran beside each other, on GPUs of their own"
    assert seen["c"] == list("0123"), "it waited for all"


@pytest.mark.parametrize(("there", "wanted"), [(2, 3)])
def test_more_gpus_than_there_are_is_refused_before_anything_runs(
    there: int, wanted: int, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(alone / "bin", there, monkeypatch)
    (alone / "looks.py").write_text(STAGES)
    text = 'name: gpus\nstages:\n  first: {uses: "looks:look"}\n'
    text += f'  many: {{uses: "looks:look", with: {{number: 1}}, execution: {{gpus: {wanted}}}}}\n'
    (alone / "gpus.yaml").write_text(text)
    done = agentrl(alone)
    assert done.returncode == 2
    assert f"error: stage many: execution.gpus is {wanted}, and this machine has {there}; lower it" in done.stderr
    assert not (alone / "store" / "runs").exists()


def test_gpus_of_other_machines_are_not_counted_here(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(alone / "bin", 0, monkeypatch)
    spread = SFTConfig(deepspeed=DeepSpeed())
    assert gpus_here(Execution(gpus=8), spread) == 8
    assert gpus_here(Execution(gpus=8, launcher="ray", nodes=2), spread) == 0
    assert gpus_here(Execution(gpus=8, launcher="ray", nodes=2), SFTConfig()) == 8, "it trains in its own process"
    assert shortage(8, {}) is not None
    assert shortage(2, {"CUDA_VISIBLE_DEVICES": "4,5"}) is None
    with reserved(1, {"CUDA_VISIBLE_DEVICES": "4,5", "A": "b"}, threading.Event(), print) as env:
        assert env == {"CUDA_VISIBLE_DEVICES": "4", "A": "b"}


def test_a_stage_waits_for_gpus_says_so_and_stops_waiting_when_the_run_ends(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(alone / "bin", 2, monkeypatch)
    stopping, text, got = threading.Event(), list[str](), list[Any]()

    def other() -> None:
        with reserved(1, {}, stopping, text.append) as env:
            got.append(env)

    with reserved(2, {}, threading.Event(), text.append):
        waiting = threading.Thread(target=other)
        waiting.start()
        until = time.monotonic() + 10
        while not text:
            assert time.monotonic() < until
            time.sleep(0.01)
        stopping.set()
        waiting.join(10)
    assert text == ["waits for 1 GPUs; 0 of 2 are free"]
    assert got == [None]
    stopping.clear()
    other()
    assert got[1]["CUDA_VISIBLE_DEVICES"] == "0"

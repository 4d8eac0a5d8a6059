"""The sequence of a whole project, as its page shows it: logs, a first model, a recorded agent, training, serving."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.pipelines.file.load import load

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples" / "project"


@pytest.mark.parametrize("name", ["old_agent.yaml", "first.yaml", "improve.yaml"])
def test_the_pipelines_of_the_page_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs.jsonl").touch()
    assert load(str(PROJECT / name)).nodes


@pytest.mark.parametrize("name", ["first.yaml", "improve.yaml"])
def test_the_page_shows_what_is_there(name: str) -> None:
    shown = (ROOT / "docs/tutorials/own-agent.md").read_text()
    assert (PROJECT / name).read_text().strip() in shown, f"docs/tutorials/own-agent.md shows another {name}"


@contextmanager
def served(model: str, folder: Path, env: dict[str, str]) -> Iterator[str]:
    command = [sys.executable, "-m", "agentrl.flows.cli", "serve", "--model", model, "--record", "store", "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        while not (match := re.search(r"(http://[\d.:]+)/v1", line := server.stdout.readline())):
            assert line, "it ended while it started"
        yield match[1]
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()


@pytest.mark.slow
def test_the_sequence_runs_from_logs_to_a_served_model(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(PROJECT, folder)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def call(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def agentrl(*words: str) -> str:
        return call(sys.executable, "-m", "agentrl.flows.cli", *words)

    def small(*more: str) -> list[str]:
        sizes = ["stages.tasks.with.train=64", "stages.tasks.with.heldout=8", "stages.tasks.with.dev=2"]
        return [word for setting in (*sizes, *more) for word in ("--set", setting)]

    agentrl("run", "old_agent.yaml", "--store", "old", *small())
    agentrl("buffer", "export", "logs.jsonl", "-f", "openai-chat", "--where", "stage = 'expert'", "--store", "old")
    first = ["stages.first.with.steps=150"]
    agentrl("run", "first.yaml", *small(*first))
    (folder / "cases.jsonl").write_text(call(sys.executable, "cases.py", "store"))
    with served("first", folder, env) as url:
        assert re.search(r"\d+ of 64 right", call(sys.executable, "agent.py", "cases.jsonl", url))
    counted = "select count(*) as n, count(success) as scored from trajectories where stage = 'recorded'"
    assert agentrl("buffer", "query", counted).split() == ["n", "scored", "64", "64"]
    version = agentrl("buffer", "history").splitlines()[1].split()[0]
    online = [f"stages.online.with.{name}" for name in ("iterations=2", "tasks=4", "samples=4")]
    more = [*first, f"stages.recorded.with.version={version}", *online]
    agentrl("run", "improve.yaml", *small(*more))
    assert "coverage: each ticket was trained on once" in agentrl("show", "online")
    with served("online", folder, env) as url:
        assert re.search(r"\d+ of 64 right", call(sys.executable, "agent.py", "cases.jsonl", url))

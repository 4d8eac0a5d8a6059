"""Benchmarks that take long run through at their smallest: what they import and call has not gone away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def ran(script: str, **settings: str) -> str:
    """What a benchmark prints at its smallest."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SCALE": "small", **settings}
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_ways_of_learning_are_measured_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    settings = {"METHODS": "rejection,DPO step,GRPO", "JOBS": "1", "KEEP": str(tmp_path)}
    first = ran("learning", **settings)
    assert [line.split("  ")[0] for line in first.splitlines()[2:]] == ["rejection", "DPO step", "GRPO"]
    assert {"rejection True 0", "GRPO False 0"} <= {path.name for path in (tmp_path / "heldout").iterdir()}
    assert ran("learning", **settings) == first


def test_experiments_about_questions_run() -> None:
    printed = ran("methods", METHODS="research,webshaper")
    assert "research, search_qa, terms:" in printed
    assert "over given again, each at its best temperature:" in printed

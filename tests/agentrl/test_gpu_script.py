"""What ``benchmarks/gpu.sh`` runs on a GPU, each part at a tiny size here: an option that was renamed breaks it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ["tests of vLLM", "memory", "training", "rollouts"]


def dry_run(venv: Path, option: str = "--dry-run") -> tuple[int, str]:
    """Exit code and output."""
    env = {**os.environ, "VENV": str(venv), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["benchmarks/gpu.sh", option],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in *training.py*) exit 3 ;; esac\n')
    python.chmod(0o755)
    code, output = dry_run(tmp_path)
    assert code == 1, output
    assert [line for line in output.splitlines() if line.startswith("== ")] == [f"== {name}" for name in PARTS]
    assert output.splitlines()[-1] == "failed: training"
    assert "--collect-only -m vllm" in output
    assert "test_engine_vllm.py" in output
    assert "ran benchmarks/gpu.py" in output


def test_an_option_that_is_not_known_runs_nothing(tmp_path: Path) -> None:
    code, output = dry_run(tmp_path, "--dryrun")
    assert (code, output) == (2, "benchmarks/gpu.sh: no option --dryrun; it takes --dry-run, or nothing\n")


@pytest.mark.slow
@pytest.mark.ci
def test_each_part_runs_at_a_tiny_size() -> None:
    pytest.importorskip("trl")
    code, output = dry_run(Path(sys.prefix))
    assert code == 0, output
    assert "adapters of rank 16, bfloat16, checkpointing" in output
    assert "SFT, 0.5 M: ours / TRL" in output
    assert "new weights by files, until the server answers with them" in output

"""A process that may not reserve memory, open files or write: one line that says what was not done."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable
from store_rows import FP, build
from typer.testing import CliRunner

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.errors import StoreError, UnfinishedError, one_line
from agentrl.datastore.table import delta_table
from agentrl.datastore.upkeep import compact
from agentrl.flows.cli import app, call

ROOT = str(Path(__file__).parents[2])


def fill(store: Path, shards: int) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(store)
    for shard in range(shards):
        buffer.append([build(shard)], stage="rollout", fingerprint=FP, shard=shard)
    return buffer


def limited(kind: int, limit: int, *arguments: str) -> tuple[int, str]:
    """``agentrl`` in a process of its own under a limit."""
    command = [sys.executable, "-m", "agentrl.flows.cli", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": ROOT},
        preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_too_little_address_space_is_said_and_never_hangs(tmp_path: Path) -> None:
    buffer = fill(tmp_path, 3)
    code, shown = limited(resource.RLIMIT_AS, 900_000 * 1024, "buffer", "compact", "--store", str(tmp_path))
    assert (code, len(shown.splitlines())) == (2, 1), shown
    assert "may reserve 878 MiB of addresses (ulimit -v)" in shown
    assert "nothing was done" in shown
    assert buffer.version == 3


def test_too_few_open_files_are_one_line_without_colours(tmp_path: Path) -> None:
    buffer = fill(tmp_path, 30)
    code, shown = limited(resource.RLIMIT_NOFILE, 24, "buffer", "compact", "--store", str(tmp_path))
    assert (code, len(shown.splitlines())) == (1, 1), shown
    assert "Too many open files" in shown
    assert "may open 24 files at once: raise `ulimit -n`" in shown
    assert "x1b" not in shown
    assert buffer.version == 30


def test_an_error_of_several_lines_becomes_one() -> None:
    text = "Kernel error -> store error\n   \x1b[31m↳\x1b[0m Unable to open x.json:\n    \x1b[31m↳\x1b[0m Too many\n"
    assert one_line(text) == "Kernel error -> store error: Unable to open x.json: Too many"
    assert one_line("") == "unknown error"


def test_compact_says_that_its_checkpoint_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 3)
    monkeypatch.setattr("agentrl.datastore.table.checkpoints.LEAST_BYTES", 1)

    def full(self: DeltaTable) -> None:
        raise OSError("Kernel error\n  ↳ No space left on device (os error 28)")

    with monkeypatch.context() as disk:
        disk.setattr(DeltaTable, "create_checkpoint", full)
        with (
            pytest.warns(UserWarning, match="no checkpoint"),
            pytest.raises(UnfinishedError, match="3 files are 1 now"),
        ):
            compact(TrajectoryBuffer(tmp_path))
        again = CliRunner().invoke(app, ["buffer", "compact", "--store", str(tmp_path)])
        assert isinstance(again.exception, UnfinishedError)
        assert "version 4, but a checkpoint of the log could not be written" in str(again.exception)
        assert "Kernel error: No space left on device" in str(again.exception)
        assert call(["buffer", "compact", "--store", str(tmp_path)]) == 1
    log = tmp_path / "trajectories/_delta_log"
    assert not list(log.glob("*.checkpoint.parquet"))
    assert call(["buffer", "compact", "--store", str(tmp_path)]) == 0
    assert len(list(log.glob("*.checkpoint.parquet"))) == 1  # made up for


def test_a_limit_that_is_enough_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (delta_table.LEAST_ADDRESSES, -1))
    TrajectoryBuffer(tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (delta_table.LEAST_ADDRESSES - 1, -1))
    with pytest.raises(StoreError, match="ulimit -v"):
        TrajectoryBuffer(tmp_path)

"""Locks of builds that were killed do not let a training job wait without end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from agentrl.training.jit_locks import clear_stale_locks

BUILD = """
import sys, time
from torch.utils.file_baton import FileBaton
print(FileBaton(sys.argv[1]).try_acquire(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "fused_adam").mkdir()
    return tmp_path / "fused_adam" / "lock"


def test_the_lock_of_a_killed_build_is_removed_and_that_of_a_living_one_is_kept(lock: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BUILD, str(lock)], stdout=subprocess.PIPE, text=True) as build:
        assert build.stdout is not None
        assert build.stdout.readline() == "True\n"
        assert clear_stale_locks() == []
        assert lock.exists()
        build.kill()
        build.wait()
    [text] = clear_stale_locks()
    assert text.startswith(f"removed {lock}")
    assert FileBaton(str(lock)).try_acquire()


def test_a_young_lock_of_a_folder_that_machines_share_is_only_reported(lock: Path) -> None:
    lock.touch()
    [text] = clear_stale_locks(shared=True)
    assert "if no other machine builds there, remove it" in text
    assert lock.exists()
    os.utime(lock, (time.time() - 3600,) * 2)
    assert clear_stale_locks(shared=True)[0].startswith("removed")
    assert clear_stale_locks() == []

"""Signs of life in a file, which ranks follow on their own clocks, without locks."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentrl.placement import signs
from agentrl.placement.signs import SIGNS, Signs, Silence

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that looks see, in its only item."""
    now = [1000.0]
    monkeypatch.setattr(signs.time, "monotonic", lambda: now[0])
    return now


def test_only_a_silence_that_was_looked_at_counts(tmp_path: Path, clock: list[float]) -> None:
    file = tmp_path / "alive"
    silence = Silence(file, 60)
    file.write_text("1")
    assert silence.look() is None
    clock[0] += 3600  # this process was stopped, and so may the other one have been
    assert silence.look() is None
    for _ in range(11):
        clock[0] += 5
        assert silence.look() is None
    file.write_text("2")
    assert silence.look() is None
    assert silence.seconds == 0
    reasons = []
    for _ in range(13):
        clock[0] += 5
        reasons.append(silence.look())
    assert reasons[:12] == [None] * 12
    assert f"the stage gave no sign of life in {file} for 60 s" in str(reasons[12])


def test_a_folder_that_is_not_shared_and_one_that_fails_are_told_apart(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = Silence(tmp_path / "other" / "alive", 5)
    clock[0] += 5
    assert silence.look() is None
    clock[0] += 1
    assert "was ever seen in" in (reason := str(silence.look()))
    assert "(No such file or directory)" in reason
    (tmp_path / "alive").write_text("1")
    silence = Silence(tmp_path / "alive", 4)
    silence.look()

    def stale(path: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "read_bytes", stale)
    clock[0] += 5
    assert "(Stale file handle) for 4 s" in str(silence.look())


def test_signs_are_given_until_they_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "BEAT_S", 0.02)
    given = Signs(tmp_path / "alive")
    seen = set()
    until = time.monotonic() + 5
    while len(seen) < 3 and time.monotonic() < until:
        seen.add((tmp_path / "alive").read_bytes())
        time.sleep(0.01)
    assert len(seen) == 3
    given.close()
    assert list(tmp_path.iterdir()) == []


def test_signs_that_cannot_be_written_are_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(signs, "BEAT_S", 0.01)
    given = Signs(tmp_path / "folder")
    failed = threading.Event()
    tries = []

    def full() -> None:
        tries.append(1)
        if len(tries) > 3:
            failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(given, "_beat", full)
    assert failed.wait(5)
    given.close()
    assert [str(warning.message).partition(";")[0] for warning in recwarn] == [
        "no sign of life can be written: [Errno 28] No space left on device"
    ]


WITHOUT_LOCKS = """
import errno, fcntl, os, sys

def absent(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

fcntl.flock = fcntl.lockf = absent
"""

STAGE = """
import sys, time
from pathlib import Path
from agentrl.placement.signs import SIGNS, Signs
from agentrl.training.orders import Orders

folder = Path(sys.argv[1])
signs = Signs(folder / f"ranks{SIGNS}")
orders = Orders(folder / "orders", lambda: None, 20)
(folder / "told.partial").write_text(str(orders.folder))
(folder / "told.partial").rename(folder / "told")
print(orders.give("double", number=4)["twice"], flush=True)
time.sleep(600)
"""

RANK = """
import sys, threading, time
from pathlib import Path
from agentrl.placement.signs import SIGNS, Silence
from agentrl.training.orders import answer, arriving

folder = Path(sys.argv[1])
while not (folder / "told").exists():
    time.sleep(0.02)

def carry_out():
    for path, order in arriving(Path((folder / "told").read_text()), 20):
        answer(path, {"twice": 2 * order["number"]})

threading.Thread(target=carry_out, daemon=True).start()
silence = Silence(folder / f"ranks{SIGNS}", float(sys.argv[2]))
while not (reason := silence.look()):
    time.sleep(0.1)
sys.exit(reason)
"""


@pytest.mark.slow
@pytest.mark.ci
def test_without_locks_orders_work_and_a_stage_that_is_killed_is_missed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = [sys.executable, "-c"]
    given = {"env": env, "text": True}
    stage = subprocess.Popen([*start, WITHOUT_LOCKS + STAGE, str(tmp_path)], stdout=subprocess.PIPE, **given)  # type: ignore[call-overload]
    rank = subprocess.Popen([*start, WITHOUT_LOCKS + RANK, str(tmp_path), "3"], stderr=subprocess.PIPE, **given)  # type: ignore[call-overload]
    assert stage.stdout.readline() == "8\n"
    time.sleep(3.5)
    assert rank.poll() is None, "it ended while signs came"
    stage.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    stage.wait()
    _, printed = rank.communicate(timeout=20)
    assert time.monotonic() - killed < 8
    assert f"the stage gave no sign of life in {tmp_path / f'ranks{SIGNS}'} for 3 s: its process ended" in printed

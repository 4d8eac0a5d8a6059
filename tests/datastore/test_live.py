"""The live log of a stage: lines that are there at once, whole and once, whatever happens to who writes them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.datastore.artifacts import live_metrics as live
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.live_metrics import LiveLog, length, lines_after, live_stages
from agentrl.datastore.errors import StoreError
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.pipelines.results.gc import collect, find_garbage


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PUT_S", 0.02)


def steps(position: Any, run: str, stage: str = "sft", cursor: int = 0, most: int = live.MOST) -> tuple[list[int], int]:
    result = lines_after(position, run, stage, cursor, most)
    assert result is not None
    return [json.loads(line)["step"] for line in result.lines], result.cursor


def there(position: Any, run: str) -> list[int]:
    return steps(position, run)[0] if lines_after(position, run, "sft") else []


def until(condition: Any) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_lines_are_read_after_a_cursor_while_they_are_written(store: str, tmp_path: Path) -> None:
    storage = Catalog(store).storage
    assert lines_after(storage, "r1", "sft") is None
    with LiveLog(storage, "r1", "sft", tmp_path / "live.jsonl") as log:
        log.write({"step": 0.0, "loss": 2.5, "norm": float("inf")})
        until(lambda: there(storage, "r1"))
        first = lines_after(storage, "r1", "sft")
        assert first is not None
        assert json.loads(first.lines[0]) == {
            "step": 0,
            "loss": 2.5,
            "norm": None,
            "time": pytest.approx(time.time(), abs=60),
        }
        log.write({"step": 1.0, "loss": 2.0})
        until(lambda: steps(storage, "r1", cursor=first.cursor)[0] == [1])
        assert live_stages(storage, "r1") == ["sft"]
    result, cursor = steps(storage, "r1")
    assert result == [0, 1]
    assert (length(storage, "r1", "sft"), length(storage, "r1", "other")) == (cursor, 0)
    assert steps(storage, "r1", cursor=cursor) == ([], cursor)


def test_a_log_of_many_parts_is_read_from_any_cursor(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PART", 300)
    storage = Catalog(store).storage
    with LiveLog(storage, "r1", "sft", tmp_path / "live.jsonl") as log:
        for number in range(20):
            log.write({"step": number, "loss": 1.0})
            if not isinstance(storage, LocalStorage) and number % 5 == 0:
                until(lambda number=number: there(storage, "r1")[-1:] == [number])
    if not isinstance(storage, LocalStorage):
        assert len(list(storage.keys("runs/r1/live"))) > 1, "a full part is not put again"
    seen, cursor = [], 0
    while (more := steps(storage, "r1", cursor=cursor, most=200))[0]:
        seen, cursor = seen + more[0], more[1]
    assert seen == list(range(20))
    whole = lines_after(storage, "r1", "sft")
    assert whole is not None
    ends = [0]
    for line in whole.lines:
        ends.append(ends[-1] + len(line) + 1)
    for number, cursor in enumerate(ends):
        assert steps(storage, "r1", cursor=cursor)[0] == list(range(number, 20))


def test_a_run_that_goes_on_has_each_step_once_and_the_killed_one_keeps_its_log(store: str, tmp_path: Path) -> None:
    """The killed run left half a line, and its checkpoint is two steps older than its log."""
    storage, kept = Catalog(store).storage, tmp_path / "live.jsonl"
    with LiveLog(storage, "r1", "sft", kept) as log:
        for number in range(5):
            log.write({"step": number, "loss": 1.0})
    with kept.open("ab") as file:
        file.write(b'{"step": 5, "lo')
    assert steps(storage, "r1")[0] == [0, 1, 2, 3, 4], "half a line is no line"
    with LiveLog(storage, "r2", "sft", kept) as log:
        for number in range(3, 8):
            log.write({"step": number, "loss": 2.0})
    assert steps(storage, "r2")[0] == list(range(8))
    assert steps(storage, "r1")[0] == list(range(5))
    with LiveLog(storage, "r2", "sft", kept) as log:  # the same run tries its stage again
        log.write({"step": 7, "loss": 3.0})
        log.write({"step": 8, "loss": 3.0})
    assert steps(storage, "r2")[0] == list(range(9))


def test_a_log_that_began_again_is_read_from_its_beginning(store: str, tmp_path: Path) -> None:
    storage = Catalog(store).storage
    ends = []
    for number in (9, 2):
        with LiveLog(storage, "r1", "sft", tmp_path / str(number)) as log:
            for step in range(number):
                log.write({"step": step})
        ends.append(steps(storage, "r1")[1])
    assert steps(storage, "r1", cursor=ends[0])[0] == [0, 1]


WRITER = """
import sys
from pathlib import Path
from agentrl.datastore.artifacts.live_metrics import LiveLog
from agentrl.datastore.storage.object_store import storage_of

with LiveLog(storage_of(sys.argv[1]), "r1", "sft", Path(sys.argv[2])) as log:
    for step in range(1_000_000):
        log.write({"step": step, "loss": 1.0, **{f"metric {number}": 0.123456789 for number in range(20)}})
"""


def test_kill_9_loses_no_line_and_doubles_none(tmp_path: Path) -> None:
    """The run that goes on begins at a checkpoint half way back."""
    store, kept = tmp_path / "store", tmp_path / "live.jsonl"
    storage = Catalog(str(store)).storage
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(store), str(kept)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    until(lambda: len(there(storage, "r1")) > 100)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    killed = (store / "runs/r1/live/sft.jsonl").read_bytes().count(b"\n")
    with LiveLog(storage, "r2", "sft", kept) as log:
        for step in range(killed // 2, killed + 9):
            log.write({"step": step, "loss": 1.0})
    seen, cursor = [], 0
    while (more := steps(storage, "r2", cursor=cursor))[0]:
        seen, cursor = seen + more[0], more[1]
    assert seen == list(range(killed + 9))


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    storage = Catalog(str(tmp_path)).storage
    for run, stage in (("..", "sft"), ("r/../..", "sft"), ("r", "../../secret"), ("", "sft")):
        with pytest.raises(StoreError, match="cannot name a folder"):
            lines_after(storage, run, stage)


def test_a_log_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "store" / "runs").mkdir(parents=True)
    (tmp_path / "store" / "runs" / "r1").write_text("in the way")
    with (
        pytest.warns(UserWarning, match="is no longer written"),
        LiveLog(Catalog(str(tmp_path / "store")).storage, "r1", "sft", tmp_path / "live.jsonl") as log,
    ):
        log.write({"step": 0})


def record(catalog: Catalog, run_id: str) -> None:
    catalog.write_run({"run_id": run_id, "state": "completed", "host": "elsewhere", "pid": 1, "stages": {}})


@pytest.mark.filterwarnings("error")
def test_gc_removes_the_logs_of_runs_that_it_does_not_keep(store: str, tmp_path: Path) -> None:
    catalog = Catalog(store)
    for run_id in ("2026-1", "2026-2"):
        record(catalog, run_id)
        with LiveLog(catalog.storage, run_id, "sft", tmp_path / run_id) as log:
            log.write({"step": 0})
    assert [run["run_id"] for run in catalog.runs()] == ["2026-1", "2026-2"]
    assert sorted(key for key, _ in catalog.storage.beside("runs")) == ["runs/2026-1.json", "runs/2026-2.json"]
    assert find_garbage(catalog, keep_runs=1).live == ["2026-1"]
    assert collect(catalog, keep_runs=1).live == ["2026-1"]
    assert lines_after(catalog.storage, "2026-1", "sft") is None
    assert steps(catalog.storage, "2026-2")[0] == [0]
    assert [run["run_id"] for run in catalog.runs()] == ["2026-1", "2026-2"]


def test_a_step_costs_less_than_a_millisecond(tmp_path: Path) -> None:
    metrics = {f"metric {number}": 0.123456789 * number for number in range(40)}
    with LiveLog(Catalog(str(tmp_path)).storage, "r1", "sft", tmp_path / "live.jsonl") as log:
        began = time.process_time()
        for number in range(500):
            log.write({"step": number, **metrics})
        each = (time.process_time() - began) / 500
    assert each < 1e-3

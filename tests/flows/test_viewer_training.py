"""Training on the page: metrics by step, the rows of a step, what changes now, and the doctor."""

import asyncio
import json
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from viewer_store import GRPO, Browser, make_store, publish, record_run, row, training_row

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.live_metrics import LiveLog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer import processes
from agentrl.flows.viewer.pages import training
from agentrl.flows.viewer.reader import StoreReader
from agentrl.pipelines.run.runs import this_process
from agentrl.schemas.manifest import Kind
from agentrl.schemas.training import TRAINING_SCHEMA

ONLINE = "2" * 32
RUN = "20260102-000000-0001"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "store"
    name = make_store(folder, rows=8)
    rows = [row(number, name) for number in range(4)]
    steps = [
        {"step": number // 2, "trajectory_id": entry.trajectory_id, "advantage": number - 1.5, "trained": number != 3}
        for number, entry in enumerate(rows)
    ]
    steps.append({"step": 1, "trajectory_id": "gone-00000000-000000", "advantage": 0.0, "trained": False})
    batches = [training_row(entry) | {"iteration": number // 2, "step": 0} for number, entry in enumerate(rows[:3])]
    schema = pa.schema([pa.field("iteration", pa.int64()), pa.field("step", pa.int64()), *TRAINING_SCHEMA])
    outputs = {
        "steps": (Kind.TABLE, pa.Table.from_pylist(steps)),
        "batches": (Kind.TABLE, pa.Table.from_pylist(batches, schema=schema)),
        "metrics": (Kind.TABLE, pa.table({"step": [0.0, 1.0], "loss": [0.5, 0.25], "grad_norm": [1.0, None]})),
        "coverage": (Kind.TABLE, pa.table({"batch": [0, 1, 1], "version": [0, 0, 1], "staleness": [0, 3, 2]})),
    }
    publish(Catalog(folder), "online", ONLINE, "train.online", outputs, minutes=9)
    return folder


def begin(store: Path, lines: int) -> None:
    """A run of this process that trains now, and has taken some steps."""
    now = datetime.now(UTC).isoformat(sep=" ")
    stages = {"late": {"status": "running", "fingerprint": "3" * 32, "reasons": [], "started_at": now}}
    record_run(store, RUN, state="running", stages=stages, **this_process())
    with LiveLog(Catalog(store).storage, RUN, "late", store / "tmp" / "live.jsonl") as log:
        for step in range(lines):
            log.write({"step": step, "loss": 1.0 / (step + 1)})


def test_training_is_listed_with_its_series(browser: Browser) -> None:
    [stage] = browser.json("/api/training")["stages"]
    assert (stage["artifact"], stage["uses"], stage["steps"]) == (f"online/{ONLINE[:8]}", "train.online", 2)
    assert stage["series"] == ["loss", "grad_norm"]
    table = browser.arrow("/api/training/metrics", artifact=stage["artifact"])
    assert table.to_pydict() == {"step": [0.0, 1.0], "loss": [0.5, 0.25], "grad_norm": [1.0, None]}


def test_a_step_leads_to_its_rows(browser: Browser) -> None:
    rows = browser.arrow("/api/training/rows", artifact=f"online/{ONLINE[:8]}", step=1).to_pylist()
    assert [entry["trajectory_id"] for entry in rows] == [
        "grpo-aaaaaaaa-000002",
        "grpo-aaaaaaaa-000003",
        "gone-00000000-000000",
    ]
    assert [entry["weight"] for entry in rows] == [0.5, 1.5, 0.0]
    assert [entry["trained"] for entry in rows] == [True, False, False]
    assert [entry["group_id"] for entry in rows] == ["g0", "g0", None]
    assert [entry["success"] for entry in rows] == [False, True, None]
    assert [entry["staleness"] for entry in rows] == [3, 3, None]  # trained at version 3, sampled by version 0


@pytest.mark.parametrize(
    ("path", "query", "status", "field"),
    [
        ("/api/training/metrics", {"artifact": "online/22222223"}, 404, "artifact"),
        ("/api/training/metrics", {"artifact": "../.."}, 404, "artifact"),
        ("/api/training/metrics", {"artifact": f"grpo/{GRPO[:8]}"}, 404, "artifact"),
        ("/api/training/rows", {"artifact": f"online/{ONLINE[:8]}", "step": 2}, 404, "step"),
        ("/api/training/rows", {"artifact": f"online/{ONLINE[:8]}", "step": -1}, 400, "step"),
        ("/api/live/lines", {"run_id": "none", "stage": "late"}, 404, "stage"),
        ("/api/live/lines", {"run_id": RUN, "stage": "late", "cursor": -1}, 400, "cursor"),
        ("/api/doctor", {"run": "none"}, 404, "run"),
    ],
)
def test_what_is_not_there_is_said(browser: Browser, path: str, query: dict[str, Any], status: int, field: str) -> None:
    assert browser.json(path, status, **query)["field"] == field


@pytest.mark.parametrize(("run_id", "stage"), [("..", "late"), ("../..", "late"), (RUN, "../late"), ("/etc", "passwd")])
def test_live_logs_are_named_and_no_paths(browser: Browser, run_id: str, stage: str) -> None:
    assert browser.ask("/api/live/lines", run_id=run_id, stage=stage).status_code in (400, 404)


def test_live_lines_come_after_a_cursor(tmp_path: Path) -> None:
    make_store(tmp_path, rows=2)
    begin(tmp_path, 3)
    browser = Browser(tmp_path)
    first = browser.json("/api/live/lines", run_id=RUN, stage="late")
    assert [json.loads(line)["step"] for line in first["lines"]] == [0, 1, 2]
    more = browser.json("/api/live/lines", run_id=RUN, stage="late", cursor=first["cursor"])
    assert (more["lines"], more["cursor"], more["restarted"]) == ([], first["cursor"], False)
    again = browser.json("/api/live/lines", run_id=RUN, stage="late", cursor=first["cursor"] + 1000)
    assert again["restarted"]
    assert len(again["lines"]) == 3
    [working] = [stage for stage in browser.json("/api/training")["stages"] if stage["artifact"] is None]
    assert (working["stage"], working["run_id"]) == ("late", RUN)


def test_a_tick_of_forty_series_is_small(tmp_path: Path) -> None:
    """Five steps come with a word of the server if there are ten in a second."""
    begin(tmp_path, 0)
    with LiveLog(Catalog(tmp_path).storage, RUN, "late", tmp_path / "tmp" / "live.jsonl") as log:
        for step in range(5):
            log.write({"step": step, **{f"some/metric_{n}": math.sin(step * 40 + n) for n in range(40)}})
    browser = Browser(tmp_path)
    sizes = {}
    for encoding in ("identity", "gzip"):
        answer = browser.ask("/api/live/lines", headers={"accept-encoding": encoding}, run_id=RUN, stage="late")
        sizes[encoding] = int(answer.headers["content-length"]) + sum(map(len, map(str, answer.headers.items())))
        assert len(answer.json()["lines"]) == 5
    assert sizes["gzip"] < 5000 < sizes["identity"], sizes


def test_a_pulse_comes_at_once_and_with_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PULSE_S", 0.01)
    make_store(tmp_path, rows=2)
    reader = StoreReader(str(tmp_path))

    async def listen() -> list[dict[str, Any]]:
        heard = []
        with anyio.fail_after(60):
            async for event in training.events(reader, lambda: False):
                heard.append(json.loads(event.decode().removeprefix("data: ")))
                if len(heard) == 1:
                    more = [row(50)]
                    await asyncio.to_thread(TrajectoryBuffer(tmp_path).append, more, stage="grpo", fingerprint="5" * 32)
                elif len(heard) == 2:
                    await asyncio.to_thread(begin, tmp_path, 1)
                elif "late" in "".join(heard[-1]["live"]):
                    return heard
        return heard

    heard = asyncio.run(listen())
    assert heard[1]["version"] == heard[0]["version"] + 1
    assert heard[0]["runs"] == {}
    assert heard[-1]["runs"] == {RUN: "running"}
    assert heard[-1]["live"][f"{RUN}/late"] > 0


def test_events_are_behind_the_door(browser: Browser) -> None:
    status, _, _ = browser.raw(b"/api/events", [(b"host", b"evil.example")])
    assert status == 403
    assert browser.ask("/api/events", headers={"origin": "http://evil.example"}).status_code == 403


def test_bounds_of_the_doctor_come_with_the_series(tmp_path: Path) -> None:
    make_store(tmp_path, rows=2)
    metrics = pa.table({"step": [0.0, 1.0], "clip_share": [0.1, 0.7], "ess": [0.9, 0.1], "loss": [1.0, 1.0]})
    config = {"algorithm": {"type": "gspo"}, "updates": 4}
    publish(Catalog(tmp_path), "late", "4" * 32, "train.grpo", {"metrics": (Kind.TABLE, metrics)}, config=config)
    begin(tmp_path, 1)
    working, late = Browser(tmp_path).json("/api/training")["stages"]
    assert [(band["metric"], band["bound"], band["above"]) for band in late["bands"]] == [
        ("clip_share", 0.6, True),
        ("ess", 0.3, False),
    ]
    assert [band["metric"] for band in working["bands"]] == ["reference_kl", "ess"]


def test_a_run_is_told_stage_by_stage(tmp_path: Path) -> None:
    make_store(tmp_path, rows=2)
    record_run(tmp_path)
    begin(tmp_path, 1)
    browser = Browser(tmp_path)
    [late] = browser.json("/api/run", run=RUN)["stages"]
    assert (late["status"], late["live"], late["artifact"]) == ("running", True, None)
    ended = browser.json("/api/run", run="20260101")
    assert ended["state"] == "failed"
    told = {
        stage["stage"]: (stage["status"], stage["uses"], stage["cause"], stage["live"]) for stage in ended["stages"]
    }
    assert told["grpo"] == ("ran", "train.grpo", "", False)
    assert told["eval"] == ("failed", "", "ValueError: no", False)
    assert {stage["stage"]: stage["warnings"] for stage in ended["stages"]} == {
        "warm": [],
        "grpo": ["env_errors 2"],
        "eval": [],
    }
    assert browser.json("/api/run", 404, run="none")["field"] == "run"


def test_findings_lead_to_their_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = {
        "name": "n",
        "evidence": "e",
        "threshold": "t",
        "remedy": "r",
        "rows": ["a"],
        "tokens": [3],
        "step": None,
    }
    make_store(tmp_path, rows=20)
    record_run(tmp_path)
    browser = Browser(tmp_path)
    told = processes.Told({"stages": {"grpo": [finding], "gone": [finding]}})
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(processes, "told_by", lambda arguments, patience: asked.append(arguments) or told)
    for _ in range(2):
        while (diagnosis := browser.json("/api/doctor", run="last"))["working"]:
            time.sleep(0.01)
    assert len(asked) == 1, "the doctor looks again only if a stage began or ended"
    artifacts = [(item["artifact"], item["rows"], item["tokens"]) for item in diagnosis["findings"]]
    assert artifacts[0][0] is not None
    assert artifacts[0][0].startswith("grpo/")
    assert artifacts[1] == (None, ["a"], [3])


@pytest.mark.slow
def test_the_doctor_looks_at_a_run(tmp_path: Path) -> None:
    make_store(tmp_path, rows=20)
    record_run(tmp_path)
    browser = Browser(tmp_path)
    while (diagnosis := browser.json("/api/doctor", run="last"))["working"]:
        time.sleep(0.2)
    assert diagnosis["problem"] is None
    assert diagnosis["run_id"] == "20260101-120000-abcd"

"""What ``agentrl status`` says of a stage that is at work."""

from types import SimpleNamespace
from typing import Any

from agentrl.flows.show import status_rows


def text_of(stage: dict[str, Any]) -> str:
    step = SimpleNamespace(name="clean", manifest=None, reasons=["it was never made"])
    runs: Any = [{"state": "running", "stages": {"clean": {"status": "running", **stage}}}]
    [row] = status_rows(SimpleNamespace(steps={"clean": step}), runs)  # type: ignore[arg-type]
    assert row["state"] == "running"
    return str(row["metrics or reason"])


def test_how_far_a_running_stage_is() -> None:
    assert text_of({}) == "it was never made"
    assert text_of({"progress": {"done": 3, "total": None, "left_s": None}}) == "3"
    tries = [
        {"shard": "bucket 7", "state": "set aside", "worker": "a, process 4", "problem": "it was killed"},
        {"shard": "bucket 8", "state": "slow", "worker": "a, process 5", "seconds": 61.2},
        {"shard": "bucket 9", "state": "running", "worker": "a, process 6", "seconds": 1.0},
    ]
    counts = {"set aside": 1, "slow": 1, "running": 1}
    progress = {"progress": {"done": 12, "total": 40, "left_s": 1.5}}
    shards = {"what": "buckets", "counts": counts, "again": 2, "tries": tries}
    assert text_of({**progress, "shards": shards}).splitlines() == [
        "12 of 40 shards: buckets, 1 set aside, 1 slow, 1 running, 2 tried again",
        "set aside: 'bucket 7' on a, process 4: it was killed",
        "slow: 'bucket 8' on a, process 5 for 61 s",
    ]
    assert text_of({**progress, "shards": "of an older version"}) == "12 of 40"

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
    progress = {"progress": {"done": 12, "total": 40, "left_s": 1.5}, "shards": "buckets, 2 tried again"}
    assert text_of(progress) == "12 of 40 shards: buckets, 2 tried again"

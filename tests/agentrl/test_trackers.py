"""Metrics reach the trackers that are asked for, as each of them stores what it was given."""

import sys
from pathlib import Path

import pytest

from agentrl.training.trackers import track

CURVE = [{"step": float(step), "loss": 1.0 / (step + 1)} for step in range(3)]


def test_tensorboard_holds_the_curve(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with track(["tensorboard"], "run-1", tmp_path) as send:
        for metrics in CURVE:
            send(metrics)
    stored = events.EventAccumulator(str(tmp_path / "run-1"))
    stored.Reload()
    result = stored.Scalars("loss")
    assert [point.step for point in result] == [0, 1, 2]
    assert [point.value for point in result] == pytest.approx([m["loss"] for m in CURVE])


@pytest.mark.slow
@pytest.mark.ci
def test_mlflow_holds_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with track(["mlflow"], "run-1", tmp_path) as send:
        for metrics in CURVE:
            send(metrics)
    client = mlflow.MlflowClient()
    [run] = client.search_runs(["0"])
    assert run.info.run_name == "run-1"
    result = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in result] == [(m["step"], m["loss"]) for m in CURVE]


@pytest.mark.slow  # it starts a service of its own
def test_weights_and_biases_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with track(["wandb"], "run-1", tmp_path) as send:
        for metrics in CURVE:
            send(metrics)
    [record] = tmp_path.rglob("run-*.wandb")
    stored = record.read_bytes()
    assert b"run-1" in stored
    assert b"loss" in stored


def test_one_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with (
        pytest.raises(ValueError, match=r"mlflow is not installed; pip install .*trackers"),
        track(["mlflow"], "x", tmp_path),
    ):
        pass

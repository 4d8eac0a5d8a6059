"""Metrics reach the trackers that are asked for."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentrl.trackers import track


def fake_modules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for the three libraries, which note what they are called with."""
    seen: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            seen.append(("tensorboard", Path(folder).name))

        def add_scalar(self, key: str, value: float, step: int) -> None:
            seen.append((key, value, step))

        def close(self) -> None:
            seen.append("closed")

    run = SimpleNamespace(
        log=lambda metrics, step: seen.append(("wandb", metrics, step)), finish=lambda: seen.append("finished")
    )
    modules = {
        "torch.utils.tensorboard": {"SummaryWriter": SummaryWriter},
        "wandb": {"init": lambda name: run},
        "mlflow": {
            "start_run": lambda run_name: seen.append(("mlflow", run_name)),
            "log_metrics": lambda metrics, step: seen.append((metrics, step)),
            "end_run": lambda: seen.append("ended"),
        },
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def test_every_tracker_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_modules(monkeypatch)
    metrics = {"step": 3.0, "loss": 0.5}
    with track(["tensorboard", "wandb", "mlflow"], "run-1", tmp_path) as send:
        send(metrics)
    assert seen == [
        ("tensorboard", "run-1"),
        ("mlflow", "run-1"),
        ("step", 3.0, 3),
        ("loss", 0.5, 3),
        ("wandb", metrics, 3),
        (metrics, 3),
        "ended",
        "finished",
        "closed",
    ]


def test_one_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with (
        pytest.raises(ValueError, match="mlflow is not installed; pip install mlflow"),
        track(["mlflow"], "x", tmp_path),
    ):
        pass

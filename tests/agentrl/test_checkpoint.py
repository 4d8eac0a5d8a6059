"""Checkpoints after a power failure: whatever is left of the newest one, training goes on from a whole one."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_rows, small_policy

from agentrl.algorithms.sft import SFT
from agentrl.training.checkpoint import load_checkpoint, save_checkpoint
from agentrl.training.loop import fit
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer


def state(number: int) -> dict[str, object]:
    return {"done": number, "weights": torch.full((300,), float(number))}


def test_the_newest_is_loaded_and_the_one_before_it_kept(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    assert load_checkpoint(path) is None
    for number in range(3):
        save_checkpoint(path, state(number))
    loaded = load_checkpoint(path)
    assert loaded is not None
    assert loaded["done"] == 2
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoint.pt", "checkpoint.pt.previous"]
    path.unlink()
    loaded = load_checkpoint(path)
    assert loaded is not None
    assert loaded["done"] == 1


@settings(deadline=None)
@given(st.data())
def test_a_damaged_checkpoint_is_named_and_set_aside(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("c") / "checkpoint.pt"
    for number in range(2):
        save_checkpoint(path, state(number))
    body = bytearray(path.read_bytes())
    weights = body.find(torch.full((300,), 1.0).numpy().tobytes())
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]  # cut short
    else:
        start = weights + data.draw(st.integers(0, 1199))
        body[start : start + 64] = bytes(byte ^ 0xFF for byte in body[start : start + 64])  # a block never written
    path.write_bytes(body)
    with pytest.warns(UserWarning, match=r"checkpoint.pt is damaged .* set aside as checkpoint.pt.damaged-"):
        loaded = load_checkpoint(path)
    assert loaded is not None
    assert loaded["done"] == 0
    assert not path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_checkpoint(path) is not None  # said once


def test_two_damaged_ones_start_over(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    for number in range(2):
        save_checkpoint(path, state(number))
    for item in list(tmp_path.iterdir()):
        item.write_bytes(b"")
    with pytest.warns(UserWarning, match="goes on from the start"):
        assert load_checkpoint(path) is None


def test_content_is_durable_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(f"sync {_name(handle)}"), sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"name {Path(b).name}"), replace(a, b))[1])
    save_checkpoint(tmp_path / "c.pt", state(0))
    assert [event.split(".")[-1] for event in events[:1]] == ["tmp"]
    assert events[1:] == ["name c.pt", f"sync {tmp_path.name}"]


def _name(handle: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{handle}")).name


def curve(folder: Path, stop_after: int | None = None) -> list[dict[str, float]]:
    trainer = Trainer(small_policy(), SFT(), OptimizerConfig(lr=1e-3, schedule="cosine", warmup=2), 7)

    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] + 1 == stop_after:
            raise KeyboardInterrupt

    rows = [row.model_copy(update={"weights": [1.0] * len(row.input_ids)}) for row in random_rows(10)]
    return fit(trainer, TrainingRows.of(rows), 4, 0, folder / "checkpoint.pt", on_step, checkpoint_every=2)


def test_training_goes_on_from_the_checkpoint_before_a_torn_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    expected = curve(whole)
    with pytest.raises(KeyboardInterrupt):
        curve(cut, stop_after=5)
    (cut / "checkpoint.pt").write_bytes((cut / "checkpoint.pt").read_bytes()[:5000])
    with pytest.warns(UserWarning, match="goes on from the checkpoint before it"):
        assert curve(cut) == expected

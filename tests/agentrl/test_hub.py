"""Models of the hub: a machine downloads one once, whoever needs it there."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_server import NAME, REVISION, hub_of
from small_models import random_rows, small_model

from agentrl.algorithms.sft import SFT
from agentrl.models.hub import on_hub, on_machine
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.placement.base import LaunchError
from agentrl.training.batch import TrainingError
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.launch import launch
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows, write_rows

WEIGHTS = "model.safetensors"
ELSEWHERE = f"/nowhere/hub/models--org--small/snapshots/{REVISION}"
"""The folder of the model in the cache of another machine."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    Policy(small_model("llama"), train_tokenizer(["some text"], 300), "model").save(folder)
    return folder


def at_once(number: int, environment: dict[str, str], *command: str) -> list[tuple[int, str, str]]:
    """Exit codes and output of processes that run at the same time."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(number)
    ]
    outputs = [process.communicate() for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, outputs, strict=True)]


def test_processes_of_a_machine_download_a_model_once(saved: Path, tmp_path: Path) -> None:
    """Those that wait for the lock of the hub's client find the file."""
    with hub_of(saved, slow_s=0.5) as hub:
        ended = at_once(3, hub.environment(tmp_path / "cache"), "-m", "agentrl.models.hub", NAME, "main")
    assert {code for code, *_ in ended} == {0}, ended
    assert hub.fetched == dict.fromkeys(hub.files, 1)
    folder = tmp_path / f"cache/hub/models--org--small/snapshots/{REVISION}"
    assert {printed for _, printed, _ in ended} == {f"{folder}\n"}
    assert (folder / WEIGHTS).read_bytes() == (saved / WEIGHTS).read_bytes()


def test_each_process_says_why_a_download_failed(saved: Path, tmp_path: Path) -> None:
    with hub_of(saved, refuses=True) as hub:
        ended = at_once(2, hub.environment(tmp_path / "cache"), "-m", "agentrl.models.hub", NAME, REVISION)
    for code, _, error in ended:
        assert code == 1
        assert f"model '{NAME}@{REVISION}' cannot be loaded on " in error, error
        assert "the download failed: 403 Forbidden: The disk of the hub is on fire." in error, error


def test_a_folder_that_lacks_weights_is_not_the_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan fetched may have a config alone, and what was killed may have half."""
    cache = saved.parent / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    kept = cache / f"models--org--small/snapshots/{REVISION}"
    kept.parent.mkdir(parents=True)
    saved.rename(kept)
    assert on_machine(ELSEWHERE) == on_machine(kept) == kept
    (kept / WEIGHTS).rename(kept / "model-00001-of-00002.safetensors")
    (kept / f"{WEIGHTS}.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    assert on_machine(ELSEWHERE) is None
    assert on_machine(kept) is None
    assert on_hub(kept) == on_hub(ELSEWHERE) == (NAME, REVISION)
    assert on_hub(cache) is None
    assert on_hub("./small") is None


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_train_from_a_model_that_their_machine_lacks(
    zero: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage's machine has it, and names its own folder."""
    pytest.importorskip("deepspeed")
    optimizer = OptimizerConfig(lr=1e-12, micro_tokens=64)
    job = TrainingJob(
        objective=SFT(),
        optimizer=optimizer,
        deepspeed=DeepSpeed(zero=zero, processes=2),
        steps=1,
        batch=4,
        seed=0,
        start=ELSEWHERE,
    )
    folder = tmp_path / "job"
    folder.mkdir()
    write_rows(folder / "rows.arrow", TrainingRows.of(random_rows(4)).batches)
    with hub_of(saved, slow_s=0.2, refuses=True) as hub:
        for name, value in hub.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        with (
            pytest.warns(UserWarning, match=f"downloads {NAME}@{REVISION}"),
            pytest.raises(
                (LaunchError, TrainingError), match=r"ranks 0 to 1 on .* cannot be loaded on .*: the download"
            ),
        ):
            launch(job.deepspeed, job.write(folder), lambda _: None)
        hub.refuses = False
        hub.fetched.clear()
        with pytest.warns(UserWarning, match=f"downloads {NAME}@{REVISION}"):
            launch(job.deepspeed, job.write(folder), lambda _: None)
    assert hub.fetched[WEIGHTS] == 1
    assert (folder / "model" / WEIGHTS).exists()


@pytest.mark.slow
def test_policies_that_processes_load_by_name_are_downloaded_once(saved: Path, tmp_path: Path) -> None:
    code = f"from agentrl.models.policy import Policy; Policy.load({NAME!r})"
    with hub_of(saved, slow_s=0.5) as hub:
        ended = at_once(3, hub.environment(tmp_path / "cache"), "-c", code)
    assert {code for code, *_ in ended} == {0}, ended
    assert hub.fetched[WEIGHTS] == 1

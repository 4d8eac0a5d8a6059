"""Stages whose rollouts explore."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.trajectories import sample

OFF_POLICY = {"type": "grpo", "off_policy": {"truncate": 2.0}}


@pytest.mark.parametrize("explore", [{"resample": {}}, {"temperature": [1.2, 0.7]}], ids=str)
def test_ratios_to_draws_of_another_policy_are_refused(explore: dict[str, Any]) -> None:
    [setting] = explore
    with pytest.raises(ValidationError, match=f"explore.{setting} takes turns that are no draws of the policy"):
        online.config.model_validate({"explore": explore})
    online.config.model_validate({"explore": explore, "algorithm": OFF_POLICY})
    online.config.model_validate({"explore": {"resample": {"eta": 0}, "tool": 0.1}})


@pytest.mark.parametrize(
    ("explore", "message"),
    [
        ({"resample": {}}, "explore needs the tokens of turns and their log-probs, and engine openai gives none"),
        ({"tool": 0.1}, "explore needs the tokens of turns and their log-probs, and engine openai gives none"),
        ({"temperature": [1.2, 0.7]}, r"explore\.temperature follows iterations, which are train\.online's"),
    ],
)
def test_what_cannot_be_explored_is_refused(
    explore: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    engine = {"type": "openai", "model": "m", "base_url": "http://localhost:1/v1", "api_key": "${JUDGE_KEY}"}
    with pytest.raises(ValidationError, match=message):
        sample.config.model_validate({"explore": explore, "engine": engine})


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(Path(tmp_path_factory.mktemp("explored")))


@pytest.mark.slow
def test_online_training_explores_and_cools_down(harness: Harness, warm: Model, tasks: Tasks) -> None:
    config: dict[str, Any] = {
        "iterations": 3, "tasks": 2, "samples": 2, "optimizer": {"lr": 1e-3}, "algorithm": OFF_POLICY,
        "max_turn_tokens": 24, "max_tokens": 120,
        "explore": {"temperature": [1.2, 0.8], "resample": {"eta": 9.0, "tries": 1}, "tool": 0.2},
    }  # fmt: skip
    done = harness.run(online, config, model=warm, tasks=tasks)
    rows = sorted(done["trajectories"].read(), key=lambda row: row.trajectory_id)
    temperatures = [json.loads(row.sampling)["temperature"] for row in rows]
    assert temperatures == pytest.approx([1.2] * 4 + [1.0] * 4 + [0.8] * 4)
    assert done.metrics["resampled"] == sum(
        int(tag.split(":")[1]) for row in rows for tag in row.tags if tag.startswith("resampled:")
    )
    assert done.metrics["resampled"] > 0
    assert done.metrics["random_calls"] > 0


@pytest.mark.slow
def test_eta_0_trains_to_the_bit_as_before(harness: Harness, warm: Model, tasks: Tasks) -> None:
    config: dict[str, Any] = {
        "iterations": 2, "tasks": 2, "samples": 2, "optimizer": {"lr": 1e-3}, "max_turn_tokens": 24, "max_tokens": 120,
    }  # fmt: skip
    plain = harness.run(online, config, model=warm, tasks=tasks)
    same = harness.run(online, {**config, "explore": {"resample": {"eta": 0.0}}}, model=warm, tasks=tasks)
    files = [(done["model"].path / "model.safetensors").read_bytes() for done in (plain, same)]
    assert files[0] == files[1]

"""What a training stage does at once: rows are written while the model loads."""

import threading
from typing import Any

import pytest

from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.stages import train
from agentrl.pipelines.stages.train import sft
from agentrl.schemas.trajectory import Message, Role, Trajectory

WAIT_S = 60


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy([[Message(role=Role.USER, content="who is the boss of ann")]], seed=0)


def row(number: int, tokenizer: str) -> Trajectory:
    return Trajectory(
        trajectory_id=f"r-{number}",
        episode_id=f"r-{number}",
        task_id="t",
        source="model",
        env="e",
        split="train",
        prompt="p",
        reward=1.0,
        success=True,
        termination="answered",
        messages=[],
        input_ids=[1, 2, 3],
        action_mask=[False, True, True],
        logprobs=[float("nan"), -1.0, -1.0],
        tokenizer=tokenizer,
        n_tokens=3,
        n_action_tokens=2,
    )


def given(harness: Harness, policy: Policy, tokenizer: str) -> tuple[Model, Trajectories]:
    return harness.model(policy.save), harness.trajectories([row(n, tokenizer) for n in range(4)])


def test_rows_are_read_while_the_model_loads(tmp_path: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path)
    model, rows = given(harness, policy, policy.tokenizer_fingerprint)
    read, start, tokens = threading.Event(), train.start_policy, Selected._read

    def load(*args: Any) -> Policy:
        assert read.wait(WAIT_S), "no row was read before the model was there"
        return start(*args)

    def watched(self: Selected, *args: Any) -> Any:
        read.set()
        return tokens(self, *args)

    monkeypatch.setattr(train, "start_policy", load)
    monkeypatch.setattr(Selected, "_read", watched)
    trained = harness.run(sft, {"steps": 1, "batch": 2}, trajectories=[rows], model=model)
    assert trained.metrics["rows"] == 4
    assert trained.metrics["dialect"] == "hermes"


def test_rows_of_another_tokenizer_are_named_before_training(tmp_path: Any, policy: Policy) -> None:
    harness = Harness(tmp_path)
    model, rows = given(harness, policy, "another")
    with pytest.raises(ValueError, match=r"r-0 was tokenised by another, and the model .* uses"):
        harness.run(sft, {"steps": 1, "batch": 2}, trajectories=[rows], model=model)
    assert not list(harness.folder.glob("*/scratch/checkpoint*"))

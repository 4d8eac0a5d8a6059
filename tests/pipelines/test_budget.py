"""Budgets of tokens come from the model, and those that cannot work are refused before anything is sampled."""

import json
import warnings
from typing import Any

import pytest
from architectures import llama
from pydantic import ValidationError

from agentrl.models.policy import Policy
from agentrl.models.tiny import TinySize
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts.budget import TokenLimits
from agentrl.pipelines.parts.common import ModelConfig
from agentrl.pipelines.stages.evaluate import evaluate
from agentrl.pipelines.stages.grpo import grpo
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.rollouts.runner import RolloutRunner
from agentrl.training.batch import TrainingError

SMALL: dict[str, Any] = {"iterations": 1, "tasks": 4, "samples": 2}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("budget"))


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": "lookup", "train": 12, "dev": 1, "heldout": 1})["train"]


@pytest.fixture(scope="module")
def model(harness: Harness, tasks: Tasks) -> Model:
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    return harness.run(sft, {"model": {"init": "tiny"}, "steps": 1, "batch": 4}, trajectories=[expert])["model"]


@pytest.fixture
def nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was sampled")

    monkeypatch.setattr(RolloutRunner, "run", refuse)
    monkeypatch.setattr(RolloutRunner, "groups", refuse)


STAGES = {
    "sample": lambda tokens: (sample, {"samples": 2, "sampling": {"max_tokens": tokens}}),
    "online": lambda tokens: (grpo, {**SMALL, "max_tokens": tokens}),
    "evaluate": lambda tokens: (evaluate, {"max_tokens": tokens}),
}


@pytest.mark.usefixtures("nothing_is_sampled")
@pytest.mark.parametrize("name", STAGES)
def test_prompts_that_leave_no_room_are_refused(harness: Harness, model: Model, tasks: Tasks, name: str) -> None:
    stage, config = STAGES[name](20)
    with pytest.raises(
        ValueError, match=r"max_tokens 20 leaves no room for a turn: the shortest prompt, .* set max_tok"
    ):
        harness.run(stage, config, model=model, tasks=tasks)
    stage, config = STAGES[name](4096)
    with pytest.raises(ValueError, match=r"max_tokens 4096 is beyond the context of 192 tokens"):
        harness.run(stage, config, model=model, tasks=tasks)


def test_tools_and_long_prompts_count(harness: Harness, model: Model, tasks: Tasks) -> None:
    """The same tasks with a real tool's schema no longer fit."""
    tools = json.dumps([{"type": "function", "function": {"name": f"tool {n} " + "x" * 99}} for n in range(9)])
    rows = [task.model_copy(update={"tools": tools}) for task in tasks.read()]
    with pytest.raises(ValueError, match="leaves no room for a turn"):
        harness.run(sample, {"samples": 1}, model=model, tasks=harness.tasks(rows))
    long = tasks.read()
    long[3] = long[3].model_copy(update={"prompt": long[3].prompt * 20})
    with pytest.warns(UserWarning, match=rf"the prompt of task {long[3].task_id} has \d+ tokens.*end before they say"):
        harness.run(sample, {"samples": 1}, model=model, tasks=harness.tasks(long))


def test_defaults_come_from_the_model(harness: Harness, model: Model, tasks: Tasks) -> None:
    tiny, other = Policy.load(model.path), llama()
    assert TokenLimits().sampling(tiny).max_tokens == 192
    assert TokenLimits().sampling(tiny).max_turn_tokens == 40
    context = other.model.config.max_position_embeddings
    assert TokenLimits().sampling(other).max_tokens == context
    assert TokenLimits().sampling(other).max_turn_tokens == context
    assert TokenLimits(max_turn_tokens=7, max_tokens=20).sampling(other, temperature=0.5).max_turn_tokens == 7
    with pytest.raises(ValidationError):
        TokenLimits(max_tokens=0)
    rows = harness.run(sample, {"samples": 1}, model=model, tasks=tasks)["trajectories"].read()
    assert {json.loads(row.sampling)["max_tokens"] for row in rows} == {192}


@pytest.mark.parametrize("name", STAGES)
def test_rollouts_that_mostly_end_by_a_limit_and_never_succeed_are_said(
    harness: Harness, model: Model, tasks: Tasks, name: str
) -> None:
    """An untrained policy says nothing that ends."""
    stage, config = STAGES[name](120)
    with pytest.warns(UserWarning, match=r"\d+% of \d+ .*rollouts ended by a limit") as caught:
        harness.run(stage, config, model=model, tasks=tasks)
    assert any("rollouts succeeded" in str(text.message) for text in caught)


def test_progress_shows_what_moves(
    harness: Harness, model: Model, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []
    make = harness._context

    def with_progress(stage: str) -> Any:
        context = make(stage)
        context.progress = lambda done, total=None, **metrics: shown.append(metrics)
        return context

    monkeypatch.setattr(harness, "_context", with_progress)
    config = {**SMALL, "algorithm": {"type": "grpo", "entropy": 0.1}, "max_tokens": 120}
    harness.run(grpo, config, model=model, tasks=tasks)
    [metrics] = shown
    assert "loss" not in metrics
    assert metrics["grad_norm"] > 0
    assert {"success", "reward", "behaviour_kl", "limited"} <= metrics.keys()


def test_rows_beyond_the_context_of_the_model_are_said(harness: Harness, tasks: Tasks) -> None:
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]

    def train(**size: int) -> Model:
        config = {"model": {"init": "tiny", "size": size}, "steps": 1, "batch": 4}
        return harness.run(sft, config, trajectories=[expert])["model"]

    with pytest.warns(UserWarning, match=r"[0-9]+ of 12 rows to train on are longer than the context of 64 tokens"):
        model = train(context=64)
    assert TokenLimits().sampling(Policy.load(model.path, model.name)).max_tokens == 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(context=400)
    with pytest.raises(TrainingError, match=r"12 of 12 rows to train on are longer than the context of 32 tokens"):
        train(context=32)


def test_a_size_is_of_the_tiny_model_alone() -> None:
    with pytest.raises(ValidationError, match="size is that of the tiny model"):
        ModelConfig(path="somebody/model", size=TinySize(layers=4))

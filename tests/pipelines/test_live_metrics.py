"""Metrics of training stages in the store while they run, also through kills."""

import json
from dataclasses import replace
from typing import Any

import pytest

from agentrl.datastore.artifacts.live_metrics import lines_after
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import synthesize

ONLINE = {"iterations": 3, "tasks": 2, "samples": 2, "checkpoint_every": 1, "max_turn_tokens": 24, "max_tokens": 120}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("live"))


class Killed(BaseException):
    pass


def logged(context: Context) -> list[dict[str, Any]]:
    result = lines_after(context.buffer.storage, context.run_id, context.stage)
    assert result is not None
    return [json.loads(line) for line in result.lines]


def killed_and_resumed(context: Context, at: int, run: Any) -> tuple[list[dict[str, Any]], Any]:
    """The log at the moment of the kill, and what the stage returns in the run that goes on."""
    meanwhile: list[dict[str, Any]] = []

    def progress(done: int, total: int | None = None, **metrics: Any) -> None:
        if done == at:
            meanwhile.extend(logged(context))
            raise Killed

    with pytest.raises(Killed):
        run(replace(context, progress=progress))
    return meanwhile, run(replace(context, run_id="again"))


def same(lines: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    assert [{name: value for name, value in line.items() if name != "time"} for line in lines] == [
        {name: value for name, value in row.items() if value is not None} for row in metrics
    ]


def test_metrics_of_sft_are_there_at_once_and_once(harness: Harness, tasks: Tasks) -> None:
    rows = harness.run(synthesize, {}, tasks=tasks)["trajectories"]
    config = sft.config.model_validate({"model": {"init": "tiny"}, "steps": 4, "batch": 2})
    context = harness._context("sft")
    meanwhile, made = killed_and_resumed(context, 3, lambda context: sft(context, config, trajectories=[rows]))
    metrics = made["metrics"].table().to_pylist()
    same(meanwhile, metrics[:3])
    same(logged(replace(context, run_id="again")), metrics)


@pytest.mark.slow
@pytest.mark.ci
def test_metrics_of_online_training_are_there_at_once_and_once(harness: Harness, warm: Model, tasks: Tasks) -> None:
    config = online.config.model_validate(ONLINE)
    context = harness._context("grpo")
    meanwhile, made = killed_and_resumed(context, 2, lambda context: online(context, config, model=warm, tasks=tasks))
    metrics = made["metrics"].table().to_pylist()
    same(meanwhile, metrics[:2])
    same(logged(replace(context, run_id="again")), metrics)

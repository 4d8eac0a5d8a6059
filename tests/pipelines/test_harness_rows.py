"""Episodes of a coding agent, of several rows each, through the stages: they count once, and what is no part of the
work is not trained on."""

import json
from pathlib import Path

import pytest

from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.evaluate import evaluate
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import reject, sample

AGENT = (Path(__file__).parents[1] / "agentrl/scripted_agent.py").read_text()
ENGINE = {"type": "transformers", "schedule": "free"}
LIMITS = {"max_tokens": 190, "max_turn_tokens": 4}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("harness"))


@pytest.fixture(scope="module")
def attempted(harness: Harness, tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    """An agent that asks for a title and a helper. Half of the attempts succeed, whatever the policy says."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    chance = {"chance.py": "import os; assert os.urandom(1)[0] % 2"}
    file.write_text("".join(json.dumps({"prompt": f"both: {n}", "tests": chance}) + "\n" for n in range(8)))
    env = {"type": "harness", "agent": ["python", "-c", AGENT], "file": str(file), "timeout": 60, "turns": 4}
    return harness.run(generate, {"env": env, "train": 4, "dev": 0, "heldout": 4})["train"]


def test_an_episode_of_several_rows_counts_once(harness: Harness, warm: Model, attempted: Tasks) -> None:
    made = harness.run(sample, {"samples": 4, "engine": ENGINE, "sampling": LIMITS}, model=warm, tasks=attempted)
    rows = made["trajectories"].read()
    assert sorted({(row.segment, row.agent) for row in rows}) == [(0, "main"), (1, "agent-2"), (2, "side")]
    assert len(rows) == 3 * 16
    for row in rows:
        assert ("not-trained" in row.tags) == (row.reward is None) == (row.agent == "side")
    assert made.metrics["rows"] == 16
    kept = harness.run(reject, {"keep": 4}, trajectories=[made["trajectories"]])["trajectories"].read()
    assert {row.agent for row in kept} == {"main", "agent-2"}


@pytest.mark.slow
@pytest.mark.ci
def test_it_trains_online_and_asynchronously(harness: Harness, warm: Model, attempted: Tasks) -> None:
    # four groups of four: that all of them have equal rewards, and teach nothing, has a chance of 1 in 4,096
    config = {"iterations": 2, "tasks": 4, "samples": 4, "engine": ENGINE, "optimizer": {"lr": 1e-3}, **LIMITS}
    for more in ({}, {"ahead": 1, "max_staleness": 2}):
        made = harness.run(online, {**config, **more}, model=warm, tasks=attempted)
        steps = made["steps"].table().to_pylist()
        names = {step["trajectory_id"] for step in steps}
        trained = [row for row in made["trajectories"].read() if row.trajectory_id in names]
        assert {row.agent for row in trained} == {"main", "agent-2"}
        advantage = {step["trajectory_id"]: step["advantage"] for step in steps}
        for row in trained:
            if row.segment:
                assert advantage[row.trajectory_id] == advantage[row.episode_id]
        metrics = made["metrics"].table().to_pylist()
        assert [row["segments"] for row in metrics] == [2.0, 2.0]
        fresh = [row["behaviour_kl"] for row in metrics if row["max_staleness"] == 0]
        assert fresh
        assert max(map(abs, fresh)) < 1e-6
    results = harness.run(evaluate, {"samples": 2, "engine": ENGINE, **LIMITS}, model=made["model"], tasks=attempted)
    [overall] = [
        row for row in results["results"].table().to_pylist() if (row["decoding"], row["level"]) == ("sampled", -1)
    ]
    assert (overall["tasks"], overall["attempts"]) == (4, 8)

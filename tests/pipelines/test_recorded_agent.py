"""An agent that pydantic-ai runs, unchanged, is recorded, and trained for two iterations of GRPO: from its recorded
rows, and online as an environment."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from own_classes import copied, planned

from agentrl.datastore import TrajectoryBuffer
from agentrl.engines.configs import EmbeddedConfig
from agentrl.environments.lookup import LookupEnvironment
from agentrl.models.policy import Policy
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts.budget import SamplingConfig
from agentrl.pipelines.run.execute import job_of, perform
from agentrl.pipelines.serve import BufferRows, recorder_of
from agentrl.pipelines.stages.select import select
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import offline, sft
from agentrl.pipelines.stages.trajectories import synthesize
from agentrl.recorder.listening import bound
from agentrl.recorder.recorder import Recorder, RecorderSettings
from agentrl.recorder.server import recording, server_of
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("pydantic_ai") is None, reason="needs pydantic-ai")]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with copied("recorded_agent", tmp_path) as folder:
        sys.path.insert(0, str(folder))
        yield folder


def warm(harness: Harness, steps: int = 150) -> Any:
    shown = harness.run(generate, {"env": "lookup", "train": 256, "dev": 1, "heldout": 1})["train"]
    expert = harness.run(synthesize, {"noise": 0.35}, tasks=shown)["trajectories"]
    config = {"model": {"init": "tiny"}, "steps": steps, "batch": 16, "optimizer": {"lr": 5e-3}}
    return harness.run(sft, config, trajectories=[expert])["model"]


async def attempt(client: httpx.AsyncClient, task: Task, number: int) -> float:
    """One run of the agent against the recorder, and its reward, which is posted afterwards."""
    from my_agent.clerk import answer
    from pydantic_ai.exceptions import AgentRunError

    opened = (await client.post("/episodes", json={"task_id": task.task_id, "sample_index": number})).json()
    facts = json.loads(task.metadata)["facts"]
    try:
        text = await answer(task.prompt, facts, opened["base_url"], opened["api_key"], opened["model"])
    except AgentRunError:
        text = ""
    reward = float(text.strip() == json.loads(task.ground_truth))
    head = {"authorization": f"Bearer {opened['api_key']}"}
    posted = await client.post(f"/episodes/{opened['id']}/reward", json={"reward": reward}, headers=head)
    assert posted.is_success, posted.text
    return reward


async def recorded(recorder: Recorder, tasks: list[Task], samples: int) -> list[float]:
    """The rewards of ``samples`` runs of the agent at each task, all at once."""
    listening = bound("127.0.0.1", 0)
    server = server_of(recording(recorder, "127.0.0.1"))
    await recorder.start()
    serving = asyncio.create_task(server.serve([listening]))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        rewards = await asyncio.gather(*(attempt(client, task, n) for task in tasks for n in range(samples)))
    server.should_exit = True
    await serving
    assert await recorder.stop() == 0
    await recorder.sampler.engine.close()
    return list(rewards)


def gap(row: Trajectory, policy: Policy) -> float:
    """The largest difference between recorded log-probs and those of the model's own logits."""
    from agentrl.engines.check import own_logprobs

    mask = np.array(row.action_mask)
    own = own_logprobs(policy.model, row.input_ids).detach().numpy()
    return float(np.abs(own - np.array(row.logprobs))[mask].max())


def test_a_recorded_agent_is_trained_for_two_iterations_of_grpo(folder: Path) -> None:
    harness = Harness(folder)
    model = warm(harness)
    tasks = LookupEnvironment().tasks({"train": 16}, 5)["train"]
    success = []
    for iteration in range(2):
        sampling, settings = SamplingConfig(), RecorderSettings(fixed_temperature=1.0)
        engine = EmbeddedConfig(schedule="free")
        recorder = recorder_of(str(folder / "store"), str(model.path), engine, sampling, settings, f"step{iteration}")
        rewards = asyncio.run(recorded(recorder, tasks, 8))
        success.append(sum(rewards) / len(rewards))
        recording_id = recorder.episodes.recording
        ids = harness.buffer.ids(recording_id)
        rows = harness.buffer.get_many(ids)
        assert len(rows) == len(rewards), "one conversation is one row"
        assert sum(row.scored_reward() for row in rows) == sum(rewards)
        policy = Policy.load(model.path)
        assert max(gap(row, policy) for row in rows[:32]) < 1e-4, "tokens and log-probs are those that were sampled"
        assert set(Counter(row.group_id for row in rows).values()) == {8}
        assert max(row.n_steps for row in rows) > 1
        config = {"version": harness.buffer.version, "where": f"fingerprint = '{recording_id}'"}
        chosen = harness.run(select, config)["trajectories"]
        trained = harness.run(
            offline,
            {"algorithm": {"type": "grpo"}, "steps": 1, "batch": 128, "optimizer": {"lr": 1e-3}},
            trajectories=[chosen],
            model=model,
        )
        assert trained["metrics"].table()["grad_norm"].to_pylist()[0] > 1e-3
        model = trained["model"]
    assert 0 < success[0] < 1, success
    assert isinstance(BufferRows(harness.buffer).stored(recording_id), set)


def test_the_example_trains_the_agent_online(folder: Path) -> None:
    small = (
        "stages.shown.with.train=128",
        "stages.tasks.with.train=16",
        "stages.tasks.with.heldout=8",
        "stages.warm.with.steps=120",
        "stages.grpo.with.tasks=4",
    )
    plan = planned(folder / "pipeline.yaml", *small)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    buffer = TrajectoryBuffer(plan.store)
    table = buffer.sql(
        "select env, termination, count(*) as n, avg(reward) as reward, max(policy_version) as v "
        "from trajectories where stage = 'grpo' group by env, termination order by n desc"
    )
    assert set(table["env"]) == {"my_agent.clerk:Clerk"}
    assert sum(table["n"]) == 2 * 4 * 8
    assert "env_error" not in set(table["termination"]), table
    assert table["v"].max() == 1
    assert 0 < table["reward"][0] < 1
    source = folder / "my_agent" / "clerk.py"
    source.write_text(source.read_text().replace('"unknown")', '"nobody knows")'))
    again = planned(folder / "pipeline.yaml", *small)
    assert again.steps["grpo"].reasons[0] == "code my_agent/clerk.py changed", "the agent is in the fingerprint"
    assert again.steps["warm"].status.value == "cached"

"""The openai engine against a server that others wrote: ``transformers serve``, with a policy of ours as the model."""

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from architectures import expert_runs, lookup_tasks

from agentrl.chat.codec import tokenize
from agentrl.engines.base import Sampling
from agentrl.engines.configs import OpenAIConfig
from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Role, Termination
from agentrl.training.loop import fit
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer

pytestmark = pytest.mark.slow


def taught(folder: Path) -> Policy:
    """A tiny policy that has learnt the form of calls."""
    from agentrl.algorithms.sft import SFT

    shown = expert_runs(96, noise=0.0)
    policy = tiny_policy([row.messages for row in shown], seed=0)
    rows = []
    for number, raw in enumerate(shown):
        row = tokenize(raw, policy.codec, policy.tokenizer_fingerprint)
        rows.append(
            TrainingRow(
                row_id=row.trajectory_id,
                unit=number,
                input_ids=row.input_ids,
                mask=row.action_mask,
                weights=[1.0] * row.n_tokens,
            )
        )
    trainer = Trainer(policy, SFT(), OptimizerConfig(lr=5e-3, warmup=5), 80)
    fit(trainer, TrainingRows.of(rows), 16, 0, folder / "checkpoint.pt", lambda metrics: None)
    return policy


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of a server, and the name of its model."""
    pytest.importorskip("uvicorn")
    taught(tmp_path).save(tmp_path / "model")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(tmp_path / "model")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + 180
    while True:
        try:
            httpx.get(f"{url}/health", timeout=5.0, trust_env=False)
            break
        except httpx.HTTPError:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < ends
            time.sleep(0.5)
    yield f"{url}/v1", str(tmp_path / "model")
    process.terminate()
    process.wait(30)


def test_episodes_with_tools_are_played_against_a_server_that_others_wrote(server: tuple[str, str]) -> None:
    """That of transformers 5.23 answers with a 500 if a model's call is no JSON. This ends one episode."""
    url, model = server
    engine = OpenAIConfig(model=model, base_url=url, api_key=None, concurrency=2, retries=0).build(None)
    sampling = Sampling(temperature=0, max_turn_tokens=40, max_tokens=400)
    with RolloutRunner(None, engine, load_environment("lookup"), sampling) as runner:
        rows = runner.run([Attempt(task) for task in lookup_tasks(8)], 0, [f"r-{n}" for n in range(8)])
    ends = Counter(row.termination for row in rows)
    assert ends[Termination.ANSWERED] >= 4, ends
    assert set(ends) <= {Termination.ANSWERED, Termination.MAX_STEPS, Termination.INFRA_ERROR}
    answered = [message for row in rows for message in row.messages if message.role is Role.TOOL]
    assert len({message.content for message in answered}) > 3, "the server reads our model's calls, and we answer them"
    assert all(row.input_ids == [] for row in rows)
    assert engine.spent.completion_tokens > 20  # type: ignore[attr-defined]

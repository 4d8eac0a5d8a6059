"""What changed in the weights, given to real vLLM: a server that took up deltas computes what one that loaded the whole
model computes, to the bit. `make test-vllm` runs these tests."""

import asyncio
import copy
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from architectures import qwen
from test_vllm_experts import mixture

from agentrl.engines.base import Sampling, Session, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.servers import SERVING, Server
from agentrl.engines.vllm import VLLMEngine
from agentrl.engines.weights import write_folder
from agentrl.models.policy import Policy
from agentrl.placement.launcher import here

pytestmark = pytest.mark.vllm

PYTHON = os.environ.get("VLLM_PYTHON", "")


def step(model: Any, seed: int, share: float = 0.03) -> None:
    """Change so many of all weights, those of each expert too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            change = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.add_(change * (torch.rand(parameter.shape, generator=generator) < share))


@contextmanager
def served(policy: Policy) -> Iterator[VLLMEngine]:
    config = VLLMConfig(dtype="bfloat16", sync="delta", python=PYTHON)
    engine = config.build(policy)
    assert isinstance(engine, VLLMEngine)
    try:
        yield engine
    finally:
        blocking(engine.close())


def on_its_loop(engine: VLLMEngine, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, engine._loop).result()


def state(engine: VLLMEngine) -> dict[str, Any]:
    [answer] = on_its_loop(engine, engine.replicas[0].told("weights_state", 60.0))
    return dict(answer)


def loaded_whole(engine: VLLMEngine, policy: Policy, model: Any, folder: Path) -> None:
    """Have the server load a whole folder, as `sync: folders` does."""
    replica = engine.replicas[0]
    write_folder(model, policy.tokenizer, folder, dtype="bfloat16")
    for work in (replica.pause(), replica.reload(folder), replica.resume()):
        on_its_loop(engine, work)


def scores(engine: VLLMEngine, policy: Policy) -> list[float]:
    ids = torch.randint(5, policy.model.config.vocab_size, (60,), generator=torch.Generator().manual_seed(7)).tolist()
    return blocking(engine.score(ids))


def updated(policy: Policy, engine: VLLMEngine, versions: range, folder: Path, every: int) -> None:
    """Give versions as deltas. ``every`` so many, log-probs are compared with those after a whole load, to the bit."""
    model, before = copy.deepcopy(policy.model), scores(engine, policy)
    for version in versions:
        step(model, version)
        blocking(engine.load(Weights(version, model)))
        if version % every == 0:
            by_delta = scores(engine, policy)
            loaded_whole(engine, policy, model, folder)
            assert by_delta == scores(engine, policy), f"version {version}"
            assert by_delta != before
            before = by_delta
    told = state(engine)
    assert (told["whole"], told["why_not_beside"], told["problem"]) == (1, "", "")
    assert engine._sync.anchors == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "kind",
    ["dense", pytest.param("mixtral", marks=pytest.mark.slow), pytest.param("qwen3-moe", marks=pytest.mark.slow)],
)
def test_deltas_give_the_log_probs_of_whole_loads_to_the_bit(kind: str, tmp_path: Path) -> None:
    policy = qwen() if kind == "dense" else mixture(kind)
    with served(policy) as engine:
        updated(policy, engine, range(1, 7), tmp_path / "whole", 3)
        if kind == "dense":
            killed(policy, engine, tmp_path)


def killed(policy: Policy, engine: VLLMEngine, folder: Path) -> None:
    """The server is killed while it takes up a version, begins again at the last folder, and serves that version."""
    model = copy.deepcopy(policy.model)
    step(model, 50)
    told = engine.replicas[0].told

    async def kills(method: str, limit_s: float, **arguments: Any) -> list[Any]:
        if method == "take_weights":
            engine.replicas[0].told = told  # type: ignore[method-assign]
            server = psutil.Process(engine.replicas[0].process.pid)  # type: ignore[attr-defined]
            for process in [*server.children(recursive=True), server]:
                process.send_signal(signal.SIGKILL)
        return await told(method, limit_s, **arguments)

    async def load() -> Session:
        engine.replicas[0].told = kills  # type: ignore[method-assign]
        await engine.load(Weights(50, model))
        session = engine.open((0,))
        session.observe([5, 6, 7])
        session.act(await engine.turn(session, Sampling(max_turn_tokens=8, max_tokens=40), stop=[], seed=0))
        return session

    session = blocking(load())
    assert engine.replicas[0].restarts == 1
    assert [span.version for span in session.spans] == [50]
    by_delta = scores(engine, policy)
    loaded_whole(engine, policy, model, folder / "whole after a kill")
    assert by_delta == scores(engine, policy)


@pytest.mark.slow
def test_two_hundred_deltas_leave_parameters_and_log_probs_equal_to_the_bit(tmp_path: Path) -> None:
    """The first server packs matrices as always, and is compared by log-probs each 20 versions. The second one does
    not, so that all its parameters can be read back."""
    policy = qwen()
    with served(policy) as engine:
        updated(policy, engine, range(1, 201), tmp_path / "whole", 20)
    replica = ReadableServer(python=PYTHON, options=OPTIONS)
    engine = VLLMEngine(policy, [replica], tmp_path / "weights", 0.05, "delta", "bfloat16")
    try:
        model = copy.deepcopy(policy.model)
        for version in range(1, 201):
            step(model, version)
            blocking(engine.load(Weights(version, model)))
            if version % 10 == 0:
                [by_delta] = on_its_loop(engine, replica.told("parameter_sums", 60.0))
                loaded_whole(engine, policy, model, tmp_path / "whole")
                assert [by_delta] == on_its_loop(engine, replica.told("parameter_sums", 60.0))
                assert any("qkv_proj.weight" in name for name in by_delta)
        assert state(engine)["whole"] == 1
    finally:
        blocking(engine.close())


OPTIONS = [
    "--dtype", "bfloat16", "--enforce-eager", "--no-enable-chunked-prefill", "--block-size", "32",
    "--worker-extension-cls", "readable_worker.Readable",
]  # fmt: skip


class ReadableServer(Server):
    """A server whose workers have the extension of this folder."""

    def _launch(self, folder: Path) -> None:
        from agentrl.engines.servers import server_command

        assert self.log is not None
        env = {**SERVING, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[:1], str(Path.cwd())])}
        command = server_command(self.python, folder, self.options)
        self.process = here().start("vLLM server", command, log=self.log, gpus=0, env=env)
        self.url = f"http://{self.process.address}"

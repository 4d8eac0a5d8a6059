"""Weights by vLLM's own transfer. NCCL and CUDA IPC need a GPU; here a backend of our own stands in their place,
and everything else is what they use. Runs where vLLM is installed (`make test-vllm`)."""

import asyncio
import copy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import qwen

from agentrl.engines.base import EngineError, Sampling, Session, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.transfer import Receivers, Transfer, transfer_option
from agentrl.engines.vllm import VLLMEngine
from agentrl.models.policy import Policy

WITH_VLLM = find_spec("vllm") is not None


@pytest.mark.skipif(WITH_VLLM, reason="vLLM is installed here")
@pytest.mark.parametrize("sync", ["nccl", "ipc"])
def test_without_vllm_a_transfer_says_what_to_do(sync: str) -> None:
    config = VLLMConfig.model_validate({"sync": sync})
    with pytest.raises(EngineError, match=rf"sync: {sync} needs vLLM where the stage runs, .* or leave sync out"):
        config.build(qwen())


class Told:
    """A client that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.told.append(info)


def test_each_replica_has_its_own_ranks_in_the_group() -> None:
    clients = [Told(), Told(), Told()]
    group = Receivers([_receiver(client, ranks) for client, ranks in zip(clients, (2, 4, 1), strict=True)])
    group.init_weight_transfer_engine({"rank_offset": 1, "world_size": group.ranks + 1})
    assert [client.told for client in clients] == [[{"rank_offset": n, "world_size": 8}] for n in (1, 3, 7)]
    group.init_weight_transfer_engine({"packed": True})
    assert [client.told[1] for client in clients] == [{"packed": True}] * 3


def _receiver(client: Any, ranks: int) -> Any:
    from agentrl.engines.replicas import Receiver

    return Receiver(client, ranks, "127.0.0.1")


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend, as a plugin that vLLM's child processes find, and as what the trainer's half is made from."""
    from agentrl.placement.local import KeptPort

    shutil.copy(Path(__file__).with_name("plain_transfer.py"), tmp_path / "plain_transfer.py")
    about = tmp_path / "plain_transfer-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-transfer\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nplain = plain_transfer:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))

    def made_from(self: Transfer, group: Receivers) -> Any:
        import plain_transfer

        plain_transfer.register()
        return plain_transfer.TrainerInfo(KeptPort().number, group.ranks + 1, rank=0)

    monkeypatch.setattr(Transfer, "_about", made_from)


@pytest.mark.vllm
@pytest.mark.skipif(not WITH_VLLM, reason="the trainer's half is part of vLLM: `make test-vllm` runs it there")
@pytest.mark.usefixtures("plain")
def test_weights_reach_all_replicas_between_two_tokens(tmp_path: Path) -> None:
    from agentrl.engines.in_process import InProcess

    policy = qwen()
    other = Policy(copy.deepcopy(policy.model), policy.tokenizer, "other")
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    options = ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill", "--block-size", "32"]
    replicas = [InProcess([*options, *transfer_option("plain")]) for _ in range(2)]
    engine = VLLMEngine(policy, replicas, tmp_path / "weights", 1e-4, "plain")  # type: ignore[arg-type]

    async def one(number: int) -> Session:
        session = engine.open((number,), root=str(number))
        session.observe([5 + number, 6, 7])
        session.act(await engine.turn(session, Sampling(max_turn_tokens=180, max_tokens=190), stop=[], seed=number))
        return session

    async def sample() -> list[Session]:
        running = [asyncio.create_task(one(number)) for number in range(8)]
        await asyncio.sleep(0.3)
        await engine.load(Weights(1, other.model))
        return await asyncio.gather(*running)

    try:
        sessions = blocking(sample())
        assert any([span.version for span in session.spans] == [0, 1] for session in sessions)
        with torch.inference_mode():
            for session in sessions:
                for span in session.spans:
                    logits = (policy, other)[span.version].model(torch.tensor([session.ids])).logits[0, :-1].float()
                    result = logits.log_softmax(-1).gather(-1, torch.tensor(session.ids)[1:, None])[:, 0].tolist()
                    wanted = session.logprobs[span.start : span.end]
                    assert result[span.start - 1 : span.end - 1] == pytest.approx(wanted, abs=1e-3)
        assert list(engine._sync._members) == replicas  # type: ignore[attr-defined]
        print("the transfer took", engine.loads, "s")
    finally:
        blocking(engine.close())

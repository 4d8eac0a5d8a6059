"""Versions of weights that servers get as what changed (`sync: delta`): real receivers behind servers that speak vLLM's
routes; with real vLLM, see test_vllm_deltas.py."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import qwen
from speaking import Handler, Speaking, settled

from agentrl.engines.base import EngineError, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.deltas import Deltas
from agentrl.engines.servers import Server
from agentrl.engines.vllm import VLLMEngine
from agentrl.engines.weights import served_dtype, tensors_of
from agentrl.engines.worker.extension import WeightReceiver
from agentrl.models.policy import Policy
from agentrl.training.lora import add_lora
from agentrl.training.optimizer import LoRA


class Receiving(Speaking):
    """A server with a receiver as vLLM's workers have, which notes what is done to it. ``break_at`` is the name of what
    it is started again at."""

    def __init__(self, policy: Policy) -> None:
        self.done: list[str] = []
        self.break_at = ""
        self.took: dict[str, torch.Tensor] = {}
        self.again()
        super().__init__(policy, handler=ReceivingHandler)

    def again(self) -> None:
        self.took = {}
        self.receiver = WeightReceiver(
            SimpleNamespace(
                device=torch.device("cuda"),
                model_runner=SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True)),
                forget_expert_kernels=lambda: None,
                reload_weights=self.take,
            )
        )

    def take(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.took = {name: tensor.clone() for name, tensor in weights_iterator}
        self.policy = Policy(copy.deepcopy(self.policy.model), self.policy.tokenizer, "served")
        self.policy.model.load_state_dict(self.took, strict=False)


class ReceivingHandler(Handler):
    server: Receiving

    def post(self, asked: dict[str, Any]) -> None:
        receiver, method = self.server.receiver, asked.get("method", self.path.partition("?")[0][1:])
        self.server.done.append(method)
        if method == self.server.break_at:
            self.server.break_at, self.server.label = "", "default"
            self.server.again()
            return self.say("worker died", 500)
        if method == "fetch_weights":
            return self.say(
                {"results": [receiver.fetch([(digest, path) for digest, path in asked["kwargs"]["steps"]])]}
            )
        if method == "weights_state":
            return self.say({"results": [receiver.state()]})
        if method == "take_weights":
            return self.say({"results": [receiver.take(**asked["kwargs"])]})
        return super().post(asked)


@contextmanager
def served(policy: Policy, folder: Path, number: int = 2) -> Iterator[tuple[VLLMEngine, list[Receiving]]]:
    servers = [Receiving(policy) for _ in range(number)]
    engine = VLLMEngine(policy, [Server(server.url) for server in servers], folder, 0.05, "delta", "bfloat16")
    try:
        yield engine, servers
    finally:
        blocking(engine.close())
        for server in servers:
            server.shutdown()
            server.server_close()


def step(policy: Policy, seed: int) -> Policy:
    """The policy after a step that changed some values of each matrix."""
    model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            change = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.add_(change * (torch.rand(parameter.shape, generator=generator) < 0.08))
    return Policy(model, policy.tokenizer, "stepped", version=seed)


def as_served(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.to(served_dtype(tensor, "bfloat16")) for name, tensor in tensors_of(policy.model).items()}


def holds(server: Receiving, policy: Policy) -> bool:
    wanted = as_served(policy)
    return server.took.keys() == wanted.keys() and all(
        server.took[name].dtype == tensor.dtype and server.took[name].equal(tensor) for name, tensor in wanted.items()
    )


@pytest.fixture(scope="module")
def policy() -> Policy:
    return qwen()


@pytest.mark.slow
@pytest.mark.ci
def test_versions_reach_all_servers_by_what_changed_and_whole_ones_when_that_is_much(
    policy: Policy, tmp_path: Path
) -> None:
    with served(policy, tmp_path) as (engine, servers):
        whole = 0
        for version in range(1, 13):
            policy = step(policy, version)
            blocking(engine.load(Weights(version, policy.model)))
            assert all(holds(server, policy) and server.label == str(version) for server in servers)
            files = {path.name for path in tmp_path.iterdir()}
            assert f"{version}.delta" in files
            whole += str(version) in files
            assert len([name for name in files if not name.endswith(".delta")]) <= 2, "earlier folders are gone"
        assert 0 < whole < 6
        assert [server.receiver.whole for server in servers] == [1, 1], "nobody but a new server reads them"
        assert isinstance(engine._sync, Deltas)
        assert engine._sync.anchors == 0
        done = servers[0].done
        last = len(done) - 1 - done[::-1].index("pause")
        assert done[last : last + 5] == ["pause", "take_weights", "update_weight_version", "weights_state", "resume"]
        assert done.index("fetch_weights", last - 20) < last, "it is fetched before the pause"


def test_a_model_folder_gives_the_same_as_the_model(policy: Policy, tmp_path: Path) -> None:
    """Ranks in other processes give theirs so."""
    with served(policy, tmp_path / "weights", 1) as (engine, [server]):
        stepped = step(policy, 1)
        stepped.save(tmp_path / "1")
        blocking(engine.load(Weights(1, tmp_path / "1")))
        assert holds(server, stepped)
        assert server.receiver.whole == 1


@pytest.mark.parametrize("fault", ["cut", "gone"])
def test_a_delta_that_is_lost_is_answered_by_the_whole(
    policy: Policy, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(policy, tmp_path) as (engine, servers):
        use = engine._sync.use

        def lost(version: int, prepared: Any) -> None:
            _, path = prepared.steps[-1]
            path.write_bytes(path.read_bytes()[:-1])
            if fault == "gone":
                path.unlink()
            for server in servers:
                server.again()  # else they have read it already
                server.receiver.loaded = "what they had"
            use(version, prepared)

        monkeypatch.setattr(engine._sync, "use", lost)
        with pytest.warns(UserWarning, match=r"version 1 was written as a whole, since the vLLM server .* DeltaError"):
            blocking(engine.load(Weights(1, step(policy, 1).model)))
        assert all(holds(server, step(policy, 1)) for server in servers)
        assert engine._sync.anchors == 1, "both servers read the same one"  # type: ignore[attr-defined]
        monkeypatch.setattr(engine._sync, "use", use)
        blocking(engine.load(Weights(2, step(policy, 2).model)))
        assert all(holds(server, step(policy, 2)) for server in servers)


STAGES = ("fetch_weights", "weights_state", "pause", "take_weights", "update_weight_version", "resume")


@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_is_started_again_at_any_stage_has_the_weights_before_it_serves(
    policy: Policy, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.engines.vllm.PAUSE_S", 0.01)
    with served(policy, tmp_path) as (engine, servers):

        async def load() -> None:
            servers[0].break_at = stage
            await engine.load(Weights(1, step(policy, 1).model))
            await settled(engine)

        blocking(load())
        assert servers[0].break_at == "", "it was started again"
        assert [server.label for server in servers] == ["1", "1"]
        assert all(holds(server, step(policy, 1)) for server in servers)


def test_a_server_that_was_started_again_behind_its_label_is_found(policy: Policy, tmp_path: Path) -> None:
    """It takes the label of the version without its weights, which no route but ours would tell."""
    with served(policy, tmp_path, 1) as (engine, [server]):
        again = server.receiver.take

        def take(digest: str) -> dict[str, Any]:
            state = again(digest)
            server.again()
            return state

        server.receiver.take = take  # type: ignore[method-assign]

        async def load() -> None:
            await engine.load(Weights(1, step(policy, 1).model))
            await settled(engine)

        blocking(load())
        assert holds(server, step(policy, 1))


def test_weights_that_servers_cannot_load_leave_the_old_ones(policy: Policy, tmp_path: Path) -> None:
    with served(policy, tmp_path, 1) as (engine, [server]):
        loaded: list[int] = []

        def fails(weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
            loaded.append(1)
            if len(loaded) < 3:
                raise MemoryError("no room")
            server.take(weights_iterator)

        server.receiver.worker.reload_weights = fails
        with pytest.warns(UserWarning, match="was written as a whole"), pytest.raises(EngineError, match="no room"):
            blocking(engine.load(Weights(1, step(policy, 1).model)))
        blocking(settled(engine))
        assert (engine.version, server.label, holds(server, policy)) == (0, "0", True)
        blocking(engine.load(Weights(2, step(policy, 2).model)))
        assert holds(server, step(policy, 2))


def test_other_shapes_adapters_and_servers_without_our_methods_are_refused(policy: Policy, tmp_path: Path) -> None:
    with served(policy, tmp_path, 1) as (engine, [server]):
        larger = copy.deepcopy(policy.model)
        larger.resize_token_embeddings(len(policy.tokenizer) + 8)
        with pytest.raises(EngineError, match=r"weights of 1 have other tensors .*: lm_head.weight is \["):
            blocking(engine.load(Weights(1, larger)))
        assert server.label == "0"
        blocking(engine.load(Weights(2, step(policy, 2).model)))
        assert holds(server, step(policy, 2))
    plain = Speaking(policy)
    with pytest.raises(EngineError, match=r"takes no deltas .* --worker-extension-cls .*, or leave sync out"):
        VLLMEngine(policy, [Server(plain.url)], tmp_path / "plain", 0.05, "delta", "bfloat16")
    plain.shutdown()
    with pytest.raises(ValueError, match=r"sync: delta compares weights in the dtype .* dtype: bfloat16"):
        VLLMConfig.model_validate({"sync": "delta"})
    adapted = Policy(copy.deepcopy(policy.model), policy.tokenizer, "adapted")
    add_lora(adapted, LoRA(rank=2, targets=["q_proj"]), 0)
    with pytest.raises(EngineError, match="this one has an adapter; leave sync out"):
        Deltas(adapted, tmp_path / "adapted", "bfloat16")

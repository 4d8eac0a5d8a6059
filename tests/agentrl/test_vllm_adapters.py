"""vLLM servers that are given adapters. The servers here speak vLLM's routes; real ones are in test_engine_vllm.py."""

import asyncio
import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from architectures import qwen
from speaking import Speaking, settled, speaking, turn

from agentrl.engines.base import EngineError, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.servers import ADAPT, Server
from agentrl.engines.vllm import VLLMEngine
from agentrl.models.policy import Policy
from agentrl.training.lora import add_lora
from agentrl.training.optimizer import LoRA


@pytest.fixture(scope="module")
def policy() -> Policy:
    return qwen()


@pytest.fixture
def servers(policy: Policy) -> Iterator[list[Speaking]]:
    with speaking(policy) as made:
        yield made


@pytest.fixture
def adapted(policy: Policy) -> Policy:
    """The policy with an adapter."""
    made = Policy(copy.deepcopy(policy.model), policy.tokenizer, "adapted")
    add_lora(made, LoRA(rank=4, alpha=8), 0)
    return made


def trained(adapted: Policy, seed: int) -> Policy:
    """The policy with another adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return adapted


def served(servers: list[Speaking], adapted: Policy) -> VLLMEngine:
    for server in servers:
        server.routes.append(ADAPT)
    return VLLMEngine(adapted, [Server(server.url) for server in servers])


def test_adapters_come_under_a_new_name_per_version_and_nothing_pauses(
    adapted: Policy, servers: list[Speaking]
) -> None:
    """A turn under way goes on with the adapter that it began with, which stays until it has ended."""
    engine = served(servers[:1], adapted)
    server = servers[0]
    [first] = server.adapters
    server.faults = [goes_on := threading.Event()]

    async def ask() -> None:
        running = asyncio.create_task(turn(engine))
        while server.faults:
            await asyncio.sleep(0.01)
        await engine.load(Weights(1, trained(adapted, 1).model))
        assert first in server.adapters
        later = await turn(engine)
        assert [span.version for span in later.spans] == [1]
        goes_on.set()
        assert [span.version for span in (await running).spans] == [0]
        await engine.load(Weights(2, trained(adapted, 2).model))

    blocking(ask())
    old, new = (request["model"] for request in server.asked)
    [current] = server.adapters
    assert old == first
    assert len({first, new, current}) == 3
    assert not {"/pause", "/collective_rpc"} & set(server.paths)
    assert len(blocking(engine.score([5, 6, 7]))) == 2
    assert len(list(engine.folder.glob("adapter-*"))) == 1
    blocking(engine.close())
    assert current not in server.adapters, "a server that goes on keeps nothing of ours"


def test_a_server_that_forgot_its_adapters_gets_the_current_one_before_it_serves(
    adapted: Policy, servers: list[Speaking]
) -> None:
    engine = served(servers, adapted)

    async def ask() -> None:
        await engine.load(Weights(3, trained(adapted, 3).model))
        for server in servers:  # as after a restart behind the same URL
            server.label, server.adapters = "default", {}
        made = await turn(engine)
        assert [span.version for span in made.spans] == [3]
        await settled(engine)

    with pytest.warns(UserWarning, match="answered 404"):
        blocking(ask())
    assert all(server.label == "0" for server in servers if server.adapters)
    assert any(server.adapters for server in servers)
    blocking(engine.close())


def test_an_adapter_over_other_weights_is_refused(adapted: Policy, servers: list[Speaking]) -> None:
    with torch.no_grad():
        next(adapted.model.parameters()).mul_(3)
    with pytest.raises(EngineError, match="other log-probs than transformers"):
        served(servers, adapted)


def test_an_adapter_of_the_output_layer_is_refused(policy: Policy, servers: list[Speaking]) -> None:
    made = Policy(copy.deepcopy(policy.model), policy.tokenizer, "adapted")
    add_lora(made, LoRA(rank=4, targets=["q_proj", "lm_head"]), 0)
    with pytest.raises(EngineError, match=r"leave lm_head out of optimizer\.lora\.targets"):
        served(servers, made)


def test_a_server_that_takes_no_adapters_names_the_flag(adapted: Policy, servers: list[Speaking]) -> None:
    with pytest.raises(EngineError, match=r"has no /v1/load_lora_adapter; start it with --enable-lora --max-lora-rank"):
        VLLMEngine(adapted, [Server(servers[0].url)])

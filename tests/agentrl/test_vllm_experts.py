"""Mixtures of experts: what servers load has the names and values of a model folder, and a real server that is given an
update has the trained model's log-probs."""

import copy
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from mixtures import mixture
from transformers import AutoModelForCausalLM

from agentrl.engines.base import Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.vllm import VLLMEngine
from agentrl.engines.weights import shapes, tensors_of, write_folder
from agentrl.models.policy import Policy
from agentrl.training.lora import add_lora
from agentrl.training.optimizer import LoRA

TOLERANCE = 1e-4
"""Mean absolute difference between log-probs of vLLM and of the trainer, in float32."""


def updated(policy: Policy, seed: int) -> Policy:
    """The policy after a step that changed all weights, those of each expert too."""
    model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return Policy(model, policy.tokenizer, policy.name, version=seed)


def _loaded(policy: Policy, folder: Path) -> Policy:
    policy.save(folder)
    return Policy(AutoModelForCausalLM.from_pretrained(folder), policy.tokenizer, policy.name)


def _adapted(policy: Policy, folder: Path) -> Policy:
    add_lora(policy, LoRA(rank=2, targets=["q_proj"]), 0)
    return policy


MADE: dict[str, Callable[[Policy, Path], Policy]] = {
    "in memory": lambda policy, folder: policy,
    "from a folder": _loaded,
    "with an adapter": _adapted,
}

KINDS = ("qwen3-moe", "mixtral")


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_the_names_and_values_of_a_model_folder(kind: str, made: str, tmp_path: Path) -> None:
    plain = mixture(kind)
    plain.save(tmp_path / "saved")
    wanted = tensors_of(tmp_path / "saved")
    policy = MADE[made](plain, tmp_path / "other")
    result = tensors_of(write_folder(policy.model, policy.tokenizer, tmp_path / "of the model"))
    assert result.keys() == wanted.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in wanted.items())
    assert sum(".experts.3." in name for name in result) == 2 * 3
    like = write_folder(
        tmp_path / "saved", policy.tokenizer, tmp_path / "of the folder", like=tmp_path / "of the model"
    )
    assert shapes(like) == shapes(tmp_path / "of the model")


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Policy, VLLMEngine]]:
    if find_spec("vllm"):
        config = VLLMConfig(dtype="float32", in_process=True)
    else:
        python = os.environ.get("VLLM_PYTHON")
        assert python, "VLLM_PYTHON names the interpreter of an environment with vLLM; `make test-vllm` sets it"
        config = VLLMConfig(dtype="float32", python=python)
    policy = mixture(request.param)
    engine = config.build(policy)
    assert isinstance(engine, VLLMEngine)
    try:
        yield policy, engine
    finally:
        blocking(engine.close())


def gap(policy: Policy, engine: VLLMEngine) -> float:
    """Mean difference of the server's log-probs from one plain pass of the model's."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(5, policy.model.config.vocab_size, (48,), generator=generator)
    with torch.inference_mode():
        logits = policy.model(ids[None]).logits[0, :-1].float()
    wanted = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    logprobs = torch.tensor(blocking(engine.score(ids.tolist())))
    return float((logprobs - wanted).abs().mean())


@pytest.mark.vllm
def test_a_server_with_experts_has_the_trained_models_log_probs_after_updates(
    served: tuple[Policy, VLLMEngine], tmp_path: Path
) -> None:
    """Updates as a model, and as a folder, which is how ranks that train in other processes give theirs."""
    policy, engine = served
    assert gap(policy, engine) < TOLERANCE
    first, second = updated(policy, 1), updated(policy, 2)
    assert gap(first, engine) > 100 * TOLERANCE, "the update is large enough to be seen"
    blocking(engine.load(Weights(1, first.model)))
    assert gap(first, engine) < TOLERANCE
    second.save(tmp_path / "second")
    blocking(engine.load(Weights(2, tmp_path / "second")))
    assert gap(second, engine) < TOLERANCE
    assert gap(first, engine) > 100 * TOLERANCE

"""A trained model as a model folder, written a shard at a time, with adapters folded in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.engines.quantized import is_quantized, whole
from agentrl.engines.weights import WeightFiles, as_saved
from agentrl.models.policy import Policy
from agentrl.schemas.permissions import readable
from agentrl.training.backend import Backend


def export(policy: Policy, backend: Backend, folder: Path) -> None:
    """Write ``policy`` as a plain model folder. All ranks take part, and the first one writes; the policy stays as it
    is, so that training may go on."""
    if not (backend.sharded or hasattr(policy.model, "peft_config")):
        if backend.rank == 0:
            policy.save(folder)
        return
    shards = None
    if backend.rank == 0:
        _begin(policy, folder)
        empty = {name: torch.empty(shape, device="meta") for name, shape in _shapes(policy.model)}
        shards = WeightFiles(folder, as_saved(policy.model, empty))
    for name, tensor in _whole(policy.model, backend):
        if shards:
            shards.add(as_saved(policy.model, {name: tensor}))
    if shards:
        shards.end()
        readable(folder)


def _begin(policy: Policy, folder: Path) -> None:
    """All but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    config = policy.model.config
    config.architectures, config.dtype = [type(policy.model).__name__], next(policy.model.parameters()).dtype
    config.save_pretrained(folder)
    if policy.model.generation_config is not None:
        policy.model.generation_config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def _shapes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Size]]:
    for name, parameter, _ in _parameters(model):
        shape = parameter.quant_state.shape if is_quantized(parameter) else parameter.shape
        yield name, getattr(parameter, "ds_shape", shape)
    for name, buffer in _buffers(model):
        yield name, buffer.shape


@torch.no_grad()
def _whole(model: torch.nn.Module, backend: Backend) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the model as it is saved, one after the other."""
    for name, parameter, adapted in _parameters(model):
        needed = (
            [
                parameter,
                *(other_parameter for other_parameter in adapted.parameters() if other_parameter is not parameter),
            ]
            if adapted
            else [parameter]
        )
        with backend.gathered(needed):
            value = whole(parameter)
            if adapted:
                for adapter in adapted.active_adapters:
                    value = value + adapted.get_delta_weight(adapter).to(value.dtype)
            value = value.to("cpu", copy=True) if backend.rank == 0 else torch.empty(0)
        yield name, value
    for name, buffer in _buffers(model):
        yield name, buffer.to("cpu", copy=True)


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Name, parameter, and the layer that adapts it, if one does. Parameters of adapters are left out, and so are other
    names of the same one."""
    adapted = dict(_adapted(model))
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        module = adapted.get(owner.removesuffix(".base_layer")) if owner.endswith(".base_layer") else None
        if module is not None:
            yield f"{owner.removesuffix('.base_layer')}.{last}", parameter, module if last == "weight" else None
        elif not any(name.startswith(f"{name_adapted}.") for name_adapted in adapted):
            yield name, parameter, None


def _adapted(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that are saved."""
    saved = set(model.state_dict().keys())
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer

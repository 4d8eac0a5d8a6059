"""New weights of a model on a CPU, made ready beside those that it computes with. vLLM packs the matrices of each layer
when it loads them, which takes longer than all else in an update; here only references change while nothing samples.

Written against vLLM 0.32: it uses what vLLM's own reload is made of, on a second tree of the model's modules.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Twin(NamedTuple):
    """A module that computes, and one like it that has the new weights. ``before`` are the attributes that the second
    one began with."""

    live: nn.Module
    new: nn.Module
    before: dict[str, Any]


class SecondTree(NamedTuple):
    """A model with new weights, and which of its modules have some."""

    twins: list[Twin]
    loaded: set[nn.Module]


@torch.no_grad()
def made_beside(model: nn.Module, weights: Mapping[str, Tensor]) -> SecondTree:
    """Load weights into a second tree of the modules of ``model``, which goes on computing meanwhile."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload import layerwise

    twins: dict[nn.Module, Twin] = {}
    root = _twin(model, twins)
    for twin in twins.values():
        known = layerwise.get_layerwise_info(twin.live)
        info = layerwise.get_layerwise_info(twin.new)
        info.restore_metadata = _unbound(known.restore_metadata, layerwise)
        info.restore_device = known.restore_device
    layerwise.initialize_layerwise_reload(root)
    for twin in twins.values():
        layerwise.get_layerwise_info(twin.new).kernel_tensors = None  # those that compute now: not to be written to
    root.load_weights(iter(weights.items()))  # type: ignore[operator]
    loaded = set()
    for twin in twins.values():
        info = layerwise.get_layerwise_info(twin.new)
        if info.can_load() and info.load_numel and is_deferred_attention_layer(twin.new):
            raise NotImplementedError(f"{type(twin.new).__name__} has weights of its own")
        if info.can_load() and info.load_numel:  # parts of it are padding
            layerwise._layerwise_process(twin.new, info)
        if not info.can_load():
            loaded.add(twin.new)
    return SecondTree(list(twins.values()), loaded)


def put_in(made: SecondTree, dtype: torch.dtype) -> None:
    """Make the live modules compute with the new weights."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for live, new, before in made.twins:
        for name, value in vars(new).items():
            if name not in _TREE and before.get(name) is not value:
                setattr(live, name, value)
        if new in made.loaded:
            live._parameters = new._parameters
            kept = {name: live._buffers[name] for name in live._non_persistent_buffers_set if name in live._buffers}
            live._buffers = {**new._buffers, **kept}
    for live, _, _ in made.twins:
        if is_deferred_attention_layer(live):
            live.process_weights_after_loading(dtype)  # type: ignore[operator]


_TREE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _twin(module: nn.Module, twins: dict[nn.Module, Twin]) -> nn.Module:
    if module in twins:
        return twins[module].new
    new = copy.copy(module)
    twins[module] = Twin(module, new, {})
    new._parameters = dict(_own(module._parameters))
    new._buffers = dict(_own(module._buffers))
    new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    new._modules = {name: child if child is None else _twin(child, twins) for name, child in module._modules.items()}
    _forget_kernel(new)
    method = vars(new).get("quant_method")
    if method is not None and getattr(method, "moe_kernel", None) is not None:
        new.quant_method = copy.copy(method)
        _forget_kernel(new.quant_method)
    twins[module].before.update(vars(new))
    return new


def _forget_kernel(module: Any) -> None:
    """Kernels of experts are made, and pack what they read, only where there is none."""
    if getattr(module, "moe_kernel", None) is not None:
        module.moe_kernel = None


def _own(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors that vLLM's reload writes to in place, each in memory of its own; the others are made anew."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    for name, tensor in tensors.items():
        yield name, _like(tensor, tensor.data.clone()) if tensor is not None and name in SKIP_TENSORS else tensor


def _unbound(metadata: Any, layerwise: Any) -> Any:
    """What a module's tensors are before they are loaded, without the loaders that vLLM's reload of another module left
    there."""
    groups: list[dict[str, Tensor]] = []
    for tensors in metadata:
        groups.append({name: _like(tensor, tensor.data) for name, tensor in tensors.items()})
        for tensor in groups[-1].values():
            if hasattr(tensor, "weight_loader"):
                tensor.weight_loader = layerwise._get_original_loader(tensor)
    return tuple(groups)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """``values`` with the class and the attributes of ``tensor``."""
    values.__class__ = tensor.__class__
    values.__dict__ = dict(tensor.__dict__)
    return values

"""Linear layers whose weights are frozen in 4 bits, NF4 with quantised scales (QLoRA, Dettmers et al. 2023, section 3),
through bitsandbytes. A product casts a layer's weight back for the time that it takes.

What is sampled, scored and saved is the model that is trained: weights as they are cast back.
"""

from typing import Any

import torch
from torch import Tensor

from agentrl.schemas.installation import install_hint


def quantize(model: torch.nn.Module) -> None:
    """Freeze the weights of all linear layers but the output layer in 4 bits, one after the other, and put the model on
    the GPU if there is one: on the host it may be larger than a GPU. A model that is in 4 bits stays as it is.

    Raises ValueError if bitsandbytes is not installed, if there is no such layer, or if a layer's inputs are no whole
    number of blocks.
    """
    try:
        import bitsandbytes
    except ImportError:
        raise ValueError(f"lora.quantize needs bitsandbytes: {install_hint('qlora')}") from None
    layers = dict(linear_layers(model))
    if any(is_quantized(layer.weight) for layer in layers.values()):
        return
    if not layers:
        raise ValueError("lora.quantize: nf4 finds no linear layer in this model; leave it out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, module in layers.items():
        layer = bitsandbytes.nn.Linear4bit(
            module.in_features, module.out_features, False, torch.float32, quant_type="nf4", device="meta"
        )
        layer.support_avx512bf16_for_cpu = False  # it would pack weights anew between passes with and without gradients
        values = module.weight.data.float()  # they are cast back to this dtype
        weight: Any = bitsandbytes.nn.Params4bit(
            values, requires_grad=False, blocksize=_block(name, module), quant_type="nf4", module=layer
        )
        layer.weight, layer.bias = weight.to(device), module.bias
        replace_module(model, name, layer.train(module.training))
    model.to(device)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what PEFT asks before it adapts such layers


def _block(name: str, layer: torch.nn.Linear) -> int:
    """Weights that share a scale: 64 as in the paper, or 32 if the inputs are no multiple of 64. A block that goes over
    the end of a row is cast back wrongly by bitsandbytes 0.50 on processors with AVX-512."""
    block = next((block for block in (64, 32) if layer.in_features % block == 0), None)
    if block is None:
        raise ValueError(
            f"lora.quantize: nf4 takes layers whose inputs are a multiple of 32; {name} has {layer.in_features}; "
            "leave quantize out"
        )
    return block


def linear_layers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Linear]]:
    """All linear layers but the output layer, by name."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]


def replace_module(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Put ``module`` in the place of the one of this name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def is_quantized(parameter: Any) -> bool:
    """Whether a parameter is in 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def whole(parameter: Any) -> Tensor:
    """The values of a parameter, cast back if it is in 4 bits."""
    if not is_quantized(parameter):
        values: Tensor = parameter.data
        return values
    from bitsandbytes.functional import dequantize_4bit

    cast: Tensor = dequantize_4bit(parameter.data, parameter.quant_state)
    return cast


def state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state of a model as one without weights in 4 bits would have it."""
    cast = {name: whole(parameter) for name, parameter in model.named_parameters() if is_quantized(parameter)}
    return without_quantized(model, model.state_dict()) | cast


def without_quantized(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a model without what is in 4 bits, which is frozen and made of the start again."""
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if is_quantized(parameter)}
    return {name: value for name, value in state.items() if f"{name.split('.weight')[0]}.weight" not in frozen}


def restore(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load a state as :func:`without_quantized` gives it. Raises RuntimeError if it is that of another model."""
    missing, unknown = model.load_state_dict(state, strict=False)
    if odd := sorted(without_quantized(model, dict.fromkeys(missing))) + unknown:
        raise RuntimeError(f"{len(odd)} tensors are in the model or in its state alone, such as {odd[:3]}")

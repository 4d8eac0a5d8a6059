"""Low-rank adapters inside a policy, through PEFT."""

from typing import Any

import torch

from agentrl.engines.quantized import is_quantized, linear_layers, quantize, replace_module, whole
from agentrl.engines.seeds import stream
from agentrl.models.policy import Policy
from agentrl.schemas.installation import install_hint
from agentrl.training.optimizer import LoRA


def add_lora(policy: Policy, config: LoRA, seed: int) -> None:
    """Put adapters into the policy's model. From then on only they are trained. The same seed gives the same adapters.

    Raises ValueError if PEFT is not installed, or bitsandbytes if weights are to be in 4 bits.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError(f"lora needs PEFT: {install_hint('lora')}") from None
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    if targets == "all-linear":
        targets = sorted({name.rpartition(".")[2] for name, _ in linear_layers(policy.model)})
    if config.quantize:
        quantize(policy.model)
    with torch.random.fork_rng():
        torch.manual_seed(stream(seed, "lora"))
        made = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
        inject_adapter_in_model(made, policy.model)


@torch.no_grad()
def merge_lora(policy: Policy) -> None:
    """Fold adapters into the weights, so that the policy is an ordinary model again. Without adapters it does
    nothing."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return
    for name, module in list(policy.model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            adapted: Any = module
            base = adapted.get_base_layer()
            if is_quantized(base.weight):
                base = _linear(base)
                base.weight += sum(adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters)
            else:
                adapted.merge()
            replace_module(policy.model, name, base)
    for name, module in linear_layers(policy.model):
        if is_quantized(module.weight):
            replace_module(policy.model, name, _linear(module))
    policy.model.requires_grad_(True)
    if hasattr(policy.model, "peft_config"):
        del policy.model.peft_config


def _linear(quantized: torch.nn.Linear) -> torch.nn.Linear:
    """The layer with its weight cast back."""
    layer = torch.nn.Linear(quantized.in_features, quantized.out_features, bias=False, device="meta")
    layer.weight, layer.bias = torch.nn.Parameter(whole(quantized.weight)), quantized.bias
    return layer.train(quantized.training)

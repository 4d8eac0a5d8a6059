"""Low-rank adapters inside a policy, through PEFT."""

import torch

from agentrl.engines.seeds import stream
from agentrl.models.policy import Policy
from agentrl.schemas.installation import install_hint
from agentrl.training.optimizer import LoRA


def add_lora(policy: Policy, config: LoRA, seed: int) -> None:
    """Put adapters into the policy's model. From then on only they are trained. The same seed gives the same adapters.

    Raises ValueError if PEFT is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError(f"lora needs PEFT: {install_hint('lora')}") from None
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    if targets == "all-linear":
        targets = _linear_names(policy.model)
    with torch.random.fork_rng():
        torch.manual_seed(stream(seed, "lora"))
        made = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
        inject_adapter_in_model(made, policy.model)


def _linear_names(model: torch.nn.Module) -> list[str]:
    """Last parts of the names of all linear modules but the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    names = {
        name.rsplit(".", 1)[-1] for name, m in model.named_modules() if type(m) is torch.nn.Linear and m is not head
    }
    return sorted(names)


def merge_lora(policy: Policy) -> None:
    """Fold adapters into the weights, so that the policy is an ordinary model again. Without adapters it does
    nothing."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return
    for name, module in list(policy.model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(policy.model.get_submodule(parent), last, module.get_base_layer())
    policy.model.requires_grad_(True)
    if hasattr(policy.model, "peft_config"):
        del policy.model.peft_config

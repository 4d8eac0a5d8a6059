"""The loss of a value head."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Loss of each token, [rows, tokens]: ``(V - R)^2 / 2``; with ``clip``, the larger of that and the loss of ``V``
    moved to within ``clip`` of the old value (the PPO of Schulman et al. 2017 as published in its code)."""
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return loss / 2

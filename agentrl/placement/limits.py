"""How many elements DeepSpeed may hold whole, and move, at a time, by the model's shape. No result depends on it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SMALL = 16_000_000
"""Elements that a model may always have gathered, 64 MB in float32. DeepSpeed's own limits, up to 4 GB, gather a small
model whole."""

AHEAD = 2_000_000_000
"""Elements that are gathered ahead at most: two layers of a dense model of 80 billion parameters, 8 GB."""

REDUCED = 50_000_000
"""Elements of gradients that are summed over ranks at a time."""


@dataclass(frozen=True)
class GatherLimits:
    """Elements, as DeepSpeed's settings of ZeRO name them: ``stage3_max_live_parameters``,
    ``stage3_max_reuse_distance``, ``stage3_prefetch_bucket_size`` and ``reduce_bucket_size``."""

    live: int = SMALL
    reuse: int = SMALL
    prefetched: int = SMALL // 2
    reduced: int = SMALL


def limits_of(largest: int, layer: int) -> GatherLimits:
    """The limits of a model with ``largest`` elements in its largest parameter and ``layer`` in its largest layer.

    DeepSpeed gathers ahead what fits beside the parameters that are there, so room for the largest one and for two
    layers lets the next layer arrive while one computes; with less than the largest matrix to spare, nothing ever
    arrives ahead (``partitioned_param_coordinator.py`` of DeepSpeed 0.19)."""
    live = largest + min(2 * layer, AHEAD)
    if live <= SMALL:
        return GatherLimits()
    prefetched = max(SMALL, min(layer, AHEAD)) // 2
    return GatherLimits(live, 0, prefetched, max(SMALL, min(REDUCED, layer)))


def sizes_of(model: "torch.nn.Module") -> tuple[int, int]:
    """Elements of a model's largest parameter and of its largest layer, also if parameters are spread over ranks.
    Layers are what its lists of modules hold; 0 if it has no such list."""
    from torch.nn import ModuleList

    def size(module: "torch.nn.Module") -> int:
        return sum(_elements(parameter) for parameter in module.parameters())

    layers = [size(layer) for module in model.modules() if isinstance(module, ModuleList) for layer in module]
    return max(_elements(parameter) for parameter in model.parameters()), max(layers, default=0)


def _elements(parameter: "torch.nn.Parameter") -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))

"""Loading a model of which each rank holds only a part (ZeRO 3): a rank reads from the files what it keeps."""

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.engines.weights import SAVED_TYPES
from agentrl.models.hub import model_folder
from agentrl.models.policy import Policy, load_tokenizer

_TYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in SAVED_TYPES.items()}


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies in a safetensors file: row by row, from byte ``start`` on."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, first: int, count: int) -> Tensor:
        """``count`` values from the ``first`` one on, as if the tensor had one dimension. No other is read."""
        with self.file.open("rb") as file:
            file.seek(self.start + first * self.dtype.itemsize)
            values = bytearray(count * self.dtype.itemsize)
            if file.readinto(values) != len(values):
                raise ValueError(f"{self.file} is cut short")
        return torch.frombuffer(values, dtype=self.dtype)


def load_partitioned(path: str | Path, settings: dict[str, Any]) -> Policy:
    """The policy of a local folder, or of a name on the Hugging Face hub, in float32. No rank ever holds more than its
    own part of it, and one module. ``settings`` are those of DeepSpeed.

    If the names in the files are not those of the model's parameters, transformers loads it, whose first process then
    reads all of it; a warning says so.
    """
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    folder = model_folder(path)
    config, stored = AutoConfig.from_pretrained(folder), dict(_tensors(folder))
    with torch.device("meta"):  # its class has to be known before DeepSpeed changes how classes are made
        shapes = AutoModelForCausalLM.from_config(config)
    why = _mismatch(shapes, stored)
    if settings["zero_optimization"].get("offload_param", {}).get("device") == "nvme":
        why = "its parameters are offloaded to nvme"
    if why:
        warnings.warn(f"the first process reads all of {path} while it is loaded: {why}", stacklevel=2)
        return Policy(_by_transformers(folder, settings).eval(), load_tokenizer(folder), str(path))
    with deepspeed.zero.Init(config_dict_or_path=settings), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    for parameter, names in _parameters(model):
        _fill(parameter, next(stored[name] for name in names if name in stored))
    _fill_buffers(model, stored)
    return Policy(model.eval(), load_tokenizer(folder), str(path))


def _tensors(folder: Path) -> Iterator[tuple[str, _Stored]]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _TYPES:
                start = 8 + size + entry["data_offsets"][0]
                yield name, _Stored(path, _TYPES[entry["dtype"]], tuple(entry["shape"]), start)


def _parameters(model: torch.nn.Module) -> list[tuple[Any, list[str]]]:
    """Each parameter with all its names."""
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.items())


def _mismatch(shapes: torch.nn.Module, stored: dict[str, _Stored]) -> str:
    """What of a model's parameters is not in the files, or nothing."""
    for parameter, names in _parameters(shapes):
        tensor = next((stored[name] for name in names if name in stored), None)
        if tensor is None:
            return f"its files have no {names[0]}"
        if tensor.shape != tuple(parameter.shape):
            return f"{names[0]} is {list(tensor.shape)} in its files, not {list(parameter.shape)}"
    return ""


@torch.no_grad()
def _fill(parameter: Any, stored: _Stored) -> None:
    part = parameter.ds_tensor
    first = dist.get_rank() * part.numel()
    count = max(0, min(part.numel(), math.prod(stored.shape) - first))
    if count:
        part[:count].copy_(stored.read(first, count))
    part[count:].zero_()


@torch.no_grad()
def _fill_buffers(model: torch.nn.Module, stored: dict[str, _Stored]) -> None:
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(stored[name].read(0, buffer.numel()).view(buffer.shape))


def _by_transformers(folder: Path, settings: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(settings)  # transformers asks for it as long as it is there
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    del alive
    return model

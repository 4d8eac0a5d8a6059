"""Going on from a checkpoint that another number of DeepSpeed ranks wrote.

Under ZeRO each rank holds, and writes, its own part of the float32 weights and of AdamW's moments (Rajbhandari et al.
2020, section 5). A rank reads from the files of all writers the values that its own part has now, and maps the files
into memory, so that no other value is read. DeepSpeed would convert the whole checkpoint into a universal one first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """``count`` values of a parameter, from its ``first`` one on, as if it had one dimension; they lie in the flat
    buffer of a ``group`` of parameters, from ``start`` on."""

    name: str
    group: int
    start: int
    first: int
    count: int


class ShardedStates:
    """The optimiser states of a checkpoint, as its ``writers`` ranks left them."""

    def __init__(self, folder: Path, writers: int, model: dict[str, Any]) -> None:
        files = (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(writers))
        self._states = [_read(file)["optimizer_state_dict"] for file in files]
        self._fragments: dict[str, list[tuple[int, Fragment]]] = {}
        for rank, state in enumerate(self._states):
            for fragment in self._fragments_of(rank, state, model["param_shapes"]):
                self._fragments.setdefault(fragment.name, []).append((rank, fragment))

    def _fragments_of(self, rank: int, state: dict[str, Any], shapes: Sequence[dict[str, Any]]) -> Iterator[Fragment]:
        if "param_slice_mappings" not in state:  # ZeRO 3: each parameter is divided over all ranks
            for group, sizes in enumerate(shapes):
                yield from divided(sizes, group, rank, len(self._states))
            return
        for group, mapping in enumerate(state["param_slice_mappings"]):
            for name, address in mapping.items():
                before = sum(fragment.count for _, fragment in self._fragments.get(name, ()))
                yield Fragment(name, group, address.start, before, address.numel)

    def fill(self, kind: str, fragment: Fragment, values: Tensor) -> None:
        """Copy the values of ``fragment``, of weights (``fp32``) or of a moment, into ``values``."""
        filled = 0
        for rank, written in self._fragments[fragment.name]:
            begin = max(fragment.first, written.first)
            count = min(fragment.first + fragment.count, written.first + written.count) - begin
            if count > 0:
                source = self._flat(kind, rank, written.group)
                start = written.start + begin - written.first
                values[begin - fragment.first :][:count].copy_(source[start : start + count])
                filled += count
        if filled != fragment.count:
            raise ValueError(f"the checkpoint has {filled} of {fragment.count} values of a part of {fragment.name}")

    def steps(self) -> Tensor | None:
        """Updates that AdamW counts; None before the first one."""
        state = _moments(self._states[0]).get(0)
        return state["step"] if state else None

    def _flat(self, kind: str, rank: int, group: int) -> Tensor:
        state = self._states[rank]
        if kind == "fp32":
            return state.get("fp32_flat_groups", state.get("single_partition_of_fp32_groups"))[group]
        return _moments(state)[group][kind]


def divided(shapes: dict[str, Any], group: int, rank: int, ranks: int) -> Iterator[Fragment]:
    """What ZeRO 3 gives a rank of the parameters of a group: an equal part of each, in order, the last one padded."""
    start = 0
    for name, shape in shapes.items():
        values = math.prod(shape)
        part = -(-values // ranks)
        yield Fragment(name, group, start, rank * part, max(0, min(part, values - rank * part)))
        start += part


def load_resharded(engine: Any, folder: Path, writers: int, restore: Any) -> dict[str, Any]:
    """Set the weights and moments of ``engine``, a DeepSpeed engine under ZeRO 1 to 3, to those of a checkpoint by
    ``writers`` ranks. ``restore`` loads what is not divided. Returns what was saved beside them. Raises ValueError if
    the checkpoint lacks values."""
    optimizer, sharded = engine.optimizer, engine.zero_optimization_partition_weights()
    prefix = "zero_pp_rank_0_" if sharded else ""
    saved = _read(folder / f"{prefix}mp_rank_00_model_states.pt")
    if sharded:
        optimizer.checkpoint_event_prologue()
    engine.load_module_state_dict(saved, custom_load_fn=restore)
    engine.global_steps, engine.skipped_steps = saved["global_steps"], saved["skipped_steps"]
    written = ShardedStates(folder, writers, saved)
    step = written.steps()
    flats = optimizer.fp32_partitioned_groups_flat if sharded else optimizer.single_partition_of_fp32_groups
    fragments = list(_own_of_zero3(optimizer) if sharded else _own(optimizer))
    for group, flat in enumerate(flats):
        targets = {"fp32": flat.data}
        if step is not None:
            state = {name: torch.zeros_like(flat.data) for name in MOMENTS}
            optimizer.optimizer.state[flat] = {"step": step.clone(), **state}
            targets |= state
        for kind, target in targets.items():
            for fragment in fragments:
                if fragment.group == group:
                    written.fill(kind, fragment, target[fragment.start : fragment.start + fragment.count])
    if sharded:
        for weights, masters in zip(optimizer.fp16_partitioned_groups_flat, flats, strict=True):
            weights.data.copy_(masters.data)
        optimizer.checkpoint_event_epilogue()
    return {name: value for name, value in saved.items() if name != "module"}


def _own_of_zero3(optimizer: Any) -> Iterator[Fragment]:
    for group, parameters in enumerate(optimizer.fp16_groups):
        shapes = {optimizer.param_names[parameter]: parameter.ds_shape for parameter in parameters}
        yield from divided(shapes, group, dist.get_rank(), dist.get_world_size())


def _own(optimizer: Any) -> Iterator[Fragment]:
    for group, parameters in enumerate(optimizer.bit16_groups):
        for parameter in parameters:
            if mapping := parameter._hp_mapping:  # this rank has a part of it
                of_parameter, of_group = mapping.lp_fragment_address, mapping.hp_fragment_address
                name = optimizer.param_names[parameter]
                yield Fragment(name, group, of_group.start, of_parameter.start, of_group.numel)


def _moments(state: dict[str, Any]) -> dict[int, dict[str, Tensor]]:
    states: dict[str, Any] = state.get("optimizer_state_dict") or state["base_optimizer_state"]
    moments: dict[int, dict[str, Tensor]] = states["state"]
    return moments


def _read(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    return state

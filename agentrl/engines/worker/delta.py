"""What changed between two versions of a model's weights, as a file: where values changed and what they are now, so
that a receiver that overwrites them is equal to the sender to the bit, and sums by which it knows that it is."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DENSE = 0.3
"""The share of changed values from which on all values of a tensor are written."""

STEP = 65535
"""The gap that says: go on by so many, no value changed there."""

THREADS = 4
"""Tensors that are compared, summed or read at once."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS, _VALUES = ":gaps", ":values"


class DeltaError(Exception):
    """A delta does not belong to the weights that it was to change, or is not whole."""


@dataclass(frozen=True)
class TensorChange:
    """What is new in one tensor: the bits of ``values`` as integers, at the positions that :func:`positions` gives of
    ``gaps``; or of all values if ``gaps`` is None."""

    gaps: np.ndarray | None
    values: np.ndarray


@dataclass(frozen=True)
class Delta:
    """What leads from the weights with the digest ``base`` to those with the digest ``result``. ``sums`` are those of
    the tensors that change, when they have."""

    base: str
    result: str
    sums: Mapping[str, int]
    changes: Mapping[str, TensorChange]

    @property
    def size(self) -> int:
        """Bytes of all changes."""
        return sum(
            change.values.nbytes + (0 if change.gaps is None else change.gaps.nbytes)
            for change in self.changes.values()
        )

    def write(self, path: Path) -> None:
        """One safetensors file, which has its name when it is whole."""
        from safetensors.numpy import save_file

        arrays = {f"{name}{_VALUES}": change.values for name, change in self.changes.items()}
        arrays |= {f"{name}{_GAPS}": change.gaps for name, change in self.changes.items() if change.gaps is not None}
        about = {"base": self.base, "result": self.result, "sums": json.dumps(self.sums)}
        partial = path.with_name(f"{path.name}.partial")
        save_file(arrays, partial, about)
        partial.chmod(0o600 | path.parent.stat().st_mode & 0o444)  # a server may be another user's
        partial.rename(path)

    @classmethod
    def read(cls, path: Path) -> "Delta":
        """Raises DeltaError if there is no whole file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "np") as file:
                about = file.metadata()
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            names = [name.removesuffix(_VALUES) for name in arrays if name.endswith(_VALUES)]
            changes = {name: TensorChange(arrays.get(f"{name}{_GAPS}"), arrays[f"{name}{_VALUES}"]) for name in names}
            return cls(about["base"], about["result"], json.loads(about["sums"]), changes)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DeltaError(f"{path} is no whole delta: {type(error).__name__}: {error}") from error


class Copy:
    """The weights of one version in host memory, by the names that a model folder has, and a sum of each tensor."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.sums = dict(zip(tensors, _each(checksum, tensors.values()), strict=True))

    @classmethod
    def of_folder(cls, folder: Path) -> "Copy":
        """The weights of a model folder, in memory of their own. Raises DeltaError if they cannot be read."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        def read(file: Path) -> dict[str, Tensor]:
            return {name: tensor.clone() for name, tensor in load_file(file).items()}  # the file may go

        try:
            parts = _each(read, sorted(folder.glob("*.safetensors")))
        except (OSError, SafetensorError) as error:
            raise DeltaError(f"the weights in {folder} cannot be read: {error}") from error
        return cls({name: tensor for part in parts for name, tensor in part.items()})

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def digest(self) -> str:
        """The same for equal weights alone."""
        lines = "".join(f"{name} {self.sums[name]}\n" for name in sorted(self.sums))
        return hashlib.sha256(lines.encode()).hexdigest()

    def move(self, tensors: Mapping[str, Any]) -> Delta:
        """Become the weights ``tensors``, which have the same names and shapes; what changed. They are tensors, or
        slices of files, and are cast to the dtypes of this copy."""
        base = self.digest

        def moved(name: str) -> TensorChange | None:
            own = self.tensors[name]
            change = changed(own, tensors[name][...].to("cpu", own.dtype))
            if change is not None:
                overwrite(own, change)
                self.sums[name] = checksum(own)
            return change

        found_changes = zip(self.tensors, _each(moved, self.tensors), strict=True)
        changes = {name: change for name, change in found_changes if change is not None}
        return Delta(base, self.digest, {name: self.sums[name] for name in changes}, changes)

    def apply(self, delta: Delta) -> None:
        """Overwrite what changed. Raises DeltaError if this is not what it starts from, or if what came out is not what
        the sender has; the copy is worth nothing then."""
        if delta.base != self.digest:
            raise DeltaError(f"the delta starts from weights with the digest {delta.base[:8]}, not {self.digest[:8]}")

        def applied(name: str) -> int:
            if name not in self.tensors:
                raise DeltaError(f"the delta changes {name}, which these weights do not have")
            overwrite(self.tensors[name], delta.changes[name])
            return checksum(self.tensors[name])

        self.sums.update(zip(delta.changes, _each(applied, delta.changes), strict=True))
        wrong = [name for name in delta.changes if self.sums[name] != delta.sums.get(name)]
        if wrong or self.digest != delta.result:
            raise DeltaError(f"{len(wrong)} tensors have other sums than those of the sender, such as {wrong[:3]}")


def changed(old: Tensor, new: Tensor) -> TensorChange | None:
    """What is new in a tensor of the same shape and dtype; None if no bit is."""
    values = bits(new)
    positions = (bits(old) != values).nonzero()[:, 0]
    if not len(positions):
        return None
    if len(positions) > DENSE * values.numel():
        return TensorChange(None, values.numpy().copy())
    return TensorChange(gaps_of(positions.numpy()), values[positions].numpy())


def overwrite(tensor: Tensor, change: TensorChange) -> None:
    """Raises DeltaError if a change does not fit the tensor."""
    own = bits(tensor).numpy()
    if change.values.dtype != own.dtype:
        raise DeltaError(f"values are {change.values.dtype}, not {own.dtype}")
    if change.gaps is None:
        if len(change.values) != len(own):
            raise DeltaError(f"there are {len(change.values)} values for a tensor of {len(own)}")
        own[:] = change.values
        return
    places = positions_of(change.gaps)
    if len(places) != len(change.values) or (len(places) and places[-1] >= len(own)):
        raise DeltaError(f"{len(places)} positions and {len(change.values)} values do not fit a tensor of {len(own)}")
    own[places] = change.values


def gaps_of(positions: np.ndarray) -> np.ndarray:
    """Sorted positions as the numbers of values between each two of them, uint16. ``STEP`` stands for a part of a
    longer gap, after which no position comes."""
    gaps = np.diff(positions, prepend=-1) - 1
    steps, rest = np.divmod(gaps, STEP)
    result = np.full(len(gaps) + int(steps.sum()), STEP, np.uint16)
    result[np.arange(len(gaps)) + np.cumsum(steps)] = rest
    return result


def positions_of(gaps: np.ndarray) -> np.ndarray:
    """What :func:`gaps_of` was given, int64."""
    ends = gaps != STEP
    positions: np.ndarray = np.cumsum(gaps.astype(np.int64) + ends)[ends] - 1
    return positions


def bits(tensor: Tensor) -> Tensor:
    """The values of a contiguous tensor as integers, [values], in the same memory."""
    return tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    values: Any = bits(tensor).numpy()
    return zlib.crc32(values)


def _each(function: Any, items: Any) -> list[Any]:
    with ThreadPoolExecutor(THREADS, "weights") as pool:
        return list(pool.map(function, items))

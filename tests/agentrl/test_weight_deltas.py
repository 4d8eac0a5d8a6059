"""What changed between two versions of weights: files, digests, and what workers of vLLM make of them without vLLM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from agentrl.engines.worker.delta import (
    Copy,
    Delta,
    DeltaError,
    bits,
    changed,
    gaps_of,
    overwrite,
    positions_of,
)
from agentrl.engines.worker.extension import Step, WeightReceiver

PATTERNS = (0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x0001, 0x3F80)
"""Bits of bfloat16: zeros of both signs, several NaNs, infinities, the smallest number and 1."""


def of_bits(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.uint16).astype(np.int16)).view(torch.bfloat16)


@given(st.lists(st.integers(0, 400_000), unique=True, max_size=30))
def test_positions_survive_as_gaps_however_long(positions: list[int]) -> None:
    given_positions = np.array(sorted(positions), np.int64)
    gaps = gaps_of(given_positions)
    assert gaps.dtype == np.uint16
    assert positions_of(gaps).tolist() == sorted(positions)


@pytest.mark.parametrize("gap", [65534, 65535, 65536, 131069, 131070, 131071])
def test_gaps_at_the_edge_of_two_bytes(gap: int) -> None:
    positions = [gap, gap + 1, 2 * gap + 2]
    assert positions_of(gaps_of(np.array(positions))).tolist() == positions


@given(st.data())
def test_a_receiver_that_overwrites_is_equal_to_the_bit(data: Any) -> None:
    old = data.draw(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=60))
    positions = data.draw(st.lists(st.integers(0, len(old) - 1), max_size=60))
    new = list(old)
    for position in positions:
        new[position] = data.draw(st.sampled_from(PATTERNS))
    change = changed(of_bits(old), of_bits(new))
    assert (change is None) == (old == new)
    if change is not None:
        share = sum(first != other for first, other in zip(old, new, strict=True)) / len(old)
        assert (change.gaps is None) == (share > 0.3)
        received = of_bits(old)
        overwrite(received, change)
        assert bits(received).equal(bits(of_bits(new)))


def weights(seed: int, changes: int = 0) -> dict[str, Tensor]:
    """Three tensors; with ``changes``, so many values of the first one are others."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "far": torch.randn(300, 700, generator=generator).bfloat16(),
        "dense": torch.randn(40, generator=generator),
        "scalar": torch.tensor(3),
    }
    generator.manual_seed(seed)
    for position in torch.randint(0, 210_000, (changes,), generator=generator).tolist():
        tensors["far"].view(-1)[position] = torch.randn((), generator=generator)
    if changes:
        tensors["dense"] += 1
    return tensors


def equal(copy: Copy, tensors: dict[str, Tensor]) -> bool:
    return copy.tensors.keys() == tensors.keys() and all(
        bits(copy.tensors[name]).equal(bits(tensor)) for name, tensor in tensors.items()
    )


def test_a_delta_survives_as_a_file_and_holds_only_what_changed(tmp_path: Path) -> None:
    sender, receiver = Copy(weights(0)), Copy(weights(0))
    delta = sender.move(weights(1, 5))
    assert set(delta.changes) == {"far", "dense"}
    assert delta.changes["dense"].gaps is None
    delta.write(tmp_path / "1.delta")
    receiver.apply(Delta.read(tmp_path / "1.delta"))
    assert equal(receiver, weights(1, 5))
    assert receiver.digest == sender.digest
    assert (tmp_path / "1.delta").stat().st_size < 1500
    nothing = sender.move(weights(1, 5))
    assert (nothing.changes, nothing.base) == ({}, nothing.result)
    nothing.write(tmp_path / "2.delta")
    receiver.apply(Delta.read(tmp_path / "2.delta"))


def test_a_delta_of_other_weights_is_refused() -> None:
    sender = Copy(weights(0))
    delta = sender.move(weights(1, 5))
    with pytest.raises(DeltaError, match="starts from weights with the digest"):
        Copy(weights(2, 1)).apply(delta)


def test_a_receiver_whose_memory_differs_does_not_pass(tmp_path: Path) -> None:
    """Its sums are those of its own start, but not what comes out."""
    sender, receiver = Copy(weights(0)), Copy(weights(0))
    receiver.tensors["far"][5, 5] += 1
    with pytest.raises(DeltaError, match=r"1 tensors have other sums than those of the sender, such as \['far'\]"):
        receiver.apply(sender.move(weights(1, 5)))


# --- what workers do


def worker(receives: list[dict[str, Tensor]]) -> Any:
    """A worker that notes what it loads; it packs nothing beside."""
    return SimpleNamespace(
        device=torch.device("cuda"),
        model_runner=SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True)),
        forget_expert_kernels=lambda: None,
        reload_weights=lambda weights_iterator: receives.append(
            {name: tensor.clone() for name, tensor in weights_iterator}
        ),
    )


class Sender:
    """Versions of weights in a folder, as :class:`agentrl.engines.deltas.Deltas` writes them."""

    def __init__(self, root: Path) -> None:
        self.root, self.held = root, Copy(weights(0))
        self.steps: list[Step] = [self.whole("0")]

    def whole(self, name: str) -> Step:
        (self.root / name).mkdir()
        save_file(self.held.tensors, self.root / name / "model.safetensors")
        return self.held.digest, str(self.root / name)

    def go_on(self, version: int) -> Step:
        delta = self.held.move(weights(version, 5))
        path = self.root / f"{version}.delta"
        delta.write(path)
        self.steps.append((delta.result, str(path)))
        return self.steps[-1]


@pytest.fixture
def sender(tmp_path: Path) -> Sender:
    return Sender(tmp_path)


def given_to(receiver: WeightReceiver, steps: list[Step]) -> str:
    """What went wrong, if something did."""
    receiver.fetch(steps)
    assert receiver._fetching is not None
    receiver._fetching.result()
    state = receiver.state()
    return str(state["problem"] or receiver.take(steps[-1][0])["problem"])


def test_a_worker_goes_from_version_to_version(sender: Sender) -> None:
    received: list[dict[str, Tensor]] = []
    receiver = WeightReceiver(worker(received))
    assert given_to(receiver, sender.steps) == ""
    for version in range(1, 6):
        sender.go_on(version)
        assert given_to(receiver, sender.steps) == ""
        assert equal(Copy(received[-1]), weights(version, 5))
    assert (receiver.whole, receiver.loaded) == (1, sender.held.digest)


def test_a_worker_that_missed_a_version_or_was_started_again_catches_up(sender: Sender) -> None:
    received: list[dict[str, Tensor]] = []
    receiver = WeightReceiver(worker(received))
    assert given_to(receiver, sender.steps) == ""
    for version in (1, 2, 3):
        sender.go_on(version)
    assert given_to(receiver, sender.steps) == ""
    assert (receiver.whole, equal(Copy(received[-1]), weights(3, 5))) == (1, True)
    again = WeightReceiver(worker(received))
    assert given_to(again, sender.steps) == ""
    assert (again.whole, equal(Copy(received[-1]), weights(3, 5))) == (1, True)


def test_a_worker_that_holds_what_is_not_in_the_chain_reads_all_of_it(sender: Sender) -> None:
    received: list[dict[str, Tensor]] = []
    receiver = WeightReceiver(worker(received))
    assert given_to(receiver, sender.steps) == ""
    sender.go_on(1)
    steps = [sender.whole("1")]
    sender.held.move(weights(2, 5)).write(sender.root / "2.delta")
    steps.append((sender.held.digest, str(sender.root / "2.delta")))
    assert given_to(receiver, steps) == ""
    assert (receiver.whole, equal(Copy(received[-1]), weights(2, 5))) == (2, True)


@pytest.mark.parametrize("fault", ["gone", "cut", "other", "flipped"])
def test_a_worker_says_what_it_cannot_follow_and_keeps_what_it_computes_with(sender: Sender, fault: str) -> None:
    received: list[dict[str, Tensor]] = []
    receiver = WeightReceiver(worker(received))
    assert given_to(receiver, sender.steps) == ""
    before = receiver.loaded
    _, path = sender.go_on(1)
    whole = Path(path).read_bytes()
    if fault == "gone":
        Path(path).unlink()
    elif fault == "cut":
        Path(path).write_bytes(whole[:-3])
    elif fault == "flipped":
        Path(path).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        Copy(weights(5, 9)).move(weights(6, 9)).write(Path(path))
    assert "DeltaError" in given_to(receiver, sender.steps)
    assert (receiver.loaded, len(received)) == (before, 1)
    assert receiver.take(sender.steps[-1][0])["problem"]
    assert given_to(receiver, [sender.whole("1")]) == "", "a whole folder of the same weights is taken"
    assert (receiver.loaded, equal(Copy(received[-1]), weights(1, 5))) == (sender.held.digest, True)


def test_a_folder_that_is_not_what_was_written_is_refused(sender: Sender) -> None:
    receiver = WeightReceiver(worker([]))
    save_file(weights(7, 1), sender.root / "0" / "model.safetensors")
    assert "are not those that were written" in given_to(receiver, sender.steps)


def test_a_worker_that_fails_half_way_has_no_weights_until_it_gets_all_of_them(sender: Sender) -> None:
    received: list[dict[str, Tensor]] = []
    receiver = WeightReceiver(worker(received))
    assert given_to(receiver, sender.steps) == ""
    sender.go_on(1)
    whole, receiver.worker.reload_weights = receiver.worker.reload_weights, lambda **_: 1 / 0
    assert "ZeroDivisionError" in given_to(receiver, sender.steps)
    assert receiver.loaded is None
    receiver.worker.reload_weights = whole
    assert given_to(receiver, sender.steps) == ""
    assert (receiver.loaded, equal(Copy(received[-1]), weights(1, 5))) == (sender.held.digest, True)

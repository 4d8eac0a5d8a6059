"""What a stage that trains holds by a trace of its own step, for `plan --trace`: see :mod:`agentrl.training.traced`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from agentrl.schemas.installation import missing

if TYPE_CHECKING:
    from agentrl.training.job import DeepSpeed
    from agentrl.training.optimizer import OptimizerConfig
    from agentrl.training.traced import TracedJob

PATIENCE_S = 1200


@dataclass(frozen=True)
class TracedStep:
    """``peaks`` are bytes of live tensors by phase of a step (forward, backward, optimizer), ``moved`` calls and bytes
    by kind of collective, ``ahead`` how often DeepSpeed begins to gather weights before they are needed."""

    peaks: dict[str, float]
    moved: dict[str, tuple[int, float]]
    ahead: dict[str, int]

    @property
    def phase(self) -> str:
        """That in which most is held."""
        return max(self.peaks, key=lambda name: self.peaks[name])


def traced_step(
    config: Any, optimizer: "OptimizerConfig", spread: "DeepSpeed | None", ranks: int, tokens: int, length: int | None
) -> TracedStep:
    """A step of two full micro batches of ``tokens`` tokens on each of so many ranks; 0 are one process. ``config`` is
    that of the model, and the loss that of SFT. Two traces of few layers give what each further layer adds.

    Raises ValueError if the step cannot be traced.
    """
    from agentrl.training.traced import TracedJob

    text = config.get_text_config()
    _check(text, spread, optimizer)
    layers = text.num_hidden_layers
    few, many = _counts(text, spread)
    length = min(length or tokens, tokens)
    job = TracedJob(
        config=config.to_dict(), layers=layers, optimizer=optimizer, rows=[length] * (2 * (tokens // length)),
        deepspeed=spread, world=ranks,
    )  # fmt: skip
    if layers <= many:
        [whole] = _run(_text([job]))
        moved = {name: tuple(entry) for name, entry in whole["moved"].items()}
        return TracedStep(whole["peaks"], moved, whole["ahead"])
    first, last = _run(_text(job.model_copy(update={"layers": count}) for count in (few, many)))

    def at_all(before: float, after: float) -> float:
        return before + (after - before) * (layers - few) / (many - few)

    peaks = {phase: at_all(size, last["peaks"][phase]) for phase, size in first["peaks"].items()}
    moved = {
        name: (round(at_all(calls, last["moved"][name][0])), at_all(size, last["moved"][name][1]))
        for name, (calls, size) in first["moved"].items()
    }
    ahead = {direction: round(at_all(count, last["ahead"][direction])) for direction, count in first["ahead"].items()}
    return TracedStep(peaks, moved, ahead)


def _counts(text: Any, spread: Any) -> tuple[int, int]:
    """Numbers of layers from which on each further one adds the same: under ZeRO 3 more, since what DeepSpeed gathers
    ahead of seven layers and fewer is not what it gathers of many."""
    first = getattr(text, "first_k_dense_replace", 0) or 0
    few = 8 if spread and spread.zero == 3 else 2
    return first + few, first + few + 2


def _check(text: Any, spread: Any, optimizer: Any) -> None:
    if optimizer.quantized:
        raise ValueError("weights in 4 bits are made from values, and a trace has none")
    if spread and (spread.offload_optimizer or spread.offload_parameters):
        raise ValueError("what is offloaded to the machine's memory is not told apart in a trace")
    if lacking := (spread and missing("deepspeed", "deepspeed")) or (optimizer.lora and missing("peft", "lora")):
        raise ValueError(lacking)
    if len(kinds := set(getattr(text, "layer_types", None) or ["all"])) > 1:
        raise ValueError(f"layers of {text.model_type} are of several kinds ({', '.join(sorted(kinds))})")


def _text(jobs: "Iterable[TracedJob]") -> str:
    return json.dumps([job.model_dump(mode="json") for job in jobs])


@cache
def _run(jobs: str) -> list[dict[str, Any]]:
    """The traces of jobs, in a process that is gone afterwards: it joins ranks that are not there."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl.training.traced"],
            input=jobs, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"the trace did not end within {PATIENCE_S} s; set optimizer.micro_tokens lower") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300])
    traces: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return traces

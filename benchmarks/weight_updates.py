"""Updates of weights: how long vLLM pauses, and how much is written, if it gets what changed (``sync: delta``) or the
whole model (``sync: folders``).

A model of the shape of SmolLM2-135M with random weights, served in bfloat16. Each step moves every weight by 1e-6,
which changes the bits of about 1 % of them in bfloat16. Two servers, one for each way, get the same versions in turn
while each samples; the pause is the time from asking a server to pause to its answer that it goes on, and medians are
compared.

    VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/weight_updates.py
    SCALE=small ...                          # three layers instead of thirty
    CHECK=1 ...                              # exit code 1 if a target is missed
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from exactness import judged
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from agentrl.engines.base import Sampling, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.vllm import VLLMEngine, Way
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer

SMALL = os.environ.get("SCALE") == "small"
VERSIONS = 5 if SMALL else 11
WAYS: tuple[Way, ...] = ("folders", "delta")


def model_135m() -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=3 if SMALL else 30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    return Policy(LlamaForCausalLM(config).eval(), train_tokenizer(["some text"], 300), "135m")


@torch.no_grad()
def step(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randint(0, 2, parameter.shape, generator=generator) * 2e-6 - 1e-6)


@contextmanager
def served(policy: Policy, way: Way, python: str) -> Iterator[tuple[VLLMEngine, list[float]]]:
    """An engine, and its pauses in seconds."""
    engine = VLLMConfig(dtype="bfloat16", tolerance=0.05, context=512, sync=way, python=python).build(policy)
    assert isinstance(engine, VLLMEngine)
    [replica] = engine.replicas
    pause, resume = replica.pause, replica.resume
    pauses, began = list[float](), [0.0]

    async def paused() -> None:
        began[0] = time.perf_counter()
        await pause()

    async def resumed() -> None:
        await resume()
        pauses.append(time.perf_counter() - began[0])

    replica.pause, replica.resume = paused, resumed  # type: ignore[method-assign]
    try:
        yield engine, pauses
    finally:
        blocking(engine.close())


async def load_while_it_samples(engine: VLLMEngine, weights: Weights) -> float:
    """Seconds of a load beside four turns."""

    async def sample(number: int) -> None:
        session = engine.open((number,))
        session.observe([5 + number, 6, 7])
        await engine.turn(session, Sampling(max_turn_tokens=60, max_tokens=100), stop=[], seed=number)

    turns = [asyncio.create_task(sample(number)) for number in range(4)]
    await asyncio.sleep(0.5)
    started = time.perf_counter()
    await engine.load(weights)
    took = time.perf_counter() - started
    await asyncio.gather(*turns)
    return took


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def main() -> int:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        print("left out: VLLM_PYTHON names no environment that has vLLM")
        return 0
    policy = model_135m()
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    written: dict[str, list[int]] = {way: [] for way in WAYS}
    with served(policy, "folders", python) as folders, served(policy, "delta", python) as delta:
        for version in range(1, VERSIONS + 1):
            step(policy.model, version)
            for way, (engine, _) in zip(WAYS, (folders, delta), strict=True):
                took[way].append(blocking(load_while_it_samples(engine, Weights(version, policy.model))))
                written[way].append(size(engine.folder / (f"{version}.delta" if way == "delta" else str(version))))
        pauses = {way: made[1][1:] for way, made in zip(WAYS, (folders, delta), strict=True)}
    for way in WAYS:
        print(
            f"{way}: pause {1000 * statistics.median(pauses[way]):,.0f} ms ({1000 * min(pauses[way]):,.0f} to "
            f"{1000 * max(pauses[way]):,.0f}), {statistics.median(written[way]) / 1e6:,.1f} MB, a load in all "
            f"{statistics.median(took[way]):.2f} s"
        )
    pause, data = (
        statistics.median(values["delta"]) / statistics.median(values["folders"]) for values in (pauses, written)
    )
    met = judged("pause by deltas, of that by whole folders", 100 * pause, 10, " %", above=False)
    met &= judged("written by deltas, of whole folders", 100 * data, 10, " %", above=False)
    return int(os.environ.get("CHECK") == "1" and not met)


if __name__ == "__main__":
    sys.exit(main())

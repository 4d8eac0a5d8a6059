"""Updates of weights: how long vLLM pauses, and how much is written, if it gets what changed (``sync: delta``) or the
whole model (``sync: folders``).

A model of the shape of SmolLM2-135M with random weights, served in bfloat16. Each step moves every weight by 1e-6,
which changes the bits of about 1 % of them in bfloat16. Two servers, one for each way, get the same versions in turn
while each writes tokens to a stream. The pause is the time from when a server stands still to its answer that it goes
on. What the stream shows is said too: the longest time without a token during a load, less the usual time between two
tokens. It has the prompts that are computed again, and the tokens by which the weights are proven; medians are
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
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from exactness import judged
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from agentrl.engines.base import Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.vllm import VLLMEngine, Way
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer

SMALL = os.environ.get("SCALE") == "small"
VERSIONS = 4 if SMALL else 10
WARM = 8
"""Tokens before and after a load."""
ANSWER_S = 0.02
"""What vLLM waits between standing still and its answer to a pause."""

WAYS: tuple[Way, ...] = ("folders", "delta")


class Load(NamedTuple):
    """Seconds of a load of weights, of its pause, and without a token in a stream."""

    all: float
    pause: float
    silence: float


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
def serving(policy: Policy, way: Way, python: str) -> Iterator[VLLMEngine]:
    engine = VLLMConfig(dtype="bfloat16", tolerance=0.05, context=512, sync=way, python=python).build(policy)
    assert isinstance(engine, VLLMEngine)
    try:
        yield engine
    finally:
        blocking(engine.close())


STREAM = """
import httpx, sys, time
url = sys.argv[1]
[model] = httpx.get(f"{url}/v1/models").json()["data"]
body = {"model": model["id"], "prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True}
with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            print(time.monotonic(), flush=True)
"""
"""A process of its own, which nothing else holds up: prints when each token comes."""


async def load_beside_a_stream(engine: VLLMEngine, weights: Weights) -> Load:
    [replica] = engine.replicas
    pause, resume = replica.pause, replica.resume
    paused: list[float] = []

    async def pausing() -> None:
        await pause()
        paused.append(time.monotonic() - ANSWER_S)

    async def resuming() -> None:
        await resume()
        paused.append(time.monotonic())

    replica.pause, replica.resume = pausing, resuming  # type: ignore[method-assign]
    stream = await asyncio.create_subprocess_exec(sys.executable, "-c", STREAM, replica.url, stdout=PIPE)  # type: ignore[attr-defined]
    assert stream.stdout is not None
    arrivals = [float(await stream.stdout.readline()) for _ in range(WARM)]
    started = time.monotonic()
    try:
        await engine.load(weights)
    finally:
        replica.pause, replica.resume = pause, resume  # type: ignore[method-assign]
    ended = time.monotonic()
    while arrivals[-WARM] < ended:
        token = await stream.stdout.readline()
        if not token:
            raise SystemExit(
                f"the stream ended after {len(arrivals)} tokens, before the load did: nothing was measured"
            )
        arrivals.append(float(token))
    stream.kill()
    await stream.wait()
    gaps = [after - before for before, after in pairwise(arrivals)]
    during = [gap for gap, after in zip(gaps, arrivals[1:], strict=True) if started < after and after - gap < ended]
    return Load(ended - started, paused[-1] - paused[0], max(during) - statistics.median(gaps))


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
    loads: dict[str, list[Load]] = {way: [] for way in WAYS}
    written: dict[str, list[int]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        engines = [stack.enter_context(serving(policy, way, python)) for way in WAYS]
        for version in range(VERSIONS + 1):
            step(policy.model, version)
            for way, engine in zip(WAYS, engines, strict=True):
                load = blocking(load_beside_a_stream(engine, Weights(version, policy.model)))
                if version:  # the first load of a server is no usual one
                    loads[way].append(load)
                    written[way].append(size(engine.folder / (f"{version}.delta" if way == "delta" else str(version))))
    pauses = {way: sorted(1000 * load.pause for load in loads[way]) for way in WAYS}
    for way in WAYS:
        print(
            f"{way}: pause {statistics.median(pauses[way]):,.0f} ms ({pauses[way][0]:,.0f} to {pauses[way][-1]:,.0f}), "
            f"{statistics.median(written[way]) / 1e6:,.1f} MB, a load in all "
            f"{statistics.median(load.all for load in loads[way]):.2f} s, no token in a stream for "
            f"{statistics.median(load.silence for load in loads[way]):.2f} s more than usual"
        )
    pause, data = (
        statistics.median(values["delta"]) / statistics.median(values["folders"]) for values in (pauses, written)
    )
    met = judged("pause by deltas, of that by whole folders", 100 * pause, 10, " %", above=False)
    met &= judged("written by deltas, of whole folders", 100 * data, 10, " %", above=False)
    return int(os.environ.get("CHECK") == "1" and not met)


if __name__ == "__main__":
    sys.exit(main())

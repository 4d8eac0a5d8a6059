"""A model of 0.5 B parameters on a CUDA device: rollouts with tools on vLLM, new weights in the middle, scores, memory.

The model is a Qwen2 made from a config, in bfloat16. It imitates demonstrations of ``lookup`` first, so that its
episodes call tools. Training against TRL on the same device is `benchmarks/training.py`; `benchmarks/gpu.sh` runs both.

    VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/gpu.py
    SCALE=small ...                          # the tiny model in float32, on any machine: tries the script out
    CHECK=1 ...                              # exit code 1 if a target is missed
"""

import os
import subprocess
import sys
import time

import torch
from exactness import judged, train, trainers_gaps
from large_models import qwen
from transformers.utils import logging

from agentrl.engines.base import Sampling, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.runner import Attempt, Limits, RolloutRunner
from agentrl.schemas.trajectory import Trajectory

SMALL = os.environ.get("SCALE") == "small"
TASKS, GROUP, SHOWN, STEPS = (8, 2, 64, 4) if SMALL else (512, 8, 2048, 200)


def half_billion(shown: list[Trajectory]) -> Policy:
    """The tokenizer of the tiny policy, and 33 layers as wide as those of Qwen2.5-0.5B: 0.49 B parameters."""
    tiny = tiny_policy([row.messages for row in shown], 0)
    if SMALL:
        return tiny
    ends = {name: getattr(tiny.model.config, name) for name in ("eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    vocabulary = -(-len(tiny.tokenizer) // 128) * 128
    model = qwen(vocabulary, layers=33, max_position_embeddings=2048, **ends)
    return Policy(model, tiny.tokenizer, "half-billion")


def machine() -> str:
    if not torch.cuda.is_available():
        return f"no CUDA device, {os.cpu_count()} cores"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    logging.set_verbosity_error()
    if not SMALL and not torch.cuda.is_available():
        print("no CUDA device here; SCALE=small tries the script out on any machine")
        return 1
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        print("VLLM_PYTHON names no interpreter; name that of an environment with vLLM for this device")
        return 1
    environment = load_environment("lookup")
    tasks = environment.tasks({"train": SHOWN}, 0)["train"]
    shown = [demonstrate(environment, task, 0.1, 0, f"expert-{number}") for number, task in enumerate(tasks)]
    policy = half_billion(shown)
    parameters = sum(weight.numel() for weight in policy.model.parameters())
    print(f"{machine()}; {parameters / 1e6:,.1f} M parameters, {policy.model.dtype}", flush=True)
    started = time.perf_counter()
    train(policy, shown, STEPS, lr=5e-3 if SMALL else 1e-4)
    print(f"SFT of {STEPS} steps of 32 rows: {time.perf_counter() - started:.1f} s", flush=True)
    if torch.cuda.is_available():
        print(f"training, peak memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    dtype, gap = ("float32", 1e-4) if SMALL else ("bfloat16", 0.05)
    engine = VLLMConfig(dtype=dtype, python=python, tolerance=max(gap, 1e-3)).build(policy)
    attempts = [Attempt(task, sample, group=task.task_id) for task in tasks[:TASKS] for sample in range(GROUP)]
    try:
        runner = RolloutRunner(policy, engine, environment, Sampling(), limits=Limits(in_flight=512))
        runner.run(attempts[:64], 0, [f"warm-{number}" for number in range(len(attempts[:64]))])
        started = time.perf_counter()
        made = runner.run(attempts, 1, [str(number) for number in range(len(attempts))])
        took = time.perf_counter() - started
        started = time.perf_counter()
        blocking(engine.load(Weights(policy.version + 1, policy.model)))
        loaded = time.perf_counter() - started
        ids = made[0].input_ids
        scored = blocking(engine.score(ids))
    finally:
        blocking(engine.close())
    sampled, calls = sum(row.n_action_tokens for row in made), sum(row.n_tool_calls for row in made)
    print(
        f"{len(made):,} episodes with {calls:,} tool calls in {took:.1f} s: {len(made) / took:,.1f} rollouts/s, "
        f"{sampled / took:,.0f} sampled tokens/s, success {sum(bool(row.success) for row in made) / len(made):.2f}; "
        f"{len(scored):,} tokens of one scored",
        flush=True,
    )
    gaps = trainers_gaps(policy, [row.model_dump() for row in made[:256]])
    met = [
        judged("tool calls per episode, so that tools are measured", calls / len(made), 1.0, ""),
        judged(
            f"log-probs against the trainer's in {dtype}, mean difference", float(gaps.mean()), gap, "", above=False
        ),
        judged("new weights by files, until the server answers with them", loaded, 0.4, " s", above=False),
    ]
    return int(os.environ.get("CHECK") == "1" and not all(met))


if __name__ == "__main__":
    sys.exit(main())

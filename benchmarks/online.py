"""Online training with slow tools: asynchronous against synchronous.

Both train the same model on the same tasks with GRPO, 8 groups of 8 rollouts in an iteration, by the stage itself, with
its store on the disk. The first tool call of an episode takes a log-normal time, equal in a group: the slowest
hundredth takes seven times as long as the median, which is about six times as long as a training step. Asynchronous is
``ahead: 1, max_staleness: 4``.

- Iterations per minute of the whole run, from the first rollout to the last step, as a ratio.
- Success on held-out tasks afterwards, of all seeds together.
- What is thrown away: rollouts in the buffer that no iteration trained on.
- Turns of the rollouts that were trained on, over turns of those that were made: less than 1 if slow or long episodes
  are dropped.
- The weights of each step copied into the engine between two of its tokens, and proven there.
- The same by files: a folder of the model, or an adapter of rank 8, is written, loaded by a vLLM server that samples,
  and proven by log-probs of 64 tokens. It needs VLLM_PYTHON, the interpreter of an environment with vLLM.
- The memory of one of two ranks under ZeRO 3 against that of one process, for 300 million parameters (small: 80).
- What recording costs a turn if 64 conversations of agents go on at once (``benchmarks/online_recorder.py``).

    python benchmarks/online.py              # 3 seeds of 24 iterations
    SCALE=small python benchmarks/online.py  # one seed of 10 iterations, about a minute
    CHECK=1 ...                              # exit code 1 if a target is missed
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from online_memory import Peaks, peaks

SMALL = os.environ.get("SCALE") == "small"
os.environ.setdefault("TOOL_MEDIAN_S", "0.8" if SMALL else "2.0")
SEEDS = (0,) if SMALL else (0, 1, 2)
ITERATIONS = 10 if SMALL else 24
WARM_STEPS = 140
TASKS, HELDOUT = 256, 64 if SMALL else 256
WAYS = {"synchronous": {}, "asynchronous": {"ahead": 1, "max_staleness": 4}}


class Found(NamedTuple):
    seconds: float
    success: float
    trained: int
    made: int
    turns_trained: int
    turns_made: int
    oldest: int


def prepared(harness: Any) -> tuple[Any, Any, Any]:
    """A model that has imitated an imperfect expert, its training tasks with slow tools, and held-out tasks."""
    from agentrl.pipelines.stages.tasks import generate
    from agentrl.pipelines.stages.train import sft
    from agentrl.pipelines.stages.trajectories import synthesize

    made = harness.run(generate, {"env": "lookup", "train": TASKS, "dev": 1, "heldout": HELDOUT})
    expert = harness.run(synthesize, {"noise": 0.35, "coverage": 0.9}, tasks=made["train"])["trajectories"]
    optimizer = {"lr": 5e-3, "schedule": "cosine", "warmup": 20}
    config = {"model": {"init": "tiny"}, "steps": WARM_STEPS, "batch": 16, "optimizer": optimizer}
    model = harness.run(sft, config, trajectories=[expert])["model"]
    slow = harness.tasks([row.model_copy(update={"env": "online_tools:SlowLookup"}) for row in made["train"].read()])
    return model, slow, made["heldout"]


def trained(harness: Any, way: str, model: Any, tasks: Any, heldout: Any) -> Found:
    import pyarrow.compute as pc

    from agentrl.pipelines.stages.evaluate import evaluate
    from agentrl.pipelines.stages.grpo import online

    config = {
        "iterations": ITERATIONS, "tasks": 8, "samples": 8, "optimizer": {"lr": 1e-3}, "checkpoint_every": 1000,
        "engine": {"type": "transformers", "schedule": "free"}, "checkpoints": {"last": 0}, **WAYS[way],
    }  # fmt: skip
    start = time.perf_counter()
    made = harness.run(online, config, model=model, tasks=tasks)
    seconds = time.perf_counter() - start
    success = harness.run(evaluate, model=made["model"], tasks=heldout).metrics["success"]
    ids = harness.buffer.ids(made["steps"].fingerprint)
    turns = dict(zip(ids, harness.buffer.read(ids, ["n_steps"])["n_steps"].to_pylist(), strict=True))
    used = made["steps"].table()["trajectory_id"].to_pylist()
    oldest = pc.max(made["coverage"].table()["staleness"]).as_py()
    print(
        f"{way}: {seconds:.1f} s for {ITERATIONS} iterations, success {success:.3f}, oldest {oldest}", file=sys.stderr
    )
    turns_trained = sum(turns[name] for name in used)
    return Found(seconds, success, len(used), len(ids), turns_trained, sum(turns.values()), oldest)


def timed_loads() -> list[float]:
    """The seconds of each load of the embedded engine, from now on."""
    from agentrl.engines.transformers import TransformersEngine

    load, times = TransformersEngine.load, []

    async def timed(self: Any, weights: Any) -> None:
        start = time.perf_counter()
        await load(self, weights)
        if weights.source is not self.model:
            times.append(time.perf_counter() - start)

    TransformersEngine.load = timed  # type: ignore[method-assign]
    return times


def served_loads(model: Any) -> dict[str, list[float]]:
    """The seconds of each load of a vLLM server that samples meanwhile, by what it is given; none without vLLM."""
    from agentrl.engines.configs import VLLMConfig
    from agentrl.models.policy import Policy
    from agentrl.training.lora import add_lora
    from agentrl.training.optimizer import LoRA

    if "VLLM_PYTHON" not in os.environ:
        return {}
    times = {}
    for what in ("a folder", "an adapter"):
        policy = Policy.load(model.path)
        if what == "an adapter":
            add_lora(policy, LoRA(rank=8), 0)
        engine = VLLMConfig(dtype="float32", python=os.environ["VLLM_PYTHON"]).build(policy)
        times[what] = asyncio.run(loaded_while_sampling(engine, policy.model, 10 if SMALL else 50))
    return times


async def loaded_while_sampling(engine: Any, model: Any, number: int) -> list[float]:
    from agentrl.engines.base import Sampling, Weights

    async def sample(seed: int) -> None:
        while True:
            with engine.open((seed,)) as session:
                session.observe([5 + seed, 6, 7])
                await engine.turn(session, Sampling(max_turn_tokens=100, max_tokens=128), stop=[], seed=seed)

    under_way = [asyncio.create_task(sample(seed)) for seed in range(8)]
    times = []
    for version in range(1, number + 1):
        await asyncio.sleep(0.2)
        start = time.perf_counter()
        await engine.load(Weights(version, model))
        times.append(time.perf_counter() - start)
    for run in under_way:
        run.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    await engine.close()
    return times


def main() -> None:
    from agentrl.pipelines.harness import Harness

    loads = timed_loads()
    result: dict[str, list[Found]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            harness = Harness(Path(folder, str(seed)), seed)
            given = prepared(harness)
            for way in WAYS:
                result[way].append(trained(harness, way, *given))
        served = served_loads(given[0])
        memory = peaks(Path(folder, "memory"), *((768, 10) if SMALL else ()))
    from online_recorder import overhead

    recorded = overhead(12 if SMALL else 24)  # requests of 4 kB; of other sizes the script itself says it
    missed = report(result["synchronous"], result["asynchronous"], loads, served, memory, recorded)
    sys.exit(1 if missed and os.environ.get("CHECK") == "1" else 0)


def report(
    calm: list[Found],
    fast: list[Found],
    loads: list[float],
    served: dict[str, list[float]],
    memory: Peaks,
    recorded: float,
) -> int:
    from agentrl.statistics.intervals import wilson

    ratio = sum(run.seconds for run in calm) / sum(run.seconds for run in fast)
    total = HELDOUT * len(SEEDS)
    bounds = [wilson(round(sum(run.success for run in runs) * HELDOUT), total) for runs in (calm, fast)]
    shares = [sum(run.success for run in runs) / len(runs) for runs in (calm, fast)]
    thrown = 1 - sum(run.trained for run in fast) / sum(run.made for run in fast)
    turns = sum(run.turns_trained for run in fast) / sum(run.turns_made for run in fast)
    load = 1000 * statistics.median(loads)
    rows = [
        ("iterations per minute, asynchronous / synchronous", f"{ratio:.2f}", "at least 2.2", ratio >= 2.2),
        ("success, synchronous and asynchronous", f"{shares[0]:.3f} {shares[1]:.3f}", "intervals overlap",
         bounds[1][1] >= bounds[0][0]),
        ("oldest rollout trained on, in versions", f"{max(run.oldest for run in fast)}", "at most 4",
         max(run.oldest for run in fast) <= 4),
        ("rollouts thrown away", f"{thrown:.1%}", "0 %", thrown == 0),
        ("turns trained / drawn", f"{turns:.3f}", "1.00 +- 0.02", abs(turns - 1) <= 0.02),
        (f"weights in place, median of {len(loads)}", f"{load:.1f} ms", "below 10 ms", load < 10),
        ("ZeRO-3 peak memory per rank of two / one process", f"{memory.rank:.2f} / {memory.alone:.2f} GiB",
         "at most 0.65", memory.rank <= 0.65 * memory.alone),
        ("recorder, a turn at 64 conversations", f"{recorded:.2f} ms", "below 2 ms", recorded < 2),
    ]  # fmt: skip
    for what, times in served.items():
        load = 1000 * statistics.median(times)
        rows.append((f"weights by {what}, median of {len(times)}", f"{load:.0f} ms", "below 250 ms", load < 250))
    print(f"{len(SEEDS)} seeds x {ITERATIONS} iterations of 8 x 8 rollouts, tools of {os.environ['TOOL_MEDIAN_S']} s")
    for what, value, target, met in rows:
        print(f"{what:<52} {value:<14} {target:<18} {'met' if met else 'MISSED'}")
    if not served:
        print("weights by files: not measured, since VLLM_PYTHON names no interpreter of an environment with vLLM")
    return sum(not met for *_, met in rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()

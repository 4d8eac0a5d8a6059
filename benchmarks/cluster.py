"""What two processor cores prove of a run on many GPUs: a line for each check, `met` or `MISSED`.

First come figures of traces of real models, which `agentrl plan --trace` makes too, then checks that are tests, each
run by itself. A check of which a test was skipped counts as missed: it was not made.

    make bench-cluster
    ONLY=traces|long|tests ...               # a part; traces take about ten minutes, as one of a long row does
    CHECK=1 ...                              # exit code 1 if a line is missed
"""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig

from agentrl.pipelines.plan.traces import TracedStep, traced_step
from agentrl.placement.memory import GIB, TrainingPlan, shape_of_config, training
from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.traced import TracedJob

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from shapes import LLAMA_8B, LLAMA_70B, QWEN_7B  # noqa: E402

ONLY = os.environ.get("ONLY")
missed: list[str] = []

TESTS = [
    ("traces hold what real steps and two gloo ranks hold, within 5 %", "test_traced.py", "holds_what"),
    ("8, 64 and 1,024 ranks exchange the same in the same order", "test_traced.py", "same_order"),
    ("DeepSpeed's limits by shape change no bit on two ranks", "test_gather_limits.py", "change_no_bit"),
    ("what bfloat16 between ranks adds to memory", "test_communication_memory.py", ""),
    ("adapters: small checkpoints, a kill, the same losses", "test_rank_checkpoints.py", "small_checkpoints"),
    ("another number of ranks goes on from a checkpoint", "test_rank_checkpoints.py", "another_number or any_number"),
    ("no rank holds the whole model to load or save it", "test_partitioned.py", ""),
    ("rows split over ranks: losses and gradients of one", "test_sequence_parallel.py", ""),
    ("two network namespaces: works, or a sentence in 30 s", "test_rendezvous.py", ""),
    ("stand-in for srun: a dead task, a lost environment, a slow node", "test_placement_slurm.py", ""),
    ("a real Slurm of two nodes on one machine: ranks, checks, restarts", "test_slurm_ranks.py", ""),
    ("Ray: a cluster of two nodes on one machine", "test_placement_ray.py", ""),
    ("a shared folder in which files are seen 5 s late", "test_orders.py", ""),
    ("file systems without locks, stages that fall silent", "test_signs.py", ""),
    ("a machine downloads a model once", "test_hub.py", ""),
    ("the checks before a run name what is wrong", "test_cluster_check.py", ""),
    ("benchmarks/gpu.sh starts each of its parts", "test_gpu_script.py", ""),
    ("routes of experts: own routes change no bit, copies are 3 x nearer", "test_routes.py", ""),
    ("weights by deltas: bit-equal or anchored, never wrong and silent", "test_weight_deltas.py", ""),
]


def report(what: str, figure: str, target: str, met: bool) -> None:
    if not met:
        missed.append(what)
    print(f"{what:<67} {figure:<24} {target:<14} {'met' if met else 'MISSED'}", flush=True)


def config_of(entries: dict[str, Any], layers: int | None = None) -> Any:
    known = {name: value for name, value in entries.items() if name != "architectures"}
    return AutoConfig.for_model(**known, **({"num_hidden_layers": layers} if layers else {}))


def settings(plan: TrainingPlan) -> tuple[OptimizerConfig, DeepSpeed | None]:
    optimizer = OptimizerConfig(
        micro_tokens=plan.tokens,
        precision="bfloat16" if plan.bfloat16 else "float32",
        gradient_checkpointing=plan.checkpointing,
        lora=LoRA(rank=plan.lora_rank) if plan.lora_rank else None,
    )
    return optimizer, DeepSpeed(zero=plan.zero) if plan.ranks else None  # type: ignore[arg-type]


def traced(config: Any, plan: TrainingPlan) -> tuple[TracedStep, float]:
    """A trace of a step, and the seconds that it took."""
    optimizer, spread = settings(plan)
    begin = time.perf_counter()
    step = traced_step(config, optimizer, spread, plan.ranks, plan.tokens, None)
    return step, time.perf_counter() - begin


def whole(entries: dict[str, Any], plan: TrainingPlan) -> float:
    """The peak of a trace of all layers, in bytes."""
    from agentrl.pipelines.plan.traces import _run, _text

    config = config_of(entries)
    optimizer, spread = settings(plan)
    job = TracedJob(
        config=config.to_dict(), layers=config.num_hidden_layers, optimizer=optimizer, rows=[plan.tokens] * 2,
        deepspeed=spread, world=plan.ranks,
    )  # fmt: skip
    return float(max(_run(_text([job]))[0]["peaks"].values()))


DENSE = TrainingPlan(4096, bfloat16=True, checkpointing=True, zero=3, ranks=8)
ADAPTERS = TrainingPlan(8192, bfloat16=True, checkpointing=True, lora_rank=16, zero=3, ranks=32)
LONG = 131_072
CASES = [
    ("8 B on 8 ranks", LLAMA_8B, DENSE, 60),
    ("8 B on 8 ranks, LoRA", LLAMA_8B, TrainingPlan(**{**vars(DENSE), "lora_rank": 16}), 60),
    ("70 B on 32 ranks, LoRA", LLAMA_70B, ADAPTERS, 60),
    ("7.6 B on 8 ranks, ZeRO 2", QWEN_7B, TrainingPlan(**{**vars(DENSE), "zero": 2}), 60),
    ("7.6 B in one process", QWEN_7B, TrainingPlan(4096, bfloat16=True, checkpointing=True), 60),
]


def traces() -> None:
    peaks = {}
    for name, entries, plan, seconds in CASES:
        config = config_of(entries)
        step, took = traced(config, plan)
        peaks[name] = max(step.peaks.values())
        report(f"trace of {name}, seconds by the clock", f"{took:.0f} s", f"< {seconds} s", took < seconds)
        need = training(shape_of_config(config), plan)
        ratio = (need.total - need.parts["overhead"]) / peaks[name]
        figures = f"{ratio:.2f} of {peaks[name] / GIB:.1f} GiB"
        report("  what the plan calculates without a trace", figures, "within 15 %", abs(ratio - 1) <= 0.15)
        if plan.zero == 3:
            ahead = f"{step.ahead['forward']} + {step.ahead['backward']}"
            report("  gathers ahead, forward + backward", ahead, "> 0 each", min(step.ahead.values()) > 0)
    ratio = peaks[CASES[0][0]] / whole(LLAMA_8B, DENSE)
    report("8 B: few layers, of a trace of all 32", f"{ratio:.3f}", "within 3 %", abs(ratio - 1) <= 0.03)


def long_row() -> None:
    """A row of 131,072 tokens that eight ranks compute together."""
    config, begin = config_of(LLAMA_8B), time.perf_counter()
    optimizer = OptimizerConfig(micro_tokens=LONG, precision="bfloat16", gradient_checkpointing=True)
    step = traced_step(config, optimizer, DeepSpeed(zero=3, processes=8, sequence_parallel=8), 8, LONG, None)
    peak, took = max(step.peaks.values()), time.perf_counter() - begin
    figures = f"{peak / GIB:.1f} GiB, {took:.0f} s"
    report("8 B, a row of 131,072 tokens split over 8 ranks", figures, "< 80 GiB", peak < 80 * GIB)
    need = training(shape_of_config(config), TrainingPlan(**{**vars(DENSE), "tokens": LONG // 8}))
    ratio = (need.total - need.parts["overhead"]) / peak
    report("  what the plan calculates without a trace", f"{ratio:.2f} of it", "within 15 %", abs(ratio - 1) <= 0.15)


def tests() -> None:
    with TemporaryDirectory() as folder:
        for what, file, chosen in TESTS:
            counts = passed_of(file, chosen, Path(folder) / "results.xml")
            report(what, f"{counts[0]} of {counts[1]} tests", "all", 0 < counts[0] == counts[1])


def passed_of(file: str, chosen: str, results: Path) -> tuple[int, int]:
    """How many of the chosen tests of a file passed, slow ones too, and how many there are."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not vllm", "-k", chosen, f"--junitxml={results}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"tests/agentrl/{file}"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    results.touch()
    suite = ElementTree.fromstring(results.read_text() or "<none/>").find("testsuite")
    results.unlink()
    if suite is None:
        print(done.stdout[-1500:], done.stderr[-1500:], file=sys.stderr)
        return 0, 0
    if done.returncode:
        print(done.stdout[-1500:], file=sys.stderr)
    number = int(suite.get("tests", 0))
    return number - sum(int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")), number


def main() -> None:
    begin = time.perf_counter()
    print(f"load average at the start, {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}")
    if ONLY in (None, "traces"):
        traces()
    if ONLY in (None, "long"):
        long_row()
    if ONLY in (None, "tests"):
        tests()
    print(f"{len(missed)} MISSED, {time.perf_counter() - begin:.0f} s")
    if missed and os.environ.get("CHECK"):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Speed and memory of training: SFT, DPO and a GRPO update against TRL and a bare forward and backward pass.

The same model, rows and batch sizes on every side; sides take turns, and the best of several rounds counts, so that
other work on the machine weighs little. Tokens are those of the rows, without padding. Prints one line for each
figure: the figure, the target, and `met` or `MISSED`. ``CHECK=1`` turns a miss into exit code 1. ``SCALE=small`` takes
under a minute. ``THREADS`` (1) are torch's. On a CUDA machine a model of 0.5 B parameters is measured too,
and everywhere SmolLM2, by CPU seconds, if `make smollm` was run.
"""

import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from large_models import qwen_05b
from training_sides import BATCH, STEPS, Side, bare, ours, trl_dpo, trl_grpo, trl_sft

SMALL = os.environ.get("SCALE") == "small"
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("THREADS", "1"))
ROUNDS = 1 if SMALL else 3
misses = 0


def line(name: str, value: float, target: float, unit: str, at_least: bool = True) -> None:
    global misses
    met = value >= target if at_least else value <= target
    misses += not met
    bound = "at least" if at_least else "at most"
    print(f"{name:<58} {value:9.2f} {unit:<9} {bound} {target:g}  {'met' if met else 'MISSED'}", flush=True)


def note(name: str, value: float, unit: str) -> None:
    print(f"{name:<58} {value:9,.0f} {unit}", flush=True)


# data: demonstrations and, for groups, several of each task


def policy_and_texts(large: bool = False) -> tuple[Any, list[list[Any]]]:
    """A policy, and for each of many tasks eight trajectories of its own tokens."""
    from agentrl.chat.codec import tokenize
    from agentrl.environments import load_environment
    from agentrl.models.tiny import tiny_policy
    from agentrl.rollouts.demonstrations import demonstrate

    environment = load_environment("lookup")
    tasks = environment.tasks({"train": BATCH * STEPS, "dev": 1, "heldout": 1}, 0)["train"]
    groups = [
        [demonstrate(environment, task, 0.5, 100 * number + sample, f"{number}-{sample}") for sample in range(8)]
        for number, task in enumerate(tasks)
    ]
    policy = tiny_policy([row.messages for group in groups for row in group], 0)
    if large:
        policy.model = qwen_05b(len(policy.tokenizer))
    code = policy.tokenizer_fingerprint
    return policy, [[tokenize(row, policy.codec, code) for row in group] for group in groups]


def training_rows(rows: list[Any], **fields: Any) -> list[Any]:
    from agentrl.schemas.training import TrainingRow

    return [
        TrainingRow(
            row_id=row.trajectory_id,
            unit=number,
            input_ids=row.input_ids,
            mask=row.action_mask,
            weights=[1.0 if number % 2 else -1.0] * len(row.input_ids) if fields else [1.0] * len(row.input_ids),
            **{name: [value] * len(row.input_ids) for name, value in fields.items()},
        )
        for number, row in enumerate(rows)
    ]


def pair_rows(groups: list[list[Any]]) -> list[Any]:
    rows = training_rows([row for group in groups for row in group[:2]], ref_logprobs=-3.0)
    return [  # pairs count by their weights
        row.model_copy(update={"unit": number // 2, "weights": [1.0] * len(row.input_ids)})
        for number, row in enumerate(rows)
    ]


def compare(name: str, tokens: int, sides: dict[str, Side]) -> None:
    """Best tokens/s of each side over several rounds, and the ratios."""
    import torch

    best = dict.fromkeys(sides, 0.0)
    for round_ in range(ROUNDS + 1):
        for side, run in sides.items():
            start = time.perf_counter()
            measured = run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = measured if isinstance(measured, float) else time.perf_counter() - start
            if round_:  # the first warms up
                best[side] = max(best[side], tokens / seconds)
    for side, speed in best.items():
        note(f"{name}: {side}", speed, "tokens/s")
    line(f"{name}: ours / TRL", best["ours"] / best["TRL"], 1.5, "x")
    line(f"{name}: ours / bare forward and backward", best["ours"] / best["bare"], 0.7, "x")


def speed(large: bool, label: str) -> None:
    from agentrl.algorithms.dpo import DPO
    from agentrl.algorithms.grpo import GRPO
    from agentrl.algorithms.sft import SFT

    policy, groups = policy_and_texts(large)
    rng = random.Random(0)
    rng.shuffle(groups)

    def copied() -> Any:
        import copy

        from agentrl.models.policy import Policy

        return Policy(copy.deepcopy(policy.model), policy.tokenizer, "copy")

    def tokens(batches: list[list[Any]]) -> int:
        return sum(len(row.input_ids) for batch in batches for row in batch)

    def parts(rows: list[Any], size: int) -> list[list[Any]]:
        return [rows[start : start + size] for start in range(0, len(rows), size)][:STEPS]

    with tempfile.TemporaryDirectory() as folder:
        single = parts(training_rows([group[0] for group in groups]), BATCH)
        sides = {"ours": ours(copied(), SFT(), single), "TRL": trl_sft(copied(), single, folder)}
        compare(f"SFT, {label}", tokens(single), sides | {"bare": bare(copied().model, single)})
        pairs = parts(pair_rows(groups), 2 * BATCH)
        sides = {"ours": ours(copied(), DPO(), pairs), "TRL": trl_dpo(copied(), groups, folder)}
        compare(f"DPO, {label}", tokens(pairs), sides | {"bare": bare(copied().model, pairs)})
        rollouts = [row for group in groups for row in group][: 8 * BATCH * (1 if SMALL else 2)]
        online = parts(training_rows(rollouts, logprobs=-3.0), 4 * BATCH)
        sides = {"ours": ours(copied(), GRPO(), online), "TRL": trl_grpo(copied(), online, folder)}
        compare(f"GRPO update, {label}", tokens(online), sides | {"bare": bare(copied().model, online)})


# memory of log-probs


def memory_child(way: str, tokens: int) -> None:
    """Print the growth of peak memory, in MiB, of log-probs forward and backward at a vocabulary of 150,000."""
    import torch

    from agentrl.training.logprobs import _head_logprobs

    hidden = torch.randn(tokens, 64, requires_grad=True)
    head = torch.nn.Linear(64, 150_000, bias=False)
    targets = torch.randint(0, 150_000, (tokens,))

    class Model:
        config = type("C", (), {"vocab_size": 150_000, "get_text_config": lambda self: self})()

        def get_output_embeddings(self) -> torch.nn.Linear:
            return head

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "ours":
        chosen = _head_logprobs(Model(), hidden, targets)[0]  # type: ignore[arg-type]
    else:
        chosen = head(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    chosen.sum().backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def memory() -> None:
    tokens = 1024 if SMALL else 8192
    used = {}
    for way in ("ours", "plain"):
        done = subprocess.run([sys.executable, __file__, "memory", way, str(tokens)], capture_output=True, text=True)
        if done.returncode:
            note(f"log-probs of {tokens} tokens, {way}: did not fit", float("nan"), "MiB")
            return
        used[way] = float(done.stdout)
        note(f"log-probs of {tokens} tokens x 150,000, peak, {way}", used[way], "MiB")
    line("log-probs: peak memory, ours / plain", used["ours"] / used["plain"], 0.25, "x", at_least=False)


def real() -> None:
    import smollm_speed

    if ratio := smollm_speed.ratio("GRPO update", smollm_speed.update):
        line("GRPO update, SmolLM2: ours / TRL", ratio, smollm_speed.TARGET, "x")


def main() -> None:
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    memory()
    speed(False, "0.5 M")
    real()
    if torch.cuda.is_available():
        speed(True, "0.5 B")
    sys.exit(1 if misses and os.environ.get("CHECK") == "1" else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if sys.argv[1:2] == ["memory"]:
        memory_child(sys.argv[2], int(sys.argv[3]))
    else:
        main()

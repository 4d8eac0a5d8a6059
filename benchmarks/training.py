"""Speed and memory of training: SFT, DPO and a GRPO update against TRL and a bare forward and backward pass.

The same model, rows and batch sizes on every side; sides take turns, and the best of several rounds counts, so that
other work on the machine weighs little. Tokens are those of the rows, without padding. Prints one line for each
figure: the figure, the target, and `met` or `MISSED`. ``CHECK=1`` turns a miss into exit code 1. ``SCALE=small`` takes
under a minute. ``THREADS`` (1) are torch's. On a CUDA machine a model of 0.5 B parameters is measured too.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = os.environ.get("SCALE") == "small"
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("THREADS", "1"))
ROUNDS = 1 if SMALL else 3
STEPS = 1 if SMALL else 6
BATCH = 32
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
        policy.model = large_model(len(policy.tokenizer))
    code = policy.tokenizer_fingerprint
    return policy, [[tokenize(row, policy.codec, code) for row in group] for group in groups]


def large_model(vocabulary: int) -> Any:
    """A Qwen2 of 0.5 B parameters on the GPU, with random weights in bfloat16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    assert vocabulary < config.vocab_size
    return Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)


def training_rows(rows: list[Any], **fields: Any) -> list[Any]:
    from schemas.training import TrainingRow

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


# sides: each is a function that takes `STEPS` optimiser steps

Side = Callable[[], object]
"""Returns its seconds if not all of its time counts."""


def ours(policy: Any, objective: Any, batches: list[list[Any]]) -> Side:
    from agentrl.training.optimizer import OptimizerConfig
    from agentrl.training.rows import TrainingRows
    from agentrl.training.step import Trainer

    trainer = Trainer(policy, objective, OptimizerConfig(lr=1e-5), 10_000)
    ready = [TrainingRows.of(batch) for batch in batches]
    return lambda: [trainer.step(batch) for batch in ready]


def bare(model: Any, batches: list[list[Any]]) -> Side:
    """Forward and backward of the same rows, padded, and nothing else: no optimiser, no clipping, no metrics."""
    from agentrl.training.batch import collate, micro_batches, units
    from agentrl.training.rows import TrainingRows

    ready = [TrainingRows.of(batch) for batch in batches]
    padded = [
        [collate(rows.take(part)).to(model.device) for part in micro_batches(rows, units(rows), 4096)] for rows in ready
    ]

    def run() -> None:
        model.train()
        for parts in padded:
            for batch in parts:
                labels = batch.input_ids.masked_fill(~batch.mask, -100)
                model(input_ids=batch.input_ids, labels=labels, use_cache=False).loss.backward()
            model.zero_grad()

    return run


def trl_settings(folder: str, batch: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "max_steps": STEPS + 1,
        "learning_rate": 1e-5,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 10_000,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def steady(trainer: Any) -> Side:
    """Train, and return the seconds from the end of the first step to that of the last: without starting up."""
    from transformers import PrinterCallback, TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    trainer.add_callback(Clock())
    trainer.remove_callback(PrinterCallback)

    def run() -> float:
        ends.clear()
        trainer.train()
        return ends[-1] - ends[0]

    return run


def split(row: Any) -> tuple[list[int], list[int]]:
    """Prompt and the rest: TRL's pairs know no tool output in the middle, so it trains on that too."""
    start = row.action_mask.index(True)
    return row.input_ids[:start], row.input_ids[start:]


def trl_sft(policy: Any, batches: list[list[Any]], folder: str) -> Side:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"input_ids": row.input_ids, "labels": [i if m else -100 for i, m in zip(row.input_ids, row.mask, strict=True)]}
        for batch in batches
        for row in batch
    ]
    trainer = SFTTrainer(
        policy.model,
        args=SFTConfig(**trl_settings(folder, BATCH)),
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.tokenizer,
    )
    return steady(trainer)


def trl_dpo(policy: Any, groups: list[list[Any]], folder: str) -> Side:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = []
    for chosen, rejected, *_ in groups:
        prompt = min(split(chosen)[0], split(rejected)[0], key=len)
        rows.append(
            {
                "prompt_ids": prompt,
                "chosen_ids": chosen.input_ids[len(prompt) :],
                "rejected_ids": rejected.input_ids[len(prompt) :],
            }
        )

    class Prepared(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset  # tokens already

    trainer = Prepared(
        policy.model,
        args=DPOConfig(precompute_ref_log_probs=True, **trl_settings(folder, BATCH)),
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.tokenizer,
    )
    return steady(trainer)


def trl_grpo(policy: Any, batches: list[list[Any]], folder: str) -> Side:
    """Its loss on given completions, backward, clipping and AdamW: an update without generation."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = trl_settings(folder, 8) | {"num_generations": 8, "beta": 0.0}
    trainer = GRPOTrainer(
        policy.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
        processing_class=policy.tokenizer,
    )
    model = trainer.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    trainer.current_gradient_accumulation_steps = len(batches[0]) // BATCH

    def padded(lists: list[list[int]], left: bool) -> Any:
        width = max(map(len, lists))
        filled = [[0] * (width - len(one)) + one if left else one + [0] * (width - len(one)) for one in lists]
        return torch.tensor(filled, device=model.device)

    def inputs(rows: list[Any]) -> dict[str, Any]:
        starts = [row.mask.index(True) for row in rows]
        prompts = [row.input_ids[:start] for row, start in zip(rows, starts, strict=True)]
        rests = [row.input_ids[start:] for row, start in zip(rows, starts, strict=True)]
        return {
            "prompt_ids": padded(prompts, True),
            "prompt_mask": padded([[1] * len(one) for one in prompts], True),
            "completion_ids": padded(rests, False),
            "completion_mask": padded([[1] * len(one) for one in rests], False),
            "tool_mask": padded([list(map(int, row.mask[s:])) for row, s in zip(rows, starts, strict=True)], False),
            "advantages": torch.tensor([row.weights[0] for row in rows], device=model.device),
            "num_items_in_batch": torch.tensor(float(sum(map(len, rests))), device=model.device),
        }

    ready = [[inputs(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)] for rows in batches]

    def run() -> None:
        model.train()
        for parts in ready:
            for part in parts:
                trainer._compute_loss(model, part).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


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


def main() -> None:
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    memory()
    speed(False, "0.5 M")
    if torch.cuda.is_available():
        speed(True, "0.5 B")
    sys.exit(1 if misses and os.environ.get("CHECK") == "1" else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if sys.argv[1:2] == ["memory"]:
        memory_child(sys.argv[2], int(sys.argv[3]))
    else:
        main()

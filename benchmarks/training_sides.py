"""The sides that ``training.py`` compares: ours, a bare forward and backward pass, and TRL's trainers."""

import os
import time
from collections.abc import Callable
from typing import Any

SMALL = os.environ.get("SCALE") == "small"
STEPS = 1 if SMALL else 6
BATCH = 8 if SMALL else 32

Side = Callable[[], object]
"""Takes ``STEPS`` optimiser steps, and returns its seconds if not all of its time counts."""


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
        filled = [
            [0] * (width - len(sequence)) + sequence if left else sequence + [0] * (width - len(sequence))
            for sequence in lists
        ]
        return torch.tensor(filled, device=model.device)

    def inputs(rows: list[Any]) -> dict[str, Any]:
        starts = [row.mask.index(True) for row in rows]
        prompts = [row.input_ids[:start] for row, start in zip(rows, starts, strict=True)]
        rests = [row.input_ids[start:] for row, start in zip(rows, starts, strict=True)]
        return {
            "prompt_ids": padded(prompts, True),
            "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], True),
            "completion_ids": padded(rests, False),
            "completion_mask": padded([[1] * len(rest) for rest in rests], False),
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

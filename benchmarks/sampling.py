"""Rollouts per second: one key-value cache kept across turns, against calling ``generate()`` for each turn.

Same model, tasks, prompts, limits and sampling. Both sides run in turn; the ratio is of medians. The model is trained
for some steps first, so that conversations have the turns and lengths of real ones.

    python benchmarks/sampling.py            # 512 tasks
    SCALE=small python benchmarks/sampling.py
    CHECK=1 ...                              # exit code 1 if the target is missed
"""

import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from agentrl.algorithms.sft import SFT
from agentrl.chat.codec import tokenize
from agentrl.engines.base import Engine, Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.training.loop import fit
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer
from schemas.task import Task
from schemas.training import TrainingRow

TARGET = 2.0


class GeneratePerTurn(TransformersEngine):
    """The usual way: ``generate()`` over the whole conversation at every turn, all unfinished rows in one batch."""

    def _step(self) -> None:
        rows, self._waiting = self._waiting, []
        sampling = rows[0].sampling
        width = max(len(row.session.ids) for row in rows)
        ids = torch.tensor([[0] * (width - len(row.session.ids)) + row.session.ids for row in rows])
        mask = torch.tensor([[0] * (width - len(row.session.ids)) + [1] * len(row.session.ids) for row in rows])
        config = GenerationConfig(
            do_sample=True, temperature=sampling.temperature, top_k=0, max_new_tokens=sampling.max_turn_tokens,
            eos_token_id=rows[0].stop[0], pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        out = self.model.generate(ids, attention_mask=mask, generation_config=config)
        new = out.sequences[:, width:]
        chosen = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, new[..., None])[..., 0].tolist()
        for row, turn, logprobs in zip(rows, new.tolist(), chosen, strict=True):
            stopped = row.stop[0] in turn
            row.ids = turn[: turn.index(row.stop[0]) + 1] if stopped else turn[: row.limit]
            row.logprobs = logprobs[: len(row.ids)]
            self._resolve(row, "stop" if stopped else "length")


def trained_policy(tasks: list[Task], steps: int) -> Policy:
    environment = load_environment("lookup")
    shown = [demonstrate(environment, task, 0.1, 0, f"expert-{n}") for n, task in enumerate(tasks)]
    policy = tiny_policy([row.messages for row in shown], seed=0)
    rows = []
    for number, raw in enumerate(shown):
        row = tokenize(raw, policy.codec, policy.tokenizer_fingerprint)
        rows.append(
            TrainingRow(
                row_id=row.trajectory_id,
                unit=number,
                input_ids=row.input_ids,
                mask=row.action_mask,
                weights=[1.0] * row.n_tokens,
            )
        )
    trainer = Trainer(policy, SFT(), OptimizerConfig(lr=5e-3, schedule="cosine", warmup=20), steps)
    with TemporaryDirectory() as folder:
        fit(trainer, TrainingRows.of(rows), 32, 0, Path(folder) / "checkpoint.pt", lambda metrics: None)
    return policy


def main() -> int:
    logging.set_verbosity_error()
    small = os.environ.get("SCALE") == "small"
    n_tasks, repeats, steps = (128, 3, 120) if small else (512, 5, 150)
    tasks = load_environment("lookup").tasks({"train": n_tasks}, 0)["train"]
    policy = trained_policy(tasks, steps)
    engines: dict[str, Engine] = {
        "one cache across turns": TransformersEngine(policy.model),
        "generate() per turn": GeneratePerTurn(policy.model),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    turns: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            rollouts = RolloutRunner(policy, engine, load_environment("lookup"), Sampling())
            started = time.perf_counter()
            made = rollouts.run([Attempt(task) for task in tasks], repeat, [str(n) for n in range(len(tasks))])
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
            turns[name] = statistics.mean(row.n_steps for row in made)
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:24s} {n_tasks / median:8.1f} rollouts/s (median of {repeats}), {turns[name]:.2f} turns each")
    ours, theirs = (statistics.median(times) for times in seconds.values())
    met = theirs / ours >= TARGET
    print(f"ratio {theirs / ours:.2f}  target {TARGET:.1f}  {'met' if met else 'MISSED'}")
    return int(os.environ.get("CHECK") == "1" and not met)


if __name__ == "__main__":
    sys.exit(main())

"""What each way of learning gains on the quickstart environment, from the same warm policy and the same rollouts.

Every method starts from one supervised policy for each seed and spends the same budget of rollouts on training tasks;
held-out success at temperature 1 with 95 % intervals over the tasks of all seeds. The last rows train with the
observation mask switched off, on tool output too, which must be worse. ``CHECK=1`` turns a miss into exit code 1;
``SCALE=small`` takes about a minute and shows that everything runs, not how well; ``METHODS=grpo,dapo`` runs some.
"""

import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

SMALL = os.environ.get("SCALE") == "small"
SEEDS = int(os.environ.get("SEEDS", "1" if SMALL else "3"))
TRAIN, HELDOUT = (48, 32) if SMALL else (768, 512)
WARM_STEPS = 20 if SMALL else 150
TASKS, SAMPLES, ITERATIONS = (4, 4, 3) if SMALL else (32, 8, 24)
BUDGET = TASKS * SAMPLES * ITERATIONS
ONLINE = ["grpo", "dapo", "rloo", "gspo", "ppo"]
OFFLINE = ["sft", "rejection", "star", "dpo_trajectory", "dpo_step"]
UNMASKED = ["sft without mask", "grpo without mask"]


class Setting:
    """One seed: tasks, a warm policy, and rollouts of it worth the whole budget."""

    def __init__(self, seed: int) -> None:
        from agentrl.chat import tokenize
        from agentrl.demonstrations import demonstrate
        from agentrl.environments import load_environment
        from agentrl.rationalize import HINT
        from agentrl.tiny import tiny_policy

        self.seed = seed
        self.environment = load_environment("lookup")
        splits = self.environment.tasks({"train": TRAIN, "dev": 1, "heldout": HELDOUT}, seed)
        self.tasks, self.heldout = splits["train"], splits["heldout"]
        shown = self.tasks[: int(0.6 * TRAIN)]
        raw = [
            demonstrate(self.environment, task, 0.35, seed, f"d{number}", HINT if number % 7 == 0 else "")
            for number, task in enumerate(shown)
        ]
        self.policy = tiny_policy(raw, seed)
        fingerprint = self.policy.tokenizer_fingerprint
        self.demonstrations = [tokenize(row, self.policy.codec, fingerprint) for row in raw]
        self.start = self.copy(self.policy)
        supervised(self.policy, self.demonstrations, WARM_STEPS, seed, lr=5e-3, schedule="cosine", warmup=20)

    def copy(self, policy: Any) -> Any:
        import copy

        from agentrl.policy import Policy

        return Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.name)

    def run(self, policy: Any, attempts: list[Any], seed: int, source: str = "model") -> list[Any]:
        return self.rollouts(policy).run(attempts, seed, [f"r{number}" for number in range(len(attempts))], source)

    def rollouts(self, policy: Any) -> Any:
        from agentrl.engines.base import Sampling
        from agentrl.engines.transformers import TransformersEngine
        from agentrl.rollout import Rollouts

        sampling = Sampling(max_turn_tokens=40, max_tokens=192)
        return Rollouts(policy, TransformersEngine(policy.model), self.environment, sampling)

    def sample(self, number: int) -> list[Any]:
        """``number`` rollouts of the warm policy, eight of a task."""
        from agentrl.rollout import Attempt

        attempts = [Attempt(task, index) for task in self.tasks for index in range(SAMPLES)][:number]
        return self.run(self.policy, attempts, self.seed)

    def success(self, policy: Any) -> int:
        from agentrl.rollout import Attempt

        made = self.run(policy, [Attempt(task) for task in self.heldout], 7)
        return sum(row.success for row in made)


def rows_of(trajectories: list[Any], mask_observations: bool = True) -> list[Any]:
    from schemas.training import TrainingRow

    return [
        TrainingRow(
            row_id=row.trajectory_id,
            unit=number,
            input_ids=row.input_ids,
            mask=row.action_mask if mask_observations else everything_after_the_prompt(row),
            weights=[1.0] * len(row.input_ids),
        )
        for number, row in enumerate(trajectories)
    ]


def everything_after_the_prompt(row: Any) -> list[bool]:
    start = row.action_mask.index(True)
    return [place >= start for place in range(len(row.input_ids))]


def supervised(
    policy: Any, trajectories: list[Any], steps: int, seed: int, mask: bool = True, **optimizer: Any
) -> None:
    from agentrl.objectives import SFT
    from agentrl.optimizer import OptimizerConfig
    from agentrl.trainer import Trainer, epochs

    trainer = Trainer(policy, SFT(), OptimizerConfig(**optimizer), steps)
    for batch, _ in zip(epochs(rows_of(trajectories, mask), 32, seed), range(steps), strict=False):
        trainer.step(batch)


def best(rollouts: list[Any], keep: int = 2) -> list[Any]:
    from agentrl.preferences import by_task

    out = []
    for rows in by_task(rollouts).values():
        out += sorted((row for row in rows if row.success), key=lambda row: (row.n_steps, row.n_tokens))[:keep]
    return out


def rationalised(setting: Setting, solved: set[str], number: int) -> list[Any]:
    """Retries of unsolved tasks with the answer as a hint; the hint is stripped from what is trained on."""
    from agentrl.rationalize import HINT, is_grounded, strip_hint
    from agentrl.rollout import Attempt

    unsolved = [task for task in setting.tasks if task.task_id not in solved]
    attempts = [Attempt(task, index, HINT) for index in range(SAMPLES) for task in unsolved][:number]
    tasks = {task.task_id: task for task in unsolved}
    made = setting.run(setting.policy, attempts, setting.seed + 1, "hinted")
    good = [row for row in made if row.success and is_grounded(row, tasks[row.task_id])]
    codec = setting.policy.codec
    return [
        strip_hint(row, setting.environment.episode(tasks[row.task_id]).opening(), codec, f"s{number}")
        for number, row in enumerate(good)
    ]


def prefer(setting: Setting, policy: Any, rollouts: list[Any], step_level: bool) -> None:
    from agentrl.objectives import DPO
    from agentrl.optimizer import OptimizerConfig
    from agentrl.preferences import by_task, step_pairs, trajectory_pairs
    from agentrl.trainer import Trainer, epochs, reference_logprobs
    from schemas.training import TrainingRow

    make = step_pairs if step_level else trajectory_pairs
    pairs = [pair for rows in by_task(rollouts).values() for pair in make(rows, 0.25, 4)]
    rows = []
    for number, pair in enumerate(pairs):
        for ids, mask in ((pair.chosen_ids, pair.chosen_mask), (pair.rejected_ids, pair.rejected_mask)):
            weights = [1.0] * len(ids)
            rows.append(TrainingRow(row_id=pair.pair_id, unit=number, input_ids=ids, mask=mask, weights=weights))
    if not rows:
        return
    trainer = Trainer(policy, DPO(beta=0.1, nll=0.5), OptimizerConfig(lr=2e-4), 30)
    data = reference_logprobs(policy, rows)
    for batch, _ in zip(epochs(data, min(32, len(pairs)), setting.seed), range(30), strict=False):
        trainer.step(batch)


def online(setting: Setting, policy: Any, name: str, mask: bool = True) -> int:
    """Train online; the number of rollouts that it took."""
    from pydantic import TypeAdapter

    from agentrl import online as module
    from agentrl.algorithms import Algorithm
    from agentrl.optimizer import OptimizerConfig

    settings: dict[str, Any] = {"type": name}
    if name == "dapo":
        settings["overlong"] = {"limit": 192, "buffer": 48}
    algorithm = TypeAdapter(Algorithm).validate_python(settings)
    loop = module.OnlineLoop(
        policy,
        setting.rollouts(policy),
        setting.tasks,
        algorithm,
        OptimizerConfig(lr=1e-3),
        iterations=ITERATIONS,
        tasks_per_step=TASKS,
        samples=SAMPLES,
        seed=setting.seed,
    )
    if not mask:
        _train_on_everything(loop)
    while loop.made < BUDGET:
        loop.step(lambda number: f"o{number}")
    return loop.made


def _train_on_everything(loop: Any) -> None:
    """Let the loop's trainer see tool output as action tokens."""
    step = loop.trainer.step

    def unmasked(rows: list[Any], scale: float) -> Any:
        changed = []
        for row in rows:
            start = row.mask.index(True)
            fill = [p if m else 0.0 for p, m in zip(row.logprobs, row.mask, strict=True)]
            mask = [place >= start for place in range(len(row.mask))]
            changed.append(row.model_copy(update={"mask": mask, "logprobs": fill}))
        from agentrl.trainer import batch_logprobs

        exact = batch_logprobs(loop.policy, changed)
        return step([r.model_copy(update={"logprobs": p}) for r, p in zip(changed, exact, strict=True)], scale)

    loop.trainer.step = unmasked


def learn(setting: Setting, method: str) -> tuple[Any, int]:
    """The trained policy, and rollouts used."""
    if method == "sft":
        return setting.policy, 0
    if method == "sft without mask":
        policy = setting.copy(setting.start)
        options = {"lr": 5e-3, "schedule": "cosine", "warmup": 20}
        supervised(policy, setting.demonstrations, WARM_STEPS, setting.seed, mask=False, **options)
        return policy, 0
    policy = setting.copy(setting.policy)
    if method in ONLINE or method == "grpo without mask":
        return policy, online(setting, policy, method.split()[0], mask=method in ONLINE)
    rollouts = setting.sample(BUDGET // 2 if method == "star" else BUDGET)
    if method.startswith("dpo"):
        prefer(setting, policy, rollouts, method == "dpo_step")
        return policy, len(rollouts)
    kept, used = best(rollouts), len(rollouts)
    if method == "star":
        kept += rationalised(setting, {row.task_id for row in kept}, BUDGET - used)
        used = BUDGET
    if kept:
        supervised(policy, kept, 12, setting.seed, lr=1e-3)
    return policy, used


def main() -> None:
    import torch

    from agentrl.intervals import wilson

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    methods = os.environ.get("METHODS", ",".join([*OFFLINE, *ONLINE, *UNMASKED])).split(",")
    solved: dict[str, list[int]] = defaultdict(list)
    used: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for seed in range(SEEDS):
        setting = Setting(seed)
        for method in methods:
            start = time.perf_counter()
            policy, used[method] = learn(setting, method)
            seconds[method] += time.perf_counter() - start
            solved[method].append(setting.success(policy))
            print(f"seed {seed}  {method:<18} {solved[method][-1] / HELDOUT:.3f}", file=sys.stderr, flush=True)
    print(f"{'method':<18} {'rollouts':>8} {'success':>8}  {'95 % interval':<15} {'each seed':<24} seconds")
    shares = {}
    for method in methods:
        total, n = sum(solved[method]), HELDOUT * SEEDS
        low, high = wilson(total, n)
        shares[method] = total / n
        each = " ".join(f"{one / HELDOUT:.2f}" for one in solved[method])
        spent = f"{seconds[method] / SEEDS:.0f}"
        print(f"{method:<18} {used[method]:>8} {total / n:>8.3f}  {low:.3f} to {high:.3f}  {each:<24} {spent}")
    misses = 0
    for masked in ("sft", "grpo"):
        if {masked, f"{masked} without mask"} <= set(methods):
            gain = shares[masked] - shares[f"{masked} without mask"]
            misses += gain <= 0
            name = f"{masked}: gain of masking observations"
            print(f"{name:<58} {gain:9.3f} {'':<9} more than 0  {'met' if gain > 0 else 'MISSED'}")
    sys.exit(1 if misses and os.environ.get("CHECK") == "1" else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()

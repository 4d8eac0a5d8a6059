"""What each way of learning gains in `lookup`, from the same warm policy and the same rollouts.

Every method starts from one supervised policy for each seed and spends the same budget of rollouts on training tasks;
success is that on held-out tasks, with 95 % intervals over the tasks of all seeds: at temperature 1, greedily, and at
the temperature that is best on dev tasks, over which the word in the table says what a method learned. Each method runs
a second time with the observation mask switched off, so that it trains on tool output too, which must be worse.

``CHECK=1`` turns a miss into exit code 1; ``SCALE=small`` takes under a minute and shows that everything runs, but says
nothing about quality; ``METHODS=GRPO,DAPO`` runs some; ``SPLIT=dev`` judges on dev tasks, on which settings are chosen;
``JOBS`` (2) run beside each other; ``KEEP=folder`` keeps what was measured, so that a benchmark that stopped goes on.
"""

import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from arms import SMALL, Arm, Solved, Spent, learned, mean, measured

os.environ["OMP_NUM_THREADS"] = "1"  # a small model: a second thread costs more than it brings
SEEDS = range(1) if SMALL else range(3)
JOBS = int(os.environ.get("JOBS", "2"))
SPLIT = os.environ.get("SPLIT", "heldout")
KEEP = os.path.join(kept, SPLIT) if (kept := os.environ.get("KEEP")) else ""
TRAIN, JUDGED, DEV = (96, 64, 16) if SMALL else (768, 512, 128)
WARM_STEPS = 120 if SMALL else 360
TASKS, SAMPLES, ITERATIONS = (4, 4, 2) if SMALL else (32, 8, 24)
BUDGET = TASKS * SAMPLES * ITERATIONS
ONLINE = {
    "GRPO": {"type": "grpo"},
    "DAPO": {"type": "dapo"},
    "RLOO": {"type": "rloo"},
    "GSPO": {"type": "gspo"},
    "PPO": {"type": "ppo", "level": "turn"},  # with a value head
}
METHODS = ["SFT only", "rejection", "STaR", "DPO trajectory", "DPO step", *ONLINE]
METHODS = [name for name in METHODS if name in os.environ.get("METHODS", ",".join(METHODS)).split(",")]


class Setting:
    """One seed: tasks, a warm policy, and rollouts of it worth the whole budget."""

    def __init__(self, seed: int) -> None:
        from agentrl.chat.codec import tokenize
        from agentrl.environments import load_environment
        from agentrl.models.tiny import tiny_policy
        from agentrl.rollouts.demonstrations import demonstrate
        from agentrl.rollouts.rationalize import HINT

        self.seed = seed
        self.environment = load_environment("lookup")
        splits = self.environment.tasks({"train": TRAIN, "dev": JUDGED, "heldout": JUDGED}, seed)
        self.tasks, self.dev = splits["train"], splits["dev"][:DEV]
        self.judged = splits["dev"][DEV:] if SPLIT == "dev" else splits["heldout"]
        raw = [
            demonstrate(self.environment, task, 0.35, seed, f"d{number}", HINT if number % 7 == 0 else "")
            for number, task in enumerate(self.tasks[: int(0.6 * TRAIN)])
        ]
        self.warm = tiny_policy([row.messages for row in raw], seed)
        self.demonstrations = [tokenize(row, self.warm.codec, self.warm.tokenizer_fingerprint) for row in raw]
        self.fresh = copied(self.warm)
        self.warm_up(self.warm, masked=True)
        self.rollouts = self.sample(self.tasks, BUDGET)

    def warm_up(self, policy: Any, masked: bool) -> None:
        rows = self.demonstrations if masked else [unmasked(row) for row in self.demonstrations]
        supervised(policy, rows, WARM_STEPS, self.seed, batch=16, lr=5e-3, schedule="cosine", warmup=20)

    def sample(self, tasks: list[Any], number: int, hint: str = "") -> list[Any]:
        """``number`` rollouts of the warm policy at most, ``SAMPLES`` of a task."""
        from agentrl.rollouts.runner import Attempt

        attempts = [Attempt(task, index, hint) for task in tasks for index in range(SAMPLES)][:number]
        return self.run(self.warm, attempts, self.seed)

    def run(self, policy: Any, attempts: list[Any], seed: int) -> list[Any]:
        return self.runner(policy).run(attempts, seed, [f"r{number}" for number in range(len(attempts))])

    def runner(self, policy: Any, temperature: float = 1.0) -> Any:
        from agentrl.engines.base import Sampling
        from agentrl.engines.transformers import TransformersEngine
        from agentrl.rollouts.runner import RolloutRunner

        sampling = Sampling(max_turn_tokens=40, max_tokens=192, temperature=temperature)
        return RolloutRunner(policy, TransformersEngine(policy.model), self.environment, sampling)

    def solved(self, policy: Any) -> Solved:
        from agentrl.rollouts.runner import Attempt

        def play(tasks: list[Any], temperature: float) -> dict[str, float]:
            attempts = [Attempt(task) for task in tasks]
            names = [f"r{number}" for number in range(len(attempts))]
            rows = self.runner(policy, temperature).run(attempts, 7, names)
            return {row.task_id: float(row.scored_success()) for row in rows}

        return measured(play, self.dev, self.judged)


def copied(policy: Any) -> Any:
    import copy

    from agentrl.models.policy import Policy

    return Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.name)


def tokens_from(start: int, length: int) -> list[bool]:
    return [position >= start for position in range(length)]


def unmasked(row: Any) -> Any:
    return row.model_copy(update={"action_mask": tokens_from(row.action_mask.index(True), len(row.action_mask))})


def with_logprobs(policy: Any, rows: list[Any]) -> list[Any]:
    from agentrl.training.rows import TrainingRows
    from agentrl.training.scoring import batch_logprobs

    exact = batch_logprobs(policy, TrainingRows.of(training_rows(rows)))
    return [row.model_copy(update={"logprobs": item.tolist()}) for row, item in zip(rows, exact, strict=True)]


def training_rows(trajectories: list[Any]) -> list[Any]:
    from agentrl.schemas.training import TrainingRow

    return [
        TrainingRow(
            row_id=row.trajectory_id,
            unit=number,
            input_ids=row.input_ids,
            mask=row.action_mask,
            weights=[1.0] * len(row.input_ids),
        )
        for number, row in enumerate(trajectories)
    ]


def supervised(policy: Any, rows: list[Any], steps: int, seed: int, batch: int = 32, **optimizer: Any) -> None:
    from agentrl.algorithms.sft import SFT
    from agentrl.training.rows import TrainingRows

    descend(policy, SFT(), TrainingRows.of(training_rows(rows)), steps, batch, seed, optimizer)


def descend(
    policy: Any, objective: Any, rows: Any, steps: int, batch: int, seed: int, optimizer: dict[str, Any]
) -> None:
    from agentrl.training.loop import epochs
    from agentrl.training.optimizer import OptimizerConfig
    from agentrl.training.step import Trainer

    trainer = Trainer(policy, objective, OptimizerConfig(**optimizer), steps)
    for part, _ in zip(epochs(rows, batch, seed), range(steps), strict=False):
        trainer.step(rows.take(part))


def best(rollouts: list[Any], keep: int = 2) -> list[Any]:
    from agentrl.pipelines.parts.pairing import by_task

    out = []
    for rows in by_task(rollouts).values():
        out += sorted((row for row in rows if row.success), key=lambda row: (row.n_steps, row.n_tokens))[:keep]
    return out


def rationalised(setting: Setting, solved: set[str], number: int) -> list[Any]:
    """Retries of unsolved tasks with the answer as a hint; the hint is stripped from what is trained on."""
    from agentrl.rollouts.rationalize import HINT, is_grounded, strip_hint

    tasks = {task.task_id: task for task in setting.tasks if task.task_id not in solved}
    made = setting.sample(list(tasks.values()), number, HINT)
    good = [row for row in made if row.success and is_grounded(row, tasks[row.task_id])]
    codec = setting.warm.codec
    return [strip_hint(row, tasks[row.task_id], HINT, codec, f"s{number}") for number, row in enumerate(good)]


def imitate(setting: Setting, policy: Any, star: bool, masked: bool) -> None:
    """Rejection sampling on the whole budget; for STaR half of it, the other half for retries with a hint."""
    kept = best(setting.rollouts[: BUDGET // 2] if star else setting.rollouts)
    if star:
        kept += rationalised(setting, {row.task_id for row in kept}, BUDGET // 2)
    if kept:
        rows = kept if masked else [unmasked(row) for row in kept]
        supervised(policy, rows, 12, setting.seed, lr=1e-3)


def prefer(setting: Setting, policy: Any, step_level: bool, masked: bool) -> None:
    from agentrl.algorithms.dpo import DPO
    from agentrl.pipelines.methods.agentq.preferences import step_pairs, trajectory_pairs
    from agentrl.pipelines.parts.pairing import by_task
    from agentrl.schemas.training import TrainingRow
    from agentrl.training.rows import TrainingRows
    from agentrl.training.scoring import reference_logprobs

    make = step_pairs if step_level else trajectory_pairs
    pairs = [pair for rows in by_task(setting.rollouts).values() for pair in make(rows, 0.25, 4)]
    prompt = {row.trajectory_id: row.action_mask.index(True) for row in setting.rollouts}
    rows = []
    for number, pair in enumerate(pairs):
        for ids, mask in ((pair.chosen_ids, pair.chosen_mask), (pair.rejected_ids, pair.rejected_mask)):
            mask = mask if masked else tokens_from(prompt[pair.chosen_id], len(ids))
            weights = [1.0] * len(ids)
            rows.append(TrainingRow(row_id=pair.pair_id, unit=number, input_ids=ids, mask=mask, weights=weights))
    if rows:
        [batch] = TrainingRows.of(rows).batches
        known = TrainingRows([reference_logprobs(policy, batch)])
        lr = 2e-4 if step_level else 1e-4
        descend(policy, DPO(beta=0.1, nll=0.5), known, 30, min(32, len(pairs)), setting.seed, {"lr": lr})


class Unrecorded:
    """A log that keeps nothing: the benchmark begins anew."""

    def stored(self, names: Any) -> dict[str, Any]:
        return {}

    under_way = stored

    def recorded(self, iteration: int) -> None:
        return None

    def record(self, made: Any) -> None: ...

    keep = append = record


def online(setting: Setting, policy: Any, algorithm: dict[str, Any], masked: bool) -> None:
    from pydantic import TypeAdapter

    from agentrl.algorithms import PolicyGradientAlgorithm
    from agentrl.online.learner import Learner
    from agentrl.online.loop import OnlineLoop
    from agentrl.online.tickets import Tickets
    from agentrl.training.optimizer import OptimizerConfig

    class Unmasked(Learner):
        """Trains on rollouts that do not say which tokens the policy sampled: all after the prompt count as actions."""

        def batch(self, iteration: int, sampled: Any, greedy: Any, *more: Any) -> Any:
            given = ([unmasked(row) for row in rows] for rows in (sampled, greedy))
            return super().batch(iteration, *(with_logprobs(policy, rows) if rows else [] for rows in given), *more)

    config = TypeAdapter(PolicyGradientAlgorithm).validate_python(algorithm)
    settings = {"iterations": ITERATIONS, "samples": SAMPLES, "seed": setting.seed}
    learner = (Learner if masked else Unmasked)(policy, config, OptimizerConfig(lr=1e-3), **settings)
    tickets = Tickets(TASKS, ITERATIONS, spare=config.resample * TASKS)
    with (
        setting.runner(policy) as runner,
        OnlineLoop(runner, learner, setting.tasks, tickets, Unrecorded(), lambda number: f"o{number:06d}") as loop,
    ):
        while loop.made < BUDGET and loop.iteration < ITERATIONS:
            loop.step()


def learn(setting: Setting, method: str, masked: bool) -> Any:
    """The policy that a method makes of the warm one; for the supervised method, of a fresh one."""
    policy = copied(setting.fresh if method == "SFT only" else setting.warm)
    if method == "SFT only":
        setting.warm_up(policy, masked)
    elif method in ("rejection", "STaR"):
        imitate(setting, policy, method == "STaR", masked)
    elif method in ONLINE:
        online(setting, policy, ONLINE[method], masked)
    else:
        prefer(setting, policy, method == "DPO step", masked)
    return policy


class Outcome(NamedTuple):
    seed: int
    method: str
    masked: bool
    solved: Solved
    seconds: float


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def prepare(folder: str, seed: int) -> None:
    import pickle

    path = Path(folder, str(seed))
    if not path.exists():
        path.write_bytes(pickle.dumps(Setting(seed)))


def outcome(folder: str, seed: int, method: str, masked: bool) -> Outcome:
    import pickle

    kept = Path(folder, f"{method} {masked} {seed}")
    if kept.exists():
        return pickle.loads(kept.read_bytes())  # type: ignore[no-any-return]
    setting = pickle.loads(Path(folder, str(seed)).read_bytes())
    start = time.perf_counter()
    policy = learn(setting, method, masked)
    seconds = time.perf_counter() - start
    result = Outcome(seed, method, masked, setting.solved(policy), seconds)
    kept.write_bytes(pickle.dumps(result))
    shares = mean([result.solved.sampled]), mean([result.solved.greedy])
    print(seed, method, masked, *shares, file=sys.stderr, flush=True)
    return result


def measure() -> list[Outcome]:
    if KEEP:
        Path(KEEP).mkdir(parents=True, exist_ok=True)
    with (
        nullcontext(KEEP) if KEEP else tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(JOBS, get_context("spawn"), initializer=one_thread) as pool,
    ):
        list(pool.map(prepare, [folder] * len(SEEDS), SEEDS))
        jobs = [(folder, seed, method, masked) for masked in (True, False) for method in METHODS for seed in SEEDS]
        return list(pool.map(outcome, *zip(*jobs, strict=True)))


def main() -> None:
    from agentrl.statistics.intervals import wilson

    result = measure()
    arms = {method: {True: Arm(method), False: Arm(method)} for method in METHODS}
    for outcome in result:
        arms[outcome.method][outcome.masked].add(outcome.solved, Spent())
    print(f"{len(SEEDS)} seeds x {JUDGED} {SPLIT} tasks; {BUDGET:,} rollouts for each method but SFT only")
    print(f"{'method':<16} {'T 1':>6}  {'95 % interval':<15} {'each seed':<20} {'greedy':>6} {'best':>6} "
          f"{'over SFT only':<13} {'without mask':<23} {'best':>6} seconds")  # fmt: skip
    misses = 0
    masked = {method: both[True] for method, both in arms.items()}
    for method, both in arms.items():
        shares, intervals = [], []
        for arm in both.values():
            solved, total = sum(sum(run.values()) for run in arm.runs), sum(map(len, arm.runs))
            low, high = wilson(solved, total)
            shares.append(solved / total)
            intervals.append(f"{low:.3f} to {high:.3f}")
        each = " ".join(mean([run]) for run in both[True].runs)
        seconds = statistics.fmean(outcome.seconds for outcome in result if outcome.masked and outcome.method == method)
        met = shares[1] < shares[0]
        misses += not met
        word = learned(masked, "SFT only", both[True])
        print(
            f"{method:<16} {shares[0]:>6.3f}  {intervals[0]} {each:<20} {mean(both[True].greedy):>6} "
            f"{mean(both[True].best):>6} {word:<13} {shares[1]:.3f}, {intervals[1]} "
            f"{mean(both[False].best):>6} {seconds:>7.0f}  "
            f"mask gains {shares[0] - shares[1]:+.3f}, more than 0: {'met' if met else 'MISSED'}"
        )
    sys.exit(1 if misses and os.environ.get("CHECK") == "1" else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()

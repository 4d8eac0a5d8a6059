"""Launch a training job through DeepSpeed, and what each of its processes runs: ``python -m agentrl.training.launch
job.json``."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.models.policy import Policy
from agentrl.training.batch import Batch, TrainingError, check_rows, collate, micro_batches, units
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.logprobs import token_logprobs
from agentrl.training.loop import epochs
from agentrl.training.lora import add_lora, merge_lora
from agentrl.training.packing import can_pack, packed
from agentrl.training.step import Metrics
from schemas.arrow import from_table
from schemas.training import TrainingRow

DONE = "AGENTRL_STEP "
FAILED = "AGENTRL_ERROR "


def command(config: DeepSpeed, job: Path) -> list[str]:
    """The command that starts the job's processes: torchrun on this node, DeepSpeed's own launcher on several."""
    module = ["agentrl.training.launch", str(job)]
    if config.hostfile:
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", config.hostfile]
        return [*launcher, "--num_gpus", str(config.processes), "--module", *module]
    nodes = ["--standalone", "--nproc_per_node", str(config.processes)]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, "-m", *module]


def launch(config: DeepSpeed, job: Path, on_step: Callable[[Metrics], None]) -> list[Metrics]:
    """Run a job file's processes to their end, calling ``on_step`` with the metrics of each step as it is done; the
    metrics of all steps. A job that was killed goes on from its last checkpoint.

    Raises TrainingError with the end of the output where they fail.
    """
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
        environment.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        command(config, job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    tail: list[str] = []
    reason = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(DONE):
                on_step(json.loads(line[len(DONE) :]))
            elif line.startswith(FAILED):
                reason = line[len(FAILED) :].strip()
            else:
                tail = [*tail[-40:], line]
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise TrainingError(reason or f"the processes of {job} ended with {code}:\n{''.join(tail)}")
    return pq.read_table(job.parent / "metrics.parquet").to_pylist()


class _Logprobs(torch.nn.Module):
    """The model as DeepSpeed wraps it: its forward pass is :func:`agentrl.logprobs.token_logprobs`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return token_logprobs(self.model, batch.input_ids, batch.mask, batch.packing)


class DistributedTrainer:
    """The training step of :class:`agentrl.trainer.Trainer`, spread over processes: each takes its share of the micro
    batches, and sums are divided by the counts of all."""

    def __init__(self, policy: Policy, job: TrainingJob) -> None:
        import deepspeed

        if job.optimizer.lora:
            torch.manual_seed(job.seed)  # all ranks begin with the same adapters
            add_lora(policy, job.optimizer.lora)
        if job.optimizer.gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = policy
        self.job = job
        self.done = 0
        self.packs = can_pack(policy.model)
        trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=_Logprobs(policy.model), model_parameters=trained, config=job.deepspeed_config()
        )
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def step(self, rows: Sequence[TrainingRow]) -> Metrics:
        """One optimiser step over all ``rows``. Raises TrainingError where the loss is not finite, on every rank."""
        objective = self.job.objective
        self.engine.train()
        parts = list(micro_batches(units(rows), self.job.optimizer.micro_tokens))
        count = sum(objective.count(collate(part)) for part in parts)
        n_tokens = sum(sum(row.mask[1:]) for row in rows)
        mine = parts[self.rank :: self.world]
        rounds = math.ceil(len(parts) / self.world)  # every rank must take part in every collective operation
        totals: Metrics = {"loss": 0.0, "entropy": 0.0}
        with packed(self.policy.model, self.packs):
            baseline = self._baseline(parts, rounds) if objective.needs_baseline else 0.0
            for round_ in range(rounds):
                real = round_ < len(mine)
                batch = collate(mine[round_] if real else parts[0][:2], self.packs).to(self.engine.device)
                logprobs, entropy = self.engine(batch)
                total, sums = objective.loss(logprobs, entropy, batch, baseline)
                self.engine.set_gradient_accumulation_boundary(round_ == rounds - 1)
                # DeepSpeed averages gradients over ranks; the sum is wanted.
                self.engine.backward(total * (self.world / count if real else 0.0))
                self._schedule()
                self.engine.step()
                for name, value in {"loss": total.item(), **sums}.items():
                    totals[name] = totals.get(name, 0.0) + real * value / count
                totals["entropy"] += real * entropy.detach().sum().item() / n_tokens
        names = sorted(totals)
        values = torch.tensor([totals[name] for name in names], dtype=torch.float64)
        values = self._sum(values)
        metrics = dict(zip(names, values.tolist(), strict=True))
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(norm):
            raise TrainingError(f"step {self.done}: loss {metrics['loss']}, gradient norm {norm}; lower lr")
        self.done += 1
        lr = self.job.optimizer.lr_at(self.done - 1, self.job.steps)
        return {**metrics, "grad_norm": norm, "lr": lr, "tokens": float(n_tokens)}

    def _schedule(self) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.job.optimizer.lr_at(self.done, self.job.steps)

    def _sum(self, values: Tensor) -> Tensor:
        values = values.to(self.engine.device)
        dist.all_reduce(values)
        return values.cpu()

    @torch.no_grad()
    def _baseline(self, parts: Sequence[Sequence[TrainingRow]], rounds: int) -> float:
        mine, total = parts[self.rank :: self.world], 0.0
        for round_ in range(rounds):
            real = round_ < len(mine)
            batch = collate(mine[round_] if real else parts[0][:2], self.packs).to(self.engine.device)
            logprobs, _ = self.engine(batch)
            total += real * ((logprobs - batch.ref_logprobs) * batch.mask).sum().item()
        return self._sum(torch.tensor([total], dtype=torch.float64)).item() / sum(len(part) for part in parts)

    def save(self, path: Path) -> None:
        """Write a plain model folder from whatever is sharded, adapters folded in; nothing is trained after it."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.policy.model.parameters()), modifier_rank=0):
            if self.rank == 0:
                merge_lora(self.policy)
                self.policy.save(path)
        dist.barrier()


def run(job_file: Path) -> None:
    """What one process does."""
    folder = job_file.parent
    job = TrainingJob.model_validate_json(job_file.read_text())
    rows = list(from_table(TrainingRow, pq.read_table(folder / "rows.parquet")))
    policy = Policy.load(folder / "start")
    check_rows(rows, policy)
    trainer = DistributedTrainer(policy, job)
    checkpoints = folder / "checkpoints"
    history: list[Metrics] = []
    if (checkpoints / "latest").exists():
        _, saved = trainer.engine.load_checkpoint(str(checkpoints))
        trainer.done, history = saved["done"], saved["history"]
    for number, batch in enumerate(epochs(rows, job.batch, job.seed)):
        if number >= job.steps:
            break
        if number < trainer.done:
            continue
        history.append({"step": float(number), **trainer.step(batch)})
        if trainer.rank == 0:
            print(DONE + json.dumps(history[-1]), flush=True)
        if trainer.done % job.checkpoint_every == 0 and trainer.done < job.steps:
            client = {"done": trainer.done, "history": history}
            trainer.engine.save_checkpoint(str(checkpoints), client_state=client)
    trainer.save(folder / "model")
    if trainer.rank == 0:
        pq.write_table(pa.Table.from_pylist(history), folder / "metrics.parquet")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # DeepSpeed's launcher adds --local_rank; the environment says the same.
    try:
        run(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--"))))
    except TrainingError as error:
        print(FAILED + str(error), flush=True)
        sys.exit(1)

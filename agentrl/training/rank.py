"""What one rank of a training job does, whoever started it."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.placement.shared import sizes_of
from agentrl.schemas.installation import PACKAGE_ROOT
from agentrl.training.job import TrainingJob
from agentrl.training.lines import DIALECT, DONE, FAILED, NO_MEMORY, NOTE, WROTE, tell

if TYPE_CHECKING:
    import torch

    from agentrl.models.policy import Policy
    from agentrl.training.backend import Backend
    from agentrl.training.optimizer import OptimizerConfig
    from agentrl.training.ranks import DeepSpeedRanks
    from agentrl.training.step import Metrics

READ = ("rows.arrow", "start")
"""What a job reads that lies beside its file, if it is there."""


def begin(job: TrainingJob) -> None:
    """Join the other ranks, on a device of one's own. What agentrl warns of is told by the first one."""
    from agentrl.training.jit_locks import clear_stale_locks
    from agentrl.training.ranks import join_ranks

    if os.environ.get("LOCAL_RANK") == "0":
        for note in clear_stale_locks(shared=os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]):
            tell(NOTE, note)
    plain, ours = warnings.showwarning, str(PACKAGE_ROOT / "agentrl")

    def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        if not filename.startswith(ours):
            plain(message, category, filename, *rest)
        elif os.environ["RANK"] == "0":
            tell(NOTE, str(message).replace("\n", " "))

    warnings.showwarning = show  # type: ignore[assignment]
    join_ranks()


def run(job_file: Path) -> None:
    """What one process does."""
    import torch.distributed as dist

    from agentrl.training.export import export
    from agentrl.training.loop import fit
    from agentrl.training.rows import TrainingRows
    from agentrl.training.step import Trainer

    folder = job_file.parent
    job = TrainingJob.model_validate_json(job_file.read_text())
    begin(job)
    rows = TrainingRows.open(folder / "rows.arrow")
    trainer = Trainer(load_start(job, folder), job.objective, job.optimizer, job.steps, backend_of(job), job.seed)
    first = trainer.backend.rank == 0

    def say(metrics: "Metrics") -> None:
        if first:
            tell(DONE, json.dumps(metrics))

    history = fit(trainer, rows, job.batch, job.seed, folder / "checkpoints", say, job.checkpoint_every)
    export(trainer.policy, trainer.backend, folder / "model")
    peak = highest_peak(trainer.backend)
    if first:
        table = pa.Table.from_pylist([{**row, "peak_gib": peak} for row in history])
        pq.write_table(table, folder / "metrics.parquet")
        tell(WROTE, json.dumps(sizes_of(folder / "metrics.parquet", folder / "model")))
    dist.barrier()
    dist.destroy_process_group()


def backend_of(job: TrainingJob) -> "Callable[[torch.nn.Module, OptimizerConfig | None], DeepSpeedRanks]":
    """What spreads a model over the ranks of a job."""
    from agentrl.training.ranks import DeepSpeedRanks

    return partial(DeepSpeedRanks, spread=job.deepspeed)


def highest_peak(backend: "Backend") -> float:
    """The most memory, in GiB, that any rank has held so far; see :func:`agentrl.training.backend.peak_gib`."""
    import numpy as np

    from agentrl.training.backend import peak_gib

    peaks = backend.collected({backend.rank: np.array(peak_gib(backend.device))})
    return float(max(peaks.values()))


def load_start(job: TrainingJob, folder: Path) -> "Policy":
    """The model that the job starts from, or this rank's part of it. If nobody looked at it before, its tokenizer is
    compared with that of the rows, and the first process says how its messages become tokens.

    Raises TrainingError if there is no model, if no dialect fits it, or if its tokenizer is another one.
    """
    from agentrl.models.hub import model_folder
    from agentrl.models.policy import Policy
    from agentrl.training.batch import TrainingError
    from agentrl.training.partitioned import load_partitioned

    start = job.start or folder / "start"
    try:
        sharded = job.deepspeed.zero == 3
        settings = job.deepspeed.settings(job.optimizer)
        policy = load_partitioned(start, settings) if sharded else Policy.load(model_folder(start), str(start))
        if job.made_by is None:
            return policy
        tokenizer, row = job.made_by
        if wrong := policy.wrote(row, tokenizer):
            raise TrainingError(wrong)
        if os.environ["RANK"] == "0":
            _tell_dialect(policy)
    except (OSError, ValueError) as error:
        raise TrainingError(str(error)) from error
    return policy


def _tell_dialect(policy: "Policy") -> None:
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        facts = {"dialect": policy.codec.dialect, "dialect_source": policy.codec.source}
    for remark in remarks:
        tell(NOTE, str(remark.message))
    tell(DIALECT, json.dumps(facts))


def run_or_say(job: Path, run: Callable[[Path], None]) -> None:
    """``run`` a job; a TrainingError is said in one line, and so is that there is not enough memory."""
    import torch

    from agentrl.training.batch import TrainingError

    try:
        run(job)
    except TrainingError as error:
        tell(FAILED, str(error))
        sys.exit(1)
    except torch.OutOfMemoryError as error:
        tell(NO_MEMORY, f"rank {os.environ['RANK']} ran out of memory: {str(error).splitlines()[0]}")
        raise

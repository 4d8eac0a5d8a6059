"""Which pool runs shards, by what a pipeline file asks for."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agentrl.datastore.errors import StoreError
from agentrl.datastore.shards.engine import Pool, Tell, run
from agentrl.datastore.shards.local import LocalProcesses
from agentrl.datastore.shards.prefect_jobs import PrefectJobs
from agentrl.datastore.shards.queued import Queued
from agentrl.datastore.shards.ray_tasks import RayTasks
from agentrl.datastore.shards.shard import Shard
from agentrl.datastore.shards.slurm import SlurmJobs
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.shards import ShardsNow

WORTH_IT = 4
"""Shards from which on they run in processes, if no engine is asked for: to start one takes about a CPU second."""


def engine_of(given: ShardEngine | str | Mapping[str, Any] | None) -> ShardEngine | None:
    """An engine by what ``execution.engine`` of a pipeline takes, as values or as YAML, or by its type alone. Raises
    StoreError that names the field."""
    if given is None or isinstance(given, ShardEngine):
        return given
    try:
        value = yaml.safe_load(given) if isinstance(given, str) else given
        engine = ShardEngine.model_validate({"type": value} if isinstance(value, str) else value)
    except yaml.YAMLError as error:
        raise StoreError(f"engine {given!r} is no YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "engine"
        reason = first["msg"].removeprefix("Value error, ")
        raise StoreError(
            f"engine {given!r}: {field}: {reason}; name a type (here, processes, ray, slurm, prefect), or as in a "
            "pipeline {type: ray, workers: 8} or {type: prefect, pool: NAME}"
        ) from None
    return engine if engine.type else engine.model_copy(update={"type": "processes"})


def workers_of(engine: ShardEngine) -> int:
    return engine.workers or len(os.sched_getaffinity(0))


@contextmanager
def running(engine: ShardEngine, folder: Path, tell: Tell) -> Iterator[Callable[[Sequence[Shard], str], None]]:
    """Yield a function that runs shards until all are done; its second argument says what they do. Workers start with
    the first shards, and end with the block. ``folder`` is one that they all see."""
    pools: list[Pool] = []

    def run_them(shards: Sequence[Shard], what: str) -> None:
        kind = engine.type or ("processes" if len(shards) >= WORTH_IT and workers_of(engine) > 1 else "here")
        if not shards:
            return
        if kind == "here":
            for number, shard in enumerate(shards):
                shard()
                tell(number + 1, len(shards), ShardsNow(what=what))
            return
        if not pools:
            pools.append(_pool(kind, engine, folder))
        run(shards, pools[0], tell, what)

    try:
        yield run_them
    finally:
        for pool in pools:
            pool.close()


def _pool(kind: str, engine: ShardEngine, folder: Path) -> Pool:
    if kind == "ray":
        return RayTasks(engine.workers, engine.memory_gib, engine.gpus)
    if kind == "slurm":
        jobs = SlurmJobs(engine.workers, engine.memory_gib, [*_gres(engine), *engine.options])
        return Queued(folder, jobs, engine.workers)
    if kind == "prefect":
        assert engine.pool is not None
        return Queued(folder, PrefectJobs(engine.pool, engine.workers), engine.workers)
    return LocalProcesses(workers_of(engine), engine.gpus)


def _gres(engine: ShardEngine) -> list[str]:
    return [f"--gres=gpu:{engine.gpus}"] if engine.gpus else []


def shared_folder(engine: ShardEngine, store: str) -> Path | None:
    """The folder that all workers see, if it is not the store's own. Raises StoreError if there must be one."""
    if engine.folder:
        return Path(engine.folder).expanduser().absolute()
    if engine.type in ("ray", "slurm", "prefect") and "://" in store:
        raise StoreError(
            f"workers of {engine.type} do not see this machine's folder for the store {store}; set "
            "execution.engine.folder to one that all of them see"
        )
    return None

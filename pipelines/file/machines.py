"""The machines that a stage's ``execution`` names, and what in it cannot work together."""

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from agentrl.placement.base import LaunchError
from agentrl.placement.devices import memory_gib, visible
from agentrl.placement.hostfile import read_hosts
from agentrl.schemas.pipeline import Execution

GIB = 2**30


def machines(execution: Execution) -> tuple[int, int]:
    """(machines, GPUs of each) that a stage's processes are spread over. Raises LaunchError for a bad hostfile."""
    if execution.launcher == "hostfile" and execution.hostfile:
        hosts = read_hosts(Path(execution.hostfile).expanduser(), execution.nodes, execution.gpus)
        return len(hosts), min(host.slots for host in hosts)
    if execution.launches == "slurm":
        nodes, gpus = (int(os.environ.get(name) or 0) for name in ("SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE"))
        return execution.nodes or nodes or 1, execution.gpus or gpus
    return execution.nodes or 1, execution.gpus


def gpu_bytes(execution: Execution) -> float | None:
    """Memory of a GPU that the stage runs on; None if it is not known."""
    if execution.gpu_gib is not None:
        return execution.gpu_gib * GIB
    if execution.pool or execution.spreads:
        return None
    memory = memory_gib()
    return None if memory is None else memory * GIB


def starts_servers(config: Any) -> bool:
    """Whether a stage with this config starts vLLM servers."""
    engine: Any = getattr(config, "engine", None)
    return getattr(engine, "type", None) == "vllm" and not engine.urls and not engine.in_process


def gpus_here(execution: Execution, config: Any) -> int:
    """GPUs of the stage's own machine that it needs. Those of its ranks and servers on other machines are for Ray,
    Slurm or the hostfile to give."""
    spreads = starts_servers(config) or getattr(config, "deepspeed", None) is not None
    return 0 if spreads and execution.spreads else execution.gpus


def wrong(execution: Execution, given: Collection[str], config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key, message) of what in a stage's ``execution`` cannot work together. ``given`` are the fields that the stage
    itself sets."""
    spread: Any = getattr(config, "deepspeed", None)
    engine: Any = getattr(config, "engine", None)
    starts = starts_servers(config)
    if (execution.launcher == "hostfile") != (execution.hostfile is not None):
        yield ("launcher",), "launcher: hostfile and hostfile: FILE belong together; set both or none"
    elif execution.hostfile and execution.pool is None:
        try:
            machines(execution)
        except LaunchError as error:
            yield ("hostfile",), str(error)
    if (execution.nodes or 1) > 1 and not execution.spreads:
        yield ("nodes",), f"nodes: {execution.nodes} needs launcher: ray, slurm or hostfile, not {execution.launcher}"
    idle = spread is None and getattr(engine, "type", None) != "vllm"
    if execution.launcher != "local" and "launcher" in given and idle:
        yield ("launcher",), "this stage starts no other processes, neither deepspeed nor engine vllm; leave it out"
    if execution.launcher == "external" and spread is not None:
        yield ("launcher",), "launcher: external starts nothing, and ranks have no address; use another one"
    if execution.launcher == "external" and starts:
        yield ("launcher",), "launcher: external starts no server; name those that run in with.engine.urls"
    if execution.spreads and starts and not engine.folder:
        yield (
            ("launcher",),
            "servers of other machines read weights from with.engine.folder; set it to a shared one",
        )


DIVIDED = (
    "trajectories.curate",
    "trajectories.cut",
    "trajectories.import",
    "trajectories.sample",
    "trajectories.score",
    "trajectories.select",
)
"""Stages whose work is divided into shards."""


def undivided(stage: str, given: Collection[str], config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key, message) if a stage itself, and not the whole pipeline, names what runs its shards, and has none."""
    if "engine" not in given:
        return
    if stage not in DIVIDED:
        yield ("engine",), f"stage {stage} has no shards; leave engine out. Stages that have: {', '.join(DIVIDED)}"
    elif stage == "trajectories.sample" and config.engine.elsewhere:
        yield (
            ("engine",),
            f"with.engine {config.engine.type} takes all rollouts by itself, on its own GPUs or servers; leave "
            "execution.engine out, or let workers sample by with.engine: {type: transformers}",
        )


def unsplittable(execution: Execution, config: Any, model: Any) -> Iterator[str]:
    """Why the rows of a stage cannot be split over ranks as ``deepspeed.sequence_parallel`` says. ``model`` is the
    config of the model that it trains, None if no stage of the file names it."""
    spread: Any = getattr(config, "deepspeed", None)
    size = spread.sequence_parallel if spread else 1
    if size == 1:
        return
    if not (execution.pool and execution.hostfile):  # that file is on another machine
        _, gpus = machines(execution)
        here = execution.launcher == "local" and execution.pool is None
        try:
            spread.ranks(gpus or (len(visible()) if here else 0))
        except ValueError as error:
            yield str(error)
    heads, keys = _heads(model) if model else (0, 0)
    if heads % size or (keys and keys % size and size % keys):
        shared = f" with {keys} for keys and values" if keys != heads else ""
        yield f"{size} ranks cannot share the model's {heads} attention heads{shared}; take a divisor of their number"


def _heads(model: Any) -> tuple[int, int]:
    """Attention heads of queries, and of keys, of the model with this config; zeros if its folder is not here."""
    if model.path is None:
        return model.size.heads, 1
    try:
        config = json.loads((Path(model.path).expanduser() / "config.json").read_text())
        text = config.get("text_config", config)
        heads = int(text["num_attention_heads"])
        return heads, int(text.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, AttributeError):
        return 0, 0

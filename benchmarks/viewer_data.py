"""The store that benchmarks/viewer.py opens, and its rows as other viewers take them.

Beside the rows of ``buffer_data`` there are long trajectories, a task with 1,024 attempts, what a small pipeline
left (a plan, models, evaluations), a search index, and a tokenizer, so that token ids have text. The
long ones show the same text in every viewer: their messages are the text of their tokens.
"""

import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import buffer_data
import numpy as np
import pyarrow as pa

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.live_metrics import LiveLog
from agentrl.datastore.artifacts.tokenizers import TokenBytes, keep
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.search.index import SearchIndex
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA

ROOT = Path(__file__).parents[1]
SEED = 7
CHUNK = 20_000
TOKENIZER = "bpe-32000-5a1f"
"""As ``buffer_data`` names it."""
TURN = 250
"""Tokens of a message of a long trajectory."""
MANY = "task-many"
RUN, SERIES = "29990101-000000-bench", 40
PIPELINE = """\
name: bench
seed: 0
execution: {env: {OMP_NUM_THREADS: "1"}}
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 16, dev: 0, heldout: 8}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {coverage: 1.0}}
  warm:
    uses: train.sft
    inputs: {trajectories: expert}
    with: {model: {init: tiny}, steps: 8, batch: 8}
  eval_warm: {uses: evaluate.policy, inputs: {model: warm, tasks: tasks.heldout}}
"""


COPIES = 8
"""Long trajectories of each length, so that none need be opened twice."""


def long_id(tokens: int, copy: int) -> str:
    return f"long-{tokens}-{copy}"


def attempt_id(rows: int, number: int) -> str:
    """An attempt at :data:`MANY`, in a store with so many other rows."""
    return f"rollout-{SEED:08x}-{rows + number:06d}"


def make_store(folder: Path, rows: int, lengths: tuple[int, ...], attempts: int) -> None:
    """A store with so many rows, long trajectories of these ``lengths`` in tokens, and a task with so many attempts."""
    store = folder.resolve() / "store"
    (folder / "bench.yaml").write_text(PIPELINE)
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "bench.yaml", "--store", str(store), "--jobs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    keep(Catalog(store).storage, TOKENIZER, tokenizer)
    buffer = TrajectoryBuffer(store)
    for shard, table in enumerate(tables(rows, lengths, attempts)):
        buffer.append(table, stage="rollout", fingerprint="0" * 32, shard=shard)
    SearchIndex(buffer).refresh()


def tables(rows: int, lengths: tuple[int, ...], attempts: int) -> Iterator[pa.Table]:
    """All rows that are appended, a table for each commit."""
    for first in range(0, rows, CHUNK):
        yield buffer_data.make(min(CHUNK, rows - first), first, SEED)
    yield _attempts(attempts, rows)
    for length in lengths:
        yield pa.concat_tables(long_row(length, copy, rows + attempts) for copy in range(COPIES))


def _attempts(count: int, first: int) -> pa.Table:
    """Rows of one task that begin with the same 64 tokens."""
    table = buffer_data.make(count, first, SEED)
    ids = table["input_ids"].combine_chunks()
    values = ids.flatten().to_numpy().copy()
    starts = ids.offsets.to_numpy()[:-1]
    for position in range(64):
        values[starts + position] = values[position]
    same = {
        "task_id": pa.array([MANY] * count),
        "group_id": pa.array([MANY] * count),
        "env": pa.array(["lookup"] * count),
        "policy_version": pa.array(np.arange(count) // 128, pa.int32()),
        "input_ids": pa.ListArray.from_arrays(ids.offsets, pa.array(values)),
    }
    return _with(table, same)


def _with(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, column in columns.items():
        field = TRAJECTORY_SCHEMA.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, column.cast(field.type))
    return table


def long_row(tokens: int, copy: int, number: int) -> pa.Table:
    """One trajectory of so many tokens, in turns of :data:`TURN`: what a tool said, then what the policy did."""
    [row] = buffer_data.make(1, number, SEED).to_pylist()
    random = np.random.default_rng([tokens, copy])
    ids = (random.zipf(1.3, tokens) % 32000).astype(np.int32)
    ends = list(range(TURN, tokens + 1, TURN))
    mask = np.repeat(np.arange(len(ends)) % 2 == 1, TURN)
    text, bounds = TokenBytes.of(tokenizer()).text(ids)
    row |= {
        "trajectory_id": long_id(tokens, copy),
        "task_id": long_id(tokens, copy),
        "input_ids": ids,
        "action_mask": mask,
        "logprobs": np.where(mask, -random.exponential(0.4, tokens), np.nan).astype(np.float32),
        "spans": [{"version": row["policy_version"], "start": TURN, "end": tokens}],
        "n_tokens": tokens,
        "n_action_tokens": int(mask.sum()),
        "n_steps": len(ends) // 2,
        "n_tool_calls": 0,
        "messages": [
            {
                "role": "assistant" if turn % 2 else "user" if turn == 0 else "tool",
                "content": text[bounds[end - TURN] : bounds[end]].decode(),
                "reasoning": None,
                "tool_calls": [],
                "tool_call_id": None,
                "name": None,
                "reward": None,
                "token_start": end - TURN,
                "token_end": end,
            }
            for turn, end in enumerate(ends)
        ],
    }
    return pa.Table.from_pylist([row], schema=TRAJECTORY_SCHEMA)


def answer_words(tokens: int, copy: int) -> str:
    """A line near the beginning of what the policy says in a long trajectory; lists show only what it was asked.
    Without the space before it, which Inspect leaves out."""
    lines = long_row(tokens, copy, 0)["messages"][0][1]["content"].as_py()[:500].split("\n")
    return str(max(lines, key=len)[:60]).strip()


@cache
def tokenizer() -> str:
    """The JSON text of a tokenizer of 32,000 words, of which every 29th ends a line."""
    words = buffer_data.WORDS
    names = (f"Ġ{words[n % len(words)]}{n // len(words) or ''}{'Ċ' if n % 29 == 7 else ''}" for n in range(32000))
    vocabulary = {name: number for number, name in enumerate(names)}
    return json.dumps(
        {"added_tokens": [], "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocabulary}}
    )


# for other viewers


SHOWN = ["trajectory_id", "task_id", "env", "level", "success", "reward", "termination", "policy", "policy_version"]
SHOWN += ["prompt", "n_tokens", "created_at", "messages"]


def lines(rows: int, lengths: tuple[int, ...], attempts: int) -> Iterator[bytes]:
    """The rows as lines of JSON, without the tokens, which other viewers have no place for."""
    for table in tables(rows, lengths, attempts):
        for part in table.select(SHOWN).to_batches(max_chunksize=1000):
            for row in part.to_pylist():
                yield json.dumps(row | {"created_at": row["created_at"].timestamp()}).encode() + b"\n"


# while the benchmark runs


def append_row(buffer: TrajectoryBuffer) -> str:
    """Commit one new row, the newest of the store. Returns its id."""
    name = f"late-{time.time_ns()}"
    now = pa.array([datetime.now(UTC)], pa.timestamp("us", "UTC"))
    table = _with(buffer_data.make(1, 10**6, SEED), {"trajectory_id": pa.array([name]), "created_at": now})
    buffer.append(table, stage="late", fingerprint=f"{time.time_ns():032x}")
    return name


def series(step: int) -> dict[str, float]:
    """The values of a step."""
    return {f"series_{n:02d}": math.exp(-step / (50 + n)) + n for n in range(SERIES)}


@contextmanager
def training(store: Path) -> Iterator[Callable[[], None]]:
    """A run of this process that trains. What it gives writes the next step, with 40 series."""
    catalog, now = Catalog(store), datetime.now(UTC).isoformat(sep=" ")
    stage = {"status": "running", "fingerprint": "3" * 32, "reasons": [], "started_at": now}
    record = {"run_id": RUN, "pipeline": "bench", "started_at": now, "command": "", "file": ""}
    record |= {"host": socket.gethostname(), "pid": os.getpid()}
    catalog.write_run({**record, "state": "running", "stages": {"train": stage}})
    kept = store / "tmp" / f"live-{time.time_ns()}.jsonl"
    with LiveLog(catalog.storage, RUN, "train", kept) as log:
        steps = itertools.count()

        def write() -> None:
            step = next(steps)
            log.write({"step": step, **series(step)})

        try:
            yield write
        finally:
            catalog.write_run({**record, "state": "completed", "stages": {"train": {**stage, "status": "ran"}}})

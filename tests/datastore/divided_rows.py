"""Rows with planted duplicates, leaks and wrong calls, a curation of them, and a program that curates them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.shards import engine as shards
from agentrl.datastore.shards import queued
from agentrl.datastore.shards.divide import Divide
from agentrl.datastore.shards.engines import running
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

RULES = [
    {"rule": "decontaminate", "cosine": 0.95},
    {"rule": "valid_calls"},
    {"rule": "exact_duplicates"},
    {"rule": "near_duplicates", "scope": "all"},
    {"rule": "near_duplicates", "threshold": 0.5, "compare": ["actions", "observations"]},
]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def rows(count: int) -> list[Trajectory]:
    random = np.random.default_rng(0)
    texts, tasks = list[list[str]](), list[int]()
    for number in range(count):
        if number and random.random() < 0.4:
            parent = int(random.integers(number))
            text, task = list(texts[parent]), tasks[parent]
            for change in random.integers(0, len(text), random.integers(0, 12)).tolist():
                text[change] = f"c{random.integers(10**6)}"
        else:
            text, task = [f"w{word}" for word in random.integers(0, 3000, random.integers(5, 90))], number % 40
        texts.append(text)
        tasks.append(task)
    return [
        row(number, " ".join(text), task, random) for number, (text, task) in enumerate(zip(texts, tasks, strict=True))
    ]


def row(number: int, text: str, task: int, random: np.random.Generator) -> Trajectory:
    call = ToolCall(id="1", name="find", arguments=json.dumps({"a": 1 if random.random() < 0.9 else "no"}))
    question = " ".join(f"q{task} q{task + word}" for word in range(12))
    messages = [
        Message(role=Role.USER, content=question),
        Message(role=Role.ASSISTANT, content=text, tool_calls=[call] if task % 3 else []),
        Message(role=Role.TOOL, content=f"answer {task}", tool_call_id="1"),
    ]
    values = {"task_id": f"t{task}", "prompt": question, "tools": json.dumps([TOOL]), "messages": messages}
    values |= {"reward": float(random.integers(3)), "split": "test" if task == 7 else "train"}
    return build(number, input_ids=[], action_mask=[], logprobs=[], n_tokens=int(random.integers(50)), **values)


def filled(folder: Path, given: Sequence[Trajectory], files: int = 5) -> TrajectoryBuffer:
    """A buffer of these rows, in so many files."""
    buffer = TrajectoryBuffer(folder)
    for number in range(files):
        buffer.append(given[number::files], stage="rollout", fingerprint="f", shard=number)
    return buffer


BY_VECTORS = [
    {"rule": "decontaminate", "cosine": 0.999, "overlap": 1.0},
    {"rule": "semantic_duplicates", "threshold": 0.9, "scope": "all", "compare": ["actions"]},
    {"rule": "diverse", "n": 20, "over": "prompt"},
    {"rule": "diverse", "n": 5, "method": "core_sets"},
]


def kept(
    buffer: TrajectoryBuffer, engine: ShardEngine, work: Path | None = None, rules: Sequence[dict[str, Any]] = RULES
) -> tuple[list[str], dict[str, str]]:
    """The ids that are left, and of each row that was dropped the rule."""
    reasons: dict[str, str] = {}
    folder = work or Path(buffer.store) / "tmp" / "work"
    with running(engine, folder, lambda *state: None) as run:
        curated = curate(
            buffer,
            Rules.model_validate({"rules": rules}).rules,
            on_dropped=lambda rule, ids: reasons.update(dict.fromkeys(ids.to_pylist(), rule)),
            divide=Divide(run, engine.shards, folder, named=engine.type is not None),
        )
    return curated.ids.to_pylist(), reasons


def main() -> None:
    """Curate a store, and write what is left: STORE WORK RESULT ENGINE"""
    shards.TRIES = 1000  # kills come from outside, and may meet one shard often
    queued.LOOK_S = 0.5
    store, work, result, engine = sys.argv[1:]
    answer = kept(TrajectoryBuffer(store), ShardEngine.model_validate_json(engine), Path(work))
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

"""Synthetic trajectories for the benchmarks: about 500 tokens each, of four turns with tool calls and observations.

Made column by column with numpy, so that a hundred million tokens take a minute and the generator is no part of what
is measured. Ids, masks and log-probs have the shape of real rollouts: sampled spans with log-probs, NaN elsewhere.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory

STEPS = 4
ENVS = ["lookup", "shop", "airline", "code"]
# fmt: off
WORDS = np.array([
    "the", "order", "of", "a", "customer", "was", "sent", "back", "to", "store", "and", "refund", "is", "due",
    "when", "bill", "shows", "item", "price", "city", "boss", "name", "find", "search", "page", "open",
    "click", "next", "file", "test", "line", "error", "fix", "run", "value", "list", "table", "user", "flight",
    "seat", "date", "book", "cancel",
])
# fmt: on


def make(count: int, first: int = 0, seed: int = 0, mean_tokens: int = 500) -> pa.Table:
    """``count`` rows numbered from ``first``; 16 rows per task, success rates by task from a Beta distribution."""
    random = np.random.default_rng([seed, first])
    number = np.arange(first, first + count)
    tasks = number // 16
    rate = np.random.default_rng(seed).beta(1, 1, size=int(tasks[-1]) + 1)[tasks]
    success = random.random(count) < rate
    observation = random.integers(mean_tokens // 8, mean_tokens // 5, size=(count, STEPS))
    action = random.integers(mean_tokens // 16, mean_tokens // 10, size=(count, STEPS))
    lengths = np.stack([observation, action], 2).reshape(count, 2 * STEPS)
    ends = lengths.cumsum(1)
    total = ends[:, -1]
    columns = _lineage(number, tasks, seed) | _tokens(lengths, number, random)
    columns |= {
        "reward": success.astype(float) - 0.01 * (total / mean_tokens),
        "success": success,
        "termination": np.where(success, "answered", "max_steps"),
        "n_steps": np.full(count, STEPS, np.int32),
        "n_tokens": total.astype(np.int32),
        "n_action_tokens": action.sum(1).astype(np.int32),
        "n_tool_calls": np.full(count, STEPS - 1, np.int32),
        "n_tool_errors": np.zeros(count, np.int32),
        "messages": _messages(count, ends, random),
        "reward_components": _components(success),
        "tags": pa.array([[]] * count, pa.list_(pa.string())),
    }
    for name, field in Trajectory.model_fields.items():
        if name not in columns:  # those that came later
            plain = [field.get_default(call_default_factory=True)] * count
            columns[name] = pa.array(plain, TRAJECTORY_SCHEMA.field(name).type)
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in TRAJECTORY_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=TRAJECTORY_SCHEMA)


def _lineage(number: np.ndarray, tasks: np.ndarray, seed: int) -> dict[str, Any]:
    """Columns that say which row it is, of which task, and where it comes from."""
    same = {
        "agent": "main",
        "source": "model",
        "env_version": "1",
        "split": "train",
        "sampling": '{"temperature": 1.0, "top_p": 1.0}',
        "policy": "warm/3f2a91c4",
        "pipeline": "bench",
        "tools": '[{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]',
        "final_state": "null",
        "tokenizer": "bpe-32000-5a1f",
        **dict.fromkeys(("stage", "fingerprint", "run_id"), ""),
    }
    return {name: [value] * len(number) for name, value in same.items()} | {
        "trajectory_id": [f"rollout-{seed:08x}-{n:06d}" for n in number],
        "episode_id": [f"episode-{n}" for n in number],
        "segment": np.zeros(len(number), np.int32),
        "task_id": [f"task-{t:06d}" for t in tasks],
        "group_id": [f"task-{t:06d}" for t in tasks],
        "sample_index": (number % 16).astype(np.int32),
        "parent_id": pa.nulls(len(number), pa.string()),
        "fork_at": np.zeros(len(number), np.int32),
        "env": [ENVS[t % 4] for t in tasks],
        "level": (tasks % 5).astype(np.int32),
        "prompt": [f"task {t}: " + " ".join(WORDS[(t * 7 + np.arange(12)) % len(WORDS)]) for t in tasks],
        "created_at": pa.array(1_700_000_000_000_000 + number * 1000, pa.timestamp("us", tz="UTC")),
        "policy_version": _version(number),
    }


def _version(number: np.ndarray) -> np.ndarray:
    return (number // 4096).astype(np.int32)


def _tokens(lengths: np.ndarray, number: np.ndarray, random: np.random.Generator) -> dict[str, Any]:
    """Ids, masks, log-probs and spans; ``lengths`` [rows, turns] are of observations and actions in turn."""
    count = len(lengths)
    total = lengths.sum(1)
    mask = np.repeat(np.tile(np.array([False, True]), count * STEPS), lengths.ravel())
    logprobs = np.where(mask, -random.exponential(0.4, len(mask)), np.nan).astype(np.float32)
    ids = random.zipf(1.3, len(mask)).astype(np.int64) % 32000
    offsets = np.concatenate([[0], total.cumsum()]).astype(np.int32)
    span = pa.StructArray.from_arrays(
        [_version(number), lengths[:, 0].astype(np.int32), total.astype(np.int32)], ["version", "start", "end"]
    )
    return {
        "input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids.astype(np.int32))),
        "action_mask": pa.ListArray.from_arrays(offsets, pa.array(mask)),
        "logprobs": pa.ListArray.from_arrays(offsets, pa.array(logprobs)),
        "spans": pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), span),
    }


def _components(success: np.ndarray) -> pa.Array:
    field = TRAJECTORY_SCHEMA.field("reward_components").type
    count = len(success)
    parts = pa.StructArray.from_arrays(
        [pa.array(["exact"] * count), pa.array(success.astype(float)), pa.array(np.ones(count))],
        fields=[field.value_type.field(i) for i in range(3)],
    )
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), parts).cast(field)


def _messages(count: int, ends: np.ndarray, random: np.random.Generator) -> pa.Array:
    """Four times a user or tool message and an assistant's answer, the first three answers with a tool call."""
    total = count * 2 * STEPS
    pick = random.integers(0, len(WORDS), size=(65536, 20))
    phrases = np.array([" ".join(WORDS[row]) for row in pick], dtype=object)
    content = phrases[random.integers(0, len(phrases), total)] + " " + phrases[random.integers(0, len(phrases), total)]
    roles = np.tile(np.array(["user", "assistant", *["tool", "assistant"] * (STEPS - 1)], dtype=object), count)
    assistant = roles == "assistant"
    last = np.arange(total) % (2 * STEPS) == 2 * STEPS - 1
    calls = np.where(assistant & ~last, 1, 0)
    names = [f"name {n}" for n in random.integers(0, 5000, int(calls.sum()))]
    call_type = TRAJECTORY_SCHEMA.field("messages").type.value_type.field("tool_calls").type
    call = pa.StructArray.from_arrays(
        [
            pa.array([f"call_{n}" for n in range(len(names))]),
            pa.array(["find"] * len(names)),
            pa.array([f'{{"who": "{name}", "rel": "boss"}}' for name in names]),
        ],
        fields=[call_type.value_type.field(i) for i in range(3)],
    )
    call_offsets = np.concatenate([[0], calls.cumsum()]).astype(np.int32)
    ends = ends.ravel().astype(np.int32)
    starts = ends.reshape(count, -1).copy()
    starts[:, 1:] = starts[:, :-1]
    starts[:, 0] = 0
    tool = roles == "tool"
    message_type = TRAJECTORY_SCHEMA.field("messages").type
    values: dict[str, pa.Array] = {
        "role": pa.array(roles, pa.string()),
        "content": pa.array(content, pa.string()),
        "reasoning": pa.nulls(total, pa.string()),
        "tool_calls": pa.ListArray.from_arrays(call_offsets, call).cast(call_type),
        "tool_call_id": pa.array(np.where(tool, "call", None), pa.string()),
        "name": pa.array(np.where(tool, "find", None), pa.string()),
        "error": pa.nulls(total, pa.bool_()),
        "reward": pa.nulls(total, pa.float64()),
        "token_start": pa.array(starts.ravel(), pa.int32()),
        "token_end": pa.array(ends, pa.int32()),
    }
    fields = [message_type.value_type.field(i) for i in range(message_type.value_type.num_fields)]
    structs = pa.StructArray.from_arrays([values[field.name] for field in fields], fields=fields)
    return pa.ListArray.from_arrays(np.arange(0, total + 1, 2 * STEPS, dtype=np.int32), structs).cast(message_type)

"""A small store for the viewer, made without running anything: rows, a model's tokenizer, training, an evaluation."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.tokenizers import _CHARACTERS, keep
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.app import application, opening
from agentrl.flows.viewer.guard import Door
from agentrl.schemas.manifest import Ingredients, InputRecord, Kind, Manifest, OutputRecord
from agentrl.schemas.training import TRAINING_SCHEMA
from agentrl.schemas.trajectory import Message, Span, Termination, ToolCall, Trajectory, trajectory_id

WHEN = datetime(2026, 1, 1, 12, tzinfo=UTC)
GRPO, WARM, EVAL, PAIRS, DPO = ("a" * 32, "b" * 32, "c" * 32, "d" * 32, "e" * 32)
IM_END, TOKENIZER = 256, "0123456789abcdef"
FIRST = "grpo-aaaaaaaa-000000"
"""The first row of `make_store`."""
ONCE = {"batch": 1, "steps": 2}
"""The config of a training of one row at a time."""

STEPS = pa.table({"step": [0], "trajectory_id": [""], "advantage": [0.5], "trained": [True]})


class Browser:
    """Asks the application as a browser would, through ASGI."""

    def __init__(self, store: Path | str, door: Door | None = None) -> None:
        self.app = application(opening(str(store)), door or Door("127.0.0.1", 8322))

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None, body: Any = None, **query: Any
    ) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8322") as client:
                return await client.request(method, path, headers=headers, json=body, params=query or None)

        return asyncio.run(send())

    def json(self, path: str, status: int = 200, **query: Any) -> Any:
        answer = self.ask(path, **query)
        assert answer.status_code == status, answer.text
        return answer.json()

    def arrow(self, path: str, **query: Any) -> pa.Table:
        answer = self.ask(path, **query)
        assert answer.status_code == 200, answer.text
        return pa.ipc.open_stream(answer.content).read_all()

    def raw(self, path: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> tuple[int, dict[str, str], bytes]:
        """A request whose path nobody has tidied up."""
        sent: list[Any] = []
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": unquote_to_bytes(path).decode("utf-8", "replace"),
            "raw_path": path,
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1:8322")] if headers is None else headers,
            "server": ("127.0.0.1", 8322),
            "client": ("127.0.0.1", 5),
            "root_path": "",
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        start = next(event for event in sent if event["type"] == "http.response.start")
        body = b"".join(event.get("body", b"") for event in sent if event["type"] == "http.response.body")
        return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, body


def keep_tokenizer(store: Path | str) -> str:
    """A byte-level tokenizer of 256 bytes and one special token. Returns the fingerprint that rows name it by."""
    vocab = {chr(character): byte for character, byte in _CHARACTERS.items() if byte < 256}
    document = {
        "added_tokens": [{"id": IM_END, "content": "<|im_end|>", "special": True}],
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab},
    }
    keep(Catalog(store).storage, TOKENIZER, lambda: json.dumps(document))
    return TOKENIZER


def row(number: int, tokenizer: str = "", **fields: Any) -> Trajectory:
    """A question, a tool call, its answer, an answer; its tokens are the bytes of its text."""
    texts = [
        ("user", f"What is {number} + 1? 🙂"),
        ("assistant", f"<call>{number}</call>"),
        ("tool", f"error: no {number}" if number % 4 == 0 else f"{number + 1}"),
        ("assistant", f"It is {number + 1}."),
    ]
    messages, ids, mask = [], [], []
    for role, text in texts:
        encoded = [*text.encode(), IM_END]
        spoken = role == "assistant"
        calls = [ToolCall(id="c1", name="add", arguments='{"x": 1}')] if text.startswith("<call>") else []
        messages.append(
            Message(
                role=role,  # type: ignore[arg-type]
                content="" if calls else text,
                tool_calls=calls,
                tool_call_id="c1" if role == "tool" else None,
                name="add" if role == "tool" else None,
                token_start=len(ids),
                token_end=len(ids) + len(encoded),
            )
        )
        ids += encoded
        mask += [spoken] * len(encoded)
    values: dict[str, Any] = {
        "trajectory_id": trajectory_id("grpo", GRPO, number),
        "episode_id": f"e{number}",
        "task_id": f"sums-{number // 4}",
        "group_id": f"g{number // 4}",
        "sample_index": number % 4,
        "source": "model",
        "env": "sums",
        "split": "train" if number % 3 else "heldout",
        "level": number % 3,
        "prompt": texts[0][1],
        "policy": f"warm/{WARM[:8]}",
        "policy_version": number // 8,
        "created_at": WHEN + timedelta(seconds=number),
        "reward": number % 10 / 10,
        "success": None if number % 7 == 6 else bool(number % 2),
        "termination": Termination.ANSWERED,
        "tags": ["sampled"],
        "n_steps": 2,
        "n_tokens": len(ids),
        "n_action_tokens": sum(mask),
        "n_tool_calls": 1,
        "n_tool_errors": int(number % 4 == 0),
        "messages": messages,
        "tokenizer": tokenizer,
        "input_ids": ids,
        "action_mask": mask,
        "logprobs": [-0.25 if acts else float("nan") for acts in mask],
        "spans": [Span(version=number // 8, start=mask.index(True), end=len(ids))],
    }
    return Trajectory.model_validate(values | fields)


def publish(
    catalog: Catalog,
    stage: str,
    fingerprint_: str,
    uses: str,
    outputs: dict[str, tuple[Kind, Any]],
    inputs: dict[str, list[tuple[str, str, str]]] | None = None,
    minutes: int = 0,
    config: dict[str, Any] | None = None,
) -> Manifest:
    """An artifact as a stage leaves it. Outputs are tables, or functions that fill a folder."""
    folder = catalog.staging(stage, fingerprint_)
    records = {}
    for name, (kind, content) in outputs.items():
        path = f"{name}.parquet" if isinstance(content, pa.Table) else name
        if isinstance(content, pa.Table):
            pq.write_table(content, folder / path, row_group_size=4)
        else:
            content(folder / path)
        records[name] = OutputRecord(kind=kind, path=path, digest=f"digest of {name}")
    edges = {
        name: [InputRecord(stage=a, output=b, fingerprint=c, digest=f"{b} of {c}") for a, b, c in each]
        for name, each in (inputs or {}).items()
    }
    ingredients = Ingredients(
        scheme=1,
        pipeline="sums",
        stage=stage,
        uses=uses,
        uses_version="1",
        config=config or {},
        seed=0,
        inputs=edges,
        code={},
    )
    manifest = Manifest(
        fingerprint=fingerprint_,
        ingredients=ingredients,
        outputs=records,
        run_id="20260101-120000-abcd",
        created_at=WHEN + timedelta(minutes=minutes),
        duration_s=1.5,
    )
    return catalog.publish(manifest, folder)


def training_row(of: Trajectory, **fields: Any) -> dict[str, Any]:
    empty: list[float] = []
    values = {"row_id": of.trajectory_id, "unit": 0, "label": 0, "input_ids": of.input_ids, "mask": of.action_mask}
    values |= {"weights": [0.5] * len(of.input_ids), "logprobs": of.logprobs, "ref_logprobs": empty}
    return {**values, **fields}


def make_store(store: Path | str, rows: int = 20) -> str:
    """A store with ``rows`` rows of ``grpo``, half of which it trained on, in two commits, and 4 rows of an
    evaluation without tokens. Returns the tokenizer's fingerprint."""
    catalog, buffer = Catalog(store), TrajectoryBuffer(store)
    name = keep_tokenizer(store)
    publish(catalog, "warm", WARM, "train.sft", {"model": (Kind.MODEL, Path.mkdir)})
    made = [row(number, name) for number in range(rows)]
    common = {"run_id": "20260101-120000-abcd", "pipeline": "sums"}
    buffer.append(made[: rows // 2], stage="grpo", fingerprint=GRPO, shard=0, **common)
    buffer.append(made[rows // 2 :], stage="grpo", fingerprint=GRPO, shard=1, **common)
    nothing: dict[str, Any] = {"input_ids": [], "action_mask": [], "logprobs": [], "spans": [], "tokenizer": ""}
    nothing |= {"n_tokens": 0, "n_action_tokens": 0, "n_steps": 2}
    evaluated = []
    for number in range(4):
        entry = row(number, **nothing)
        messages = [message.model_copy(update={"token_start": None, "token_end": None}) for message in entry.messages]
        evaluated.append(
            entry.model_copy(update={"messages": messages, "trajectory_id": trajectory_id("eval", EVAL, number)})
        )
    buffer.append(evaluated, stage="eval", fingerprint=EVAL, **common)
    trained = [training_row(row) | {"iteration": number // 4, "step": number} for number, row in enumerate(made[::2])]
    schema = pa.schema([pa.field("iteration", pa.int64()), pa.field("step", pa.int64()), *TRAINING_SCHEMA])
    publish(
        catalog,
        "grpo",
        GRPO,
        "train.grpo",
        {"batches": (Kind.TABLE, pa.Table.from_pylist(trained, schema=schema)), "steps": (Kind.TABLE, STEPS)},
        {"model": [("warm", "model", WARM)]},
        minutes=1,
    )
    overall = {"policy": "grpo", "split": "heldout", "env": "", "level": -1, "tasks": 10, "attempts": 20}
    results = [
        {**overall, "decoding": "sampled", "success": 0.6, "low": 0.39, "high": 0.78},
        {**overall, "decoding": "greedy", "success": 0.7, "low": 0.48, "high": 0.85},
        {**overall, "decoding": "sampled", "level": 1, "success": 0.1, "low": 0.0, "high": 0.3},
    ]
    publish(
        catalog,
        "eval",
        EVAL,
        "evaluate.policy",
        {"results": (Kind.TABLE, pa.Table.from_pylist(results))},
        {"model": [("grpo", "model", GRPO)]},
        minutes=2,
    )
    return name


def record_run(store: Path | str, run_id: str = "20260101-120000-abcd", **changes: Any) -> None:
    """The record of a run of pipeline ``sums``."""
    stages = {
        "warm": {"status": "ran", "fingerprint": WARM, "reasons": ["never ran"]},
        "grpo": {"status": "ran", "fingerprint": GRPO, "reasons": ["never ran"], "warnings": ["env_errors 2"]},
        "eval": {"status": "failed", "fingerprint": "", "reasons": ["never ran"], "cause": "ValueError: no"},
    }
    record = {
        "run_id": run_id,
        "pipeline": "sums",
        "file": "/nowhere/sums.yaml",
        "command": "agentrl run sums.yaml",
        "host": "elsewhere",
        "pid": 1,
        "engine": "none",
        "engine_reason": "",
        "state": "failed",
        "started_at": "2026-01-01 12:00:00+00:00",
        "ended_at": "2026-01-01 12:01:00+00:00",
        "duration_s": 60.0,
        "stages": stages,
    }
    Catalog(store).write_run(record | changes)

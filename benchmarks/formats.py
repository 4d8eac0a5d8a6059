"""How fast each format is read, and in how much memory.

    python benchmarks/formats.py [FORMAT ...]      100,000 rows of each format: about half an hour
    SCALE=small python benchmarks/formats.py       under a minute
    CHECK=1 ...                                    exit code 1 if a target is missed

For each format a file of rows with four turns, two tool calls and, if the format has them, tokens. ``read`` gives
checked Arrow tables, as an append takes them, and is held against plain parsing of the same file by the standard
library (``json.loads`` of each line, or ``json.load``; Parquet and ``datasets`` folders ``to_pylist``) that keeps
nothing: at most twice its processor time. Peak memory is that of a process
of its own which reads the whole file, interpreter and libraries included: at most 500 MB. ``import`` appends the
rows to a buffer, with memory as its target (not at the small scale). Each line prints the figure, the target, and
``met`` or ``MISSED``.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datastore.formats import FORMATS, detect
from datastore.formats.columns import batches
from datastore.formats.source import Source
from schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

SMALL = os.environ.get("SCALE") == "small"
ROWS = 2_000 if SMALL else 100_000
IMPORTED = ["openai-chat", "verifiers-v1"]
MEMORY_MB = 500
RATIO = 2.0

WORDS = [
    "the",
    "order",
    "of",
    "a",
    "customer",
    "was",
    "sent",
    "back",
    "to",
    "the",
    "store",
    "and",
    "the",
    "refund",
    "is",
    "due",
    "when",
    "the",
    "bill",
    "shows",
    "the",
    "item",
]
TOOLS = [{"type": "function", "function": {"name": "find", "description": "finds", "parameters": {"type": "object"}}}]


def text(number: int, words: int) -> str:
    return f"{number} " + " ".join(WORDS[(number + i) % len(WORDS)] for i in range(words))


def row(number: int) -> Trajectory:
    """Four assistant messages, two of them with a call; 240 tokens."""
    messages = [Message(role=Role.SYSTEM, content=text(0, 120)), Message(role=Role.USER, content=text(number, 30))]
    for turn in range(2):
        call = ToolCall(id=f"c{turn}", name="find", arguments=json.dumps({"who": f"Ann {number}", "turn": turn}))
        messages.append(Message(role=Role.ASSISTANT, content=text(number, 20), tool_calls=[call]))
        messages.append(Message(role=Role.TOOL, content=text(number + turn, 60), tool_call_id=f"c{turn}", name="find"))
        messages.append(Message(role=Role.ASSISTANT, content=text(number, 40)))
        messages.append(Message(role=Role.USER, content=text(number, 20)))
    for place, message in enumerate(messages):
        message.token_start, message.token_end = place * 24, place * 24 + 24
    mask = [message.role is Role.ASSISTANT for message in messages for _ in range(24)]
    return Trajectory(
        trajectory_id=f"r-{number:07d}",
        episode_id=f"e{number}",
        task_id=f"t{number // 4}",
        source="model",
        env="shop",
        split="train",
        prompt=messages[1].content,
        reward=float(number % 2),
        success=bool(number % 2),
        termination=Termination.ANSWERED,
        messages=messages,
        tools=json.dumps(TOOLS),
        tokenizer="t",
        input_ids=[(number + i) % 32000 for i in range(len(mask))],
        action_mask=mask,
        logprobs=[-0.5 if one else float("nan") for one in mask],
        n_tokens=len(mask),
        n_action_tokens=sum(mask),
        n_steps=4,
        n_tool_calls=2,
    )


def rows() -> Iterator[Trajectory]:
    return (row(number) for number in range(ROWS))


def chat(number: int) -> list[dict[str, Any]]:
    from datastore.formats.messages import to_chat

    return to_chat(row(number).messages)


def blocks(number: int) -> list[dict[str, Any]]:
    """A session of Claude Code, line by line."""
    lines = []
    for place, one in enumerate(chat(number)[1:]):
        kind = "assistant" if one["role"] == "assistant" else "user"
        content: Any = one["content"]
        if one["role"] == "tool":
            content = [{"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": content}]
        elif "tool_calls" in one:
            content = [{"type": "tool_use", "id": f"c{place}", "name": "find", "input": {"who": "Ann"}}]
        message = {"role": kind, "content": content, "id": f"m{place}", "model": "m"}
        lines.append({"type": kind, "message": message, "sessionId": f"s{number}", "uuid": f"{place}"})
    return lines


def items(number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in chat(number):
        if one["role"] == "tool":
            found.append({"type": "function_call_output", "call_id": one["tool_call_id"], "output": one["content"]})
            continue
        found.append({"type": "message", "role": one["role"], "content": one["content"]})
        for call in one.get("tool_calls", []):
            found.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return found


def events(number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"id": 0, "action": "system", "source": "agent", "args": {"content": "s", "tools": TOOLS}}
    ]
    for place, one in enumerate(chat(number)[1:], 1):
        if one["role"] == "tool":
            found.append({"id": place, "observation": "run", "content": one["content"], "cause": place - 1})
        elif "tool_calls" in one:
            arguments = {"command": "ls", "thought": one["content"]}
            found.append({"id": place, "action": "run", "source": "agent", "args": arguments})
        else:
            source = "user" if one["role"] == "user" else "agent"
            found.append({"id": place, "action": "message", "source": source, "args": {"content": one["content"]}})
    return found


def sample(number: int) -> dict[str, Any]:
    messages = []
    for one in chat(number):
        calls = [{"id": c["id"], "function": "find", "arguments": {"who": "Ann"}} for c in one.get("tool_calls", [])]
        messages.append({key: one[key] for key in ("role", "content")} | ({"tool_calls": calls} if calls else {}))
        if one["role"] == "tool":
            messages[-1] |= {"tool_call_id": one["tool_call_id"], "function": "find"}
    scores = {"match": {"value": "C"}}
    return {"id": number, "epoch": 1, "input": "q", "target": "t", "messages": messages, "scores": scores}


def span(number: int) -> dict[str, Any]:
    said = chat(number)
    attributes = {"gen_ai.input.messages": json.dumps(said[:-1]), "gen_ai.output.messages": json.dumps(said[-1:])}
    return {"context": {"trace_id": f"t{number}"}, "attributes": attributes | {"gen_ai.request.model": "m"}}


RECORDS: dict[str, Any] = {
    "openai-responses": lambda n: {"input": items(n)[:2], "output": items(n)[2:], "model": "m", "tools": TOOLS},
    "nemo-gym": lambda n: {
        "responses_create_params": {"input": items(n)[:2], "tools": TOOLS},
        "response": {"model": "m", "output": items(n)[2:]},
        "reward": 1.0,
    },
    "sharegpt-preference": lambda n: {
        "conversations": [{"from": "human", "value": text(n, 200)}],
        "chosen": {"from": "gpt", "value": text(n, 200)},
        "rejected": {"from": "gpt", "value": text(n + 1, 200)},
    },
    "alpaca": lambda n: {"instruction": text(n, 60), "input": text(n, 60), "output": text(n, 300)},
    "tau-bench": lambda n: {"task_id": n, "reward": 1.0, "info": {"task": {"n": n}}, "traj": chat(n), "trial": 0},
    "openhands": lambda n: {"instance_id": str(n), "history": events(n), "metadata": {"llm_config": {"model": "m"}}},
    "otel": span,
}


def write(name: str, folder: Path) -> list[Path]:
    """Files with :data:`ROWS` rows of one format."""
    format = FORMATS[name]
    if name == "trl-preference":
        path = folder / "rows.jsonl"
        with path.open("w") as file:
            for n in range(ROWS // 2):
                said = chat(n)
                file.write(json.dumps({"prompt": said[:2], "chosen": said[2:6], "rejected": said[2:4]}) + "\n")
        return [path]
    if format.write:
        path = folder / f"rows{format.suffix or ('.jsonl' if name == 'atif' else '')}"
        format.write(rows(), path)
        return sorted(path.iterdir()) if path.is_dir() and name != "huggingface" else [path]
    if name == "mini-swe-agent":
        paths = [folder / f"{n}.traj.json" for n in range(ROWS)]
        for n, path in enumerate(paths):
            info = {"exit_status": "Submitted", "config": {"model": {"model_name": "m"}}}
            document = {"info": info, "messages": chat(n), "trajectory_format": "mini-swe-agent-1.1"}
            path.write_text(json.dumps(document))
        return paths
    if name == "inspect":
        path = folder / "rows.eval"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for n in range(ROWS):
                archive.writestr(f"samples/{n}_epoch_1.json", json.dumps(sample(n)))
            archive.writestr("header.json", json.dumps({"version": 2, "status": "success", "eval": {"task": "t"}}))
        return [path]
    if name == "claude-code":  # a session per file, as it writes them
        paths = [folder / f"{n}.jsonl" for n in range(ROWS)]
        for n, path in enumerate(paths):
            path.write_text("".join(json.dumps(one) + "\n" for one in blocks(n)))
        return paths
    path = folder / "rows.jsonl"
    count = ROWS // 2 if name == "sharegpt-preference" else ROWS
    with path.open("w") as file:
        for n in range(count):
            file.write(json.dumps(RECORDS[name](n)) + "\n")
    return [path]


def parse(paths: list[Path]) -> None:
    """The same files, parsed plainly and kept nowhere."""
    for path in paths:
        if path.suffix == ".jsonl":
            with path.open() as file:
                for line in file:
                    json.loads(line)
        elif path.suffix == ".parquet":
            import pyarrow.parquet as pq

            for batch in pq.ParquetFile(path).iter_batches(256):
                batch.to_pylist()
        elif path.suffix == ".eval":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    json.loads(archive.read(name))
        elif path.is_dir():
            from datasets import load_from_disk

            dataset = load_from_disk(str(path))
            for start in range(0, len(dataset), 256):
                dataset.select(range(start, min(len(dataset), start + 256))).data.table.to_pylist()
        else:
            with path.open() as file:
                json.load(file)


def work(task: str, name: str, paths: list[Path], folder: Path) -> tuple[int, float]:
    """Rows and processor seconds of one task, in this process: others may use the machine too."""
    start, count = time.process_time(), 0
    if task == "parse":
        parse(paths)
    elif task == "read":
        read = ((source, row) for source in map(Source, paths) for row in FORMATS[name].rows(source))
        count = sum(batch.table.num_rows for batch in batches(read))
    else:
        from datastore import TrajectoryBuffer
        from datastore.formats.imports import import_paths

        count = import_paths(TrajectoryBuffer(folder / "store"), paths).rows
    return count, time.process_time() - start


def measured(task: str, name: str, folder: Path) -> tuple[int, float, float]:
    """Rows, seconds and peak MB of one task in a process of its own; in this one if the scale is small."""
    if SMALL:
        count, seconds = min((work(task, name, files(name, folder), folder) for _ in range(3)), key=lambda one: one[1])
        return count, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    command = [sys.executable, __file__, "--task", task, name, str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    count, seconds, peak = json.loads(out.stdout.splitlines()[-1])
    return count, seconds, peak


def files(name: str, folder: Path) -> list[Path]:
    paths = sorted((folder / "files").iterdir())
    alone = len(paths) == 1 and paths[0].is_dir() and name != "huggingface"
    return sorted(paths[0].iterdir()) if alone else paths


def child(task: str, name: str, folder: Path) -> None:
    count, seconds = work(task, name, files(name, folder), folder)
    print(json.dumps([count, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def main() -> int:
    chosen = sys.argv[1:] or list(FORMATS)
    missed = 0
    for name in chosen:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "files").mkdir()
            paths = write(name, folder / "files")
            assert detect(Source(paths[0])) == name, (name, detect(Source(paths[0])))
            plain = measured("parse", name, folder)[1]
            count, seconds, peak = measured("read", name, folder)
            assert count >= ROWS - 1, (name, count)
            missed += line(
                f"{name}: read {count / seconds:,.0f} rows/s, {seconds / plain:.2f}x of plain parsing",
                seconds <= RATIO * plain,
                f"{RATIO:g}x of json.loads",
            )
            missed += line(f"{name}: read in {peak:.0f} MB", peak <= MEMORY_MB, f"{MEMORY_MB} MB")
            if name in IMPORTED and not SMALL:
                count, seconds, peak = measured("import", name, folder)
                missed += line(
                    f"{name}: import {count / seconds:,.0f} rows/s in {peak:.0f} MB",
                    peak <= MEMORY_MB,
                    f"{MEMORY_MB} MB",
                )
    return int(bool(missed) and os.environ.get("CHECK") == "1")


def line(figure: str, met: bool, target: str) -> bool:
    print(f"{figure} (target {target}): {'met' if met else 'MISSED'}", flush=True)
    return not met


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        child(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        sys.exit(main())

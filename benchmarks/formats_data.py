"""Files with the rows that ``benchmarks/formats.py`` reads."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.messages import to_chat
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

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
    for position, message in enumerate(messages):
        message.token_start, message.token_end = position * 24, position * 24 + 24
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
        logprobs=[-0.5 if acts else float("nan") for acts in mask],
        n_tokens=len(mask),
        n_action_tokens=sum(mask),
        n_steps=4,
        n_tool_calls=2,
    )


def rows(count: int) -> Iterator[Trajectory]:
    return (row(number) for number in range(count))


def chat(number: int) -> list[dict[str, Any]]:
    return to_chat(row(number).messages)


def blocks(number: int) -> list[dict[str, Any]]:
    """A session of Claude Code, line by line."""
    lines = []
    for position, turn in enumerate(chat(number)[1:]):
        kind = "assistant" if turn["role"] == "assistant" else "user"
        content: Any = turn["content"]
        if turn["role"] == "tool":
            content = [{"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": content}]
        elif "tool_calls" in turn:
            content = [{"type": "tool_use", "id": f"c{position}", "name": "find", "input": {"who": "Ann"}}]
        message = {"role": kind, "content": content, "id": f"m{position}", "model": "m"}
        lines.append({"type": kind, "message": message, "sessionId": f"s{number}", "uuid": f"{position}"})
    return lines


def items(number: int) -> list[dict[str, Any]]:
    matches: list[dict[str, Any]] = []
    for turn in chat(number):
        if turn["role"] == "tool":
            matches.append({"type": "function_call_output", "call_id": turn["tool_call_id"], "output": turn["content"]})
            continue
        matches.append({"type": "message", "role": turn["role"], "content": turn["content"]})
        for call in turn.get("tool_calls", []):
            matches.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return matches


def events(number: int) -> list[dict[str, Any]]:
    matches: list[dict[str, Any]] = [
        {"id": 0, "action": "system", "source": "agent", "args": {"content": "s", "tools": TOOLS}}
    ]
    for position, turn in enumerate(chat(number)[1:], 1):
        if turn["role"] == "tool":
            matches.append({"id": position, "observation": "run", "content": turn["content"], "cause": position - 1})
        elif "tool_calls" in turn:
            arguments = {"command": "ls", "thought": turn["content"]}
            matches.append({"id": position, "action": "run", "source": "agent", "args": arguments})
        else:
            source = "user" if turn["role"] == "user" else "agent"
            matches.append(
                {"id": position, "action": "message", "source": source, "args": {"content": turn["content"]}}
            )
    return matches


def sample(number: int) -> dict[str, Any]:
    messages = []
    for turn in chat(number):
        calls = [{"id": c["id"], "function": "find", "arguments": {"who": "Ann"}} for c in turn.get("tool_calls", [])]
        messages.append({key: turn[key] for key in ("role", "content")} | ({"tool_calls": calls} if calls else {}))
        if turn["role"] == "tool":
            messages[-1] |= {"tool_call_id": turn["tool_call_id"], "function": "find"}
    scores = {"match": {"value": "C"}}
    return {"id": number, "epoch": 1, "input": "q", "target": "t", "messages": messages, "scores": scores}


def span(number: int) -> dict[str, Any]:
    text = chat(number)
    attributes = {"gen_ai.input.messages": json.dumps(text[:-1]), "gen_ai.output.messages": json.dumps(text[-1:])}
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


def write(name: str, folder: Path, count: int) -> list[Path]:
    """Files with ``count`` rows of one format."""
    format = FORMATS[name]
    if name == "trl-preference":
        path = folder / "rows.jsonl"
        with path.open("w") as file:
            for n in range(count // 2):
                text = chat(n)
                file.write(json.dumps({"prompt": text[:2], "chosen": text[2:6], "rejected": text[2:4]}) + "\n")
        return [path]
    if format.write:
        path = folder / f"rows{format.suffix or ('.jsonl' if name == 'atif' else '')}"
        format.write(rows(count), path)
        return sorted(path.iterdir()) if path.is_dir() and name != "huggingface" else [path]
    if name == "mini-swe-agent":
        paths = [folder / f"{n}.traj.json" for n in range(count)]
        for n, path in enumerate(paths):
            info = {"exit_status": "Submitted", "config": {"model": {"model_name": "m"}}}
            document = {"info": info, "messages": chat(n), "trajectory_format": "mini-swe-agent-1.1"}
            path.write_text(json.dumps(document))
        return paths
    if name == "inspect":
        path = folder / "rows.eval"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for n in range(count):
                archive.writestr(f"samples/{n}_epoch_1.json", json.dumps(sample(n)))
            archive.writestr("header.json", json.dumps({"version": 2, "status": "success", "eval": {"task": "t"}}))
        return [path]
    if name == "claude-code":  # a session per file, as it writes them
        paths = [folder / f"{n}.jsonl" for n in range(count)]
        for n, path in enumerate(paths):
            path.write_text("".join(json.dumps(block) + "\n" for block in blocks(n)))
        return paths
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for n in range(count // 2 if name == "sharegpt-preference" else count):
            file.write(json.dumps(RECORDS[name](n)) + "\n")
    return [path]

"""What is exported is valid for the programs that it is for."""

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from format_rows import KINDS
from formats_trl import tokenizer_of_bytes
from pydantic import TypeAdapter
from real_rows import real_rows

from agentrl.datastore.formats import FORMATS
from agentrl.schemas.trajectory import Trajectory

LINES = [name for name, format_ in FORMATS.items() if format_.write and format_.suffix == ".jsonl"]


def rows() -> list[Trajectory]:
    odd = [row for kind in ("odd calls", "text", "parallel calls", "reasoning") for row in KINDS[kind]]
    return [*odd, *(row for group in real_rows().values() for row in group)]


def exported(name: str, folder: Path) -> Path:
    path = folder / f"out{FORMATS[name].suffix}"
    assert FORMATS[name].write is not None
    FORMATS[name].write(rows(), path)
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def whole(value: Any) -> Any:
    """A value with what pydantic reads only when it is asked for."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    return (
        value if isinstance(value, str | bytes) or not hasattr(value, "__iter__") else [whole(inner) for inner in value]
    )


def check(kind: Any, value: Any) -> Any:
    return whole(TypeAdapter(kind).validate_python(value))


def test_openai_takes_messages_and_tools(tmp_path: Path) -> None:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

    for line in records(exported("openai-chat", tmp_path)):
        assert len(check(list[ChatCompletionMessageParam], line["messages"])) == len(line["messages"])
        assert "tools" not in line or check(list[ChatCompletionToolParam], line["tools"])
        calls = {call["id"] for message in line["messages"] for call in message.get("tool_calls") or []}
        answers = [message["tool_call_id"] for message in line["messages"] if message["role"] == "tool"]
        assert "" not in calls
        assert set(answers) <= calls


def test_anthropic_takes_messages_and_tools(tmp_path: Path) -> None:
    from anthropic import types

    kinds = {
        "text": types.TextBlockParam,
        "thinking": types.ThinkingBlockParam,
        "tool_use": types.ToolUseBlockParam,
        "tool_result": types.ToolResultBlockParam,
    }
    for line in records(exported("anthropic", tmp_path)):
        assert {message["role"] for message in line["messages"]} <= {"user", "assistant"}
        assert all(check(types.ToolParam, tool) for tool in line.get("tools", []))
        blocks = [block for message in line["messages"] for block in message["content"]]
        assert all(TypeAdapter(kinds[block["type"]]).validate_python(block) for block in blocks)
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        assert all(calls)
        assert {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"} <= set(calls)


@pytest.mark.parametrize("name", LINES)
def test_datasets_loads_every_file(name: str, tmp_path: Path) -> None:
    """Rows of one environment: the columns of JSON are found by the library."""
    from datasets import load_dataset

    chosen = [row for row in real_rows()["lookup"] if row.success is not None]
    path = tmp_path / "out.jsonl"
    assert FORMATS[name].write is not None
    number = FORMATS[name].write(chosen, path)
    if number:
        loaded = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        assert len(loaded) == number


def test_trl_renders_messages_and_tools(tmp_path: Path) -> None:
    from trl import apply_chat_template, is_conversational

    for line in records(exported("trl-sft", tmp_path)):
        assert is_conversational(line)
        tools = json.loads(line["tools"])
        assert all(tool["type"] == "function" and tool["function"]["name"] for tool in tools)
        text = apply_chat_template({"messages": line["messages"]}, tokenizer_of_bytes(), tools=tools or None)["text"]
        assert all(message["content"] in text for message in line["messages"])


def asked(variable: str, script: str, *arguments: Path) -> Any:
    """What a script prints as JSON in the interpreter that an environment variable names."""
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no interpreter; `make test-adapters` sets it")
    done = subprocess.run(
        [python, "-c", textwrap.dedent(script), *map(str, arguments)], capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout.decode().splitlines()[-1])


def spoken() -> list[list[int]]:
    """Of each row how many messages beside the system's, and how many calls."""
    return [
        [sum(m.role != "system" for m in row.messages), sum(len(m.tool_calls) for m in row.messages)] for row in rows()
    ]


@pytest.mark.adapters
def test_inspect_takes_messages_of_chat(tmp_path: Path) -> None:
    script = """
        import asyncio, json, sys
        from inspect_ai.model import messages_from_openai
        found = []
        for line in open(sys.argv[1]):
            messages = asyncio.run(messages_from_openai(json.loads(line)["messages"]))
            spoken = [m for m in messages if m.role != "system"]
            found.append([len(spoken), sum(len(m.tool_calls or []) for m in spoken if m.role == "assistant")])
        print(json.dumps(found))
    """
    assert asked("INSPECT_PYTHON", script, exported("openai-chat", tmp_path)) == spoken()


@pytest.mark.adapters
def test_verifiers_loads_results_and_traces(tmp_path: Path) -> None:
    script = """
        import json, sys
        from pathlib import Path
        from verifiers.legacy.types import Tool
        from verifiers.legacy.utils.save_utils import load_outputs
        from verifiers.v1.episode import WireEpisode
        from verifiers.v1.types import Tool as NewTool
        folder = Path(sys.argv[1])
        outputs = load_outputs(folder)
        for one in outputs:
            for tool in one["tool_defs"]:
                Tool.model_validate(tool)
        lines = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
        for line in lines:
            WireEpisode.model_validate({**line, "traces": []})
            for trace in line["traces"]:
                for tool in trace["tools"]:
                    NewTool.model_validate(tool)
        print(json.dumps([len(outputs), len(lines)]))
    """
    exported("verifiers", tmp_path).rename(tmp_path / "results.jsonl")
    exported("verifiers-v1", tmp_path).rename(tmp_path / "traces.jsonl")
    assert asked("VERIFIERS_PYTHON", script, tmp_path) == [len(rows()), len(rows())]

"""Functions under a common name, as Codex offers its sub-agents."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from recording import policy_for_tests, served

from agentrl.recorder import responses
from agentrl.recorder.wire import read
from agentrl.schemas.trajectory import Message, Role, ToolCall

REQUESTS = Path(__file__).parent / "harness/codex_par.jsonl"


def recorded() -> dict[str, Any]:
    bodies = (json.loads(line)["body"] for line in REQUESTS.read_text().splitlines())
    return next(body for body in bodies if isinstance(body, dict) and body.get("tools"))


def test_the_policy_reads_functions_of_a_namespace_by_flat_names() -> None:
    body = recorded()
    [namespace] = [tool for tool in body["tools"] if tool["type"] == "namespace"]
    asked = read(responses.REQUEST, json.dumps(body).encode()).asked()
    names = [tool["function"]["name"] for tool in json.loads(asked.tools)]
    flat = [f"{namespace['name']}__{tool['name']}" for tool in namespace["tools"]]
    assert names[-len(flat) :] == flat
    assert asked.namespaces[flat[0]] == (namespace["name"], namespace["tools"][0]["name"])
    functions = sum(tool["type"] == "function" for tool in body["tools"])
    assert (len(names), asked.dropped_tools) == (functions + len(flat), len(body["tools"]) - functions - 1)


def test_a_flat_name_that_a_function_has_is_not_taken_twice() -> None:
    function = {"type": "function", "parameters": {"type": "object"}}
    inner = [function | {"name": "b"}, {"type": "custom", "name": "c"}]
    tools = [function | {"name": "a__b"}, {"type": "namespace", "name": "a", "tools": inner}]
    body = {"model": "tiny", "input": "hi", "tools": tools}
    asked = read(responses.REQUEST, json.dumps(body).encode()).asked()
    assert (asked.namespaces, asked.dropped_tools, asked.tools.count("a__b")) == ({}, 2, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_told_in_the_clients_form_and_recognised_when_it_comes_back(tmp_path: Path, stream: bool) -> None:
    call = ToolCall(id="c", name="a__b", arguments='{"x": 1}')
    policy = policy_for_tests()
    words = iter([Message(role=Role.ASSISTANT, tool_calls=[call]), "done"])
    inner = [{"type": "function", "name": "b", "parameters": {"type": "object"}}]
    tools = [{"type": "namespace", "name": "a", "tools": inner}]
    talk: list[Any] = [{"type": "message", "role": "user", "content": "hi"}]
    with served(tmp_path / "store", policy, lambda _: next(words)) as server:
        for _ in range(2):
            body = {"model": "tiny", "input": talk, "tools": tools, "stream": stream}
            text = httpx.post(f"{server.url}/v1/responses", json=body).raise_for_status().text
            last = text.strip().rpartition("data: ")[2]
            output = json.loads(last)["response"]["output"] if stream else json.loads(text)["output"]
            if output[-1]["type"] == "function_call":
                assert (output[-1]["namespace"], output[-1]["name"]) == ("a", "b")
                result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "ok"}
                talk += [*output, result]
        [episode] = server.recorder.episodes.opened.values()
        [row] = episode.rows()
    assert [made.name for message in row.messages for made in message.tool_calls] == ["a__b"]
    assert not [tag for tag in row.tags if tag.startswith(("written_turns", "tools_dropped"))]

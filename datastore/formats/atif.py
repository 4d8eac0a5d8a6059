"""ATIF v1.7 (Agent Trajectory Interchange Format): a JSON document per trajectory, or JSON Lines of them.

An assistant message is an ``agent`` step; the tool messages after it are its ``observation.results``. Token ids and
log-probs go into ``metrics`` (``prompt_token_ids``, ``completion_token_ids``, ``logprobs``) and come back exactly,
as do the action mask and all message spans. What has no place goes under ``extra.agentrl``. Not carried: a tool
message that does not follow an agent step keeps its text but becomes a user step; run and fingerprint are the
importer's.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datastore.formats.common import (
    carried,
    file_name,
    finite,
    json_text,
    make_row,
    read_document,
    read_lines,
    strings,
    text_of,
    write_lines,
)
from schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

VERSION = "ATIF-v1.7"
_SOURCES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "agent", Role.TOOL: "user"}


def write(rows: Iterable[Trajectory], path: Path) -> int:
    """JSON Lines where ``path`` ends in ``.jsonl``, else a folder with a document per row."""
    if path.suffix == ".jsonl":
        return write_lines(path, map(_document, rows))
    path.mkdir(parents=True, exist_ok=True)
    count = 0
    for row in rows:
        document = json.dumps(_document(row), ensure_ascii=False, allow_nan=False, indent=2)
        (path / file_name(row.trajectory_id, ".json")).write_text(document, encoding="utf-8")
        count += 1
    return count


def _document(row: Trajectory) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for message in row.messages:
        if message.role is Role.TOOL and steps and steps[-1]["source"] == "agent":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            extra = {"name": message.name, "span": _span(message)}
            results.append({"source_call_id": message.tool_call_id, "content": message.content, "extra": extra})
            continue
        steps.append({"step_id": len(steps) + 1, "source": _SOURCES[message.role], "message": message.content})
        steps[-1]["extra"] = {"role": message.role.value, "reward": message.reward, "span": _span(message)}
        if message.role is Role.ASSISTANT:
            _agent_step(steps[-1], message, row)
    spanned = [message.token_end for message in row.messages if message.token_end is not None]
    rest = max(spanned, default=0)
    return {
        "schema_version": VERSION,
        "session_id": row.episode_id,
        "trajectory_id": row.trajectory_id,
        "agent": {
            "name": row.agent,
            "version": str(row.policy_version),
            "model_name": row.policy or None,
            "tool_definitions": json.loads(row.tools),
        },
        "steps": steps,
        "final_metrics": {"total_steps": len(steps), "total_completion_tokens": row.n_action_tokens},
        "extra": {
            "agentrl": carried(row) | {"tools": row.tools},
            "tokens": {"input_ids": row.input_ids, "action_mask": [int(one) for one in row.action_mask]}
            if rest < len(row.input_ids) or any(row.action_mask)
            else None,
        },
    }


def _agent_step(step: dict[str, Any], message: Message, row: Trajectory) -> None:
    if message.reasoning is not None:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [
            {
                "tool_call_id": one.id,
                "function_name": one.name,
                "arguments": one.parsed(),
                "extra": {"text": one.arguments},  # byte for byte, as it was sampled
            }
            for one in message.tool_calls
        ]
    if message.token_start is not None and message.token_end is not None and row.input_ids:
        step["metrics"] = {
            "prompt_tokens": message.token_start,
            "completion_tokens": message.token_end - message.token_start,
            "prompt_token_ids": row.input_ids[: message.token_start],
            "completion_token_ids": row.input_ids[message.token_start : message.token_end],
            "logprobs": finite(row.logprobs[message.token_start : message.token_end]),
        }


def _span(message: Message) -> list[int] | None:
    start, end = message.token_start, message.token_end
    return None if start is None or end is None else [start, end]


def read(path: Path) -> Iterator[Trajectory]:
    if path.suffix == ".jsonl":
        documents: Iterable[dict[str, Any]] = read_lines(path)
    else:
        documents = map(read_document, sorted(path.rglob("*.json")) if path.is_dir() else [path])
    for number, document in enumerate(documents):
        yield _row(number, document)


def _row(number: int, document: dict[str, Any]) -> Trajectory:
    messages: list[Message] = []
    sampled: list[tuple[list[int], list[int], list[Any]]] = []
    for step in document["steps"]:
        messages += _messages(step)
        metrics = step.get("metrics") or {}
        if metrics.get("completion_token_ids"):
            completion = metrics["completion_token_ids"]
            logprobs = metrics.get("logprobs") or [None] * len(completion)
            sampled.append((metrics.get("prompt_token_ids") or [], completion, logprobs))
    extra = dict((document.get("extra") or {}).get("agentrl") or {})
    agent = document.get("agent") or {}
    tools = extra.pop("tools", None) or json_text(agent.get("tool_definitions") or [])
    tokens = _tokens(sampled, (document.get("extra") or {}).get("tokens"), messages)
    return make_row(
        number,
        messages,
        extra=extra,
        trajectory_id=document.get("trajectory_id") or document.get("session_id"),
        episode_id=document.get("session_id"),
        env=agent.get("name"),
        policy=agent.get("model_name"),
        tools=tools,
        termination=Termination.ANSWERED,
        **tokens,
    )


def _messages(step: dict[str, Any]) -> list[Message]:
    extra = step.get("extra") or {}
    role = extra.get("role") or {"agent": "assistant"}.get(step["source"], step["source"])
    calls = [
        ToolCall(
            id=str(call["tool_call_id"]),
            name=call["function_name"],
            arguments=(call.get("extra") or {}).get("text") or json_text(call.get("arguments") or {}),
        )
        for call in step.get("tool_calls") or []
    ]
    names = {call.id: call.name for call in calls}
    start, end = extra.get("span") or (None, None)
    messages = [
        Message(
            role=Role(role),
            content=text_of(step.get("message")),
            reasoning=step.get("reasoning_content"),
            tool_calls=calls,
            reward=extra.get("reward"),
            token_start=start,
            token_end=end,
        )
    ]
    for result in (step.get("observation") or {}).get("results") or []:
        own = result.get("extra") or {}
        start, end = own.get("span") or (None, None)
        identity = strings(result.get("source_call_id"))
        messages.append(
            Message(
                role=Role.TOOL,
                content=text_of(result.get("content")),
                tool_call_id=identity,
                name=own["name"] if "name" in own else names.get(identity or ""),
                token_start=start,
                token_end=end,
            )
        )
    return messages


def _tokens(
    sampled: list[tuple[list[int], list[int], list[Any]]], whole: dict[str, Any] | None, messages: list[Message]
) -> dict[str, Any]:
    """Token columns from the steps. A prompt that does not begin with what came before belongs to another context; such
    a document comes without tokens, since its steps are not one sequence."""
    if not sampled and not whole:
        return {}
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[Any] = []
    spans = []
    for prompt, completion, values in sampled:
        if prompt[: len(ids)] != ids:
            return {}
        new = len(prompt) - len(ids)
        spans.append((len(prompt), len(prompt) + len(completion)))
        ids = prompt + completion
        mask += [False] * new + [True] * len(completion)
        logprobs += [None] * new + list(values)
    if whole:
        ids, mask = whole["input_ids"], [bool(one) for one in whole["action_mask"]]
        logprobs += [None] * (len(ids) - len(logprobs))
    elif len(spans) == (own := sum(message.role is Role.ASSISTANT for message in messages)) and own:
        places = iter(spans)
        for index, message in enumerate(messages):
            if message.role is Role.ASSISTANT:
                start, end = next(places)
                messages[index] = message.model_copy(update={"token_start": start, "token_end": end})
    return {"input_ids": ids, "action_mask": mask, "logprobs": logprobs}

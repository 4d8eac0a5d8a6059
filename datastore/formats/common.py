"""What the formats share: messages as others spell them, and rows from messages."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datastore.errors import StoreError
from schemas.json_text import MAX_DEPTH, depth, loads
from schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

CARRIED = (
    *("trajectory_id", "episode_id", "segment", "agent", "task_id", "group_id", "sample_index", "parent_id", "source"),
    *("env", "env_version", "split", "level", "prompt", "policy", "policy_version", "sampling", "reward", "success"),
    *("termination", "tags", "final_state", "tokenizer"),
)
"""Columns that go through a format's free-form field, where it has one, under the key ``agentrl``."""


def carried(row: Trajectory) -> dict[str, Any]:
    data = row.model_dump(mode="json", include={*CARRIED, "reward_components"})
    return {name: value for name, value in data.items() if value not in (None, [], "")}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON Lines file. Raises with the line number."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    value = loads(line)
                except ValueError as error:
                    raise StoreError(f"{path}:{number} is not JSON: {error}") from None
                if not isinstance(value, dict):
                    raise StoreError(f"{path}:{number} is a {type(value).__name__}, an object is needed")
                yield value


def read_document(path: Path) -> dict[str, Any]:
    try:
        value = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StoreError(f"{path} holds a {type(value).__name__}, an object is needed")
    return value


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def file_name(identity: str, suffix: str) -> str:
    """A file's name from an id, which is anybody's text: never a path, never hidden, never longer than 120 bytes.

    An id of letters, digits, ``.``, ``_`` and ``-`` stays as it is; others get a digest, so that no two are one file.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", identity)[:80].lstrip(".-") or "row"
    if name != identity or re.search(r"-[0-9a-f]{16}$", name):  # what looks like one of ours must not be another's
        name = f"{name}-{hashlib.blake2b(identity.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"
    return f"{name}{suffix}"


def text_of(content: Any) -> str:
    """Message content as text: a string, or the text parts of a list."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return json.dumps(content, ensure_ascii=False)


def json_text(value: Any) -> str:
    """Arguments and tools as JSON text: text that is JSON stays as it is, byte for byte."""
    if isinstance(value, str):
        try:
            loads(value)
        except ValueError as error:
            if depth(value) > MAX_DEPTH:
                raise StoreError(f"JSON {error!s}") from None
            return json.dumps(value, ensure_ascii=False)
        return value
    return json.dumps(value, ensure_ascii=False)


def to_chat(messages: Sequence[Message], arguments: str = "text") -> list[dict[str, Any]]:
    """OpenAI chat messages. ``arguments`` of a call are JSON ``text`` (OpenAI) or a ``dict`` (TRL)."""
    chat = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.reasoning is not None:
            one["reasoning_content"] = message.reasoning
        if message.tool_calls:
            one["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if arguments == "text" else call.parsed(),
                    },
                }
                for call in message.tool_calls
            ]
        for name in ("tool_call_id", "name"):
            if (value := getattr(message, name)) is not None:
                one[name] = value
        chat.append(one)
    return chat


def from_chat(chat: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages from OpenAI or TRL chat; arguments may be text or dict, ``developer`` is a system message."""
    messages = []
    for one in chat:
        calls = []
        for call in one.get("tool_calls") or []:
            function = call.get("function") or call
            calls.append(
                ToolCall(
                    id=str(call.get("id") or ""),
                    name=function["name"],
                    arguments=json_text(function.get("arguments", {})),
                )
            )
        role = {"developer": "system", "function": "tool"}.get(one["role"], one["role"])
        messages.append(
            Message(
                role=Role(role),
                content=text_of(one.get("content")),
                reasoning=one.get("reasoning_content") or one.get("reasoning"),
                tool_calls=calls,
                tool_call_id=one.get("tool_call_id"),
                name=one.get("name"),
            )
        )
    return messages


def make_row(number: int, messages: list[Message], extra: Mapping[str, Any] | None = None, **fields: Any) -> Trajectory:
    """A row from messages, with counts; ``extra`` is what :func:`carried` gave, and wins over ``fields``.

    Without an outcome of its own a row gets reward 0 and no success. Log-probs that are None become NaN.
    """
    prompt = next((message.content for message in messages if message.role is Role.USER), "")
    values: dict[str, Any] = {
        "trajectory_id": f"row-{number:06d}",
        "task_id": f"task-{number:06d}",
        "source": "imported",
        "env": "imported",
        "split": "train",
        "prompt": prompt,
        "reward": 0.0,
        "success": False,
        "termination": Termination.ANSWERED,
    }
    values |= {name: value for name, value in fields.items() if value is not None}
    values |= dict(extra or {})
    values.setdefault("episode_id", values["trajectory_id"])
    logprobs = [math.nan if one is None else one for one in values.get("logprobs", [])]
    mask = values.get("action_mask", [])
    return Trajectory(
        messages=messages,
        n_steps=sum(message.role is Role.ASSISTANT for message in messages),
        n_tool_calls=sum(len(message.tool_calls) for message in messages),
        n_tokens=len(mask),
        n_action_tokens=sum(mask),
        **{**values, "logprobs": logprobs},
    )


def finite(values: Sequence[float]) -> list[float | None]:
    """Log-probs for JSON, which has no NaN."""
    return [None if math.isnan(value) else value for value in values]


def split_prompt(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What comes before the first assistant message, and the rest."""
    first = next((i for i, message in enumerate(messages) if message.role is Role.ASSISTANT), len(messages))
    return list(messages[:first]), list(messages[first:])


def strings(value: Any) -> str | None:
    return None if value is None else str(value)

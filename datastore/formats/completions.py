"""Logs of chat requests with what came back: OpenHands' ``llm_completions`` (``messages``, ``response``, ``kwargs``),
litellm's callbacks (``original_response``, ``optional_params``) and payloads (``model_parameters``), and any log of
``{"request", "response"}``.

A response is a completion (``choices``, of which each is a row), a message of chat or of Anthropic, either as JSON
text, or plain text. ``finish_reason`` gives the end.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from agentrl.datastore.formats.anthropic import from_blocks
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import BESIDE
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Termination

ANSWERS = ("response", "original_response")
SETTINGS = ("kwargs", "optional_params", "model_parameters", "request")
"""Objects that may hold the tools and the model of a request."""
FINISHES = {
    "length": Termination.MAX_TOKENS,
    "max_tokens": Termination.MAX_TOKENS,
    "stop": Termination.ANSWERED,
    "end_turn": Termination.ANSWERED,
    "tool_calls": Termination.UNKNOWN,
    "tool_use": Termination.UNKNOWN,
    "function_call": Termination.UNKNOWN,
    "content_filter": Termination.UNKNOWN,
}


def asked(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """What holds the messages of a request: the record, or its ``request``."""
    request = line.get("request")
    return request if "messages" not in line and isinstance(request, dict) else line


def answer_key(line: Mapping[str, Any]) -> str | None:
    """The key that holds what came back; None if nothing did."""
    for key in ANSWERS:  # a loop takes a fifth of the time of a generator, here and below
        if line.get(key):
            return key
    return None


def with_answer_read(line: dict[str, Any]) -> dict[str, Any]:
    """The record, with what came back as an object if it is one that was written as JSON text."""
    key = answer_key(line)
    if key and isinstance(line[key], str):
        with suppress(ValueError):
            return {**line, key: loads(line[key])}
    return line


def setting(line: Mapping[str, Any], name: str) -> Any:
    """A setting of the request (``tools``, ``model``), wherever it stands."""
    if value := line.get(name):
        return value
    for key in SETTINGS:
        if isinstance(holder := line.get(key), dict) and (value := holder.get(name)):
            return value
    return None


def model_of(answer: Any) -> str | None:
    """The model that a response names."""
    return answer.get("model") if isinstance(answer, dict) else None


def completions(value: Any, notes: Notes, key: str) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Each message of a response, as chat has it, and why it ended. Raises ValueError if there is none."""
    if isinstance(value, str):
        yield {"role": "assistant", "content": value}, None
        return
    if not isinstance(value, dict):
        raise ValueError(f"{key} is a {type(value).__name__}, a completion is needed")
    if choices := value.get("choices"):
        notes.rest(value, BESIDE | {"choices", "object"}, f"{key}.")
        for choice in choices:
            notes.rest(choice, {"message", "text", "index", "finish_reason"}, f"{key}.choices.")
            answer = choice.get("message") or {"role": "assistant", "content": choice["text"]}
            yield {"role": "assistant", **answer}, choice.get("finish_reason")
    elif value.get("type") == "message" and isinstance(value.get("content"), list):
        notes.rest(value, BESIDE | {"type", "role", "content", "stop_reason"}, f"{key}.")
        for message in from_blocks([{"role": "assistant", "content": value["content"]}], notes)[0]:
            yield message, value.get("stop_reason")
    elif "content" in value or "tool_calls" in value:
        yield {"role": "assistant", **value}, None
    else:
        raise ValueError(f"{key} holds no completion, but the keys {', '.join(map(str, list(value)[:6]))}")

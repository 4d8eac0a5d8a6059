"""ATIF v1.7 (Agent Trajectory Interchange Format): a JSON document per trajectory, or JSON Lines of them.

An assistant message is an ``agent`` step; the tool messages after it are its ``observation.results``. Token ids and
log-probs go into ``metrics`` (``prompt_token_ids``, ``completion_token_ids``, ``logprobs``) and come back exactly, as
do the action mask and all message spans. ``agent`` gives name (agent), model (policy; else the first step that names
one) and tools. What has no field of its own goes under ``extra.agentrl``. Steps with ``is_copied_context`` were said
in another document and are marked as such by a remark. Completion ids without prompt ids are no sequence to train on:
such a document comes without tokens, and so does one whose steps are not one sequence.

A tool message that does not follow an agent step is a user step. Not read:
``subagent_trajectories`` (documents of their own), ``notes``, times of steps after the first, ``cached_tokens``.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.datastore.formats.files import file_name, is_lines, write_lines
from agentrl.datastore.formats.messages import json_text, text_of, tools_text
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, count, moment
from agentrl.datastore.formats.rows import carried, finite, make_row, spoken
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.valid import functions
from agentrl.schemas.trajectory import Message, Role, Trajectory

VERSION = "ATIF-v1.7"
_SOURCES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "agent", Role.TOOL: "user"}


def fits(head: Any) -> int:
    if not isinstance(head, dict) or not isinstance(head.get("steps"), list):
        return 0
    return 2 if str(head.get("schema_version", "")).startswith("ATIF") or "agent" in head else 0


def write(rows: Iterable[Trajectory], path: Path) -> int:
    """JSON Lines if the name says so, else a folder with a document per row."""
    if is_lines(path):
        return write_lines(path, map(_document, rows))
    path.mkdir(parents=True, exist_ok=True)
    count = 0
    for row in rows:
        document = json.dumps(_document(row), ensure_ascii=False, allow_nan=False, indent=2)
        (path / file_name(count, row.trajectory_id, ".json")).write_text(document, encoding="utf-8")
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
        if message.role is Role.TOOL:
            steps[-1]["extra"] |= {"tool_call_id": message.tool_call_id, "name": message.name}
        if message.role is Role.ASSISTANT:
            _agent_step(steps[-1], message, row)
    return {
        "schema_version": VERSION,
        "session_id": row.episode_id,
        "trajectory_id": row.trajectory_id,
        "agent": {
            "name": row.agent,
            "version": str(row.policy_version),
            "model_name": row.policy or None,
            "tool_definitions": functions(row.tools),
        },
        "steps": steps,
        "final_metrics": {"total_steps": len(steps), "total_completion_tokens": row.n_action_tokens},
        "extra": {
            "agentrl": carried(row) | {"tools": row.tools},
            "tokens": {
                "input_ids": row.input_ids,
                "action_mask": [int(is_action) for is_action in row.action_mask],
                "logprobs": finite(row.logprobs),
            }
            if row.input_ids
            else None,
        },
    }


def _agent_step(step: dict[str, Any], message: Message, row: Trajectory) -> None:
    if message.reasoning is not None:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [
            {
                "tool_call_id": call.id,
                "function_name": call.name,
                "arguments": call.parsed(),
                "extra": {"text": call.arguments},  # byte for byte, as it was sampled
            }
            for call in message.tool_calls
        ]
    if message.token_start is not None and message.token_end is not None and row.input_ids:
        step["metrics"] = {
            "prompt_tokens": message.token_start,
            "completion_tokens": message.token_end - message.token_start,
            "prompt_token_ids": row.input_ids[: message.token_start],
            "completion_token_ids": row.input_ids[message.token_start : message.token_end],
        }
        logprobs = finite(row.logprobs[message.token_start : message.token_end])
        if None not in logprobs:  # ATIF has no gap among them; ``extra.tokens`` has
            step["metrics"]["logprobs"] = logprobs


def _span(message: Message) -> list[int] | None:
    start, end = message.token_start, message.token_end
    return None if start is None or end is None else [start, end]


_KNOWN = frozenset({"schema_version", "session_id", "trajectory_id", "agent", "steps", "extra"})
_KNOWN_AGENT = frozenset({"name", "model_name", "tool_definitions"})
_KNOWN_STEP = frozenset(
    {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics", "extra"}
    | {"is_copied_context"}
)
_KNOWN_METRICS = frozenset(
    {"prompt_token_ids", "completion_token_ids", "logprobs", "prompt_tokens", "completion_tokens", "cost_usd"}
)
_TOTALS = ("total_prompt_tokens", "total_completion_tokens", "total_cost_usd")
_KNOWN_EXTRA = frozenset({"role", "reward", "span", "name", "tool_call_id"})
_KNOWN_CALL = frozenset({"tool_call_id", "function_name", "arguments", "extra"})
_KNOWN_RESULT = frozenset({"source_call_id", "content", "extra"})
_OURS = frozenset({"agentrl", "tokens"})


def read(source: Source) -> Iterator[Row]:
    def convert(document: dict[str, Any]) -> Iterator[Row]:
        yield _row(source, document)

    return each(source, source.records(), convert)


def _row(source: Source, document: dict[str, Any]) -> Row:
    notes = source.notes
    extra = dict((document.get("extra") or {}).get("agentrl") or {})
    agent = document.get("agent") or {}
    if not extra:  # ours has counts there, which follow from the rest
        notes.rest(document, _KNOWN | {"final_metrics"})
        notes.rest(document.get("final_metrics") or {}, frozenset(_TOTALS), "final_metrics.")
        notes.rest(agent, _KNOWN_AGENT, "agent.")
    notes.rest(document.get("extra") or {}, _OURS, "extra.")
    models = [agent.get("model_name"), *(step.get("model_name") for step in document["steps"])]
    policy = next((model for model in models if model), None)
    messages: list[dict[str, Any]] = []
    sampled: list[tuple[list[int] | None, list[int], list[Any], int]] = []
    for step in document["steps"]:
        notes.rest(step, _KNOWN_STEP | {"model_name"} if step.get("model_name") == policy else _KNOWN_STEP, "steps.")
        if step.get("is_copied_context"):
            notes.remark("steps copied from another document (is_copied_context)")
        metrics = step.get("metrics") or {}
        if not extra:
            notes.rest(metrics, _KNOWN_METRICS, "steps.metrics.")
        if completion := metrics.get("completion_token_ids"):
            logprobs = metrics.get("logprobs") or [None] * len(completion)
            sampled.append((metrics.get("prompt_token_ids"), completion, logprobs, len(messages)))
        messages += _messages(step, notes)
    tools = extra.pop("tools", None) or tools_text(agent.get("tool_definitions"))
    own = (document.get("extra") or {}).get("tokens")
    tokens = own and {name: own[name] for name in ("input_ids", "action_mask", "logprobs") if name in own}
    return make_row(
        messages,
        source="atif",
        extra=extra,
        origin=_origin(document, notes),
        trajectory_id=document.get("trajectory_id") or document.get("session_id"),
        episode_id=document.get("session_id"),
        agent=agent.get("name"),
        policy=policy,
        tools=tools,
        **(tokens or _tokens(sampled, messages, source)),
    )


def _origin(document: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """The time of the first step, and the totals of the document, else the sums over its steps."""
    times = (moment(step.get("timestamp")) for step in document["steps"])
    summed, total = Calls(notes), Calls(notes)
    for step in document["steps"]:
        if not step.get("is_copied_context"):
            metrics = step.get("metrics") or {}
            summed.tokens(count(metrics.get("prompt_tokens")), count(metrics.get("completion_tokens")))
            summed.paid(metrics.get("cost_usd"), "steps.metrics.cost_usd")
    final = document.get("final_metrics") or {}
    total.tokens(*(count(final.get(name)) for name in _TOTALS[:2]))
    total.paid(final.get(_TOTALS[2]), "final_metrics.total_cost_usd")
    return {"source_time": next((time for time in times if time), None)} | summed.fields() | total.fields()


def _messages(step: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    extra = step.get("extra") or {}
    notes.rest(extra, _KNOWN_EXTRA, "steps.extra.")
    for call in step.get("tool_calls") or []:
        notes.rest(call, _KNOWN_CALL, "steps.tool_calls.")
        notes.rest(call.get("extra") or {}, frozenset({"text"}), "steps.tool_calls.extra.")
    notes.rest(step.get("observation") or {}, frozenset({"results"}), "steps.observation.")
    role = extra.get("role") or {"agent": "assistant"}.get(step["source"], step["source"])
    calls = [
        {
            "id": str(call["tool_call_id"]),
            "name": call["function_name"],
            "arguments": (call.get("extra") or {}).get("text") or json_text(call.get("arguments") or {}),
        }
        for call in step.get("tool_calls") or []
    ]
    names = {call["id"]: call["name"] for call in calls}
    message = {
        "role": role,
        "content": text_of(step.get("message"), notes, "steps.message."),
        "reward": extra.get("reward"),
        **_place(extra),
    }
    if step.get("reasoning_content") is not None:
        message["reasoning"] = step["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message |= {"tool_call_id": extra.get("tool_call_id"), "name": extra.get("name")}
    messages = [message]
    for result in (step.get("observation") or {}).get("results") or []:
        own = result.get("extra") or {}
        identity = spoken(result.get("source_call_id"))
        name = own["name"] if "name" in own else names.get(identity or "")
        notes.rest(result, _KNOWN_RESULT, "steps.observation.results.")
        notes.rest(own, _KNOWN_EXTRA, "steps.observation.results.extra.")
        content = text_of(result.get("content"), notes, "steps.observation.results.content.", data=True)
        messages.append({"role": "tool", "content": content, "tool_call_id": identity, "name": name, **_place(own)})
    return messages


def _place(extra: dict[str, Any]) -> dict[str, Any]:
    start, end = extra.get("span") or (None, None)
    return {"token_start": start, "token_end": end}


def _tokens(
    sampled: list[tuple[list[int] | None, list[int], list[Any], int]], messages: list[dict[str, Any]], source: Source
) -> dict[str, Any]:
    """Token columns from the steps, and spans of the messages that were sampled. Nothing if they are not one
    sequence."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[Any] = []
    spans = []
    for prompt, completion, values, number in sampled:
        if not prompt:
            source.notes.remark("completion ids without prompt ids: the row comes without tokens")
            return {}
        if prompt[: len(ids)] != ids:
            source.notes.remark("token ids of the steps are not one sequence: the row comes without tokens")
            return {}
        new = len(prompt) - len(ids)
        spans.append((number, len(prompt), len(prompt) + len(completion)))
        ids = prompt + completion
        mask += [False] * new + [True] * len(completion)
        logprobs += [None] * new + list(values)
    for number, start, end in spans:
        messages[number] |= {"token_start": start, "token_end": end}
    return {"input_ids": ids, "action_mask": mask, "logprobs": logprobs}

"""Codex rollouts, JSON Lines: ``~/.codex/sessions/<year>/<month>/<day>/rollout-*.jsonl``. Read only.

``response_item`` holds the conversation, in the items of OpenAI Responses (:mod:`responses`); the instructions of
``session_meta`` are the first system message, and ``developer`` messages are system messages too. After ``compacted`` a
new row of the episode begins with its ``replacement_history``. The summary before it is left out: it answers a prompt
that is not in the file. A call into a ``namespace`` of tools has its name in front, ``<namespace>__<name>``, as
the recorder has it. A rollout of
a sub-agent is a row of the episode of its parent thread, tagged ``kind:subagent``.

``turn_context.model`` is the policy, ``token_usage_record`` (before it came: the last ``token_count``) the usage. The
last ``task_complete`` with an error is an ``infra_error``, ``max_context`` if the window was exceeded, and
``turn_aborted`` is ``cancelled``. Rows are unscored.

Cannot carry: schemas of the tools (not in the file), encrypted reasoning, whether a call failed (its output says it in
words), ids. Lines of other types (``event_msg`` repeats items, ``world_state``) are counted by type.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, count, moment
from agentrl.datastore.formats.responses import from_items
from agentrl.datastore.formats.rows import make_row
from agentrl.datastore.formats.sessions.claude_code import SUBAGENT
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.trajectory import Termination

_TYPES = frozenset({"session_meta", "response_item", "event_msg", "turn_context", "compacted", "world_state"})
_KNOWN = frozenset({"type", "payload"})
_KNOWN_META = frozenset(
    {"id", "session_id", "timestamp", "base_instructions", "instructions", "forked_from_id", "source"}
)
_ENDS = ("task_complete", "turn_aborted", "task_started", "error")


def fits(head: Any) -> int:
    if not isinstance(head, dict) or not isinstance(head.get("payload"), dict):
        return 0
    return 3 if head.get("type") in _TYPES or "ordinal" in head else 0


@dataclass
class _Context:
    """What the model had between two compactions."""

    first: int
    items: list[dict[str, Any]] = field(default_factory=list)
    spent: list[dict[str, Any]] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    times: list[Any] = field(default_factory=list)


@dataclass
class _Rollout:
    contexts: list[_Context]
    meta: dict[str, Any] = field(default_factory=dict)
    end: Termination | None = None
    total: dict[str, Any] | None = None
    """Usage of the whole session, in files without records of each call."""


def read(source: Source) -> Iterator[Row]:
    rollout = _Rollout([_Context(1)])

    def take(record: dict[str, Any]) -> Iterator[Row]:
        _take(record, rollout, source)
        yield from ()

    yield from each(source, source.records(), take)
    for segment, context in enumerate(rollout.contexts):
        source.number = context.first
        yield from each(source, [rollout.meta], lambda meta, n=segment: _row(meta, n, rollout, source.notes))  # type: ignore[misc]


def _take(record: dict[str, Any], rollout: _Rollout, source: Source) -> None:
    kind, payload = record["type"], record["payload"]
    context, notes = rollout.contexts[-1], source.notes
    if not isinstance(payload, dict):
        raise ValueError(f"payload is a {type(payload).__name__}, an object is needed")
    match kind:
        case "session_meta":
            if not rollout.meta:  # a fork repeats that of the thread it came from
                rollout.meta = payload
            notes.rest(payload, _KNOWN_META, "session_meta.")
        case "turn_context":
            if isinstance(payload.get("model"), str):
                context.models.append(payload["model"])
            notes.rest(payload, {"model"}, "turn_context.")
        case "response_item":
            if not context.items and len(rollout.contexts) == 1:
                context.first = source.number
            context.items.append(payload)
            context.times.append(record.get("timestamp"))
        case "compacted":
            _compact(payload, rollout, source)
        case "token_usage_record":
            context.spent.append(payload.get("usage") or {})
            notes.rest(payload, {"usage"}, "token_usage_record.")
            notes.rest(context.spent[-1], {"input_tokens", "output_tokens"}, "token_usage_record.usage.")
        case "event_msg":
            _event(payload, rollout, notes)
        case _:
            notes.ignored[f"lines of type {kind}"] += 1
    notes.rest(record, _KNOWN | {"timestamp"} if kind == "response_item" else _KNOWN)


def _compact(payload: dict[str, Any], rollout: _Rollout, source: Source) -> None:
    """Begin a new context, without the summary in the old one."""
    items, history = rollout.contexts[-1].items, payload.get("replacement_history")
    last = items[-1] if items else {}
    if last.get("type") == "message" and last.get("role") == "assistant":
        source.notes.remark("summaries before a compaction, whose prompt is not in the file, left out")
        del items[-1]
    if not isinstance(history, list):
        source.notes.remark("compactions that do not say what they kept: the summary alone is carried")
        history = [{"type": "message", "role": "user", "content": payload.get("message") or ""}]
    models = rollout.contexts[-1].models[-1:]
    rollout.contexts.append(_Context(source.number, list(history), models=models))
    source.notes.rest(payload, {"message", "replacement_history"}, "compacted.")


def _event(payload: dict[str, Any], rollout: _Rollout, notes: Notes) -> None:
    kind, info = payload.get("type"), payload.get("info")
    if kind == "token_count" and isinstance(info, dict) and isinstance(info.get("total_token_usage"), dict):
        rollout.total = info["total_token_usage"]
    if kind in _ENDS:
        rollout.end = _end(payload)
    notes.ignored[f"lines of type event_msg/{kind}"] += 1


def _end(event: dict[str, Any]) -> Termination | None:
    if event["type"] == "turn_aborted":
        return Termination.CANCELLED
    if event["type"] == "task_started":
        return Termination.UNKNOWN  # until it is over
    if error := event.get("error") or (event if event["type"] == "error" else None):
        return Termination.MAX_CONTEXT if "context_window" in str(error) else Termination.INFRA_ERROR
    return None


def _row(meta: dict[str, Any], segment: int, rollout: _Rollout, notes: Notes) -> Iterator[Row]:
    context = rollout.contexts[segment]
    thread = str(meta.get("id") or meta.get("session_id") or "unnamed")
    given = meta.get("base_instructions") or meta.get("instructions")
    if isinstance(given, dict) and not segment:
        notes.rest(given, {"text"}, "session_meta.base_instructions.")
    system = given.get("text") if isinstance(given, dict) else given
    items = [{"type": "message", "role": "system", "content": system}] if isinstance(system, str) and system else []
    messages = from_items([*items, *map(_with_namespace, context.items)], notes)
    if not any(message["role"] != "system" for message in messages):
        notes.remark("sessions in which nothing was said")
        return
    last = segment == len(rollout.contexts) - 1
    helper = isinstance(meta.get("source"), dict) and "subagent" in meta["source"]
    times = [meta.get("timestamp")] if not segment else context.times
    episode = str(meta.get("session_id") or thread)
    yield make_row(
        messages,
        source="codex",
        origin={"source_id": thread, "source_time": next(filter(None, map(moment, times)), None)}
        | _spent(context, rollout, segment),
        trajectory_id=f"{thread}-{segment}",
        episode_id=episode,
        segment=segment,
        agent="subagent" if helper else None,
        tags=[SUBAGENT] if helper else None,
        policy=context.models[-1] if context.models else None,
        termination=rollout.end if last else Termination.UNKNOWN,
    )


def _with_namespace(item: dict[str, Any]) -> dict[str, Any]:
    """A call under the name of its namespace."""
    if item.get("type") != "function_call" or not isinstance(name := item.get("namespace"), str) or not name:
        return item
    return {key: value for key, value in item.items() if key != "namespace"} | {"name": f"{name}__{item['name']}"}


def _spent(context: _Context, rollout: _Rollout, segment: int) -> dict[str, Any]:
    """Usage, in which what was cached is part of the prompt."""
    calls = Calls(Notes())
    records = context.spent
    if not any(other.spent for other in rollout.contexts) and rollout.total and not segment:
        records = [rollout.total]
    for usage in records:
        calls.tokens(count(usage.get("input_tokens")), count(usage.get("output_tokens")))
    return calls.fields()

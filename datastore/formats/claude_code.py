"""Claude Code sessions, JSON Lines: ``~/.claude/projects/<project>/<session>.jsonl``. Read only.

A session is a row. Lines of type ``user`` and ``assistant`` hold messages of the Anthropic API; lines of one
``message.id`` are pieces of one message. After a ``compact_boundary`` a new segment of the same episode begins, and
each subagent (``isSidechain``, by ``agentId``) is a segment with the agent ``subagent``. ``message.model`` is the
policy, ``tool_result`` with ``is_error`` a tool error; the last ``stop_reason`` gives the end. A message of the model
``<synthetic>`` was made by the program; the row that ends in an API error (``isApiErrorMessage``) is an
``infra_error``. Rows are unscored.

Cannot carry: the system prompt and tool schemas (not in the file), ``toolUseResult``, signatures, times after the
first. Lines of
other types (``summary``, ``system``, ``file-history-snapshot``, ``progress``) are counted by type. A session that
was rewound has its abandoned lines in the file too; they stay, in the file's order.
"""

import re
from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats.anthropic import STOPS, from_blocks
from agentrl.datastore.formats.origin import Calls, moment
from agentrl.datastore.formats.parts import between, in_parts
from agentrl.datastore.formats.rows import make_row, termination
from agentrl.datastore.formats.source import Row, Source, Stretch, each
from agentrl.schemas.trajectory import Termination

_SESSION = re.compile(rb'"sessionId"\s*:\s*("(?:[^"\\]|\\.)*"|[^\s,}]+)')
_KNOWN = frozenset(
    {"type", "message", "sessionId", "isSidechain", "agentId", "isApiErrorMessage", "subtype", "costUSD"}
)
_KNOWN_MESSAGE = frozenset({"role", "content", "id", "type", "model", "stop_reason", "usage"})


def fits(head: Any) -> int:
    if not isinstance(head, dict) or "type" not in head:
        return 0
    if head["type"] in ("user", "assistant") and isinstance(head.get("message"), dict) and "sessionId" in head:
        return 3
    others = ("summary", "file-history-snapshot", "queue-operation", "system", "progress")
    return 2 if head["type"] in others and {"leafUuid", "messageId", "sessionId"} & head.keys() else 0


def read(source: Source) -> Iterator[Row]:
    return in_parts(source, cut, _sessions)


def cut(source: Source) -> Iterator[Stretch] | None:
    """Parts of whole sessions."""
    return between(source, _session)


def _session(line: bytes) -> list[bytes]:
    """The session of a line, found without reading all of it: inside a text the quotes have backslashes."""
    if match := _SESSION.search(line):
        return [match[1]]
    return [b""] if b'"message"' in line else []


def _sessions(source: Source) -> Iterator[Row]:
    parts: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    compacted: dict[tuple[str, str], int] = {}
    for line in source.records():
        if not isinstance(line, dict):
            source.notes.refuse(source.place, f"is a {type(line).__name__}, an object is needed")
            continue
        agent = str(line.get("agentId") or "subagent") if line.get("isSidechain") else ""
        key = (str(line.get("sessionId")), agent)
        if line.get("subtype") == "compact_boundary":
            compacted[key] = compacted.get(key, 0) + 1
        if line.get("type") not in ("user", "assistant") or not isinstance(line.get("message"), dict):
            source.notes.ignored[f"lines of type {line.get('type')}"] += 1
            continue
        source.notes.rest(line, _KNOWN)
        parts.setdefault((*key, compacted.get(key, 0)), []).append(line)
    segments: dict[str, int] = {}
    for session, agent, part in list(parts):
        lines = parts.pop((session, agent, part))
        segment = segments[session] = segments.get(session, -1) + 1
        source.record = lines
        yield from each(source, [lines], lambda rows, s=session, a=agent, n=segment: [_row(source, rows, s, a, n)])  # type: ignore[misc]


def _origin(lines: list[dict[str, Any]], session: str, source: Source) -> dict[str, Any]:
    """The session, the time of its first line, and what its messages used. Pieces of one message repeat its usage."""
    spent = Calls(source.notes)
    last: dict[Any, Any] = {}
    for number, line in enumerate(lines):
        spent.paid(line.get("costUSD"), "costUSD")
        if usage := line["message"].get("usage"):
            last[line["message"].get("id") or number] = usage
    for usage in last.values():
        spent.usage(usage, "message.usage.")
    times = (moment(line.get("timestamp")) for line in lines)
    return {"source_id": session, "source_time": next((time for time in times if time), None)} | spent.fields()


def _row(source: Source, lines: list[dict[str, Any]], session: str, agent: str, segment: int) -> Row:
    chat: list[dict[str, Any]] = []
    last = None
    for line in lines:
        message = line["message"]
        source.notes.rest(message, _KNOWN_MESSAGE, "message.")
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        if message.get("id") and message.get("id") == last:
            chat[-1]["content"] += blocks
        else:
            chat.append({"role": message.get("role") or line["type"], "content": list(blocks)})
        last = message.get("id")
    messages, errors = from_blocks(chat, source.notes)
    models = [line["message"].get("model") for line in lines]
    end = termination(STOPS, lines[-1]["message"].get("stop_reason"), source.notes)
    failed = bool(lines[-1].get("isApiErrorMessage"))
    return make_row(
        messages,
        source="claude-code",
        origin=_origin(lines, session, source),
        trajectory_id=f"{session}-{segment}",
        episode_id=session,
        segment=segment,
        agent="subagent" if agent else None,
        policy=next((model for model in models if model and model != "<synthetic>"), None),
        n_tool_errors=errors,
        termination=Termination.INFRA_ERROR if failed else end,
    )

"""What ``claude -p --output-format stream-json --verbose`` prints, JSON Lines. Read only.

Lines ``assistant`` and ``user`` are messages as in a session (:mod:`claude_code`); those with ``parent_tool_use_id``
are of the sub-agent that this call began, and its row is the child of the row with the call. ``result`` says how the
run ended (``terminal_reason``, ``subtype``, ``is_error``; never ``subtype`` alone) and what it used: usage is that of
the main agent and cost that of all, so both are in the first row. After a ``compact_boundary`` a new row begins, with
what the compaction kept. The session file of the same run has more: import one of the two.

Cannot carry: the task, which the program does not print, the system prompt, names of tools, times of answers, and usage
of single messages, which is not final; lines of type ``system`` (retries, tasks, hooks) and parts of answers
(``stream_event``) are counted by type.
"""

from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats.anthropic import STOPS
from agentrl.datastore.formats.origin import Calls
from agentrl.datastore.formats.rows import termination
from agentrl.datastore.formats.sessions.claude_code import Spoken, rows_of
from agentrl.datastore.formats.sessions.conversations import SessionLine, conversations, is_boundary
from agentrl.datastore.formats.source import Row, Source
from agentrl.schemas.trajectory import Termination

_TYPES = frozenset({"system", "assistant", "user", "result", "stream_event"})
_KNOWN_RESULT = frozenset(
    {"type", "subtype", "is_error", "terminal_reason", "stop_reason", "usage", "total_cost_usd", "session_id"}
)
_RENAMED = frozenset({"session_id", "parent_tool_use_id", "subagent_type", "tool_use_result"})
_ENDS = {
    "max_turns": Termination.MAX_STEPS,
    "error_max_turns": Termination.MAX_STEPS,
    "prompt_too_long": Termination.MAX_CONTEXT,
    "error_max_budget_usd": Termination.MAX_TOKENS,
    "error_during_execution": Termination.INFRA_ERROR,
}


def fits(head: Any) -> int:
    return 3 if isinstance(head, dict) and head.get("type") in _TYPES and {"session_id", "uuid"} <= head.keys() else 0


def read(source: Source) -> Iterator[Row]:
    chains: dict[tuple[str, str], list[SessionLine]] = {}
    kinds: dict[str, str] = {}
    results: dict[str, list[dict[str, Any]]] = {}
    for record in source.records():
        if not isinstance(record, dict):
            source.notes.refuse(source.place, f"is a {type(record).__name__}, an object is needed")
            continue
        session, agent = str(record.get("session_id")), str(record.get("parent_tool_use_id") or "")
        if record.get("type") == "result":
            results.setdefault(session, []).append(record)
            continue
        if isinstance(kind := record.get("subagent_type"), str):
            kinds[agent] = kind
        line = SessionLine(source.number, _as_session(record, session, agent))
        if not line.speaks:
            part = f"/{record['subtype']}" if isinstance(record.get("subtype"), str) else ""
            source.notes.ignored[f"lines of type {record.get('type')}{part}"] += 1
        if line.speaks or is_boundary(record):
            chains.setdefault((session, agent), []).append(line)
    yield from rows_of(_spoken(source, chains, kinds, results))


def _as_session(record: dict[str, Any], session: str, agent: str) -> dict[str, Any]:
    """A line in the spelling of a session file."""
    line = {key: value for key, value in record.items() if key not in _RENAMED}
    line |= {"sessionId": session, "toolUseResult": record.get("tool_use_result")}
    return line | ({"isSidechain": True, "agentId": agent} if agent else {})


def _spoken(
    source: Source,
    chains: dict[tuple[str, str], list[SessionLine]],
    kinds: dict[str, str],
    results: dict[str, list[dict[str, Any]]],
) -> list[Spoken]:
    """Conversations of all agents. What the result says is that of the main one."""
    spoken = []
    for (session, agent), lines in chains.items():
        talks = [
            Spoken(source, session, agent, talk, {"agentType": kinds[agent]} if agent in kinds else {}, {})
            for talk in sorted(conversations(lines), key=lambda talk: talk.first)
        ]
        if not agent and talks:
            source.notes.remark("runs without their task, which is not printed")
            ended = results.pop(session, [])
            talks[0].spent, talks[-1].end = _spent(ended, source), _end(ended, source)
        spoken += talks
    for lost in results.values():
        source.notes.ignored["results of runs without a message"] += len(lost)
    return sorted(spoken, key=lambda talk: talk.conversation.first)


def _spent(results: list[dict[str, Any]], source: Source) -> dict[str, Any]:
    """Usage of all turns, and their cost, which later results hold too."""
    if not results:
        source.notes.remark("runs that were cut: they have no result")
    spent = Calls(source.notes)
    for result in results:
        spent.usage(result.get("usage"), "result.usage.")
        source.notes.rest(result, _KNOWN_RESULT, "result.")
    spent.paid(results[-1].get("total_cost_usd") if results else None, "result.total_cost_usd")
    return spent.fields()


def _end(results: list[dict[str, Any]], source: Source) -> Termination | None:
    if not results:
        return None
    result = results[-1]
    if isinstance(reason := result.get("terminal_reason"), str) and reason in _ENDS:
        return _ENDS[reason]
    if (subtype := result.get("subtype")) != "success":
        return termination(_ENDS, subtype, source.notes)
    if result.get("is_error"):
        return Termination.INFRA_ERROR
    return termination(STOPS, result.get("stop_reason"), source.notes)

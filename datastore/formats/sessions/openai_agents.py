"""Sessions of the OpenAI Agents SDK, in the SQLite database of its ``SQLiteSession`` (``SQLiteSession("id",
"conversations.db")``; a table with the columns ``session_id`` and ``message_data``). Read only. The SDK writes its
traces to no file: those go to a server, or through OpenTelemetry (:mod:`otel`).

A session is a row. Its items are those of OpenAI Responses (:mod:`responses`); the time is that of its first item. A
session of ``AdvancedSQLiteSession`` has a row for each branch, ``main`` first, with the usage of the branch's own turns
(``turn_usage``). Rows are unscored.

Cannot carry: instructions, tools and model (not in the file), names of agents after a hand-off, ids of items, times
after the first. Items of an ``EncryptedSession`` are refused.
"""

import json
from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, moment
from agentrl.datastore.formats.responses import from_items
from agentrl.datastore.formats.rows import make_row
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.sqlite import columns_of, quoted, rows_of

_ITEMS = frozenset({"id", "session_id", "message_data"})
_BRANCHES = frozenset({"session_id", "message_id", "branch_id", "sequence_number"})
_USAGE = frozenset({"session_id", "branch_id", "input_tokens", "output_tokens"})


def fits(source: Source) -> int:
    return 3 if source.kind == "sqlite" and _table(source, _ITEMS) else 0


def _table(source: Source, columns: frozenset[str]) -> str | None:
    """The first table that has these columns."""
    return next((name for name, own in sorted(columns_of(source.path).items()) if columns <= own), None)


def read(source: Source) -> Iterator[Row]:
    items, branches, usage = (_table(source, columns) for columns in (_ITEMS, _BRANCHES, _USAGE))
    assert items is not None
    query = f"select *, 'main' as branch from {quoted(items)} order by session_id, id"
    if branches:
        query = (
            f"select items.*, parts.branch_id as branch from {quoted(items)} items join {quoted(branches)} parts on "
            "parts.message_id = items.id order by items.session_id, parts.branch_id <> 'main', parts.branch_id, "
            "parts.sequence_number, items.id"
        )
    spent = _spent(source, usage) if usage else {}
    segment, session = 0, None
    for number, rows in enumerate(_grouped(rows_of(source.path, source.name, query, source.limit)), 1):
        source.number = number
        segment, session = (segment + 1 if rows[0]["session_id"] == session else 0), rows[0]["session_id"]
        yield from each(source, [rows], lambda rows, n=segment: _row(rows, n, spent, source.notes))  # type: ignore[misc]


def _grouped(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The items of each branch of each session."""
    group: list[dict[str, Any]] = []
    for row in rows:
        if group and (row["session_id"], row["branch"]) != (group[0]["session_id"], group[0]["branch"]):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _spent(source: Source, table: str) -> dict[tuple[str, str], Calls]:
    """Usage of each branch of each session."""
    spent: dict[tuple[str, str], Calls] = {}
    for row in rows_of(source.path, source.name, f"select * from {quoted(table)}", source.limit):
        calls = spent.setdefault((row["session_id"], row["branch_id"]), Calls(source.notes))
        calls.usage({name: row[name] for name in ("input_tokens", "output_tokens")}, "turn_usage.")
    return spent


def _row(rows: list[dict[str, Any]], segment: int, spent: dict[tuple[str, str], Calls], notes: Notes) -> Iterator[Row]:
    session, branch = str(rows[0]["session_id"]), str(rows[0]["branch"])
    items = [json.loads(row["message_data"]) for row in rows]
    if any("__enc__" in item for item in items):
        raise ValueError("is encrypted (EncryptedSession): decrypt it with the SDK and its key")
    usage = spent.get((rows[0]["session_id"], rows[0]["branch"]))
    yield make_row(
        from_items(items, notes),
        source="openai-agents",
        origin={"source_id": session, "source_time": moment(rows[0].get("created_at"))}
        | (usage.fields() if usage else {}),
        trajectory_id=f"{session}-{segment}",
        episode_id=session,
        segment=segment,
        tags=[f"branch:{branch}"] if branch != "main" else None,
    )

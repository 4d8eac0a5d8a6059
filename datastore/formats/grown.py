"""Sessions that have grown since they were imported: only what is new comes in.

A row that the buffer has already is left out. A row that goes on from an earlier one is added, and the earlier one is
removed after it, unless an artifact or an annotation names it: then both stay. Sessions are known by their ids, which
no other session has, wherever their files are. In databases of frameworks users choose the ids, so that a session is
known by its file too.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from agentrl.datastore.errors import NoBufferError
from agentrl.datastore.formats.columns import with_column

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

FORMATS_OF_SESSIONS = ("claude-code", "codex", "gemini-cli", "langgraph", "openai-agents", "opencode")
_CHOSEN_BY_USERS = ("langgraph", "openai-agents")
_Key = tuple[str, str, str]
"""Source, the session's id, and its file if users choose such ids."""
_KEY = "imports/superseded.json"
_OF_AN_IMPORT = frozenset(
    {"trajectory_id", "episode_id", "group_id", "parent_id", "fingerprint", "run_id", "created_at", "pipeline", "stage"}
    | {"source_file"}
)
"""Columns in which equal rows of two imports differ. Parents are compared by what they are."""


class EarlierSessions:
    """The rows of sessions that earlier imports of a stage brought in, if ``same`` says of their fingerprint that
    format and labels were those of this import. ``present`` counts rows that are left out, and ``superseded`` has the
    ids of rows from which new ones go on."""

    def __init__(self, buffer: "TrajectoryBuffer", stage: str, same: Callable[[str], bool]) -> None:
        import polars as pl

        self._buffer = buffer
        self._ids: dict[_Key, list[str]] = {}
        self._rows: dict[_Key, dict[str, dict[str, Any]]] = {}
        self._old: dict[str, str] = {}
        self._begun: set[str] = set()
        columns = ["trajectory_id", "source", "source_id", "source_file", "fingerprint"]
        of_sessions = (pl.col("stage") == stage) & pl.col("source").is_in(FORMATS_OF_SESSIONS)
        try:
            rows = buffer.scan().filter(of_sessions).select(columns).collect()
        except NoBufferError:
            return
        known = {fingerprint for fingerprint in rows["fingerprint"].unique() if same(fingerprint)}
        for name, source, session, file, fingerprint in rows.iter_rows():
            if fingerprint in known:
                self._ids.setdefault(_key(source, session, file), []).append(name)

    @property
    def present(self) -> int:
        return len(self._old)

    @property
    def superseded(self) -> list[str]:
        return sorted(self._begun - set(self._old.values()))

    def without(self, table: pa.Table) -> pa.Table:
        """The rows that are new, in the episodes of those that the buffer has."""
        columns = (table[name].to_pylist() for name in ("source", "source_id", "source_file"))
        keys = [_key(*values) for values in zip(*columns, strict=True)]
        if self._ids.keys().isdisjoint(keys):
            return table
        rows = table.to_pylist()
        for row, key in zip(rows, keys, strict=True):
            row["parent_id"] = self._old.get(row["parent_id"], row["parent_id"])
            if key in self._ids:
                self._compare(row, self._known(key))
        for name in ("parent_id", "episode_id", "group_id"):
            table = with_column(table, name, [row[name] for row in rows])
        return table.filter(pa.array([row["trajectory_id"] not in self._old for row in rows], pa.bool_()))

    def _known(self, key: _Key) -> dict[str, dict[str, Any]]:
        if key not in self._rows:
            self._rows.clear()  # a session's rows stand together
            rows = self._buffer.read(self._ids[key]).to_pylist()
            self._rows[key] = {row["trajectory_id"]: row for row in rows}
        return self._rows[key]

    def _compare(self, row: dict[str, Any], known: dict[str, dict[str, Any]]) -> None:
        taken = set(self._old.values())
        for name, old in known.items():
            if name not in taken and old["parent_id"] == row["parent_id"] and _content(old) == _content(row):
                self._old[row["trajectory_id"]] = name
                return
        self._begun.update(name for name, old in known.items() if goes_on(row["messages"], old["messages"]))
        mark = next(iter(known.values()))["episode_id"].rpartition("@")[2]
        for column in ("episode_id", "group_id"):
            row[column] = f"{row[column].rpartition('@')[0]}@{mark}"


def _key(source: str, session: str, file: str) -> _Key:
    return source, session, file if source in _CHOSEN_BY_USERS else ""


def _content(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _OF_AN_IMPORT}


def goes_on(messages: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> bool:
    """Whether a conversation begins with an earlier one, whose last message may not have been complete."""
    if not earlier or len(messages) < len(earlier) or messages[: len(earlier) - 1] != earlier[:-1]:
        return False
    last, now = earlier[-1], messages[len(earlier) - 1]
    texts = all((now[name] or "").startswith(last[name] or "") for name in ("content", "reasoning"))
    calls = (now["tool_calls"] or [])[: len(last["tool_calls"] or [])] == (last["tool_calls"] or [])
    return texts and calls and all(now[name] == last[name] for name in ("role", "tool_call_id"))


def plan_removal(buffer: "TrajectoryBuffer", run_id: str, ids: list[str]) -> None:
    """Write down which rows are to be removed once those of an import are in the buffer."""
    if ids:
        buffer.storage.write(_KEY, json.dumps({"run_id": run_id, "ids": ids}).encode())


def remove_superseded(buffer: "TrajectoryBuffer") -> tuple[int, int]:
    """Remove what was planned, also by an import that was killed after its append. Gives how many rows were removed,
    and how many stay."""
    import polars as pl

    from agentrl.datastore.upkeep.forgetting import remove

    planned = buffer.storage.read(_KEY)
    if planned is None:
        return 0, 0
    plan, removed, stay = json.loads(planned), 0, 0
    if buffer.scan().filter(pl.col("run_id") == plan["run_id"]).select("run_id").head(1).collect().height:
        removed, stay = remove(buffer, set(plan["ids"]))
    buffer.storage.delete(_KEY)
    return removed, stay

"""Which calls of tools failed: by tool, and the failed ones of the newest rows, each with its message."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from agentrl.flows.viewer.pages.trajectory import failed, timed
from agentrl.flows.viewer.query.tables import both
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, Filtered

ROWS = 2000
"""The newest rows with calls whose messages are read."""
SHOWN = 200
"""Failed calls that are listed."""
TEXT = 300
"""Characters of arguments and answers."""


class ToolCalls(Answer):
    """Calls of one tool, how many of them were answered and how many failed, in so many rows; the ``seconds`` that
    ``timed`` of them took together, and their median, which is None if no call says it."""

    name: str
    calls: int
    answered: int
    failed: int
    rows: int
    timed: int
    seconds: float
    median: float | None


class FailedCall(Answer):
    """A call that failed: the number of the ``message`` that answers it, and how both texts begin."""

    trajectory_id: str
    message: int
    tool: str
    arguments: str
    answer: str


class CallsByTool(Answer):
    """Calls of the newest ``looked_at`` of the ``rows`` in the filter that call tools; the tool that failed most comes
    first. ``unknown`` errors were counted by rows that do not say which call they are of. At most 200 failed calls are
    listed, those of the newest rows."""

    version: int
    rows: int
    looked_at: int
    unknown: int
    tools: list[ToolCalls]
    failed: list[FailedCall]


def calls(reader: StoreReader, question: Filtered) -> CallsByTool:
    """The calls of the rows in a filter."""
    snapshot = reader.tables.at(question.at)
    part = reader.part(question, snapshot)
    calling = snapshot.columns(["n_tool_calls"])["n_tool_calls"].gt(0).to_numpy()
    numbers = snapshot.chosen(question.filter, "created_at", True, both(calling, part.mask if part else None))
    ids = snapshot.columns(["trajectory_id"])["trajectory_id"][numbers[:ROWS]].to_list()
    columns = ("trajectory_id", "n_tool_errors", "messages", "message_seconds")
    rows = reader.read(ids, columns, snapshot).to_pylist() if ids else []
    tools: dict[str, Counter[str]] = {}
    took: defaultdict[str, list[float]] = defaultdict(list)
    listed: list[FailedCall] = []
    for row in rows:
        _count(tools, took, listed, row)
    by_errors = sorted(tools.items(), key=lambda item: (-item[1]["failed"], -item[1]["calls"], item[0]))
    return CallsByTool(
        version=snapshot.version,
        rows=len(numbers),
        looked_at=len(rows),
        unknown=sum(row["n_tool_errors"] for row in rows) - sum(counts["failed"] for counts in tools.values()),
        tools=[_tool(name, counts, took[name]) for name, counts in by_errors],
        failed=listed[:SHOWN],
    )


_KINDS = ("calls", "answered", "failed", "rows")


def _tool(name: str, counts: Counter[str], took: list[float]) -> ToolCalls:
    known = {kind: counts[kind] for kind in _KINDS}
    return ToolCalls(name=name, **known, timed=len(took), seconds=sum(took), median=median(took) if took else None)


def _count(
    tools: dict[str, Counter[str]],
    took: defaultdict[str, list[float]],
    listed: list[FailedCall],
    row: Mapping[str, Any],
) -> None:
    """Add the calls of a row to those of their tools, the seconds that they took, and its failed ones to the list."""
    messages = timed(row["messages"], row["message_seconds"])
    errors = failed(messages, row["n_tool_errors"])
    called: dict[str, Mapping[str, Any]] = {}
    own: set[str] = set()
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            called = {call["id"]: call for call in message["tool_calls"]}  # ids may come again in a later step
            for call in message["tool_calls"]:
                tools.setdefault(call["name"], Counter())["calls"] += 1
                own.add(call["name"])
        elif message["role"] == "tool":
            call = called.get(message["tool_call_id"]) or {"name": message["name"] or "", "arguments": ""}
            counts = tools.setdefault(call["name"], Counter())
            own.add(call["name"])
            counts["answered"] += 1
            if message["seconds"] is not None:
                took[call["name"]].append(message["seconds"])
            if number in errors:
                counts["failed"] += 1
                listed.append(_failed_call(row["trajectory_id"], number, call, message))
    for name in own:
        tools[name]["rows"] += 1


def _failed_call(row_id: str, number: int, call: Mapping[str, Any], answer: Mapping[str, Any]) -> FailedCall:
    return FailedCall(
        trajectory_id=row_id,
        message=number,
        tool=call["name"],
        arguments=call["arguments"][:TEXT],
        answer=answer["content"][:TEXT],
    )

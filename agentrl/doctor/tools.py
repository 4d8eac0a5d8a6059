"""Checks of tool calls."""

import json
from collections import Counter

from agentrl.doctor.case import FEW, SHOWN, Case, Finding, Row, names


def calls_of(row: Row) -> list[Row]:
    """All tool calls of a row, in order."""
    return [call for message in row["messages"] for call in message.get("tool_calls") or []]


def hallucinated_tools(case: Case) -> Finding | None:
    """More than 5 % of the calls name a tool that the row does not offer."""
    unknown: Counter[str] = Counter()
    wrong, total = [], 0
    for row in case.sample:
        known = {tool.get("function", tool).get("name") for tool in json.loads(row["tools"] or "[]")}
        for call in calls_of(row) if known else []:
            total += 1
            if call["name"] not in known:
                unknown[call["name"]] += 1
                wrong.append(row["trajectory_id"])
    if total < FEW or sum(unknown.values()) <= 0.05 * total:
        return None
    return Finding(
        "hallucinated tools",
        f"{sum(unknown.values())} of {total} calls are of tools that do not exist: {names(list(unknown))}",
        "5 %",
        "show the tools in the chat template; reject such rows; add negative examples",
        rows=tuple(dict.fromkeys(wrong))[:SHOWN],
    )


def tool_loops(case: Case) -> Finding | None:
    """The same call again and again in one episode, or the same first call in nearly all tasks."""
    used = [row for row in case.sample if calls_of(row)]
    if len(used) < FEW:
        return None
    looping = []
    first: Counter[tuple[str, str]] = Counter()
    for row in used:
        calls = [(call["name"], call["arguments"]) for call in calls_of(row)]
        first[calls[0]] += 1
        if max(Counter(calls).values()) >= 3:
            looping.append(row["trajectory_id"])
    tasks = len({row["task_id"] for row in used})
    [(call, times)] = first.most_common(1)
    monotone = tasks >= 8 and times > 0.9 * len(used)
    if len(looping) <= 0.1 * len(used) and not monotone:
        return None
    what = f"{times} of {len(used)} rollouts of {tasks} tasks begin with {call[0]} {call[1]}" if monotone else ""
    loops = f"{len(looping)} of {len(used)} rollouts repeat a call three times or more ({names(looping)})"
    return Finding(
        "monotone tool use",
        what or loops,
        "10 % of rollouts with a loop; 90 % with the same first call",
        "penalise repeated calls in the reward, lower the temperature of the warm-up data, filter loops out (reject)",
        rows=tuple(looping[:SHOWN]),
    )

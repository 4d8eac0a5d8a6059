"""tau2-bench results: a document with ``info``, ``tasks`` and ``simulations``, or the folder layout that newer
versions write: ``results.json`` (without the messages) beside ``simulations/<id>.json``.

A simulation is a row. ``task_id`` with the content of its task in ``tasks``, ``trial`` (sample index),
``reward_info.reward`` (success at 1, as the benchmark counts), ``reward_info.reward_breakdown`` and the checks
``db_check``, ``env_assertions``, ``action_checks``, ``nl_assertions``, ``communicate_checks`` as components,
``termination_reason``, ``messages``; from ``info`` the domain (env), the agent's model (policy) and the domain's
policy as system message, if the messages have none; ``start_time``, ``agent_cost`` and the usage of the
agent's messages. Without ``reward_info`` a row is unscored. Tool messages with
``error`` count as tool errors. Calls of the simulated user (``requestor: user``) stay calls of the user, which no
stage trains on. A full-duplex (voice) simulation has ``ticks`` and no messages: refused by name. ``elements`` are
streamed.

Cannot carry: tokens, masks, log-probs, the text of tasks (their digest is in the task's id), what a check checked.
What has no place goes under ``agentrl`` of the simulation.
"""

import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from agentrl.datastore.formats.files import line, text_file, write_list
from agentrl.datastore.formats.messages import from_chat, tools_text
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, moment
from agentrl.datastore.formats.parts import of_list
from agentrl.datastore.formats.rows import carried, components, make_row, score, spoken, termination
from agentrl.datastore.formats.source import Row, Source, Stretch, each
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

_REASONS = {
    "agent_stop": Termination.ANSWERED,
    "user_stop": Termination.ANSWERED,
    "max_steps": Termination.MAX_STEPS,
    "timeout": Termination.TIME_LIMIT,
    "too_many_errors": Termination.ENV_ERROR,
    "agent_error": Termination.FORMAT_ERROR,
    "user_error": Termination.ENV_ERROR,
    "infrastructure_error": Termination.INFRA_ERROR,
    "unexpected_error": Termination.INFRA_ERROR,
    "context_window_exceeded": Termination.MAX_CONTEXT,
    "cancelled": Termination.CANCELLED,
}
_KNOWN_DOCUMENT = {
    "": frozenset({"info", "simulations"}),
    "info": frozenset({"environment_info", "agent_info"}),
    "info.environment_info": frozenset({"domain_name", "policy", "tool_defs"}),
    "info.agent_info": frozenset({"llm"}),
}
_KNOWN = frozenset(
    {"id", "task_id", "trial", "termination_reason", "reward_info", "messages", "seed", "agentrl", "policy"}
    | {"start_time", "timestamp", "agent_cost"}
)
_NEEDED = ("info", "tasks")
_CHECKS = ("action_checks", "env_assertions", "nl_assertions", "communicate_checks")
_KNOWN_REWARD = frozenset({"reward", "reward_breakdown", "db_check", *_CHECKS})
_MET = frozenset({"met", "action_match"})
_KNOWN_MESSAGE = frozenset(
    {"role", "content", "tool_calls", "id", "error", "requestor", "tool_messages", "name"}
    | {"reasoning_content", "usage", "cost"}
)


def fits(head: Any) -> int:
    if not isinstance(head, dict):
        return 0
    simulations = head.get("simulations")
    if isinstance(simulations, list):
        return 2 if not simulations or "task_id" in simulations[0] else 0
    return 2 if {"task_id", "termination_reason"} <= head.keys() and ("messages" in head or "ticks" in head) else 0


def read(source: Source) -> Iterator[Row]:
    if isinstance(source.head, dict) and "simulations" in source.head:
        document = source.before
        yield from each(source, source.elements("simulations", _NEEDED), _Context(source, document).rows)
        if source.ended:
            source.notes.inside(document, _KNOWN_DOCUMENT)
        return
    # one simulation of a folder, whose results.json says the rest
    beside = source.path.parent.parent / "results.json"
    document = _beside(beside, beside.stat().st_mtime_ns) if beside.is_file() else {}
    yield from each(source, source.records(), _Context(source, document).rows)


def cut(source: Source) -> Iterator[Stretch] | None:
    """Parts of the simulations of a document."""
    return of_list(source, "simulations", _NEEDED) if source.kind == "document" else None


@lru_cache(maxsize=4)
def _beside(path: Path, changed: int) -> dict[str, Any]:
    """The document of a folder. It is parsed once for all files of the folder, as long as it does not change."""
    return Source(path).document()


class _Context:
    """What a simulation's row takes from the document around it."""

    def __init__(self, source: Source, document: dict[str, Any]) -> None:
        self.source = source
        self.document = document
        self._tasks: dict[str, Any] | None = None

    def task(self, name: str) -> Any:
        if self._tasks is None:
            self._tasks = {str(task.get("id")): task for task in self.document.get("tasks") or []}
        return self._tasks.get(name)

    def rows(self, simulation: dict[str, Any]) -> Iterator[Row]:
        notes = self.source.notes
        if not simulation.get("messages") and simulation.get("ticks"):
            raise ValueError("is a full-duplex simulation: it has ticks and no messages")
        notes.rest(simulation, _KNOWN, "simulations.")
        reward = simulation.get("reward_info") or {}
        notes.rest(reward, _KNOWN_REWARD, "reward_info.")
        info = self.document.get("info") or {}
        domain = (info.get("environment_info") or {}).get("domain_name") or "tau2"
        extra = dict(simulation.get("agentrl") or {})
        tools = extra.pop("tools", None) or tools_text((info.get("environment_info") or {}).get("tool_defs"))
        messages, errors = _messages(simulation["messages"], self.source)
        system = simulation.get("policy") or (info.get("environment_info") or {}).get("policy")
        if system and not extra and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        scored = score(reward, "reward", notes, "reward_info.")
        yield make_row(
            messages,
            source="tau2",
            extra=extra,
            origin=_origin(simulation, notes),
            task=f"{domain}/{simulation['task_id']}",
            task_content=self.task(str(simulation["task_id"])) or "",
            trajectory_id=str(simulation["id"]),
            sample_index=simulation.get("trial"),
            env=domain,
            policy=(info.get("agent_info") or {}).get("llm"),
            sampling=line({"seed": simulation["seed"]}) if simulation.get("seed") is not None else None,
            tools=tools,
            reward=scored,
            success=None if scored is None else scored >= 1.0,
            termination=termination(_REASONS, simulation.get("termination_reason"), notes),
            reward_components=components(_parts(reward, notes), notes, "reward_info."),
            n_tool_errors=errors,
        )


def _origin(simulation: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """When a simulation began, and what the agent used: the user and the judge are not the policy."""
    spent = Calls(notes)
    cost = simulation.get("agent_cost")
    for message in simulation["messages"]:
        for name in ("usage", "cost"):
            if message.get(name) and message.get("role") != "assistant":
                notes.ignored[f"messages.{name}"] += 1
        if message.get("role") == "assistant":
            spent.usage(message.get("usage"), "messages.usage.")
            if cost is None:
                spent.paid(message.get("cost"), "messages.cost")
    spent.paid(cost, "simulations.agent_cost")
    return {"source_time": moment(simulation.get("start_time") or simulation.get("timestamp")), **spent.fields()}


def _parts(reward: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Components by name: the breakdown, the database check, and of each list of checks the share that holds."""
    parts = dict(reward.get("reward_breakdown") or {})
    if isinstance(check := reward.get("db_check"), dict):
        parts["db_check"] = check.get("db_reward")
        notes.rest(check, frozenset({"db_reward"}), "reward_info.db_check.")
    for key in _CHECKS:
        checks = [check for check in reward.get(key) or [] if isinstance(check, dict)]
        for single in checks:
            notes.rest(single, _MET, f"reward_info.{key}.")
        met = [
            bool(check.get("met", check.get("action_match")))
            for check in checks
            if "met" in check or "action_match" in check
        ]
        if met:
            parts[key] = sum(met) / len(met)
    return parts


def _messages(items: Iterable[dict[str, Any]], source: Source) -> tuple[list[dict[str, Any]], int]:
    """Fields of messages, and how many tool messages have an error."""
    flat = list(chain.from_iterable(message.get("tool_messages") or [message] for message in items))
    chat, errors = [], 0
    for item in flat:
        source.notes.rest(item, _KNOWN_MESSAGE, "messages.")
        plain = {
            "role": item["role"],
            "content": item.get("content"),
            "reasoning_content": item.get("reasoning_content"),
        }
        if item["role"] == "tool":
            errors += bool(item.get("error"))
            plain |= {"tool_call_id": spoken(item.get("id")), "name": item.get("name")}
            plain |= {"is_error": bool(item["error"])} if item.get("error") is not None else {}
        elif item.get("tool_calls"):
            plain["tool_calls"] = item["tool_calls"]
        chat.append(plain)
    return from_chat(chat, source.notes), errors


def write(rows: Iterable[Trajectory], path: Path) -> int:
    tasks: dict[str, dict[str, Any]] = {}
    envs: dict[str, None] = {}

    def simulations() -> Iterator[dict[str, Any]]:
        for row in rows:
            tasks[row.task_id] = {"id": row.task_id, "user_scenario": {"instructions": row.prompt}}
            envs[row.env] = None
            yield _simulation(row)

    with TemporaryFile("w+", encoding="utf-8", dir=path.parent) as later, text_file(path) as file:
        count = write_list(later, simulations())  # the document begins with their tasks, as tau2 writes it
        later.seek(0)
        info = {"environment_info": {"domain_name": next(iter(envs)) if len(envs) == 1 else "several"}}
        first = {"timestamp": datetime.now(UTC).isoformat(), "info": info, "tasks": list(tasks.values())}
        file.write(line(first)[:-1] + ',\n"simulations": ')
        shutil.copyfileobj(later, file)
        file.write("}\n")
    return count


def _simulation(row: Trajectory) -> dict[str, Any]:
    reasons = {value: key for key, value in reversed(_REASONS.items())}
    reward = {"reward": row.reward, "reward_breakdown": {part.name: part.value for part in row.reward_components}}
    return {
        "id": row.trajectory_id,
        "task_id": row.task_id,
        "trial": row.sample_index,
        "termination_reason": reasons.get(row.termination, row.termination.value),
        "reward_info": None if row.reward is None else reward,
        "messages": [_message(message) for message in row.messages],
        "agentrl": carried(row) | {"tools": row.tools},
    }


def _message(message: Message) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.role is Role.TOOL:
        known = {} if message.error is None else {"error": message.error}
        return answer | {"id": message.tool_call_id, "name": message.name, "requestor": "assistant", **known}
    if message.reasoning is not None:
        answer["reasoning_content"] = message.reasoning
    if message.tool_calls:
        answer["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.parsed(), "requestor": message.role.value}
            for call in message.tool_calls
        ]
    return answer

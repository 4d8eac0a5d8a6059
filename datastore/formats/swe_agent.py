"""SWE-agent ``.traj``: one JSON document per trajectory.

Import: the messages before the first step are those of its ``query`` (``message`` before 1.1) that are system or user
messages, else the head of ``history``. If ``history`` has native tool calls, the whole ``history`` is the conversation;
the last steps that it lacks, and the observation of its last one, come from ``trajectory``, as calls of a tool that the
history has called (``submit``), else of ``bash``. Otherwise a step becomes an assistant message (``thought``, else
``response``) with a call of the tool ``bash`` (``{"command": action}``) and its observation; ``response``, the text
that both were parsed from, is counted. ``info.exit_status`` is the end: ``submitted`` is an answer, also after
``exit_cost`` and the like, and every other exit its own termination. Whether the submission is right is not in the
file: rows are unscored. ``info.submission`` is the final state, ``replay_config.agent.model.name`` the policy,
``info.model_stats`` usage and cost; the rest of ``replay_config`` is not carried.

Export: a folder with a file per row. ``action`` is the command of the first call, or its name and arguments; the
exact messages of a step go under ``extra_info.agentrl``, what else has no place under ``info.agentrl``. Cannot
carry: tokens, masks, log-probs.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from agentrl.datastore.formats.files import file_name
from agentrl.datastore.formats.messages import from_chat, split_prompt, text_of, to_chat, tools_text
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, count
from agentrl.datastore.formats.rows import carried, make_row, termination
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

_EXITS = {
    "submitted": Termination.ANSWERED,
    "exit_cost": Termination.MAX_TOKENS,
    "exit_total_execution_time": Termination.TIME_LIMIT,
    "exit_command_timeout": Termination.TIME_LIMIT,
    "exit_context": Termination.MAX_CONTEXT,
    "exit_format": Termination.FORMAT_ERROR,
    "exit_forfeit": Termination.ANSWERED,
    "exit_command": Termination.CANCELLED,
    "early_exit": Termination.MAX_STEPS,
    "exit_environment_error": Termination.INFRA_ERROR,
    "exit_api": Termination.INFRA_ERROR,
    "exit_error": Termination.ENV_ERROR,
}
_KNOWN = frozenset({"trajectory", "history", "info", "instance_id"})
_KNOWN_INFO = frozenset({"exit_status", "submission", "agentrl", "agentrl_tools", "model_stats"})
_KNOWN_STATS = frozenset({"tokens_sent", "tokens_received", "instance_cost"})
_KNOWN_STEP = frozenset({"action", "observation", "thought", "query", "message", "messages", "extra_info"})
_KNOWN_HISTORY = frozenset(
    {"role", "content", "tool_calls", "tool_call_ids", "tool_call_id", "action", "thought", "thinking_blocks"}
)


def fits(head: Any) -> int:
    if not isinstance(head, dict):
        return 0
    steps = head.get("trajectory")
    if isinstance(steps, list) and (not steps or {"action", "observation"} <= steps[0].keys()):
        return 2
    return 1 if isinstance(head.get("history"), list) and "role" in (head["history"] or [{}])[0] else 0


def read(source: Source) -> Iterator[Row]:
    def convert(document: dict[str, Any]) -> Iterator[Row]:
        if "agentrl" not in (document.get("info") or {}):  # ours has the rest there
            source.notes.rest(document, _KNOWN)
        info = document.get("info") or {}
        source.notes.rest(info, _KNOWN_INFO, "info.")
        status = str(info.get("exit_status") or "")
        status = "submitted" if status.startswith("submitted") else status
        name = document.get("instance_id") or source.path.name.split(".")[0]
        yield make_row(
            _messages(document, source),
            source="swe-agent",
            extra=info.get("agentrl"),
            origin=_spent(info.get("model_stats") or {}, source),
            task=name,
            termination=termination(_EXITS, status, source.notes),
            policy=_model(document),
            final_state=json.dumps({"submission": info["submission"]}) if info.get("submission") else None,
            tools=tools_text(info.get("agentrl_tools")),
        )

    return each(source, source.records(), convert)


def _spent(stats: dict[str, Any], source: Source) -> dict[str, Any]:
    """Usage and cost of the trajectory; ``total_cost`` is that of the whole run, if there is one of the instance."""
    spent = Calls(source.notes)
    spent.tokens(count(stats.get("tokens_sent")), count(stats.get("tokens_received")))
    cost = "instance_cost" if "instance_cost" in stats else "total_cost"
    spent.paid(stats.get(cost), f"info.model_stats.{cost}")
    same = {"total_cost"} if stats.get("total_cost") == stats.get(cost) else set()
    source.notes.rest(stats, _KNOWN_STATS | same, "info.model_stats.")
    return spent.fields()


def _model(document: dict[str, Any]) -> str | None:
    config = document.get("replay_config")
    config = loads(config) if isinstance(config, str) else config
    try:
        return str(config["agent"]["model"]["name"])  # type: ignore[index]
    except (KeyError, TypeError):
        return None


def _messages(document: dict[str, Any], source: Source) -> list[dict[str, Any]]:
    steps, history = document.get("trajectory") or [], document.get("history") or []
    ours = any((step.get("extra_info") or {}).get("agentrl") for step in steps)
    if history and not ours and (not steps or any(message.get("tool_calls") for message in history)):
        return _from_history(history, steps, source)
    if not steps:
        raise KeyError("trajectory")
    messages = _chat(_opening(steps[0]) or _leading(history), source)
    for number, step in enumerate(steps):
        messages += _step_messages(number, step, source)
    return messages


def _from_history(history: list[dict[str, Any]], steps: list[dict[str, Any]], source: Source) -> list[dict[str, Any]]:
    """The history, and what the steps have beyond its end: a run that is ended from outside leaves its last step in the
    trajectory alone."""
    messages = _chat(history, source)
    own = [message for message in history if message["role"] == "assistant" and not message.get("is_demo")]
    within, exact = _steps_within(steps, own)
    later = steps[within:]
    for step in steps[:within]:  # their text is in the history too
        source.notes.rest(step, _KNOWN_STEP | {"response"}, "trajectory.")
    last = messages[-1] if messages else {}
    if exact and last.get("tool_calls"):
        observation = text_of(steps[within - 1].get("observation"), source.notes, "trajectory.observation.", data=True)
        if observation:
            source.notes.remark("observations of a last step that the history lacks: taken from the trajectory")
            call = last["tool_calls"][0]
            messages.append({"role": "tool", "content": observation, "tool_call_id": call["id"], "name": call["name"]})
    tools = {call["name"] for message in messages for call in message.get("tool_calls") or []}
    for number, step in enumerate(later, within):
        source.notes.remark("last steps that the history lacks: taken from the trajectory")
        messages += _step_messages(number, step, source, tools)
    return messages


def _steps_within(steps: list[dict[str, Any]], own: list[dict[str, Any]]) -> tuple[int, bool]:
    """How many steps the history has: up to the last one that says or does what its last assistant message does, and
    whether there is such a one. Otherwise as many as it has assistant messages."""
    if not own:
        return 0, False
    last = own[-1]
    for number in range(len(steps), 0, -1):
        step = steps[number - 1]
        text = text_of(last.get("content"), Notes())
        acted = bool(last.get("action")) and step.get("action") == last["action"]
        if (acted and (step.get("thought") or "") == (last.get("thought") or "")) or (
            text and step.get("response") == text
        ):
            return number, True
    return min(len(own), len(steps)), False


def _chat(history: list[dict[str, Any]], source: Source) -> list[dict[str, Any]]:
    """History items as chat: SWE-agent keeps the ids of answered calls in a list. Demonstrations are left out."""
    plain = []
    for message in history:
        source.notes.rest(message, _KNOWN_HISTORY, "history.")
        if message.get("is_demo"):
            source.notes.remark("demonstrations in the history (is_demo)")
            continue
        ids = message.get("tool_call_ids")
        item = {"role": message["role"], "content": message.get("content"), "tool_calls": message.get("tool_calls")}
        for block in message.get("thinking_blocks") or []:
            source.notes.rest(block, frozenset({"type", "thinking"}), "history.thinking_blocks.")
        if thoughts := [part.get("thinking") for part in message.get("thinking_blocks") or []]:
            item["reasoning"] = "\n".join(text for text in thoughts if text)
        if message["role"] == "tool" or ids:
            item |= {"role": "tool", "tool_call_id": ids[0] if ids else message.get("tool_call_id")}
        plain.append(item)
    return from_chat(plain, source.notes)


def _step_messages(
    number: int, step: dict[str, Any], source: Source, tools: Collection[str] = ()
) -> list[dict[str, Any]]:
    """An action and its observation. ``tools`` are those that may be called by their name alone."""
    notes = source.notes
    kept = (step.get("extra_info") or {}).get("agentrl")
    if kept:  # written by us: the messages as they were
        return from_chat(kept, notes)
    notes.rest(step, _KNOWN_STEP, "trajectory.")
    notes.rest(step.get("extra_info") or {}, frozenset(), "trajectory.extra_info.")
    thought = step.get("thought") or ""
    action = (step.get("action") or "").strip()
    if not action:
        text = (thought or step.get("response") or "").strip()
        return [{"role": "assistant", "content": text}] if text else []
    name, arguments = (action, {}) if action in tools else ("bash", {"command": action})
    call = {"id": f"call_{number}", "name": name, "arguments": json.dumps(arguments)}
    result = text_of(step.get("observation"), notes, "trajectory.observation.", data=True)
    return [
        {"role": "assistant", "content": thought.strip(), "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": call["id"], "name": name},
    ]


def _opening(step: dict[str, Any]) -> list[dict[str, Any]]:
    asked = step.get("query") or step.get("messages") or step.get("message") or []
    return (
        [message for message in asked if message.get("role") in ("system", "user")] if isinstance(asked, list) else []
    )


def _leading(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System and user messages at the head of the history."""
    return list(takewhile(lambda message: message.get("role") in ("system", "user"), history))


def write(rows: Iterable[Trajectory], path: Path) -> int:
    """One file per row in the folder ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    count = 0
    for row in rows:
        opening, rest = split_prompt(row.messages)
        state = json.loads(row.final_state)
        document = {
            "environment": row.env,
            "trajectory": _steps(rest, to_chat(opening)),
            "history": to_chat(row.messages),
            "info": {
                "exit_status": _exit(row.termination),
                "submission": state.get("submission") if isinstance(state, dict) else None,
                "agentrl": carried(row),
                "agentrl_tools": row.tools,
            },
        }
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (path / file_name(count, row.trajectory_id, ".traj")).write_text(text, encoding="utf-8")
        count += 1
    return count


def _exit(end: Termination) -> str:
    return next((name for name, known in _EXITS.items() if known is end), end.value)


def _steps(messages: list[Message], opening: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A step per assistant message. What follows it, the tool's or the user's, is its observation."""
    steps: list[dict[str, Any]] = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            call = message.tool_calls[0] if message.tool_calls else None
            steps.append(
                {
                    "action": _command(call),
                    "observation": "",
                    "response": message.content,
                    "thought": message.content,
                    "state": {},
                    "query": opening if not steps else [],
                    "extra_info": {"agentrl": to_chat([message])},
                }
            )
        elif steps:
            steps[-1]["observation"] += message.content
            steps[-1]["extra_info"]["agentrl"] += to_chat([message])
    return steps


def _command(call: ToolCall | None) -> str:
    if call is None:
        return ""
    arguments = call.parsed()
    if isinstance(arguments, dict) and set(arguments) == {"command"}:
        return str(arguments["command"])
    return f"{call.name} {call.arguments}"

"""What ``codex exec --json`` prints, JSON Lines: a thread is a row. Read only.

``agent_message`` and ``reasoning`` are the model's words. ``command_execution``, ``mcp_tool_call``, ``file_change``,
``web_search`` and other items of the program are calls by these names with their answers; ``exit_code`` and ``status``
say whether they failed. They show what the program did, not the calls as the model wrote them, so that rows are tagged
``not-trained``: the rollout of the same session has these, its system prompt and its task, which are not printed here.
``turn.completed`` has the usage, ``turn.failed`` is an ``infra_error``. Items of type ``error`` are counted.
"""

import json
from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, count
from agentrl.datastore.formats.rows import make_row, untrained
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.trajectory import Termination

_ANSWERS = ("aggregated_output", "result", "error", "exit_code", "status")
"""Keys of an item that say what came of it; every other one is an argument."""
_STATUS = {"failed": True, "declined": True, "completed": False, "in_progress": False, None: False}


def fits(head: Any) -> int:
    if not isinstance(head, dict) or not isinstance(head.get("type"), str):
        return 0
    if head["type"].startswith("item.") and isinstance(head.get("item"), dict):
        return 3
    return 2 if head["type"] in ("thread.started", "turn.started", "turn.completed", "turn.failed") else 0


def read(source: Source) -> Iterator[Row]:
    threads: list[_Thread] = []

    def take(event: dict[str, Any]) -> Iterator[Row]:
        if event["type"] == "thread.started" or not threads:
            threads.append(_Thread(str(event.get("thread_id") or "unnamed"), source.number, source.notes))
        threads[-1].take(event)
        yield from ()

    yield from each(source, source.records(), take)
    for thread in threads:
        source.number = thread.first
        if thread.messages:
            yield from each(source, [thread.name], lambda _, thread=thread: [thread.row()])  # type: ignore[misc]
        else:
            source.notes.remark("sessions in which nothing was said")


class _Thread:
    def __init__(self, name: str, first: int, notes: Notes) -> None:
        self.name, self.first, self.notes = name, first, notes
        self.messages: list[dict[str, Any]] = []
        self.spent = Calls(notes)
        self.end: Termination | None = None
        self.errors = 0
        self._open: set[str] = set()

    def take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        match kind:
            case "turn.completed":
                usage = event.get("usage") or {}
                self.spent.tokens(count(usage.get("input_tokens")), count(usage.get("output_tokens")))
                self.notes.rest(usage, {"input_tokens", "output_tokens"}, "usage.")
                self.end = None
            case "turn.failed":
                error = json.dumps(event.get("error"))
                self.end = Termination.MAX_CONTEXT if "context window" in error else Termination.INFRA_ERROR
            case "turn.started":
                self.end = Termination.UNKNOWN
            case "item.started" | "item.updated" | "item.completed":
                item = event["item"]
                identity = str(item.get("id"))
                if item["type"] not in ("agent_message", "reasoning", "error") and identity not in self._open:
                    self._open.add(identity)
                    self._call(item, identity)
                if kind == "item.completed":
                    self._completed(item, identity)
            case "thread.started":
                pass
            case _:
                self.notes.ignored[f"lines of type {kind}"] += 1
        self.notes.rest(event, {"type", "thread_id", "usage", "item", "error"})

    def _said(self) -> dict[str, Any]:
        """The message that the model's next item belongs to: after a tool's answer a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _call(self, item: dict[str, Any], identity: str) -> None:
        arguments = {key: value for key, value in item.items() if key not in ("id", "type", *_ANSWERS)}
        call = {"id": identity, "name": str(item["type"]), "arguments": json.dumps(arguments, ensure_ascii=False)}
        self._said().setdefault("tool_calls", []).append(call)

    def _completed(self, item: dict[str, Any], identity: str) -> None:
        match item["type"]:
            case "agent_message":
                if self.messages and self.messages[-1].get("tool_calls"):
                    self.messages.append({"role": "assistant", "content": ""})
                message = self._said()
                message["content"] = "\n".join(filter(None, [message["content"], str(item.get("text") or "")]))
            case "reasoning":
                message = self._said()
                message["reasoning"] = "\n".join(filter(None, [message.get("reasoning"), str(item.get("text") or "")]))
            case "error":
                self.notes.ignored["items of kind error"] += 1
                return
            case kind:
                self._answer(item, identity, kind)
                return
        self.notes.rest(item, {"type", "text"}, "item.")

    def _answer(self, item: dict[str, Any], identity: str, kind: str) -> None:
        told = next((item[key] for key in _ANSWERS[:3] if item.get(key)), "")
        failed = _STATUS.get(status := item.get("status"), False) or item.get("exit_code") not in (None, 0)
        if status not in _STATUS:
            self.notes.ignored["item.status"] += 1
        self.errors += failed
        text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
        self._open.discard(identity)
        self.messages.append(
            {"role": "tool", "content": text, "tool_call_id": identity, "name": str(kind), "error": failed}
        )

    def row(self) -> Row:
        self.notes.remark("calls as Codex shows them, not as the model wrote them: rows are not trained on")
        if self._open:
            self.notes.remark("calls that were never completed", len(self._open))
        return make_row(
            self.messages,
            source="codex-exec",
            origin={"source_id": self.name} | self.spent.fields(),
            trajectory_id=self.name,
            termination=self.end,
            n_tool_errors=self.errors,
            tags=untrained(),
        )

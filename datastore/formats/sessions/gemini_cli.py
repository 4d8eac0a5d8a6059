"""Chats of Gemini CLI: ``~/.gemini/tmp/<project>/chats/session-*.jsonl``, and the documents ``session-*.json`` that it
wrote before. Read only.

The first line names the session. A later line with the ``id`` of a message replaces it, ``{"$set": {...}}`` replaces
members of the session (its ``messages`` too), and ``{"$rewindTo": id}`` takes that message and all after it away:
these are not said to the model any more, and are counted. A message of ``type: user`` is a user's; ``gemini`` is the
model's, with ``thoughts`` and ``toolCalls``, whose ``result`` is the tool's answer (``status: error`` an error). A
user's message of function responses that repeats them is not taken twice. ``model`` is the policy and ``tokens`` the
usage, thoughts with the answer. A session of ``kind: subagent`` is tagged ``kind:subagent``. Rows are unscored.

Cannot carry: the system prompt and tools (not in the file), ``resultDisplay``, ids, later times. Messages of other
types (``info``, ``error``, ``warning``), which the program wrote for the user, are counted by type.
"""

import json
from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats.messages import text_of
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, count, moment
from agentrl.datastore.formats.rows import make_row
from agentrl.datastore.formats.sessions.claude_code import SUBAGENT
from agentrl.datastore.formats.source import Row, Source, each

_KNOWN_MESSAGE = frozenset({"type", "content", "thoughts", "toolCalls", "tokens", "model"})
_KNOWN_CALL = frozenset({"id", "name", "args", "result", "status"})
_KNOWN_SESSION = frozenset({"sessionId", "startTime", "messages", "kind"})


def fits(head: Any) -> int:
    if not isinstance(head, dict):
        return 0
    if {"sessionId", "projectHash"} <= head.keys():
        return 3
    patch = "$set" in head or "$rewindTo" in head
    return 2 if patch or (head.get("type") in ("user", "gemini") and "id" in head and "content" in head) else 0


def read(source: Source) -> Iterator[Row]:
    sessions: list[_Chat] = []

    def take(record: dict[str, Any]) -> Iterator[Row]:
        if "sessionId" in record or not sessions:
            sessions.append(_Chat(source.number))
        sessions[-1].take(record, source.notes)
        yield from ()

    yield from each(source, source.records(), take)
    for chat in sessions:
        source.number = chat.first
        yield from each(source, [chat.session], lambda session, chat=chat: _row(session, chat, source.notes))  # type: ignore[misc]


class _Chat:
    """A session and its messages, by their ids."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.session: dict[str, Any] = {}
        self.messages: dict[str, dict[str, Any]] = {}

    def take(self, record: dict[str, Any], notes: Notes) -> None:
        if "$rewindTo" in record:
            ids = list(self.messages)
            taken = ids[ids.index(record["$rewindTo"]) :] if record["$rewindTo"] in self.messages else ids
            notes.remark("messages that were taken back", len(taken))
            for name in taken:
                del self.messages[name]
        elif "$set" in record:
            self._set(record["$set"])
        elif "sessionId" in record:
            self._set(record)
        else:
            self.messages[str(record["id"])] = record
            return
        if "sessionId" not in record:
            notes.rest(record, {"$rewindTo", "$set"})

    def _set(self, members: dict[str, Any]) -> None:
        self.session |= {key: value for key, value in members.items() if key != "messages"}
        if isinstance(messages := members.get("messages"), list):
            self.messages = {str(message["id"]): message for message in messages}


def _row(session: dict[str, Any], chat: _Chat, notes: Notes) -> Iterator[Row]:
    notes.rest(session, _KNOWN_SESSION, "session.")
    spent = Calls(notes)
    messages: list[dict[str, Any]] = []
    answered: set[str] = set()
    models = []
    for message in chat.messages.values():
        kind = message.get("type")
        if kind not in ("user", "gemini"):
            notes.ignored[f"messages of type {str(kind)[:60]}"] += 1
            continue
        notes.rest(message, _KNOWN_MESSAGE, "messages.")
        if kind == "user":
            messages += _asked(message, answered, notes)
            continue
        messages += _said(message, answered, notes)
        if message.get("model"):
            models.append(message["model"])
        _spend(message.get("tokens") or {}, spent, notes)
    if not messages:
        notes.remark("sessions in which nothing was said")
        return
    name = str(session.get("sessionId") or "unnamed")
    helper = session.get("kind") == "subagent"
    if session.get("kind") not in (None, "main", "subagent"):
        notes.ignored["session.kind"] += 1
    yield make_row(
        messages,
        source="gemini-cli",
        origin={"source_id": name, "source_time": moment(session.get("startTime"))} | spent.fields(),
        trajectory_id=name,
        policy=models[-1] if models else None,
        agent="subagent" if helper else None,
        tags=[SUBAGENT] if helper else None,
    )


def _spend(tokens: dict[str, Any], spent: Calls, notes: Notes) -> None:
    written = [known for key in ("output", "thoughts") if (known := count(tokens.get(key))) is not None]
    spent.tokens(count(tokens.get("input")), sum(written) if written else None)
    notes.rest(tokens, {"input", "output", "thoughts", "cached", "total"}, "messages.tokens.")


def _text(content: Any, notes: Notes) -> str:
    """Text of parts, which have no type here."""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            notes.rest(part, {"text"}, "messages.content.")
            texts.append(part["text"])
        elif isinstance(part, dict):
            notes.ignored[f"messages.content.{next(iter(part), 'part')[:60]}"] += 1
        else:
            texts.append(text_of(part, notes))
    return "".join(texts)


def _asked(message: dict[str, Any], answered: set[str], notes: Notes) -> Iterator[dict[str, Any]]:
    """A user's message. Answers of tools that stand beside their calls are not repeated."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    rest = []
    for part in parts:
        if isinstance(part, dict) and isinstance(response := part.get("functionResponse"), dict):
            if str(response.get("id")) not in answered:
                answered.add(str(response.get("id")))
                yield _answer(str(response.get("id")), response.get("name"), [part], None, notes)
        else:
            rest.append(part)
    if text := _text(rest, notes):
        yield {"role": "user", "content": text}


def _said(message: dict[str, Any], answered: set[str], notes: Notes) -> Iterator[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": _text(message.get("content") or "", notes)}
    thoughts = [_thought(thought, notes) for thought in message.get("thoughts") or []]
    if any(thoughts):
        answer["reasoning"] = "\n".join(filter(None, thoughts))
    answers = []
    for call in message.get("toolCalls") or []:
        notes.rest(call, _KNOWN_CALL, "messages.toolCalls.")
        identity = str(call.get("id") or f"call_{len(answered)}")
        arguments = json.dumps(call.get("args") or {}, ensure_ascii=False)
        answer.setdefault("tool_calls", []).append({"id": identity, "name": str(call["name"]), "arguments": arguments})
        if call.get("result") is None:
            continue
        answered.add(identity)
        status = call.get("status")
        failed = True if status in ("error", "cancelled") else False if status == "success" else None
        answers.append(_answer(identity, call["name"], call["result"], failed, notes))
    if answer["content"] or len(answer) > 2:
        yield answer
    yield from answers


def _thought(thought: Any, notes: Notes) -> str:
    if not isinstance(thought, dict):
        return str(thought)
    notes.rest(thought, {"subject", "description"}, "messages.thoughts.")
    return ": ".join(str(thought[key]) for key in ("subject", "description") if thought.get(key))


def _answer(identity: str, name: Any, result: Any, failed: bool | None, notes: Notes) -> dict[str, Any]:
    """A tool's message: the text of its output or error, else the JSON of what it answered."""
    parts = result if isinstance(result, list) else [result]
    texts = []
    for part in parts:
        response = part.get("functionResponse") if isinstance(part, dict) else None
        value = response.get("response") if isinstance(response, dict) else part
        if isinstance(response, dict):
            notes.rest(part, {"functionResponse"}, "result.")
            notes.rest(response, {"name", "response"}, "result.functionResponse.")
        if isinstance(value, dict) and len(value) == 1 and isinstance(inner := next(iter(value.values())), str):
            failed = True if failed is None and "error" in value else failed
            value = inner
        texts.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    message = {
        "role": "tool",
        "content": "\n".join(texts),
        "tool_call_id": identity,
        "name": str(name) if name else None,
    }
    return message if failed is None else message | {"error": failed}

"""OpenCode: ``opencode export SESSION`` (a document: ``{info, messages: [{info, parts}]}``), and the JSON Lines that
``opencode run --format json`` prints. Read only.

A session is a row. An assistant message is one answer: its parts ``text`` and ``reasoning`` are the model's words, a
part ``tool`` is a call (``callID``, ``state.input``) and its answer (``state.output``, or ``state.error`` if its status
is ``error``). A message with a part ``compaction`` begins a new row of the episode: of what was said before, the model
knows the summary alone from there on, which is the next answer. ``modelID`` is the policy; ``tokens``, with what was
cached and reasoning, and ``cost`` are those of all answers; the last ``finish`` or ``error`` gives the end. Rows are
unscored.

Cannot carry: the system prompt and tools (not in the file), in what is printed also the task, and the model; ids, later
times, ``state.metadata``. Parts of other kinds (files, patches, snapshots) are counted by type.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, count, moment
from agentrl.datastore.formats.rows import make_row, termination
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.trajectory import Termination

_ENDS = {
    "stop": Termination.ANSWERED,
    "end-turn": Termination.ANSWERED,
    "length": Termination.MAX_TOKENS,
    "tool-calls": Termination.UNKNOWN,
    "unknown": Termination.UNKNOWN,
    "other": Termination.UNKNOWN,
    "content-filter": Termination.UNKNOWN,
    "error": Termination.INFRA_ERROR,
    "ContextOverflowError": Termination.MAX_CONTEXT,
    "MessageOutputLengthError": Termination.MAX_TOKENS,
    "MessageAbortedError": Termination.CANCELLED,
    "APIError": Termination.INFRA_ERROR,
    "ProviderAuthError": Termination.INFRA_ERROR,
    "UnknownError": Termination.INFRA_ERROR,
}
_KNOWN_INFO = frozenset({"id", "role", "tokens", "cost", "modelID", "finish", "time", "error"})
_KNOWN_STATE = frozenset({"status", "input", "output", "error"})
_KNOWN_PART = {
    **dict.fromkeys(("text", "reasoning"), frozenset({"type", "text"})),
    "tool": frozenset({"type", "tool", "callID", "state"}),
    "step-start": frozenset({"type"}),
    "step-finish": frozenset({"type", "tokens", "cost", "reason"}),
}
"""Keys of parts. The steps stand around an answer; in what is printed the second one has its usage and its end."""


def fits(head: Any) -> int:
    if not isinstance(head, dict):
        return 0
    if isinstance(head.get("part"), dict) and "sessionID" in head:
        return 3
    info, messages = head.get("info"), head.get("messages")
    if not isinstance(info, dict) or not isinstance(messages, list) or not {"projectID", "version"} & info.keys():
        return 0
    return 3 if not messages or (isinstance(messages[0], dict) and "parts" in messages[0]) else 0


def read(source: Source) -> Iterator[Row]:
    printed: dict[str, dict[str, Any]] = {}

    def convert(record: dict[str, Any]) -> Iterator[Row]:
        if "part" in record or "sessionID" in record:
            _take(record, printed, source)
        else:
            source.notes.rest(record, {"info", "messages"})
            yield from _rows(record["info"], record["messages"], source.notes)

    yield from each(source, source.records(), convert)
    for session in printed.values():
        source.number = session["first"]
        source.notes.remark("runs without their task and model, which are not printed")
        yield from each(
            source,
            [{"info": session["info"], "messages": list(session["messages"].values())}],
            lambda document: _rows(document["info"], document["messages"], source.notes),
        )


def _take(event: dict[str, Any], printed: dict[str, dict[str, Any]], source: Source) -> None:
    """Add a printed part to the message that it is of."""
    name = str(event["sessionID"])
    session = printed.setdefault(name, {"info": {"id": name}, "messages": {}, "first": source.number})
    session["info"].setdefault("time", {"created": event.get("timestamp")})
    source.notes.rest(event, {"type", "sessionID", "part", "timestamp", "error"})
    part = event.get("part")
    if not isinstance(part, dict):
        if event.get("error") and session["messages"]:
            next(reversed(session["messages"].values()))["info"]["error"] = event["error"]
        source.notes.ignored[f"lines of type {event.get('type')}"] += 1
        return
    message = session["messages"].setdefault(
        str(part.get("messageID")), {"info": {"role": "assistant", "id": part.get("messageID")}, "parts": []}
    )
    if part.get("type") == "step-finish":
        message["info"] |= {"tokens": part.get("tokens"), "cost": part.get("cost"), "finish": part.get("reason")}
    message["parts"].append(part)


def _rows(session: dict[str, Any], messages: list[dict[str, Any]], notes: Notes) -> Iterator[Row]:
    notes.rest(session, {"id", "time", "tokens", "cost"}, "info.")
    contexts: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if contexts[-1] and any(part.get("type") == "compaction" for part in message["parts"]):
            contexts.append([])
        contexts[-1].append(message)
    name = str(session.get("id") or "unnamed")
    for segment, context in enumerate(contexts):
        errors = len(chat := [*_chat(context, notes)]) and sum(message.get("error") is True for message in chat)
        if not chat:
            notes.remark("sessions in which nothing was said")
            continue
        infos = [message["info"] for message in context]
        answers = [info for info in infos if info.get("role") == "assistant"]
        created = (session if not segment else infos[0]).get("time")
        yield make_row(
            chat,
            source="opencode",
            origin={
                "source_id": name,
                "source_time": moment(created.get("created") if isinstance(created, dict) else None),
            }
            | _spent(answers, notes),
            trajectory_id=f"{name}-{segment}",
            episode_id=name,
            segment=segment,
            policy=next((info["modelID"] for info in reversed(answers) if info.get("modelID")), None),
            termination=_end(infos, segment == len(contexts) - 1, notes),
            n_tool_errors=errors,
        )


def _end(infos: list[dict[str, Any]], last: bool, notes: Notes) -> Termination | None:
    """How a row ends. Before a compaction and after a user's message nobody says it."""
    if not last:
        return Termination.UNKNOWN
    error = infos[-1].get("error")
    if error:
        name = error.get("name") if isinstance(error, dict) else None
        return _ENDS.get(str(name), Termination.INFRA_ERROR)
    return termination(_ENDS, infos[-1].get("finish"), notes)


def _spent(answers: Iterable[dict[str, Any]], notes: Notes) -> dict[str, Any]:
    spent = Calls(notes)
    for info in answers:
        tokens, parts = info.get("tokens") or {}, ("read", "write")
        cache = tokens.get("cache") or {}
        asked = [count(tokens.get("input")), *(count(cache.get(part)) for part in parts)]
        written = [count(tokens.get("output")), count(tokens.get("reasoning"))]
        spent.tokens(
            *(sum(filter(None, part)) if any(n is not None for n in part) else None for part in (asked, written))
        )
        spent.paid(info.get("cost"), "info.cost")
        notes.rest(cache, {*parts}, "info.tokens.cache.")
        notes.rest(tokens, {"input", "output", "reasoning", "cache", "total"}, "info.tokens.")
    return spent.fields()


def _chat(context: Iterable[dict[str, Any]], notes: Notes) -> Iterator[dict[str, Any]]:
    for number, message in enumerate(context):
        info = message["info"]
        notes.rest(message, {"info", "parts"}, "messages.")
        notes.rest(info, _KNOWN_INFO, "messages.info.")
        answer: dict[str, Any] = {"role": info["role"], "content": ""}
        answers: list[dict[str, Any]] = []
        texts, thoughts = [], []
        for part in message["parts"]:
            kind = part.get("type")
            if kind == "text":
                texts.append(str(part["text"]))
            elif kind == "reasoning":
                thoughts.append(str(part["text"]))
            elif kind == "tool":
                answer.setdefault("tool_calls", []).append(_call(part, f"call_{number}_{len(answers)}"))
                answers += _answer(part, answer["tool_calls"][-1], notes)
            elif kind not in _KNOWN_PART:
                notes.ignored[f"parts of type {str(kind)[:60]}"] += 1
            if kind in _KNOWN_PART:
                notes.rest(part, _KNOWN_PART[kind], "parts.")
        answer["content"] = "\n".join(texts)
        if thoughts:
            answer["reasoning"] = "\n".join(thoughts)
        if answer["content"] or len(answer) > 2:
            yield answer
        yield from answers


def _call(part: dict[str, Any], fallback: str) -> dict[str, Any]:
    state = part.get("state") or {}
    arguments = json.dumps(state.get("input") or {}, ensure_ascii=False)
    return {"id": str(part.get("callID") or fallback), "name": str(part["tool"]), "arguments": arguments}


def _answer(part: dict[str, Any], call: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    """The tool's message; none if the tool was still at work."""
    state = part.get("state") or {}
    notes.rest(state, _KNOWN_STATE, "parts.state.")
    if state.get("status") not in ("completed", "error"):
        notes.remark("calls that were never completed")
        return []
    failed = state["status"] == "error"
    told = state.get("error" if failed else "output") or ""
    content = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
    return [{"role": "tool", "content": content, "tool_call_id": call["id"], "name": call["name"], "error": failed}]

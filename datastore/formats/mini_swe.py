"""mini-swe-agent ``.traj.json``: a document with ``info``, ``messages`` and ``trajectory_format``; before version 1
a bare list of messages. Read only.

``messages`` are OpenAI chat, with calls from version 2 on, and otherwise with commands in code blocks, which stay text
as the model saw it; or they are items of OpenAI Responses, each answer of the model a response (checked against files
that version 2.4.6 wrote). ``info.exit_status`` is the end (``Submitted``, ``LimitsExceeded``, ``TimeExceeded``, or the
name of an exception, an ``infra_error``), ``info.submission`` the final state, ``info.config.model.model_name`` the
policy, ``instance_id`` or the file's name the task. The message of role ``exit``, or the last one if it is empty, only
repeats them. Whether the submission is right is not in the file: rows are unscored. Usage and time are those of the
responses in ``extra``, the cost is ``info.model_stats.instance_cost``. Not carried: the rest of ``extra`` (raw
responses, parsed actions).
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from agentrl.datastore.formats.chat import is_chat
from agentrl.datastore.formats.messages import from_chat
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, moment
from agentrl.datastore.formats.raw import TooLongError
from agentrl.datastore.formats.responses import from_items
from agentrl.datastore.formats.rows import make_row
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.trajectory import Termination

_EXITS = {
    "Submitted": Termination.ANSWERED,
    "LimitsExceeded": Termination.MAX_STEPS,
    "TimeExceeded": Termination.TIME_LIMIT,
    "RepeatedFormatError": Termination.FORMAT_ERROR,
    "FormatError": Termination.FORMAT_ERROR,
    "UserInterruption": Termination.CANCELLED,
    "KeyboardInterrupt": Termination.CANCELLED,
    "ContextWindowExceededError": Termination.MAX_CONTEXT,
}
_KNOWN = {
    "": frozenset({"info", "messages", "trajectory_format", "instance_id"}),
    "info": frozenset({"exit_status", "submission", "config", "model_stats"}),
    "info.model_stats": frozenset({"instance_cost"}),
    "info.config": frozenset({"model"}),
    "info.config.model": frozenset({"model_name"}),
}


def fits(source: Source) -> int:
    head = source.head
    if isinstance(head, dict) and str(head.get("trajectory_format", "")).startswith("mini-swe-agent"):
        return 3
    bare = source.kind == "array" and is_chat([head]) and "".join(source.path.suffixes[-2:]) == ".traj.json"
    return 2 if bare else 0


def read(source: Source) -> Iterator[Row]:
    def convert(document: Any) -> Iterator[Row]:
        if isinstance(document, list):
            document = {"messages": document}
        source.notes.inside(document, _KNOWN)
        info = document.get("info") or {}
        config = info.get("config") or {}
        status = info.get("exit_status")
        model = (config.get("model") or {}).get("model_name")
        yield make_row(
            _messages(document["messages"], source.notes),
            source="mini-swe-agent",
            origin=_origin(document["messages"], info.get("model_stats") or {}, source.notes),
            task=document.get("instance_id") or source.path.name.split(".")[0],
            policy=model,
            termination=_EXITS.get(status, Termination.INFRA_ERROR) if status else None,
            final_state=json.dumps({"submission": info["submission"]}) if info.get("submission") else None,
        )

    def documents() -> Iterator[Any]:
        source.number = 1
        try:
            source.record = source.document()
        except TooLongError as error:
            source.notes.refuse(source.place, error)
        else:
            yield source.record

    return each(source, documents(), convert)


def _origin(messages: list[dict[str, Any]], stats: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """The time of the first message that has one, the usage of the responses, and the cost of the instance."""
    inner = Notes()  # of ``extra`` most is not read: it is counted as a whole
    spent, start = Calls(inner), None
    for message in messages:
        extra = message.get("extra") if isinstance(message.get("extra"), dict) else {}
        assert extra is not None
        start = start or moment(extra.get("timestamp") or message.get("timestamp"))
        response = extra.get("response") or (message if message.get("object") == "response" else {})
        if isinstance(response, dict):
            spent.usage(response.get("usage"), "")
    spent.cost = None
    total = Calls(notes)
    total.paid(stats.get("instance_cost"), "info.model_stats.instance_cost")
    return {"source_time": start} | spent.fields() | total.fields()


def _messages(messages: list[dict[str, Any]], notes: Notes) -> list[dict[str, Any]]:
    """Fields of messages from chat, or from Responses items, among which each answer of the model is a response."""
    for message in messages:
        if message.get("extra"):
            notes.ignored["messages.extra"] += 1
    spoken = _spoken(messages)
    if all("role" in message for message in spoken):
        return from_chat(spoken, notes)
    items: list[dict[str, Any]] = []
    for message in spoken:
        if message.get("object") == "response":
            notes.rest(message, frozenset({"object", "output"}), "messages.")
            items += message["output"]
        else:
            items.append(message)
    return from_items(items, notes)


def _spoken(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages that the model saw, or that it said."""
    kept = [{k: v for k, v in message.items() if k != "extra"} for message in messages if message.get("role") != "exit"]
    last = kept[-1] if kept else {}
    return kept[:-1] if last.get("role") == "user" and not last.get("content") else kept

"""OpenHands: ``output.jsonl`` of an evaluation (a line per instance, with ``history``), and a list of events, as a
JSON array or as JSON Lines. Events of version 0 (``action``, ``observation``) and of the software agent SDK
(``kind``). Read only.

The model's own message in ``tool_call_metadata.model_response`` is the assistant message, once for all its calls;
an action without it is a call by the action's name, with ``thought`` as text. An observation answers the call of
its ``tool_call_id`` or ``cause``; one of kind ``error`` is a tool error, and without either it answers the last call
that has no answer. ``finish`` is an answer.
``metadata.llm_config.model`` is the policy, ``test_result.git_patch`` the final state, ``report.resolved`` or
``success`` the success (otherwise unscored). An ``error`` of the instance gives the end. Actions and observations
of the program (``recall``, changes of state, condensation) are counted. Cost and usage are those that ``metrics``
accumulated. Not carried: other ``metrics``, ``extras``, ``instance``.
"""

import json
from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats.messages import from_chat, text_of, tools_text
from agentrl.datastore.formats.origin import Calls, count, moment
from agentrl.datastore.formats.parts import by_record
from agentrl.datastore.formats.rows import make_row
from agentrl.datastore.formats.source import Row, Source, Stretch, each
from agentrl.schemas.trajectory import Termination

_KNOWN = {
    "": frozenset({"instance_id", "history", "metadata", "test_result", "report", "success", "resolved", "git_patch"})
    | {"metrics"},
    "metrics": frozenset({"accumulated_cost", "accumulated_token_usage"}),
    "metadata": frozenset({"llm_config"}),
    "metadata.llm_config": frozenset({"model"}),
    "test_result": frozenset({"git_patch", "report"}),
    "test_result.report": frozenset({"resolved"}),
    "report": frozenset({"resolved"}),
}
_KNOWN_ACTION = frozenset({"id", "source", "action", "args", "tool_call_metadata"})
_KNOWN_OBSERVATION = frozenset({"id", "source", "observation", "content", "cause", "tool_call_metadata", "success"})
_KNOWN_META = {
    "": frozenset({"tool_call_id", "function_name", "model_response", "total_calls_in_response"}),
    "model_response": frozenset({"id", "choices", "model", "object"}),
}
_KNOWN_TEXT = frozenset({"content", "tools"})
_KNOWN_CHOICE = frozenset({"message", "index"})
_KNOWN_SAID = frozenset({"role", "content", "tool_calls", "reasoning_content"})
_KNOWN_SDK = {
    "SystemPromptEvent": frozenset({"kind", "source", "system_prompt", "tools", "dynamic_context"}),
    "MessageEvent": frozenset({"kind", "source", "llm_message", "extended_content"}),
    "ActionEvent": frozenset(
        {"kind", "source", "tool_name", "tool_call_id", "tool_call", "action", "thought", "reasoning_content"}
        | {"llm_response_id", "thinking_blocks"}
    ),
    "ObservationEvent": frozenset({"kind", "source", "tool_name", "tool_call_id", "observation"}),
    "AgentErrorEvent": frozenset({"kind", "source", "tool_name", "tool_call_id", "error"}),
    "UserRejectObservation": frozenset({"kind", "source", "tool_name", "tool_call_id", "rejection_reason"}),
}
_PROGRAM = frozenset({"recall", "change_agent_state", "agent_state_changed", "null", "condensation", "pause", "resume"})
_KINDS = _KNOWN_SDK.keys()


def _is_event(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    old = ("action" in record and ("args" in record or "source" in record)) or (
        "observation" in record and "content" in record
    )
    return record.get("kind") in _KINDS or (old and "history" not in record)


def fits(head: Any) -> int:
    if _is_event(head):
        return 2
    if not isinstance(head, dict) or not isinstance(head.get("history"), list) or "trajectory" in head:
        return 0
    first = head["history"][0] if head["history"] else None
    first = first[0] if isinstance(first, list) and first else first
    return 3 if isinstance(first, dict) and ({"action", "observation"} & first.keys() or first.get("kind")) else 0


def read(source: Source) -> Iterator[Row]:
    if _is_event(source.head):
        return each(source, [list(_events(source))], lambda event_list: [_row(source, event_list, {})])

    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.inside(line, _KNOWN)
        pairs = line["history"]
        events = [event for pair in pairs for event in (pair if isinstance(pair, list) else [pair])]
        yield _row(source, events, line)

    return each(source, source.records(), convert)


def cut(source: Source) -> Iterator[Stretch] | None:
    """Parts of an evaluation; a list of events is one row."""
    return None if _is_event(source.head) else by_record(source)


def _events(source: Source) -> Iterator[dict[str, Any]]:
    for record in source.records():
        if isinstance(record, dict):
            yield record
        else:
            source.notes.refuse(source.place, f"is a {type(record).__name__}, an event is an object")


def _row(source: Source, events: list[dict[str, Any]], line: dict[str, Any]) -> Row:
    conversation = _Talk(source)
    for event in events:
        conversation.add(event)
    issue = line.get("issue") or {}
    task = line.get("instance_id") or (f"{issue['repo']}-{issue['number']}" if "number" in issue else None)
    report = line.get("report") or (line.get("test_result") or {}).get("report") or {}
    solved = report.get("resolved", line.get("resolved", line.get("success")))
    patch = (line.get("test_result") or {}).get("git_patch") or line.get("git_patch")
    return make_row(
        from_chat(conversation.chat, source.notes),
        source="openhands",
        origin=_origin(events, line, source),
        task=task,
        policy=((line.get("metadata") or {}).get("llm_config") or {}).get("model") or conversation.model,
        success=solved if isinstance(solved, bool) else None,
        reward=float(solved) if isinstance(solved, bool) else None,
        final_state=json.dumps({"git_patch": patch}) if patch else None,
        tools=tools_text(conversation.tools),
        termination=_end(line.get("error")) or (Termination.ANSWERED if conversation.finished else None),
        n_tool_errors=conversation.errors,
    )


def _origin(events: list[dict[str, Any]], line: dict[str, Any], source: Source) -> dict[str, Any]:
    """The time of the first event, and what the metrics of the line say, else those that the last event has."""
    spent = Calls(source.notes)
    last: dict[str, Any] = next(
        (event["llm_metrics"] for event in reversed(events) if isinstance(event.get("llm_metrics"), dict)), {}
    )
    metrics = line.get("metrics") or last
    usage = metrics.get("accumulated_token_usage")
    if isinstance(usage, dict):
        spent.tokens(count(usage.get("prompt_tokens")), count(usage.get("completion_tokens")))
    spent.paid(metrics.get("accumulated_cost"), "metrics.accumulated_cost")
    times = (moment(event["timestamp"]) for event in events if event.get("timestamp"))
    return {"source_time": next((time for time in times if time), None)} | spent.fields()


def _end(error: Any) -> Termination | None:
    if not error:
        return None
    text = str(error).lower()
    for word, end in (
        ("iteration", Termination.MAX_STEPS),
        ("timeout", Termination.TIME_LIMIT),
        ("context", Termination.MAX_CONTEXT),
        ("stuck", Termination.UNKNOWN),  # in a loop of its own making
    ):
        if word in text:
            return end
    return Termination.INFRA_ERROR


class _Talk:
    """The conversation of a list of events."""

    def __init__(self, source: Source) -> None:
        self.notes = source.notes
        self.chat: list[dict[str, Any]] = []
        self.tools: list[Any] = []
        self.errors = 0
        self.finished = False
        self.model: str | None = None
        self._responses: set[str] = set()
        self._calls: dict[Any, str] = {}

    def add(self, event: dict[str, Any]) -> None:
        kind = event.get("kind")
        if kind in _KINDS:
            self._sdk(event, str(kind))
        elif event.get("action") in _PROGRAM or event.get("observation") in _PROGRAM or kind:
            name = kind or event.get("action") or event.get("observation")
            self.notes.ignored[f"events of kind {name}"] += 1
        elif isinstance(event.get("action"), str):
            self._action(event)
        elif isinstance(event.get("observation"), str):
            self._observation(event)
        else:
            raise KeyError("action")

    def _action(self, event: dict[str, Any]) -> None:
        name, args = event["action"], event.get("args")
        if isinstance(args, dict):
            self.notes.rest(event, _KNOWN_ACTION)
        else:
            args = {k: v for k, v in event.items() if k not in _EVENT}
            self.notes.rest({k: v for k, v in event.items() if k in _EVENT}, _KNOWN_ACTION)
        content = args.get("content")
        if name in ("system", "message"):
            self.notes.rest(args, _KNOWN_TEXT, "args.")
        if name == "system":
            self.chat.append({"role": "system", "content": content})
            self.tools = args.get("tools") or []
            return
        meta = event.get("tool_call_metadata") or {}
        if name == "message" and not meta:
            user = event.get("source", "user" if not self.chat else "agent") == "user"
            self.chat.append({"role": "user" if user else "assistant", "content": content or event.get("message")})
            return
        self.finished = self.finished or name == "finish"
        if meta:
            self._response(meta, event)
            return
        identity = f"call_{event.get('id', len(self.chat))}"
        plain = {k: v for k, v in args.items() if k != "thought" and v is not None}
        call = {"id": identity, "function": {"name": name, "arguments": plain}}
        self.chat.append({"role": "assistant", "content": args.get("thought") or "", "tool_calls": [call]})
        self._calls[event.get("id", "last")] = identity

    def _response(self, meta: dict[str, Any], event: dict[str, Any]) -> None:
        """The model's message, at the first of its calls."""
        self.notes.inside(meta, _KNOWN_META, "tool_call_metadata.")
        response = meta.get("model_response") or {}
        self.model = self.model or response.get("model")
        key = str(response.get("id") or meta.get("tool_call_id"))
        self._calls[event.get("id")] = str(meta.get("tool_call_id"))
        if key in self._responses:
            return
        self._responses.add(key)
        choices = response.get("choices") or []
        message = choices[0].get("message") if choices else None
        for choice in choices[:1]:
            self.notes.rest(choice, _KNOWN_CHOICE, "tool_call_metadata.model_response.choices.")
        if not message:
            function = {"name": meta.get("function_name"), "arguments": event.get("args") or {}}
            message = {"content": "", "tool_calls": [{"id": meta.get("tool_call_id"), "function": function}]}
        else:  # it holds the arguments as the model wrote them
            self.notes.ignored["args"] += 1
        self._say("assistant", message, "tool_call_metadata.model_response.message.")

    def _say(self, role: str, message: dict[str, Any], prefix: str) -> None:
        self.notes.rest(message, _KNOWN_SAID, prefix)
        wanted = ("content", "tool_calls", "reasoning_content")
        self.chat.append({"role": role, **{name: message[name] for name in wanted if message.get(name)}})

    def _observation(self, event: dict[str, Any]) -> None:
        self.notes.rest(event, _KNOWN_OBSERVATION)
        meta = event.get("tool_call_metadata") or {}
        identity = meta.get("tool_call_id") or self._calls.get(event.get("cause", "last"))
        error = event["observation"] == "error" or event.get("success") is False
        self.errors += error
        content = text_of(event.get("content"), self.notes, data=True)
        if identity is None and event["observation"] == "error" and event.get("cause") is None:
            identity = next(reversed(self._open()), None)
        if identity is None and event.get("cause") is None and "id" in event:
            self.notes.ignored[f"events of kind {event['observation']}"] += 1
            return
        self.chat.append({"role": "tool", "content": content, "tool_call_id": identity, "is_error": error})

    def _open(self) -> list[str]:
        """Ids of the calls without an answer, in order."""
        answered = {message.get("tool_call_id") for message in self.chat}
        calls = [str(call["id"]) for message in self.chat for call in message.get("tool_calls") or [] if call.get("id")]
        return [identity for identity in calls if identity not in answered]

    def _sdk(self, event: dict[str, Any], kind: str) -> None:
        self.notes.rest(event, _KNOWN_SDK[kind])
        if kind == "SystemPromptEvent":
            prompt = [self._text(event.get(key)) for key in ("system_prompt", "dynamic_context")]
            self.chat.append({"role": "system", "content": "\n\n".join(filter(None, prompt))})
            self.tools = [self._sdk_tool(tool) for tool in event.get("tools") or []]
        elif kind == "MessageEvent":
            llm_message = event.get("llm_message") or {}
            role = llm_message.get("role") or ("assistant" if event.get("source") == "agent" else "user")
            texts = [self._text(content) for content in (llm_message.get("content"), event.get("extended_content"))]
            self._say(role, {**llm_message, "content": "\n".join(filter(None, texts))}, "llm_message.")
        elif kind == "ActionEvent":
            self._sdk_action(event)
        else:
            observation = event.get("observation") or {}
            known = observation.get("is_error")
            failed = True if kind == "AgentErrorEvent" else None if known is None else bool(known)
            self.errors += bool(failed)
            held = next((key for key in ("content", "output") if observation.get(key)), "content")
            self.notes.rest(observation, {"kind", "is_error", held}, "observation.")
            content = self._text(event.get("error") or event.get("rejection_reason") or observation.get(held), True)
            answer = {"role": "tool", "content": content, "tool_call_id": event.get("tool_call_id")}
            self.chat.append(answer | {"name": event.get("tool_name"), "is_error": failed})

    def _sdk_action(self, event: dict[str, Any]) -> None:
        self.finished = self.finished or event.get("tool_name") == "finish"
        call = event.get("tool_call") or {}
        self.notes.rest(call, {"id", "name", "arguments"}, "tool_call.")
        name = call.get("name") or event.get("tool_name")
        arguments = call.get("arguments", event.get("action") or {})
        tool_call = {"id": event.get("tool_call_id"), "function": {"name": name, "arguments": arguments}}
        response = event.get("llm_response_id")
        if response and response in self._responses and self.chat[-1].get("tool_calls"):
            self.chat[-1]["tool_calls"].append(tool_call)
            return
        self._responses.add(str(response))
        message = {"role": "assistant", "content": self._text(event.get("thought")), "tool_calls": [tool_call]}
        blocks = event.get("thinking_blocks") or []
        for block in blocks:
            self.notes.rest(block, {"type", "thinking"}, "thinking_blocks.")
        thoughts = "\n".join(block["thinking"] for block in blocks if block.get("thinking")) or None
        self.chat.append(message | {"reasoning_content": event.get("reasoning_content") or thoughts})

    def _sdk_tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """A tool as chat has it. The SDK writes its name and description, and no schema of its parameters."""
        if "function" in tool or "title" not in tool:
            return tool
        self.notes.rest(tool, {"title", "description", "kind"}, "tools.")
        return {"type": "function", "function": {"name": tool["title"], "description": tool.get("description") or ""}}

    def _text(self, content: Any, data: bool = False) -> str:
        return text_of(content, self.notes, data=data)


_EVENT = frozenset({"id", "timestamp", "source", "message", "action", "cause", "llm_metrics", "is_confirmed"})

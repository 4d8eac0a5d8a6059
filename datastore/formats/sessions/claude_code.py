"""Claude Code sessions, JSON Lines: ``~/.claude/projects/<project>/<session>.jsonl``, with the sub-agents in
``<session>/subagents/agent-<id>.jsonl``. Read only. The folder ``projects`` is imported as it is.

A session is an episode. Lines of type ``user`` and ``assistant`` hold messages of the Anthropic API, in the order that
:mod:`conversations` says; lines of one ``message.id`` are pieces of one message. After a ``compact_boundary`` a new
row of the episode begins, with the summary and what the compaction kept. Each sub-agent is a row, tagged
``kind:subagent``; ``agent`` is its type, else ``subagent``, and its parent the row with the call that began it
(``toolUseId``, ``toolUseResult.agentId``, or the prompt). A branch that was left is a row, tagged ``rewound`` and
``not-trained``. A command that was queued is a user message, as far as the file says.

``message.model`` is the policy, ``usage`` and ``costUSD`` are those of the row's own messages, ``tool_result`` with
``is_error`` a tool error. The last ``stop_reason`` gives the end, ``max_turns_reached`` is ``max_steps``, an interrupt
by the user ``cancelled``. A message of the model ``<synthetic>`` was made by the program and is left out; if it is the
last one and says that the API failed (``isApiErrorMessage``), the row is an ``infra_error``, or ``max_context`` if the
prompt was too long. Rows are unscored.

Cannot carry: the system prompt and tool schemas (not in the file), ``toolUseResult``, signatures, times after the
first. Attachments (lists of skills and agents, reminders), whose words to the model are not in the file, and lines of
other types (``summary``, ``system``, ``last-prompt``, ``queue-operation``) are counted by type.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.datastore.formats.anthropic import STOPS, from_blocks
from agentrl.datastore.formats.origin import Calls, moment
from agentrl.datastore.formats.parts import between, in_parts
from agentrl.datastore.formats.rows import make_row, termination, untrained
from agentrl.datastore.formats.sessions.conversations import (
    SessionLine,
    SessionPart,
    conversations,
    is_boundary,
    is_message,
)
from agentrl.datastore.formats.source import Row, Source, Stretch, each
from agentrl.schemas.trajectory import Termination

_SESSION = re.compile(rb'"sessionId"\s*:\s*("(?:[^"\\]|\\.)*"|[^\s,}]+)')
_KNOWN = frozenset(
    {"type", "message", "sessionId", "isSidechain", "agentId", "isApiErrorMessage", "subtype", "costUSD"}
    | {"parentUuid", "logicalParentUuid", "isCompactSummary", "attachment"}
)
_KNOWN_MESSAGE = frozenset({"role", "content", "id", "type", "model", "stop_reason", "usage"})
_SYNTHETIC = "<synthetic>"
_TOO_LONG = "Prompt is too long"
_INTERRUPTED = "[Request interrupted by user"
SUBAGENT = "kind:subagent"
REWOUND = "rewound"


def fits(head: Any) -> int:
    if not isinstance(head, dict) or not isinstance(head.get("type"), str):
        return 0
    if head["type"] in ("user", "assistant") and isinstance(head.get("message"), dict) and "sessionId" in head:
        return 3
    others = ("summary", "file-history-snapshot", "system", "progress")
    return 2 if "sessionId" in head or (head["type"] in others and {"leafUuid", "messageId"} & head.keys()) else 0


def companions(path: Path) -> list[Path]:
    """Files of the sub-agents of a session."""
    folder = path.with_suffix("") / "subagents"
    return sorted(folder.glob("agent-*.jsonl")) if path.suffix == ".jsonl" and folder.is_dir() else []


def _about(path: Path) -> dict[str, Any]:
    """What the file beside a sub-agent's says of it. Nothing if there is none."""
    beside = path.with_suffix(".meta.json")
    if not beside.is_file():
        return {}
    try:
        about = Source(beside).document()
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def read(source: Source) -> Iterator[Row]:
    return in_parts(source, cut, _sessions)


def cut(source: Source) -> Iterator[Stretch] | None:
    """Parts of whole sessions."""
    return between(source, _session)


def _session(line: bytes) -> list[bytes]:
    """The session of a line, found without reading all of it: inside a text the quotes have backslashes."""
    if match := _SESSION.search(line):
        return [match[1]]
    return [b""] if b'"message"' in line else []


@dataclass
class Spoken:
    """A conversation on its way to a row."""

    source: Source
    session: str
    agent: str
    """Id of the sub-agent; "" is the main one."""
    conversation: SessionPart
    about: dict[str, Any] = field(default_factory=dict)
    """What a file beside it says of a sub-agent."""
    spent: dict[str, Any] | None = None
    """Usage and cost; None: what its messages say."""
    end: Termination | None = None
    """How it ended; None: as its messages say."""

    @property
    def times(self) -> list[datetime]:
        return [time for line in self.conversation.own if (time := moment(line.record.get("timestamp")))]

    @property
    def begun(self) -> tuple[int, datetime]:
        """How many agents began it one after the other, and when it began."""
        depth = self.about.get("spawnDepth")
        return depth if isinstance(depth, int) else 1, min(self.times, default=datetime.max.replace(tzinfo=UTC))


def _sessions(source: Source) -> Iterator[Row]:
    spoken = list(_spoken(source, {}))
    helpers: list[Spoken] = []
    if not source.span or not source.span.before:
        for path in companions(source.path):
            name = source.name.removesuffix(str(source.path)) + str(path)
            helpers += _spoken(Source(path, source.notes, name), _about(path))
    yield from rows_of([*spoken, *sorted(helpers, key=lambda talk: talk.begun)])


def rows_of(spoken: list[Spoken]) -> Iterator[Row]:
    """Rows of conversations; sub-agents after the conversations that began them."""
    segments: dict[str, int] = {}
    calls: dict[tuple[str, str], str] = {}
    for talk in spoken:
        segment = segments[talk.session] = segments.get(talk.session, -1) + 1
        own, source = talk.conversation.own, talk.source
        if talk.conversation.left and not any(line.record["type"] == "assistant" for line in own):
            source.notes.remark("messages of a branch that was left, without an answer", len(own))
            continue
        source.number, source.record = talk.conversation.first, [line.record for line in talk.conversation.lines]
        yield from each(source, [source.record], lambda _, t=talk, n=segment: _row(t, n, calls))  # type: ignore[misc]


def _spoken(source: Source, about: dict[str, Any]) -> Iterator[Spoken]:
    chains: dict[tuple[str, str], list[SessionLine]] = {}
    for record in source.records():
        if not isinstance(record, dict):
            source.notes.refuse(source.place, f"is a {type(record).__name__}, an object is needed")
            continue
        agent = str(record.get("agentId") or "subagent") if record.get("isSidechain") else ""
        line = SessionLine(source.number, record)
        if not line.speaks:
            _count(record, source)
        if line.speaks or "uuid" in record or is_boundary(record):
            chains.setdefault((str(record.get("sessionId")), agent), []).append(line)
    own = about if about or source.path.parent.name != "subagents" else _about(source.path)
    spoken = [
        Spoken(source, session, agent, talk, own)
        for (session, agent), lines in chains.items()
        for talk in conversations(lines, apart=bool(agent))
    ]
    yield from sorted(spoken, key=lambda talk: talk.conversation.first)


def _count(record: dict[str, Any], source: Source) -> None:
    """Count a line that is no message, unless it is carried."""
    kind = record.get("type")
    if kind != "attachment":
        source.notes.ignored[f"lines of type {kind}"] += 1
    elif _attached(record) not in ("queued_command", "max_turns_reached"):
        source.notes.ignored[f"attachments of type {_attached(record)}"] += 1


def _attached(record: dict[str, Any]) -> str:
    attachment = record.get("attachment")
    return str(attachment.get("type"))[:60] if isinstance(attachment, dict) else "unknown"


def _origin(talk: Spoken) -> dict[str, Any]:
    """The session, the time of its first message, and what its messages used."""
    spent = _spent(talk) if talk.spent is None else talk.spent
    return {"source_id": talk.session, "source_time": min(talk.times, default=None)} | spent


def _spent(talk: Spoken) -> dict[str, Any]:
    """What messages used. Pieces of one message repeat its usage."""
    spent = Calls(talk.source.notes)
    last: dict[Any, Any] = {}
    for line in talk.conversation.own:
        spent.paid(line.record.get("costUSD"), "costUSD")
        usage, made_up = line.record["message"].get("usage"), line.record["message"].get("model") == _SYNTHETIC
        if usage and not made_up:
            last[line.record["message"].get("id") or line.number] = usage
    for usage in last.values():
        spent.usage(usage, "message.usage.")
    return spent.fields()


def _chat(talk: Spoken) -> list[dict[str, Any]]:
    """Messages with content blocks. The keys of a line are counted where it stands first."""
    chat: list[dict[str, Any]] = []
    last, own, notes = None, {line.number for line in talk.conversation.own}, talk.source.notes
    for line in talk.conversation.lines:
        if not line.speaks:
            if line.record.get("type") == "attachment" and _attached(line.record) == "queued_command":
                chat.append({"role": "user", "content": line.record["attachment"].get("prompt") or ""})
            continue
        message = line.record["message"]
        if line.number in own:
            notes.rest(line.record, _KNOWN)
            notes.rest(message, _KNOWN_MESSAGE, "message.")
        if message.get("model") == _SYNTHETIC:
            notes.remark("messages that the program made in the name of the model, left out")
            continue
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        if message.get("id") and message.get("id") == last:
            chat[-1]["content"] += blocks
        else:
            chat.append({"role": message.get("role") or line.record["type"], "content": list(blocks)})
        last = message.get("id")
    return chat


def _end(talk: Spoken) -> Termination | None:
    """Why the conversation ended, by what stands after the last answer."""
    records = [line.record for line in reversed(talk.conversation.lines)]
    answer = next((number for number, record in enumerate(records) if record.get("type") == "assistant"), len(records))
    if any(_attached(record) == "max_turns_reached" for record in records[:answer]):
        return Termination.MAX_STEPS
    last = next(record for record in records if is_message(record))
    text = str(last["message"].get("content"))
    if last.get("isApiErrorMessage"):
        return Termination.MAX_CONTEXT if _TOO_LONG in text else Termination.INFRA_ERROR
    if last["type"] == "user" and _INTERRUPTED in text:
        return Termination.CANCELLED
    return termination(STOPS, last["message"].get("stop_reason"), talk.source.notes)


def _row(talk: Spoken, segment: int, calls: dict[tuple[str, str], str]) -> Iterator[Row]:
    """The row of a conversation. ``calls`` are the rows with the calls that may have begun a sub-agent, by session and
    id, agent or prompt; the row adds its own."""
    name = f"{talk.session}-{segment}"
    messages, errors = from_blocks(_chat(talk), talk.source.notes)
    models = [line.record["message"].get("model") for line in talk.conversation.own]
    tags = [SUBAGENT] if talk.agent else []
    kind = talk.about.get("agentType")
    if not messages:
        talk.source.notes.remark("conversations in which nobody but the program spoke")
        return
    yield make_row(
        messages,
        source="claude-code",
        origin=_origin(talk),
        trajectory_id=name,
        episode_id=talk.session,
        segment=segment,
        agent=(kind if isinstance(kind, str) and kind else "subagent") if talk.agent else None,
        parent_id=_parent(talk, messages, calls) if talk.agent else None,
        policy=next((model for model in models if model and model != _SYNTHETIC), None),
        n_tool_errors=errors,
        termination=talk.end or _end(talk),
        tags=untrained([*tags, REWOUND]) if talk.conversation.left else tags,
    )
    _name_calls(talk, name, calls)


def _name_calls(talk: Spoken, name: str, calls: dict[tuple[str, str], str]) -> None:
    for line in talk.conversation.own:
        result, content = line.record.get("toolUseResult"), line.record["message"].get("content")
        if isinstance(result, dict) and isinstance(agent := result.get("agentId"), str):
            calls.setdefault((talk.session, agent), name)
        for block in content if isinstance(content, list) else []:
            if isinstance(block, dict) and block.get("type") == "tool_use":
                asked = block.get("input")
                prompt = asked.get("prompt") if isinstance(asked, dict) else None
                for key in (block.get("id"), prompt):
                    if isinstance(key, str) and key:
                        calls.setdefault((talk.session, key), name)


def _parent(talk: Spoken, messages: list[dict[str, Any]], calls: dict[tuple[str, str], str]) -> str | None:
    asked = next((message["content"] for message in messages if message["role"] == "user"), None)
    for key in (talk.about.get("toolUseId"), talk.agent, asked):
        if isinstance(key, str) and (parent := calls.get((talk.session, key))):
            return parent
    talk.source.notes.remark("sub-agents whose call is in no file of their session")
    return None

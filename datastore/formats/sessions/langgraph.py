"""Checkpoints of LangGraph in the SQLite database of its ``SqliteSaver`` (``langgraph-checkpoint-sqlite``; the table
``checkpoints``). Read only, and without LangGraph: values are msgpack with names of Python classes, of which nothing is
imported or called; only their fields are read. It needs the package ``msgpack``.

A thread is an episode. The messages of its newest checkpoint are a row: those of the channel ``messages``, else of the
first channel that holds messages. If they were shortened or rewritten on the way, as by a summary, what the model had
before is a row of its own. A branch that was left (a checkpoint that nothing follows) is a row, tagged ``rewound`` and
``not-trained``. A subgraph with checkpoints of its own is a row, tagged ``kind:subagent``, and its parent the thread's
first row, unless all of its answers stand in other rows. ``usage_metadata`` gives the usage of the row's own messages,
``response_metadata`` the model (``model_name`` or ``model``), ``ts`` the time. A thread whose last step raised an error
is an ``env_error``. Rows are unscored.

Cannot carry: the system prompt and tools (not in the file), other channels, ids of messages, ``additional_kwargs``.
Values that are Python's pickle, and channels that keep changes in place of values, are refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.messages import from_chat
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, moment
from agentrl.datastore.formats.rows import make_row, untrained
from agentrl.datastore.formats.sessions.claude_code import REWOUND, SUBAGENT
from agentrl.datastore.formats.source import BROKEN, Row, Source, each
from agentrl.datastore.formats.sqlite import columns_of, rows_of
from agentrl.schemas.installation import install_hint, is_installed
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Termination

_COLUMNS = frozenset({"thread_id", "checkpoint_ns", "checkpoint_id", "parent_checkpoint_id", "type", "checkpoint"})
_CHECKPOINTS = "select * from checkpoints order by thread_id, checkpoint_ns, checkpoint_id"
_FAILED = "select thread_id, checkpoint_ns, checkpoint_id from writes where channel = '__error__'"
_PYDANTIC = (4, 5)  # langgraph.checkpoint.serde.jsonplus: module, class, fields, and how it is made
_CONSTRUCTED = (0, 1, 2, 3)  # module, class, arguments
_SAYS = frozenset({"human", "ai", "tool", "system", "user", "assistant", "function", "developer"})
_KNOWN = frozenset({"content", "type", "role", "name", "id", "tool_calls", "tool_call_id", "usage_metadata", "status"})
_KNOWN_ANSWER = frozenset({"model_name", "model"})


def fits(source: Source) -> int:
    if source.kind != "sqlite":
        return 0
    tables = columns_of(source.path)
    return 3 if tables.get("checkpoints", frozenset()) >= _COLUMNS and "writes" in tables else 0


@dataclass
class _Checkpoint:
    number: int
    name: str
    parent: str | None
    time: Any
    messages: list[dict[str, Any]]


@dataclass
class _Thread:
    """The checkpoints of a graph in a thread, or of a subgraph in it."""

    name: str
    graph: str
    checkpoints: dict[str, _Checkpoint] = field(default_factory=dict)

    def leaves(self) -> list[_Checkpoint]:
        """Checkpoints that nothing follows, the newest one first."""
        parents = {checkpoint.parent for checkpoint in self.checkpoints.values()}
        return [self.checkpoints[name] for name in sorted(self.checkpoints, reverse=True) if name not in parents]

    def contexts(self, leaf: _Checkpoint) -> list[_Checkpoint]:
        """The last checkpoints before messages were shortened or rewritten, and the leaf."""
        path: dict[str, _Checkpoint] = {}
        at: _Checkpoint | None = leaf
        while at is not None and at.name not in path:
            path[at.name] = at
            at = self.checkpoints.get(at.parent or "")
        ends: list[_Checkpoint] = []
        for checkpoint in reversed(path.values()):
            if ends and checkpoint.messages[: len(ends[-1].messages)] == ends[-1].messages:
                ends.pop()
            ends.append(checkpoint)
        return [end for end in ends if end is leaf or _answers(end.messages)]


def _answers(messages: list[dict[str, Any]]) -> int:
    return sum(_role(message) in ("ai", "assistant") for message in messages)


def _role(message: dict[str, Any]) -> Any:
    return message.get("role") or message.get("type")


def read(source: Source) -> Iterator[Row]:
    if not is_installed("msgpack"):
        raise StoreError(f"{source.name}: checkpoints of LangGraph need the package msgpack; {install_hint('formats')}")
    failed = {tuple(row.values()) for row in rows_of(source.path, source.name, _FAILED, source.limit)}
    episode: list[_Thread] = []
    for thread in _threads(source):
        if episode and thread.name != episode[0].name:
            yield from _episode(episode, failed, source)
            episode = []
        episode.append(thread)
    if episode:
        yield from _episode(episode, failed, source)


def _threads(source: Source) -> Iterator[_Thread]:
    thread: _Thread | None = None
    rows = rows_of(source.path, source.name, _CHECKPOINTS, source.limit)
    for number, row in enumerate(rows, 1):
        source.number = number
        if thread is None or (thread.name, thread.graph) != (row["thread_id"], row["checkpoint_ns"]):
            if thread is not None:
                yield thread
            thread = _Thread(row["thread_id"], row["checkpoint_ns"])
        try:
            thread.checkpoints[row["checkpoint_id"]] = _checkpoint(row, number, source.notes)
        except BROKEN as error:
            source.notes.refuse(source.place, error)
    if thread is not None:
        yield thread


def _checkpoint(row: dict[str, Any], number: int, notes: Notes) -> _Checkpoint:
    value = _decoded(row["checkpoint"], row["type"])
    channels = value["channel_values"]
    names = sorted((name for name in channels if _is_chat(channels[name])), key=lambda name: name != "messages")
    messages = channels[names[0]] if names else []
    for name in channels.keys() - {*names[:1], "__start__"}:
        if channels[name] and not name.startswith(("branch:", "__")):
            notes.ignored[f"channel_values.{name}"] += 1
    return _Checkpoint(number, row["checkpoint_id"], row["parent_checkpoint_id"], value.get("ts"), messages)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, dict) and _role(part) in _SAYS for part in value)


def _decoded(data: bytes | str, kind: str) -> Any:
    """A value that was written by LangGraph. Raises ValueError for what only Python itself can read."""
    if kind == "json":
        return _plain(loads(data if isinstance(data, str) else data.decode()))
    if kind != "msgpack":
        raise ValueError(f"a checkpoint of type {kind!r} is read by Python alone, and runs code: it is not read")
    import msgpack

    return msgpack.unpackb(data, ext_hook=_fields, strict_map_key=False, unicode_errors="replace")


def _fields(code: int, data: bytes) -> Any:
    """The fields of an object, or the arguments it is made from."""
    import msgpack

    value = msgpack.unpackb(data, ext_hook=_fields, strict_map_key=False, unicode_errors="replace")
    if code in _PYDANTIC or code in _CONSTRUCTED:
        return value[2]
    raise ValueError(f"a value of msgpack's type {code} is not known here, such as changes of a channel")


def _plain(value: Any) -> Any:
    """Objects of older versions, which are JSON with the name of a class, as their fields."""
    if isinstance(value, dict):
        if value.get("lc") and isinstance(value.get("kwargs"), dict):
            value = value["kwargs"]
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _episode(threads: list[_Thread], failed: set[tuple[Any, ...]], source: Source) -> Iterator[Row]:
    """Rows of a thread and its subgraphs, the graph itself first."""
    segment, root = 0, None
    told: list[dict[str, Any]] = []
    for thread in threads:
        ends = [
            (number > 0, end, end is leaf)
            for number, leaf in enumerate(thread.leaves())
            for end in thread.contexts(leaf)
        ]
        for left, end, last in ends:
            own = [message for message in end.messages if message not in told]
            if not _answers(own):
                continue
            told += own
            source.number = end.number
            name = f"{thread.name}-{segment}"
            about = {
                "trajectory_id": name,
                "episode_id": thread.name,
                "segment": segment,
                "parent_id": root if thread.graph else None,
                "agent": thread.graph.partition(":")[0] or None,
                "tags": (untrained([REWOUND]) if left else []) + ([SUBAGENT] if thread.graph else []),
                "termination": Termination.ENV_ERROR
                if last and (thread.name, thread.graph, end.name) in failed
                else None,
            }
            root = root or (None if thread.graph else name)
            segment += 1
            yield from each(source, [end], lambda end, o=own, a=about: [_row(end, o, a, source.notes)])  # type: ignore[misc]


def _row(context: _Checkpoint, own: list[dict[str, Any]], about: dict[str, Any], notes: Notes) -> Row:
    """``own`` are the messages that no earlier row has."""
    spent, models = Calls(notes), []
    for message in own:
        answer = message.get("response_metadata") or {}
        models += [answer[key] for key in ("model_name", "model") if answer.get(key)][:1]
        spent.usage(message.get("usage_metadata"), "usage_metadata.")
        notes.rest(message, _KNOWN | {"response_metadata"}, "messages.")
        notes.rest(answer, _KNOWN_ANSWER, "messages.response_metadata.")
    return make_row(
        from_chat([_chat(message) for message in context.messages], notes),
        source="langgraph",
        origin={"source_id": about["episode_id"], "source_time": moment(context.time)} | spent.fields(),
        policy=models[-1] if models else None,
        **about,
    )


def _chat(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat has it. What is beside is counted once, with the row whose own it is."""
    kept = {key: message[key] for key in ("content", "name", "tool_call_id", "status") if message.get(key) is not None}
    calls = [{**call, "type": "function"} for call in message.get("tool_calls") or []]
    return {"role": _role(message), "content": "", **kept} | ({"tool_calls": calls} if calls else {})

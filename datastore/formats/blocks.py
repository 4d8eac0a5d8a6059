"""Some rows taken apart: values field by field, as columns take them over."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from agentrl.datastore.formats.rows import ROW_DEFAULTS
from agentrl.datastore.formats.source import Row
from agentrl.schemas.trajectory import Message, ToolCall, Trajectory

BLOCK_ROWS = 64
BLOCK_SIZE = 2**18
"""Rows are taken apart after so many of them, or so many characters of source."""

CALL_FIELDS = ToolCall.model_fields.keys()
PLAIN_FIELDS = [name for name in Message.model_fields if name not in ("role", "content", "tool_calls")]
ROW_FIELDS = Trajectory.model_fields.keys()
_MORE_FIELDS = frozenset(PLAIN_FIELDS)
_KNOWN = Message.model_fields.keys()
ABSENT = object()
"""In place of a value that a row lacks and that has no default: it fits no column."""
_REQUIRED = frozenset(name for name, info in Trajectory.model_fields.items() if info.is_required())
DEFAULTS = {
    name: info.get_default(call_default_factory=True, validated_data={})
    for name, info in Trajectory.model_fields.items()
    if name not in _REQUIRED and name != "created_at"
} | ROW_DEFAULTS
"""Values of the fields that a row need not give."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Values of neighbouring rows."""

    lengths: list[int]
    """How many messages each row has."""
    fields: dict[str, list[Any]]
    """Values of the messages: role and content, and the other fields that any of them has."""
    calls: list[int]
    """How many calls each message has."""
    call_fields: list[list[str]]
    """Ids, names and arguments of the calls; nothing if there is no call."""
    row_fields: dict[str, list[Any]]
    """Values of the fields but messages that any row has."""
    numbers: Sequence[int] = ()
    """Of each row the number of its record in the source, if the block was read as a whole."""


def block_of(rows: Sequence[Row]) -> RowBlock:
    """Rows taken apart. Raises if one does not have the shape of a row."""
    talks = [row["messages"] for row in rows]
    messages = list(chain.from_iterable(talks))
    more = [(at, message) for at, message in enumerate(messages) if len(message) > 2 or "content" not in message]
    given, names = set().union(*rows), set().union(*[message for _, message in more])
    if not (given <= ROW_FIELDS and names <= _KNOWN):
        raise ValueError("has a field that is not known")
    fields = {
        "role": [message["role"] for message in messages],
        "content": [message.get("content", "") for message in messages],
    }
    for name in names & _MORE_FIELDS:
        fields[name] = values = list[Any]([None]) * len(messages)
        for at, message in more:
            values[at] = message.get(name)
    lengths = [0] * len(messages)
    parts: list[list[str]] = []
    if "tool_calls" in names:
        calls: list[dict[str, str]] = []
        for at, message in more:
            if own := message.get("tool_calls"):
                lengths[at] = len(own)
                calls += own
        if set(map(len, calls)) - {len(CALL_FIELDS)}:
            raise ValueError("has a call with other fields than a call has")
        parts = [[call[name] for call in calls] for name in CALL_FIELDS]
    return RowBlock([*map(len, talks)], fields, lengths, parts, columns_of(rows, given - {"messages"}))


def columns_of(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Values of fields, with defaults for rows that lack them."""
    columns = {}
    for name in names:
        default = DEFAULTS.get(name, ABSENT)
        columns[name] = [row.get(name, default) for row in rows]
    return columns

"""Rows from what a reader found, and what of a row goes through a format's free-form field."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from agentrl.datastore.formats.annotated import KEY, in_record
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.source import Row
from agentrl.schemas.json_text import writer
from agentrl.schemas.trajectory import INFRASTRUCTURE, NOT_TRAINED, Role, Termination, Trajectory

CARRIED = (
    *("trajectory_id", "episode_id", "segment", "agent", "task_id", "group_id", "sample_index", "parent_id", "source"),
    "fork_at",
    *("source_id", "source_time", "model", "prompt_tokens", "completion_tokens", "cost_usd", "message_seconds"),
    *("env", "env_version", "split", "level", "prompt", "policy", "policy_version", "sampling", "reward", "success"),
    *("termination", "tags", "final_state", "tokenizer", "n_tool_errors", "reward_components", "spans"),
)
"""Columns that go through a format's free-form field, if it has one, under the key ``agentrl``."""


Item = TypeVar("Item")
_CANONICAL = writer(sort_keys=True, default=str)

NAMELESS = "row"
"""Id of a row, and of its episode, if the source gives none."""

ROW_DEFAULTS: dict[str, Any] = {
    "trajectory_id": NAMELESS,
    "episode_id": NAMELESS,
    "split": "train",
    "reward": None,
    "success": None,
}
"""Fields of a trajectory that a reader need not give, though the model has no default of them."""


def carried(row: Trajectory) -> dict[str, Any]:
    """What goes through a free-form field: columns of the row, and under ``errors`` which of its tool messages are."""
    data = row.model_dump(mode="json", include={*CARRIED})
    kept = {name: value for name, value in data.items() if value not in ([], "", None)}
    errors = [message.error for message in row.messages if message.role is Role.TOOL]
    known = {ERRORS: errors} if any(error is not None for error in errors) else {}
    return kept | known | {name: data[name] for name in _NULL} | in_record(row)


ERRORS = "errors"


_NULL = ("reward", "success")  # null means that the row is unscored


def make_row(
    messages: list[dict[str, Any]],
    *,
    source: str,
    task: Any = None,
    task_content: Any = None,
    extra: Mapping[str, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Row:
    """A row from fields of messages.

    ``source`` names the format and ``task`` the task in it. ``task_content`` distinguishes tasks of one name; without
    it, the messages before the first assistant message do. ``extra`` is what :func:`carried` gave, and wins over
    ``fields``, of which None counts as not given. ``origin`` has columns of the origin, which a row with ``extra``
    brings itself; without them the id is ``trajectory_id``, else that of the task, and the model is the policy. Without
    an outcome the row is unscored. Log-probs may be None. ``n_tool_errors``, if it is not given, counts the messages
    that are errors. A row that failed by no doing of the policy is unscored; a tag says which reward its source gave.
    Raises ValueError if there is no message, or nothing in any.
    """
    for message in messages:
        if message.get("content") or message.get("tool_calls") or message.get("reasoning"):
            break
    else:
        raise ValueError("has no messages" if not messages else "has messages, and nothing in any of them")
    row: Row = {"source": source, "env": source, "prompt": _prompt(messages), "messages": messages}
    for name, value in fields.items():
        if value is not None:
            row[name] = value
    if extra:
        row |= {name: value for name, value in extra.items() if name != KEY}
        _set_errors(messages, row.pop(ERRORS, ()))
        if len(row.get("message_seconds") or ()) != len(messages):  # joined or split on the way: whose they are is lost
            row.pop("message_seconds", None)
    else:
        _name_origin(row, task, origin or {})
    if "task_id" not in row:
        row["task_id"] = task_id(source, task, _opening(messages) if task_content is None else task_content)
    if "termination" not in row:
        row["termination"] = _termination(messages)
    if row["termination"] in INFRASTRUCTURE and {row.get("reward"), row.get("success")} != {None}:
        row["tags"] = [*row.get("tags", ()), f"excluded_reward:{row.get('reward')}"]
        row |= {"reward": None, "success": None}
    if "n_tool_errors" not in row and (errors := [message for message in messages if message.get("error") is True]):
        row["n_tool_errors"] = len(errors)
    if "trajectory_id" in row:
        row.setdefault("episode_id", row["trajectory_id"])
    if not row.get("action_mask"):  # what counts tokens says nothing without them
        row.pop("spans", None)
        row.pop("fork_at", None)
    return row


def _set_errors(messages: Sequence[dict[str, Any]], errors: Sequence[bool | None]) -> None:
    """Say of the tools' messages which are errors; if there are not as many, nobody knows which are meant."""
    answers = [message for message in messages if message["role"] == "tool"]
    if len(answers) == len(errors):
        for answer, error in zip(answers, errors, strict=True):
            answer["error"] = error


def _name_origin(row: Row, task: Any, origin: Mapping[str, Any]) -> None:
    """Add the columns of the origin."""
    for name, value in origin.items():
        if value is not None:
            row[name] = value
    if "source_id" not in row and (known := row.get("trajectory_id", task)) is not None:
        row["source_id"] = str(known)
    if "model" not in row and isinstance(policy := row.get("policy"), str):
        row["model"] = policy


def _prompt(messages: Sequence[dict[str, Any]]) -> str:
    """The first text of a user."""
    for message in messages:
        if message["role"] == "user" and message["content"]:
            text: str = message["content"]
            return text
    return ""


def task_id(source: str, task: Any, content: Any) -> str:
    """``<source>/<task>-<digest of its content>``: one for the same task in two files, two for different tasks of one
    name."""
    text = canonical(content)
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{source}/{digest}" if task is None else f"{source}/{str(task)[:200]}-{digest}"


def canonical(content: Any) -> str:
    """One text for equal contents of tasks. A text stays as it is."""
    return content if isinstance(content, str) else _written(content)


def _written(value: Any) -> str:
    """JSON text in ASCII, as ``json`` writes it. Lists of texts, as most contents are, take half of its time."""
    if type(value) is not list:
        return _CANONICAL(value)
    written = [
        _PLAIN(element).decode()
        if type(element) is str and element.isascii() and "\x7f" not in element
        else _written(element)
        for element in value
    ]
    return f"[{', '.join(written)}]"


_PLAIN = msgspec.json.Encoder().encode


def _opening(messages: Sequence[dict[str, Any]]) -> str:
    parts = []
    for message in messages:
        if message["role"] == "assistant":
            break
        parts.append(f"{message['role']}\0{message.get('content')}")
    return "\0".join(parts)


def answered(row: Row, notes: Notes) -> Row:
    """The row. Raises ValueError if no message is an assistant's, unless the import asks for such rows."""
    if not notes.prompts and all(message["role"] in _ASKING for message in row["messages"]):
        raise ValueError("has no assistant message; --prompts takes such records as rows too")
    return row


_ASKING = frozenset({"system", "user", "tool"})


def _termination(messages: Sequence[dict[str, Any]]) -> Termination:
    """The end that messages show: ``answered`` if the last one is an assistant message without a call."""
    last = messages[-1]
    answered = last["role"] == "assistant" and not last.get("tool_calls")
    return ANSWERED if answered else UNKNOWN


ANSWERED, UNKNOWN = Termination.ANSWERED, Termination.UNKNOWN  # a member of an enum is slow to find


def termination(known: Mapping[str, Termination], value: Any, notes: Notes) -> Termination | None:
    """The end that a source names; ``unknown``, remarked on, for a name that is not known, and None for no name."""
    if value is None or value == "":
        return None
    if end := known.get(str(value)):
        return end
    if str(value) in set(Termination):
        return Termination(str(value))
    notes.remark(f"end {str(value)[:60]!r} is not known: termination unknown")
    return Termination.UNKNOWN


def number(value: Any) -> float | None:
    """A score as a finite number; None if it is not one."""
    if not isinstance(value, int | float):
        return None
    try:
        known = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return known if math.isfinite(known) else None


def score(record: Mapping[str, Any], key: str, notes: Notes, prefix: str = "") -> float | None:
    """The score that a record has under a key; None if it has none, or one that is no finite number, which is said."""
    value = record.get(key)
    known = number(value)
    if known is None and value is not None:
        notes.remark(f"{prefix}{key} is no finite number: unscored")
    return known


def components(values: Mapping[str, Any], notes: Notes, prefix: str, weight: float = 1.0) -> list[dict[str, Any]]:
    """Metrics by name as reward components; values that are not numbers are counted under ``prefix``."""
    parts = []
    for name, value in values.items():
        if (known := number(value)) is not None:
            parts.append(component(str(name), known, weight))
        elif value is not None:
            notes.ignored[f"{prefix}{name}"] += 1
    return parts


def component(name: str, value: float, weight: float = 1.0) -> dict[str, Any]:
    return {"name": name, "value": value, "weight": weight}


def finite(values: Sequence[float]) -> list[float | None]:
    """Log-probs for JSON, which has no NaN."""
    return [None if math.isnan(value) else value for value in values]


def spoken(value: Any) -> str | None:
    """An id as text."""
    return None if value is None else str(value)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


def untrained(tags: Sequence[str] = ()) -> list[str]:
    """Tags of a row that is no training data, such as a judge's."""
    return [*tags, NOT_TRAINED]

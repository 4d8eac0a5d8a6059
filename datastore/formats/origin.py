"""Where an imported row comes from, as its source says it: id, time, model, tokens of its calls, and their cost.

Readers take these from wherever their format has them. What cannot be read as what it should be is counted as ignored,
as other keys are that no column takes.
"""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.rows import number

COLUMNS = ("source_id", "source_file", "source_time", "model", "prompt_tokens", "completion_tokens", "cost_usd")

TIMES = ("timestamp", "created", "created_at", "created_time", "date", "started_at", "start_time")
COSTS = ("cost_usd", "cost", "response_cost", "total_cost_usd", "total_cost")
BESIDE = frozenset({"id", "model", "usage", "token_usage", *TIMES, *COSTS})
"""Keys that :func:`beside` reads."""

_PROMPT = ("prompt_tokens", "input_tokens")
_CACHED = (
    *("cache_read_input_tokens", "cache_creation_input_tokens"),
    *("input_tokens_cache_read", "input_tokens_cache_write"),
    "cached_input_tokens",
)
"""What Anthropic, Inspect and verifiers count beside the prompt; others count what was cached in it."""
_COMPLETION = ("completion_tokens", "output_tokens")
_USAGE = frozenset({*_PROMPT, *_COMPLETION, *_CACHED, "total_tokens", "cost", "total_cost"})
SPENT = ("prompt_tokens", "completion_tokens", "cost_usd")
"""Columns that several rows of one record must not have twice."""
_MOST = 2**53
_SECONDS = 1e11
"""A number of seconds since 1970 is below this until the year 5138; larger ones are milliseconds, microseconds or
nanoseconds."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(value: Any) -> datetime | None:
    """A time, from ISO 8601 text (without a zone: UTC), a number of seconds, milliseconds, microseconds or nanoseconds
    since 1970, or a datetime. None if it is none of them."""
    try:
        if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
            value = datetime.fromisoformat(value.strip())
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC)
        seconds = None if isinstance(value, bool) else number(float(value))
        if seconds is None or seconds <= 0:
            return None
        while seconds >= _SECONDS:
            seconds /= 1000
        return _EPOCH + timedelta(seconds=seconds)
    except (ValueError, TypeError, OverflowError):
        return None


def lasted(start: Any, end: Any) -> float | None:
    """Seconds between two times as :func:`moment` reads them; None if one is not known, or the end comes first."""
    begun, ended = moment(start), moment(end)
    return (ended - begun).total_seconds() if begun and ended and ended >= begun else None


def count(value: Any) -> int | None:
    """A number of tokens: whole and not negative. None if it is none."""
    known = None if isinstance(value, bool) else number(value)
    return int(known) if known is not None and 0 <= known < _MOST and known == int(known) else None


def dollars(value: Any) -> float | None:
    """An amount that is not negative. None if it is none."""
    known = number(value)
    return known if known is not None and known >= 0 and not isinstance(value, bool) else None


def spoken_id(value: Any) -> str | None:
    """An id that is text or a whole number, as text."""
    return str(value)[:1000] if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


class Calls:
    """The usage and the cost of several calls, added up; None as long as no call says it."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.prompt: int | None = None
        self.completion: int | None = None
        self.cost: float | None = None

    def usage(self, usage: Any, prefix: str) -> None:
        """Add the usage of a call, in the spelling of OpenAI or of Anthropic."""
        if not isinstance(usage, Mapping):
            if usage:
                self.notes.ignored[prefix.removesuffix(".")] += 1
            return
        taken = set(_USAGE)
        prompt = self._first(usage, _PROMPT, taken)
        if prompt is not None:
            prompt += sum(count(usage.get(key)) or 0 for key in _CACHED)
        completion = self._first(usage, _COMPLETION, taken)
        total = count(usage.get("total_tokens"))
        if total != (prompt or 0) + (completion or 0):
            taken.discard("total_tokens")
        self.tokens(prompt, completion)
        self.paid(usage.get("cost", usage.get("total_cost")), f"{prefix}cost")
        self.notes.rest(usage, taken, prefix)

    def _first(self, usage: Mapping[str, Any], keys: Iterable[str], taken: set[str]) -> int | None:
        """The first of some keys that is a count; others that hold something are left to be counted."""
        for key in keys:
            if (known := count(usage.get(key))) is not None:
                return known
            taken.discard(key)
        return None

    def tokens(self, prompt: int | None, completion: int | None) -> None:
        if prompt is not None:
            self.prompt = min((self.prompt or 0) + prompt, _MOST)
        if completion is not None:
            self.completion = min((self.completion or 0) + completion, _MOST)

    def paid(self, cost: Any, name: str) -> None:
        """Add the cost of a call; one that is no amount is counted under ``name``."""
        known = dollars(cost)
        if known is not None and math.isfinite(total := (self.cost or 0.0) + known):
            self.cost = total
        elif cost is not None:
            self.notes.ignored[name] += 1

    def fields(self) -> dict[str, Any]:
        """The columns of a row."""
        values = {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "cost_usd": self.cost}
        return {name: value for name, value in values.items() if value is not None}


def beside(record: Mapping[str, Any], notes: Notes, prefix: str = "") -> dict[str, Any]:
    """Columns from the keys that many formats have beside the messages, :data:`BESIDE`: ``id``, ``model``, a time, a
    ``usage`` and a cost. A reader that calls this counts none of them itself."""
    if record.keys().isdisjoint(BESIDE):
        return {}
    calls = Calls(notes)
    for name in ("usage", "token_usage"):
        if record.get(name):
            calls.usage(record[name], f"{prefix}{name}.")
    values: dict[str, Any] = {}
    readers = [("source_id", ("id",), spoken_id), ("source_time", TIMES, moment), ("model", ("model",), spoken_id)]
    for column, keys, read in [*readers, ("cost_usd", COSTS, dollars)]:
        for key in keys:
            value = record.get(key)
            if value is None or value == "":
                continue
            if column not in values and (known := read(value)) is not None:
                values[column] = known
            else:
                notes.ignored[prefix + key] += 1
    return calls.fields() | values


def unspent(origin: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of another row of the same record: usage and cost are in the first row alone."""
    return {name: value for name, value in origin.items() if name not in SPENT}


def within(record: Mapping[str, Any], notes: Notes, *keys: str) -> dict[str, Any]:
    """The same of a record and of the objects under some of its keys, of which a later one wins; the record itself
    wins over them."""
    values: dict[str, Any] = {}
    for key in keys:
        if isinstance(part := record.get(key), dict):
            values |= beside(part, notes, f"{key}.")
    return values | beside(record, notes)

"""Counts of an import beside the rows: keys that are not carried, guesses, and records that cannot be read."""

import json
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.annotated import KEY, ours

EXCERPT = 4096
"""Characters that are kept of a record that cannot be read."""


@dataclass(frozen=True)
class Unreadable:
    """A record that gives no row. ``place`` is ``file:line`` or ``file[number]``; ``key`` is the field at fault."""

    place: str
    key: str
    reason: str
    excerpt: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Notes:
    """Counts of one import. With ``quarantine`` records that cannot be read are set aside, otherwise they raise. With
    ``prompts`` records of chat without any assistant message are rows too."""

    quarantine: bool = False
    prompts: bool = False
    ignored: Counter[str] = field(default_factory=Counter)
    """How often each key of the source had a value that no column takes."""
    remarks: Counter[str] = field(default_factory=Counter)
    """What was guessed or left out for a reason, in words, and how often."""
    unreadable: list[Unreadable] = field(default_factory=list)

    def rest(self, record: Mapping[str, Any], known: AbstractSet[str], prefix: str = "") -> None:
        """Count the keys of ``one`` that are not ``known`` and hold something: None, false, "", [] and {} do not."""
        if record.keys() <= known:
            return
        for key in record.keys() - known:
            value = record[key]
            if key == KEY and ours(value):
                continue
            if value or (value == 0 and value is not False):
                self.ignored[prefix + key] += 1

    def inside(self, record: Any, known: Mapping[str, AbstractSet[str]], prefix: str = "") -> None:
        """:meth:`rest` of each object that a dotted path of ``known`` names in ``one``; "" is ``one`` itself."""
        for path, keys in known.items():
            part = record
            for key in path.split(".") if path else ():
                part = part.get(key) if isinstance(part, dict) else None
            if isinstance(part, dict):
                self.rest(part, keys, f"{prefix}{path}." if path else prefix)

    def outcome(self, record: Mapping[str, Any], key: str, prefix: str = "") -> bool | None:
        """A verdict of the source: true or false. Anything else is counted, and says nothing."""
        value = record.get(key)
        if isinstance(value, bool) or value is None:
            return value
        self.ignored[prefix + key] += 1
        return None

    def remark(self, text: str, count: int = 1) -> None:
        self.remarks[text] += count

    @property
    def empty(self) -> bool:
        return not (self.ignored or self.remarks or self.unreadable)

    def add(self, others: "Notes") -> None:
        """Add what was noted of a later part."""
        if others.ignored:
            self.ignored.update(others.ignored)
        if others.remarks:
            self.remarks.update(others.remarks)
        self.unreadable += others.unreadable

    def refuse(self, location: str, error: BaseException | str, record: str = "") -> None:
        """Set a record aside, or raise StoreError that names it."""
        key = str(error.args[0]) if isinstance(error, KeyError) and error.args else getattr(error, "key", "")
        reason = f"lacks {key!r}" if isinstance(error, KeyError) else _first_line(error)
        if not self.quarantine:
            raise StoreError(f"{location}: {reason}; --quarantine sets such records aside and reads on")
        self.unreadable.append(Unreadable(location, key, reason, record[:EXCERPT]))


def excerpt(record: Any) -> str:
    """A record as text, to be set aside."""
    with suppress(ValueError, RecursionError):
        return json.dumps(record, ensure_ascii=False, default=str)
    return ""


def _first_line(error: BaseException | str) -> str:
    from pydantic import ValidationError

    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        path = ".".join(str(key) for key in first["loc"])
        return f"{path}: {first['msg']}, not {str(first['input'])[:60]!r}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]

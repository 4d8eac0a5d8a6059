"""Rewards, verdicts, splits and tags of a file beside the trajectories, found by a key that both have.

The file is JSON Lines, a JSON array, CSV or Parquet. ``reward``, ``success`` (true, false, 1 or 0), ``split`` and
``tags`` (a list, or words between commas) set these columns; a ``label`` is a success if it is true or false, and a tag
otherwise. Every other number is a reward component of weight 0, which ``--reward`` and ``--success`` may name. Other
fields are counted. All of the file is in memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.columns import with_column
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.rows import component, number
from agentrl.datastore.formats.source import Source

COLUMNS = ("source_id", "source_file", "task_id", "episode_id")
"""Columns of a row that may be the key, if its record has no field of that name."""
_TRUE, _FALSE = frozenset({"true", "1", "yes"}), frozenset({"false", "0", "no"})


class SideFile:
    """Records of a file by their key. ``on`` is the name of the key, or ``OURS=THEIRS`` if the trajectories have it
    under the dotted path ``OURS`` and the file under ``THEIRS``."""

    def __init__(self, path: str | Path, on: str, notes: Notes) -> None:
        ours, _, on_theirs = on.partition("=")
        self.ours, self.theirs, self.name, self.notes = ours, on_theirs or ours, str(path), notes
        if not self.ours or not self.theirs:
            raise StoreError(f"--on {on!r} names no key; write --on KEY, or --on OURS=THEIRS")
        if not Path(path).is_file():
            raise StoreError(f"there is no file to join at {path}")
        source = Source(Path(path), notes)
        self.records: dict[str, dict[str, Any]] = {}
        self._used: set[str] = set()
        self._alone = 0
        keys: dict[str, None] = {}
        for record in source.records():
            if not isinstance(record, dict) or (key := key_of(record.get(self.theirs))) is None:
                if isinstance(record, dict):
                    keys |= dict.fromkeys(map(str, record))
                notes.refuse(source.place, f"has no key {self.theirs!r}")
                continue
            fields = {name: value for name, value in record.items() if name != self.theirs}
            if self.records.setdefault(key, fields) != fields:
                raise StoreError(
                    f"{source.place}: {self.theirs} {key!r} occurs twice with different values; keep one of "
                    "these records"
                )
        if not self.records:
            has = f"; its keys are {', '.join(list(keys)[:12])}" if keys else ""
            raise StoreError(f"{self.name} has no record with the key {self.theirs!r}{has}")

    def add(self, rows: pa.Table, keys: Sequence[Any]) -> pa.Table:
        """Rows with what the file says of them. ``keys`` are what the rows' records have under the key."""
        if self.ours in COLUMNS:
            held = rows[self.ours].to_pylist()
            keys = [own if key is None else key for key, own in zip(keys, held, strict=True)]
        names = [key_of(key) for key in keys]
        records = [self.records.get(name) if name is not None else None for name in names]
        self._used.update(
            name for name, record in zip(names, records, strict=True) if name is not None and record is not None
        )
        self._alone += sum(record is None for record in records)
        if not any(records):
            return rows
        columns = {name: rows[name].to_pylist() for name in ("reward", "success", "split", "tags", "reward_components")}
        for index, fields in enumerate(records):
            for name, value in (fields or {}).items():
                self._set(columns, index, name, value)
        for name, values in columns.items():
            rows = with_column(rows, name, values)
        return rows

    def _set(self, columns: dict[str, list[Any]], index: int, name: str, value: Any) -> None:
        verdict, known = verdict_of(value), number_of(value)
        if value is None or value == "":
            return
        if name == "reward" and known is not None:
            columns["reward"][index] = known
        elif name in ("success", "label") and verdict is not None:
            columns["success"][index] = verdict
        elif name == "split" and isinstance(value, str):
            columns["split"][index] = value
        elif name == "label" and isinstance(value, str):
            columns["tags"][index] = [*columns["tags"][index], value]
        elif name == "tags" and isinstance(value, str | list):
            words = value.split(",") if isinstance(value, str) else value
            more = [word.strip() for word in words if isinstance(word, str) and word.strip()]
            columns["tags"][index] = [*columns["tags"][index], *more]
        elif name not in ("reward", "success", "split", "tags", "label") and known is not None:
            others = [part for part in columns["reward_components"][index] if part["name"] != name]
            columns["reward_components"][index] = [*others, component(name, known, 0.0)]
        else:
            self.notes.ignored[f"{self.name}: {name}"] += 1

    def finish(self) -> None:
        """Say how many keys had no partner. Raises StoreError if none had one."""
        if not self._used:
            raise StoreError(
                f"no row has a partner in {self.name}: none has one of its {len(self.records)} keys {self.theirs!r}, "
                f"such as {next(iter(self.records))!r}, under {self.ours!r}; --on OURS=THEIRS names both"
            )
        if self._alone:
            self.notes.remark(f"rows without a partner in {self.name}", self._alone)
        if without := len(self.records.keys() - self._used):
            self.notes.remark(f"keys of {self.name} without a row", without)


def key_of(value: Any) -> str | None:
    """A key as text: 7, 7.0 and "7" are one. None if the value is no key."""
    if isinstance(value, float) and value == int(value if abs(value) < 2**53 else 0):
        value = int(value)
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def number_of(value: Any) -> float | None:
    """A number, also of a cell of CSV: its text, or true and false."""
    if not isinstance(value, str):
        return number(value)
    if value.strip().lower() in ("true", "false"):
        return float(value.strip().lower() == "true")
    try:
        return number(float(value))
    except ValueError:
        return None


def verdict_of(value: Any) -> bool | None:
    text = str(value).strip().lower().removesuffix(".0")
    return True if text in _TRUE else False if text in _FALSE else None

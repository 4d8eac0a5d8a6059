"""Whatever a file of others holds is in a row, or is counted by its key."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from format_files import Read
from format_samples import SAMPLES

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.imports import import_paths

CASES = [
    pytest.param(name, suffix, document, id=f"{name}-{number}")
    for name, files in SAMPLES.items()
    for number, (suffix, document) in enumerate(files)
]
WRITTEN_ONLY = {"huggingface", "verl-sft", "trl-sft"}  # columns of a table, or chat as openai-chat has it
DATABASES = {"openai-agents", "langgraph"}  # test_formats_frameworks.py has files of the packages

WHOLE = {"mini-swe-agent", "openhands"}  # a file is one record


def test_every_format_has_a_sample() -> None:
    assert FORMATS.keys() - WRITTEN_ONLY - DATABASES == SAMPLES.keys()


def objects(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all objects in a value."""
    if isinstance(value, dict):
        yield path
        for key, inner in value.items():
            yield from objects(inner, (*path, key))
    if isinstance(value, list):
        for position, inner in enumerate(value):
            yield from objects(inner, (*path, position))


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize(("name", "suffix", "document"), CASES)
def test_a_key_that_no_reader_knows_is_carried_or_counted(
    name: str, suffix: str, document: Any, tmp_path: Path
) -> None:
    plain = Read(tmp_path, name, document, suffix)
    assert plain.notes.unreadable == []
    assert plain.rows
    for path in objects(document):
        odd = deepcopy(document)
        at(odd, path)["odd_key"] = "odd value"
        read = Read(tmp_path, name, odd, suffix)
        rows = "".join(row.model_dump_json() for row in read.rows)
        more = read.notes.ignored - plain.notes.ignored
        kind = str(at(document, path).get("type"))  # a part that is no text is counted by its type
        counted = any(key.endswith("odd_key") for key in more) or f"messages.content.{kind}" in plain.notes.ignored
        inside = [key for key in plain.notes.ignored if set(key.split(".")[-1:]) & set(map(str, path))]
        refused = [item.reason for item in read.notes.unreadable]
        assert "odd value" in rows or counted or inside or refused, (path, dict(more))
        assert len(read.rows) == len(plain.rows) or refused, path


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all texts and numbers in a value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield path


def told(read: Read) -> str:
    """Everything that a reader says of a file."""
    rows = [row.model_dump_json(exclude={"created_at"}) for row in read.rows]
    return json.dumps([rows, read.notes.ignored, read.notes.remarks, [item.reason for item in read.notes.unreadable]])


@pytest.mark.parametrize(("name", "suffix", "document"), CASES)
def test_a_change_of_any_value_shows(name: str, suffix: str, document: Any, tmp_path: Path) -> None:
    """In a row, in a count or in a refusal: what does not show is not carried, and its key is counted."""
    plain = Read(tmp_path, name, document, suffix)
    counted = {key.rpartition(".")[2] for key in plain.notes.ignored}
    hidden = set()
    for path in leaves(document):
        other = deepcopy(document)
        before = at(other, path)
        at(other, path[:-1])[path[-1]] = "another" if isinstance(before, str) else before + 1
        holder = at(document, path[:-1])
        kind = {str(holder.get("type"))} if isinstance(holder, dict) else set()  # of a part that is counted whole
        if counted & (kind | set(map(str, path))):
            continue
        try:
            shows = told(Read(tmp_path, name, other, suffix)) != told(plain)
        except AssertionError:  # it is no file of this format any more
            shows = True
        if not shows:
            hidden.add(str(path[-1]))
    assert hidden <= SHAPE | REPEATED.get(name, set())


SHAPE = {"type", "kind", "version", "schema_version", "trajectory_format", "step_id", "cause"}
"""Keys that say of what kind an object is, or where it stands."""
REPEATED = {
    "anthropic": {"role"},  # of a message of tool results
    "claude-code": {"role"},  # of the line's type
    "claude-code-stream": {"role"},
    "openhands": {"action", "observation", "source", "id", "role", "tool_name"},  # of the model's own message
    "otel": {"role", "id"},  # of a message of tool answers; of the trace that each observation names
}
"""Keys whose value stands in another place too, which is read."""


@pytest.mark.parametrize(("name", "suffix", "document"), CASES)
@pytest.mark.parametrize("junk", [3, [[]], {}, {"messages": 3, "traceId": {}}])
def test_a_record_that_is_junk_is_refused_by_its_place(
    name: str, suffix: str, document: Any, junk: Any, tmp_path: Path
) -> None:
    """Beside a good record, so that the file is recognised; no traceback, and with quarantine the rest comes in."""
    records = [*document, junk] if isinstance(document, list) else [document, junk]
    path = tmp_path / f"file{'.jsonl' if suffix == '.json' else suffix}"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    buffer = TrajectoryBuffer(tmp_path / "store")
    try:
        import_paths(buffer, [path], dry_run=True)
    except StoreError as error:
        assert path.name in str(error)  # noqa: PT017
        if name not in WHOLE:
            assert import_paths(buffer, [path], dry_run=True, on_error="quarantine").rows


@pytest.mark.parametrize(("name", "suffix", "document"), CASES)
def test_a_value_of_another_kind_is_read_or_refused_by_its_place(
    name: str, suffix: str, document: Any, tmp_path: Path
) -> None:
    """Every object in turn is text, a number, a list."""
    for path in objects(document):
        for junk in ("text", 3, [3], [[]], None, True):
            odd = deepcopy(document)
            if not path:
                continue
            at(odd, path[:-1])[path[-1]] = junk
            file = tmp_path / f"file{suffix}"
            text = "".join(json.dumps(name) + "\n" for name in odd) if suffix.startswith(".jsonl") else json.dumps(odd)
            file.write_text(text)
            try:
                import_paths(TrajectoryBuffer(tmp_path / "store"), [file], dry_run=True)
            except StoreError as error:
                assert file.name in str(error)  # noqa: PT017

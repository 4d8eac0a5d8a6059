"""Inspect logs: ``.eval`` (a ZIP archive) and ``.json`` (a document). Read only.

A sample is a row. ``messages`` (content in parts; reasoning parts; calls ``{id, function, arguments}``, an answer with
``error`` is a tool error), ``scores`` (each scorer's value as a component: ``C`` 1, ``I`` and ``N`` 0, ``P`` 0.5,
numbers and booleans as they are, the numbers of a dict one by one), ``input`` and ``target`` (the task's content),
``id``, ``epoch`` (sample index), ``eval.model`` (policy), ``eval.task`` (env), ``started_at`` (else ``eval.created``),
``model_usage`` of that model. The reward is the only score, and a score of exactly 1 or 0 is the success; with several
scorers say ``--reward NAME --success SQL``. ``limit`` and ``error`` give the end. Text that was moved to
``attachments`` is put back. ``message_seconds`` comes from ``events``: of a turn the ``time`` of the output with its
``id``, of an answer the time from the beginning to the end of the tool's event with the call's id.

The archive is read by ``zipfile``, one sample in memory at a time, and what Zstandard compressed (as Inspect writes
since 0.3.160) by Arrow's decoder: ``inspect_ai`` itself cannot be installed beside this project's dependencies. Not
carried: ``target``, explanations of scores, what else is in ``events``, ``store``, ``output``, other times, and of the
log all but ``eval.task``, ``eval.model`` and ``eval.created``.
"""

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.messages import from_chat
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, lasted, moment
from agentrl.datastore.formats.parts import grouped
from agentrl.datastore.formats.raw import TooLongError
from agentrl.datastore.formats.rows import components, make_row, number, termination
from agentrl.datastore.formats.source import Row, Source, Stretch, each
from agentrl.schemas.trajectory import Termination, seconds_of_messages

_KNOWN_LOG = frozenset({"version", "eval", "samples"})
_KNOWN_EVAL = frozenset({"task", "model", "created"})
_KNOWN = frozenset({"id", "epoch", "input", "messages", "scores", "score", "limit", "attachments"})
_KNOWN |= {"started_at", "model_usage"}
_KNOWN_MESSAGE = frozenset({"id", "role", "content", "tool_calls", "tool_call_id", "function", "error"})
_KNOWN_CALL = frozenset({"id", "function", "arguments", "type"})
_ZSTANDARD = 93
_LIMITS = {
    "context": Termination.MAX_CONTEXT,
    "time": Termination.TIME_LIMIT,
    "working": Termination.TIME_LIMIT,
    "message": Termination.MAX_STEPS,
    "turn": Termination.MAX_STEPS,
    "token": Termination.MAX_TOKENS,
    "cost": Termination.MAX_TOKENS,
    "operator": Termination.CANCELLED,
    "custom": Termination.ENV_ERROR,
}
_GRADES = {"C": 1.0, "I": 0.0, "N": 0.0, "P": 0.5}


def fits(source: Source) -> int:
    if source.kind == "zip":
        try:
            with zipfile.ZipFile(source.path) as archive:
                names = set(archive.namelist())
        except (zipfile.BadZipFile, OSError):
            return 0
        return 3 if {"header.json", "_journal/start.json"} & names else 0
    head = source.head
    return 3 if isinstance(head, dict) and {"eval", "status", "version"} <= head.keys() else 0


def read(source: Source) -> Iterator[Row]:
    if source.kind == "zip":
        header, samples = _archive(source)
    else:
        header, samples = source.before, source.elements("samples", ("eval",))
    yield from each(source, samples, lambda sample: [_row(source, header, sample)])
    if source.span and source.span.before:
        return  # counted with the first samples
    source.notes.rest(header, _KNOWN_LOG)
    source.notes.rest(header.get("eval") or {}, _KNOWN_EVAL, "eval.")


def cut(source: Source) -> Iterator[Stretch] | None:
    """Samples of an archive, by their size."""
    if source.kind != "zip":
        return None
    archive, _, samples = _open(source)
    return grouped((archive.getinfo(name).file_size, 1) for name in samples)


def _archive(source: Source) -> tuple[dict[str, Any], Iterator[Any]]:
    """The header, and the samples one at a time."""
    archive, header, names = _open(source)

    def samples() -> Iterator[Any]:
        first, end, source.number = source.span or (0, len(names), 0)
        for name in names[first:end]:
            source.number += 1
            try:
                source.record = _member(archive, name, source)
            except StoreError as error:
                if not source.notes.quarantine:
                    raise
                source.notes.refuse(f"{source.name}:{name}", error)
                continue
            source.read_to += archive.getinfo(name).file_size
            yield source.record

    return _member(archive, header, source), samples()


def _open(source: Source) -> tuple[zipfile.ZipFile, str, list[str]]:
    """The archive, the name of its header, and the names of its samples."""
    try:
        return _opened(source.path, source.path.stat().st_mtime_ns, os.getpid())
    except (zipfile.BadZipFile, OSError) as error:
        raise StoreError(f"{source.name} is no archive that can be read: {error}") from None


@lru_cache(maxsize=1)
def _opened(path: Path, changed_ns: int, process: int) -> tuple[zipfile.ZipFile, str, list[str]]:
    """Its parts are all read from one archive, and each process has its own place in the file."""
    archive = zipfile.ZipFile(path)
    names = archive.namelist()
    header = next((name for name in ("header.json", "_journal/start.json") if name in names), names[0])
    return archive, header, sorted(name for name in names if name.startswith("samples/"))


def _member(archive: zipfile.ZipFile, name: str, source: Source) -> Any:
    try:
        return from_json(_content(archive, archive.getinfo(name), source.limit))
    except (ValueError, NotImplementedError, OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise StoreError(f"{source.name}: {name} cannot be read: {error}") from None


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> bytes:
    """The bytes of a member. ``zipfile`` reads Zstandard from Python 3.14 on. Raises TooLongError if there are more
    than ``limit``, whatever the archive says of it."""
    if member.file_size > limit:
        raise TooLongError(limit)
    if member.compress_type != _ZSTANDARD:
        with archive.open(member) as file:
            return _bounded(file.read(limit + 1), limit)
    import pyarrow as pa

    stored = copy(member)  # as if it were not compressed
    stored.compress_type, stored.file_size = zipfile.ZIP_STORED, member.compress_size
    del stored.CRC
    with archive.open(stored) as raw, pa.CompressedInputStream(pa.PythonFile(raw), "zstd") as packed:
        content = _bounded(packed.read(limit + 1), limit)
    if zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {member.filename!r}")
    return content


def _bounded(content: bytes, limit: int) -> bytes:
    if len(content) > limit:
        raise TooLongError(limit)
    return content


def _row(source: Source, header: dict[str, Any], sample: dict[str, Any]) -> Row:
    notes = source.notes
    notes.rest(sample, _KNOWN, "samples.")
    about = header.get("eval") or {}
    stored = sample.get("attachments") or {}
    if stored:  # those of what is not carried
        text = json.dumps([sample["messages"], sample.get("input")])
        if unused := sum(key not in text for key in stored):
            notes.ignored["samples.attachments"] += unused
    messages, errors = _messages(_restored(sample["messages"], stored), source)
    scores = sample.get("scores") or ({"score": sample["score"]} if sample.get("score") else {})
    parts = dict(_values(scores, notes))
    reward = next(iter(parts.values())) if len(parts) == 1 else None
    limit = sample.get("limit") or {}
    notes.rest(limit, frozenset({"type"}), "samples.limit.")
    end = Termination.INFRA_ERROR if sample.get("error") else termination(_LIMITS, limit.get("type"), notes)
    epoch = sample.get("epoch")
    return make_row(
        messages,
        source="inspect",
        origin=_origin(sample, about, notes),
        task=f"{about.get('task') or 'task'}/{sample.get('id')}",
        task_content=[_asked(_restored(sample.get("input"), stored)), sample.get("target")],
        trajectory_id=f"{sample.get('id')}-{epoch}",
        sample_index=epoch - 1 if isinstance(epoch, int) else None,
        env=about.get("task"),
        policy=about.get("model"),
        reward=reward,
        success=bool(reward) if reward in (0.0, 1.0) else None,
        reward_components=components(parts, notes, "samples.scores."),
        termination=end,
        n_tool_errors=errors,
        message_seconds=_seconds(sample),
    )


def _seconds(sample: dict[str, Any]) -> list[float | None] | None:
    """How long each message took, as the events of the sample say."""
    turns: dict[Any, float | None] = {}
    calls: dict[Any, float | None] = {}
    for event in sample.get("events") or []:
        if not isinstance(event, dict):
            continue
        output = event.get("output")
        if event.get("event") == "model" and isinstance(output, dict):
            took = number(output.get("time"))
            for choice in output.get("choices") or []:
                answer = choice.get("message") if isinstance(choice, dict) else None
                turns[(answer or {}).get("id")] = took if took is not None and took >= 0 else None
        elif event.get("event") == "tool":
            calls[event.get("id")] = lasted(event.get("timestamp"), event.get("completed"))
    known = {
        position: took
        for position, item in enumerate(sample["messages"])
        if (took := _took(item, turns, calls)) is not None
    }
    return seconds_of_messages(known, len(sample["messages"]))


def _took(item: dict[str, Any], turns: dict[Any, float | None], calls: dict[Any, float | None]) -> float | None:
    return {"assistant": turns.get(item.get("id")), "tool": calls.get(item.get("tool_call_id"))}.get(item["role"])


def _origin(sample: dict[str, Any], about: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """When the sample began, else the log, and what its model used. Other models, as a judge's, are counted."""
    spent, used = Calls(notes), sample.get("model_usage") or {}
    for model, usage in used.items():
        if model == about.get("model") or len(used) == 1:
            spent.usage(usage, "samples.model_usage.")
        else:
            notes.ignored["samples.model_usage of another model"] += 1
    return {"source_time": moment(sample.get("started_at")) or moment(about.get("created"))} | spent.fields()


def _asked(given: Any) -> Any:
    """The input of a sample without the ids of its messages, which Inspect draws anew in each run."""
    return [[message["role"], message["content"]] for message in given] if isinstance(given, list) else given


def _values(scores: dict[str, Any], notes: Notes) -> Iterator[tuple[str, float]]:
    """Names and numbers of the scores. Values that are no numbers are counted."""
    for name, score in scores.items():
        value = score.get("value") if isinstance(score, dict) else score
        if isinstance(score, dict):
            notes.rest(score, frozenset({"value"}), "samples.scores.")
        items = [(f"{name}.{key}", part) for key, part in value.items()] if isinstance(value, dict) else [(name, value)]
        for key, grade in items:
            known = _GRADES.get(grade) if isinstance(grade, str) else number(grade)
            if known is not None:
                yield key, known
            else:
                notes.ignored[f"samples.scores.{key}"] += 1


def _messages(items: list[dict[str, Any]], source: Source) -> tuple[list[dict[str, Any]], int]:
    chat, errors = [], 0
    for item in items:
        source.notes.rest(item, _KNOWN_MESSAGE, "samples.messages.")
        plain = {name: item.get(name) for name in ("role", "content", "tool_call_id")}
        if item["role"] == "tool":
            error = item.get("error") or {}
            errors += bool(error)
            plain |= {"name": item.get("function"), "is_error": bool(error)}
            if plain["content"] and error.get("message", plain["content"]) != plain["content"]:
                source.notes.ignored["samples.messages.error.message"] += 1
            plain["content"] = plain["content"] or error.get("message")
            source.notes.rest(error, frozenset({"message"}), "samples.messages.error.")
        calls = []
        for call in item.get("tool_calls") or []:
            source.notes.rest(call, _KNOWN_CALL, "samples.messages.tool_calls.")
            calls.append({"id": call["id"], "name": call["function"], "arguments": call["arguments"]})
        plain["tool_calls"] = calls or None
        chat.append(plain)
    return from_chat(chat, source.notes), errors


def _restored(value: Any, stored: dict[str, str]) -> Any:
    """A value with the text that was moved to the attachments."""
    if not stored or "attachment://" not in json.dumps(value):
        return value
    if isinstance(value, str):
        return stored.get(value.removeprefix("attachment://"), value) if value.startswith("attachment://") else value
    if isinstance(value, list):
        return [_restored(element, stored) for element in value]
    return {key: _restored(element, stored) for key, element in value.items()} if isinstance(value, dict) else value

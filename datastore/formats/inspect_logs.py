"""Inspect logs: ``.eval`` (a ZIP archive) and ``.json`` (a document). Read only.

A sample is a row. ``messages`` (content in parts; reasoning parts; calls ``{id, function, arguments}``, an answer
with ``error`` is a tool error), ``scores`` (each scorer's value as a component: ``C`` 1, ``I`` and ``N`` 0, ``P``
0.5, numbers and booleans as they are, the numbers of a dict one by one), ``input`` and ``target`` (the task's
content), ``id``, ``epoch`` (sample index), ``eval.model`` (policy), ``eval.task`` (env). The reward is the only
score, and a score of exactly 1 or 0 is the success; with several scorers say ``--reward NAME --success SQL``.
``limit`` and ``error`` give the end. Text that was moved to ``attachments`` is put back.

The archive is read by ``zipfile``, one sample in memory at a time: ``inspect_ai`` itself cannot be installed beside
this project's dependencies. A newer archive compressed by Zstandard is refused by name; ``inspect log convert --to
json`` makes a document of it. Not carried: ``events``, ``store``, ``output``, usage and times.
"""

import json
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from datastore.errors import StoreError
from datastore.formats.messages import from_chat
from datastore.formats.rows import components, make_row, number, termination
from datastore.formats.source import Row, Source, each
from schemas.trajectory import Termination

_KNOWN = frozenset(
    {"id", "epoch", "input", "target", "messages", "scores", "score", "limit", "error", "attachments", "choices"}
    | {"messages_condensed"}
)
_KNOWN_MESSAGE = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "function", "error", "id", "source", "model", "name"}
)
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
        header, samples = source.before, source.elements("samples")

    def convert(sample: dict[str, Any]) -> Iterator[Row]:
        yield _row(source, header, sample)

    return each(source, samples, convert)


def _archive(source: Source) -> tuple[dict[str, Any], Iterator[Any]]:
    """The header, and the samples one at a time."""
    try:
        archive = zipfile.ZipFile(source.path)
    except (zipfile.BadZipFile, OSError) as error:
        raise StoreError(f"{source.name} is no archive that can be read: {error}") from None
    names = archive.namelist()
    header = next((name for name in ("header.json", "_journal/start.json") if name in names), names[0])

    def samples() -> Iterator[Any]:
        source.number = 0
        for name in sorted(name for name in names if name.startswith("samples/")):
            source.number += 1
            source.record = _member(archive, name, source)
            yield source.record

    return _member(archive, header, source), samples()


def _member(archive: zipfile.ZipFile, name: str, source: Source) -> Any:
    try:
        return from_json(archive.read(name))
    except (ValueError, NotImplementedError, OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise StoreError(f"{source.name}: {name} cannot be read: {error}") from None


def _row(source: Source, header: dict[str, Any], sample: dict[str, Any]) -> Row:
    source.notes.rest(sample, _KNOWN, "samples.")
    about = header.get("eval") or {}
    stored = sample.get("attachments") or {}
    messages, errors = _messages(_restored(sample["messages"], stored), source)
    scores = sample.get("scores") or ({"score": sample["score"]} if sample.get("score") else {})
    parts = dict(_values(scores))
    reward = next(iter(parts.values())) if len(parts) == 1 else None
    limit = (sample.get("limit") or {}).get("type")
    end = Termination.INFRA_ERROR if sample.get("error") else termination(_LIMITS, limit, source.notes)
    epoch = sample.get("epoch")
    return make_row(
        messages,
        source="inspect",
        task=f"{about.get('task') or 'task'}/{sample.get('id')}",
        task_content=[sample.get("input"), sample.get("target")],
        trajectory_id=f"{sample.get('id')}-{epoch}",
        sample_index=epoch - 1 if isinstance(epoch, int) else None,
        env=about.get("task"),
        policy=about.get("model"),
        reward=reward,
        success=bool(reward) if reward in (0.0, 1.0) else None,
        reward_components=components(parts),
        termination=end,
        n_tool_errors=errors,
    )


def _values(scores: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and numbers of the scores."""
    for name, score in scores.items():
        value = score.get("value") if isinstance(score, dict) else score
        items = [(f"{name}.{key}", one) for key, one in value.items()] if isinstance(value, dict) else [(name, value)]
        for key, one in items:
            known = _GRADES.get(one) if isinstance(one, str) else number(one)
            if known is not None:
                yield key, known


def _messages(items: list[dict[str, Any]], source: Source) -> tuple[list[dict[str, Any]], int]:
    chat, errors = [], 0
    for one in items:
        source.notes.rest(one, _KNOWN_MESSAGE, "samples.messages.")
        plain = {name: one.get(name) for name in ("role", "content", "tool_call_id")}
        if one["role"] == "tool":
            errors += bool(one.get("error"))
            plain["name"] = one.get("function")
            plain["content"] = plain["content"] or (one.get("error") or {}).get("message")
        if one.get("tool_calls"):
            plain["tool_calls"] = [
                {"id": each["id"], "name": each["function"], "arguments": each["arguments"]}
                for each in one["tool_calls"]
            ]
        chat.append(plain)
    return from_chat(chat, source.notes), errors


def _restored(value: Any, stored: dict[str, str]) -> Any:
    """A value with the text that was moved to the attachments."""
    if not stored or "attachment://" not in json.dumps(value):
        return value
    if isinstance(value, str):
        return stored.get(value.removeprefix("attachment://"), value) if value.startswith("attachment://") else value
    if isinstance(value, list):
        return [_restored(one, stored) for one in value]
    return {key: _restored(one, stored) for key, one in value.items()} if isinstance(value, dict) else value

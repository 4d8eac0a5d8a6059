"""Annotations on their way into the table: from Python, from a file, from the viewer and from the recorder's clients.

Each is checked against the row that it is about. What does not fit is set aside with its reason, and the rest is
appended. One without an ``annotation_id`` is named by its content, so that the same file adds nothing the second time.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.pairs import PreferredIn
from agentrl.datastore.errors import NoBufferError, StoreError
from agentrl.datastore.formats.notes import Notes, Unreadable, excerpt
from agentrl.datastore.formats.rows import batched
from agentrl.datastore.formats.source import Source
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.hints import did_you_mean

if TYPE_CHECKING:
    import polars as pl

    from agentrl.datastore.buffer import TrajectoryBuffer

AT_ONCE = 4096
"""Annotations of one append."""
EXCERPT = 4096
SHOWN_PAIRS = 5

_BY_US = ("number", "version")  # these follow from the rest, and stand in a table that was exported
FIELDS = [name for name in Annotation.model_fields if name not in _BY_US]


@dataclass(frozen=True)
class Annotations:
    """What became of annotations: ``rows`` were added, ``already`` were there, ``refused`` were set aside. ``version``
    is that of the table now."""

    version: int
    rows: int
    already: int
    refused: list[Unreadable]


def annotate(
    buffer: "TrajectoryBuffer",
    given: Iterable[tuple[str, Any]],
    *,
    source: str,
    defaults: Mapping[str, Any] | None = None,
    strict: bool = False,
    pairs: Mapping[str, Sequence[str]] | None = None,
) -> Annotations:
    """Append annotations, ``given`` as (location, fields): the location is how one is named if it is refused, and
    ``defaults`` are fields of those that lack them. With ``strict`` nothing is appended if one is refused. ``pairs``
    are ids of pairs by the row that is preferred in them, beside those that the store has.

    Raises StoreError then, and if the store fails.
    """
    table, preferred_in = buffer.annotations, PreferredIn(Catalog(buffer.store))
    checked: list[Annotation] = []
    refused: list[Unreadable] = []
    rows = already = 0
    for part in batched(given, AT_ONCE):
        fine = [
            each
            for each in (read(location, fields, source, defaults or {}, refused) for location, fields in part)
            if each
        ]
        fit = _fitting(buffer, preferred_in, pairs or {}, fine, refused)
        if strict:
            checked += fit
            continue
        done = table.append(fit)
        rows, already = rows + done.rows, already + done.already
    if strict:
        if refused:
            raise StoreError(_told(refused))
        done = table.append(checked)
        rows, already = done.rows, done.already
    return Annotations(table.version, rows, already, refused)


def _told(refused: Sequence[Unreadable]) -> str:
    lines = [f"{each.place}: {each.key}: {each.reason}" for each in refused[:10]]
    more = [f"... and {len(refused) - 10} more"] if len(refused) > 10 else []
    return "annotations that do not fit, nothing was written:\n  " + "\n  ".join([*lines, *more])


def read(
    location: str, given: Any, source: str, defaults: Mapping[str, Any], refused: list[Unreadable]
) -> tuple[str, Annotation] | None:
    """The annotation that fields say, or None if they say none, which is added to ``refused``."""

    def refuse(key: str, reason: str) -> None:
        refused.append(Unreadable(location, key, reason, excerpt(given)[:EXCERPT]))

    if not isinstance(given, Mapping):
        refuse("", f"is no object of fields, but {type(given).__name__}")
        return None
    fields = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in fields if name not in FIELDS and name not in _BY_US]:
        hint = did_you_mean(str(unknown[0]), FIELDS) or f"; there are {', '.join(FIELDS)}"
        refuse(str(unknown[0]), f"is no field of an annotation{hint}")
        return None
    fields = {**defaults, "source": source, **{name: value for name, value in fields.items() if name not in _BY_US}}
    try:
        annotation = Annotation.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        reason = "is missing" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        refuse(key, reason if first["type"] == "missing" or not key else f"is {str(first['input'])[:60]!r}: {reason}")
        return None
    if annotation.withdraws and "value" not in given:
        refuse("value", "says nothing: give a value, a comment or a correction; value: null takes back what was said")
        return None
    if "annotation_id" not in fields:
        annotation = annotation.model_copy(update={"annotation_id": name_of(annotation, "created_at" in fields)})
    return location, annotation


def name_of(annotation: Annotation, timed: bool) -> str:
    """The id of an annotation by what it says, and by its time if that is given."""
    left_out = {"annotation_id", "source", "number", *(() if timed else ("created_at",))}
    content = json.dumps(annotation.model_dump(mode="json", exclude=left_out), sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _fitting(
    buffer: "TrajectoryBuffer",
    preferred_in: PreferredIn,
    others: Mapping[str, Sequence[str]],
    given: Sequence[tuple[str, Annotation]],
    refused: list[Unreadable],
) -> list[Annotation]:
    """The annotations that fit the rows they are about; others are added to ``refused``."""
    wanted = sorted({annotation.trajectory_id for _, annotation in given})
    tokens = _tokens(buffer, wanted)
    turns = _turns(buffer, sorted({a.trajectory_id for _, a in given if a.turn is not None} & tokens.keys()))
    asked = sorted({a.trajectory_id for _, a in given if a.pair_id is not None} & tokens.keys())
    known = preferred_in(asked)
    pairs = {name: [*known.get(name, []), *others.get(name, [])] for name in asked}
    return fitting(given, tokens, turns, pairs, refused)


def fitting(
    given: Sequence[tuple[str, Annotation]],
    tokens: Mapping[str, int],
    turns: Mapping[str, int],
    pairs: Mapping[str, Sequence[str]],
    refused: list[Unreadable],
) -> list[Annotation]:
    """The annotations that fit rows with so many ``tokens`` and assistant messages, preferred in these ``pairs``;
    others are added to ``refused``."""
    those = []
    for location, annotation in given:
        name = annotation.trajectory_id
        problem: tuple[str, str] | None = None
        if name not in tokens:
            problem = "trajectory_id", f"no row {name!r} in the buffer"
        elif annotation.turn is not None and annotation.turn >= turns[name]:
            problem = "turn", f"is {annotation.turn}; the row has {turns[name]} assistant messages, numbered from 0"
        elif annotation.token_end is not None and not tokens[name]:
            next_step = "name a turn instead, and quote the words that you mean in the comment"
            problem = "token_end", f"is {annotation.token_end}; the row has no tokens, only messages: {next_step}"
        elif annotation.token_end is not None and annotation.token_end > tokens[name]:
            problem = "token_end", f"is {annotation.token_end}; the row has {tokens[name]} tokens"
        elif annotation.pair_id is not None and annotation.pair_id not in pairs.get(name, ()):
            problem = "pair_id", f"is {annotation.pair_id[:60]!r}; {_preferred(pairs.get(name, []))}"
        if problem is None:
            those.append(annotation)
        else:
            refused.append(Unreadable(location, *problem, _excerpt(annotation)))
    return those


def _excerpt(annotation: Annotation) -> str:
    left_out = {"annotation_id", "created_at"}  # which may be new each time
    return annotation.model_dump_json(exclude_defaults=True, exclude=left_out)[:EXCERPT]


def _tokens(buffer: "TrajectoryBuffer", ids: Sequence[str]) -> dict[str, int]:
    """Numbers of tokens of those rows that exist."""
    import polars as pl

    def ask() -> pl.DataFrame:
        return buffer.scan().filter(pl.col("trajectory_id").is_in(ids)).select("trajectory_id", "n_tokens").collect()

    try:
        return dict(buffer.current(None, ask).iter_rows())
    except NoBufferError:
        return {}


def _preferred(pairs: Sequence[str]) -> str:
    """What the ``pair_id`` of a row may be."""
    if not pairs:
        return "the row is preferred in no pair of this store"
    more = f" and {len(pairs) - SHOWN_PAIRS} more" if len(pairs) > SHOWN_PAIRS else ""
    return f"the row is preferred in {', '.join(pairs[:SHOWN_PAIRS])}{more}"


def _turns(buffer: "TrajectoryBuffer", ids: Sequence[str]) -> dict[str, int]:
    """Numbers of assistant messages of rows."""
    counts: dict[str, int] = {}
    for start in range(0, len(ids), 256):
        for row in buffer.read(ids[start : start + 256], ["trajectory_id", "messages"]).to_pylist():
            counts[row["trajectory_id"]] = sum(message["role"] == "assistant" for message in row["messages"])
    return counts


# -- from Python, and of files

if TYPE_CHECKING:
    Said: TypeAlias = str | os.PathLike[str] | pl.DataFrame | Iterable[Mapping[str, Any]]


def annotate_by_python(buffer: "TrajectoryBuffer", given: "Said | None", fields: Mapping[str, Any]) -> Annotations:
    """Append the one annotation that ``fields`` are, or those of a frame, of dicts or of a file; see
    :meth:`agentrl.flows.api.store.Store.annotate`."""
    import polars as pl

    if isinstance(given, str | os.PathLike):
        return annotate_from(buffer, Path(given), fields)[0]
    if given is None:
        return annotate(buffer, [("annotation", fields)], source="python", strict=True)
    dicts = given.to_dicts() if isinstance(given, pl.DataFrame) else given
    named = ((f"annotation {number}", each) for number, each in enumerate(dicts))
    return annotate(buffer, named, source="python", defaults=fields, strict=True)


def annotate_from(
    buffer: "TrajectoryBuffer", path: Path, defaults: Mapping[str, Any] | None = None
) -> tuple[Annotations, str | None]:
    """Append what a file says: JSON Lines, a JSON array, CSV or Parquet, compressed or not. Lines that are set aside
    are kept in the store's ``quarantine``, under the key that is returned. A line without ``created_at`` counts as said
    now.

    Raises StoreError if there is no such file, or if it has another form.
    """
    notes = Notes(quarantine=True)
    source = Source(path, notes, path.name)
    if not path.is_file() or source.kind not in ("lines", "array", "csv", "parquet", "empty"):
        what = source.kind if path.exists() else "not there"
        raise StoreError(f"{path} is {what}; annotations are JSON Lines, a JSON array, CSV or Parquet")
    records = source.records() if source.kind != "empty" else iter(())
    given = ((source.place, record) for record in records)
    done = annotate(buffer, given, source=path.name, defaults=defaults)
    refused = sorted([*notes.unreadable, *done.refused], key=lambda each: each.place)
    return replace(done, refused=refused), keep_refused(buffer, refused)


def keep_refused(buffer: "TrajectoryBuffer", refused: Sequence[Unreadable]) -> str | None:
    """Write what was set aside into the store's ``quarantine``, and return under which key; None if there is nothing.
    The same lines are written once."""
    if not refused:
        return None
    lines = "".join(json.dumps(each.as_dict(), ensure_ascii=False) + "\n" for each in refused)
    data = lines.encode("utf-8", "replace")
    key = f"quarantine/annotations-{hashlib.blake2b(data, digest_size=4).hexdigest()}-records.jsonl"
    buffer.storage.write(key, data)
    return key

"""Rows that carry what people and judges said of them into the files of an export, and out of those of an import.

A record has the annotations that count under ``annotations``: as objects, or as JSON text where the file is read as a
table, in which tools are JSON text too. Formats with room for what agentrl adds have them there, under ``agentrl``. A
pair has those of both rows, each with its ``side``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.datastore.read.lookup import Ids, id_array
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.redaction.rows import RowRedaction

KEY, SIDE = "annotations", "side"
CARRIED = ("turn", "token_start", "token_end", "name", "value", "comment", "correction", "author", "author_kind")
"""Fields of an annotation that are written, and the time."""
_PLACES: tuple[tuple[str | int, ...], ...] = (
    (),
    ("agentrl",),
    ("info", "agentrl"),
    ("extra", "agentrl"),
    ("traces", 0, "info", "agentrl"),
)
"""Where the annotations of a record may stand."""


class AnnotatedRow(Trajectory):
    """A row, and what counts of what was said of it."""

    annotations: list[dict[str, Any]]


# out


def said_of(buffer: "TrajectoryBuffer", ids: Ids) -> dict[str, list[Annotation]]:
    """What counts of what was said of these rows; what was said of pairs does not come with them."""
    import polars as pl

    from agentrl.datastore.annotations.current import current

    rows = buffer.annotations.frame().join(
        pl.DataFrame({"trajectory_id": id_array(ids)}), on="trajectory_id", how="semi"
    )
    named: dict[str, list[Annotation]] = {}
    for fields in current(rows.filter(pl.col("pair_id").is_null())).drop("version").iter_rows(named=True):
        named.setdefault(fields["trajectory_id"], []).append(Annotation.model_validate(fields))
    return named


def annotated(
    rows: Iterable[Trajectory],
    said_of_rows: Mapping[str, Sequence[Annotation]],
    redaction: "RowRedaction | None" = None,
) -> Iterator[Trajectory]:
    """Rows that carry what was said of them, with placeholders for secrets if there is a ``redaction``."""
    for row in rows:
        given = said_of_rows.get(row.trajectory_id, ())
        clean = [redaction.annotation(each) if redaction else each for each in given]
        fields = [each.model_dump(mode="json", include={*CARRIED, "created_at"}) for each in clean]
        yield AnnotatedRow.model_construct(**row.__dict__, annotations=fields)


def in_record(row: Trajectory, *, text: bool = False) -> dict[str, Any]:
    """The annotations of a row as a part of its record; nothing if it carries none."""
    if not isinstance(row, AnnotatedRow):
        return {}
    if text:  # of each record, since it is a column
        return {KEY: json.dumps(row.annotations, ensure_ascii=False)}
    return {KEY: row.annotations} if row.annotations else {}


def of_sides(chosen: Trajectory, rejected: Trajectory) -> dict[str, Any]:
    """The same of a pair, as text."""
    if not isinstance(chosen, AnnotatedRow) or not isinstance(rejected, AnnotatedRow):
        return {}
    sides = {"chosen": chosen.annotations, "rejected": rejected.annotations}
    marked = [{SIDE: side, **fields} for side, each in sides.items() for fields in each]
    return {KEY: json.dumps(marked, ensure_ascii=False)}


# in


def carried_by(record: Any) -> list[dict[str, Any]]:
    """The annotations of a record; none if it has none that we wrote."""
    for steps in _PLACES:
        part = record
        for step in steps:
            part = _under(part, step)
        if given := ours(_under(part, KEY)):
            return given
    return []


def _under(part: Any, step: str | int) -> Any:
    if isinstance(part, list) and isinstance(step, int):
        return part[step] if step < len(part) else None
    return part.get(step) if isinstance(part, dict) else None


def ours(value: Any) -> list[dict[str, Any]]:
    """The annotations that a value is; none if others wrote it. Others call something else by that name."""
    if isinstance(value, str) and value[:2] == "[{":
        try:
            value = loads(value)
        except ValueError:
            return []
    if not isinstance(value, list) or not value:
        return []
    known = {*CARRIED, "created_at", SIDE}
    fits = all(isinstance(each, dict) and {"name", "author"} <= each.keys() <= known for each in value)
    return value if fits else []

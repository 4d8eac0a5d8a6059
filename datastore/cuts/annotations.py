"""What people and judges said of the rows of a cut: beside them in an export, and from there into another store."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.annotations.table import VERSION
from agentrl.datastore.formats.annotations import Annotations, annotate, keep_refused
from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.redaction.rows import REDACTED, RowRedaction
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.arrow import from_table

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

ANNOTATIONS = "annotations.parquet"
"""File of an exported cut: a row for each annotation, with the columns of :class:`Annotation`."""
ANNOTATION_LINES = "annotations.jsonl"
"""The same beside rows in JSON, since ``datasets`` loads all tables of a folder by one reader."""


class Given(NamedTuple):
    """Annotations of one name by one kind of author, and the rows that they are about."""

    name: str
    author_kind: str
    annotations: int
    rows: int


@dataclass(frozen=True)
class Written:
    """What an export wrote of annotations, in which ``file``, and how many it left out since they hold secrets."""

    given: list[Given]
    left_out: int = 0
    file: str = ANNOTATIONS

    @property
    def total(self) -> int:
        return sum(each.annotations for each in self.given)


NOTHING = Written([])


def write_annotations(buffer: "TrajectoryBuffer", rows: pl.DataFrame, folder: Path, look: bool, lines: bool) -> Written:
    """Write what was ever said of ``rows`` (``trajectory_id`` and ``tags``), oldest first, and count it: as
    JSON Lines or as Parquet. Annotations of pairs stay out, as pairs do. So do those in which a search finds secrets,
    if we are to ``look`` for them or the row was redacted: they may say what the row lost."""
    every = buffer.annotations.rows()
    ids = rows["trajectory_id"].to_arrow().cast(pa.string())
    of_rows = pc.and_(pc.is_in(every["trajectory_id"], value_set=ids), every["pair_id"].is_null())
    logged = every.filter(of_rows).drop_columns([VERSION])
    redacted = rows.filter(pl.col("tags").list.contains(REDACTED))["trajectory_id"].to_arrow().cast(pa.string())
    searched = pa.chunked_array([pa.repeat(look, len(logged))])
    searched = pc.or_(searched, pc.is_in(logged["trajectory_id"], value_set=redacted))
    kept = logged.filter(pa.array(_clean(buffer, logged, searched.to_pylist()), pa.bool_()))
    if len(kept) and lines:
        records = ({**row, "created_at": row["created_at"].isoformat()} for row in kept.to_pylist())
        write_lines(folder / ANNOTATION_LINES, records)
    elif len(kept):
        pq.write_table(kept.combine_chunks(), folder / ANNOTATIONS, compression="zstd")
    counts = pl.DataFrame(kept.select(["name", "author_kind", "trajectory_id"])).group_by("name", "author_kind")
    totals = counts.agg(pl.len().alias("annotations"), pl.col("trajectory_id").n_unique().alias("rows"))
    given = [Given(*row) for row in totals.sort("name", "author_kind").rows()]
    return Written(given, len(logged) - len(kept), ANNOTATION_LINES if lines else ANNOTATIONS)


def _clean(buffer: "TrajectoryBuffer", logged: pa.Table, searched: list[bool]) -> list[bool]:
    """Which annotations hold no secret; those that are not ``searched`` count as such."""
    if not any(searched):
        return [True] * len(logged)
    redaction = RowRedaction(buffer.storage)
    each = zip(from_table(Annotation, logged), searched, strict=True)
    return [not look or redaction.annotation(annotation) is annotation for annotation, look in each]


def take_annotations(buffer: "TrajectoryBuffer", folder: Path) -> Annotations | None:
    """Append the annotations of an exported cut that the store lacks; None if it has none. Those that do not fit their
    row are set aside in the store's ``quarantine``."""
    path = folder / ANNOTATIONS
    if not path.is_file():
        return None
    given = ((f"{ANNOTATIONS}[{number}]", fields) for number, fields in enumerate(pq.read_table(path).to_pylist()))
    done = annotate(buffer, given, source="cut")
    keep_refused(buffer, done.refused)
    return done

"""What people and judges said of the rows of a cut: beside them in an export, and from there into another store."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.annotations.table import VERSION
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.pairs import SIDES, PreferredIn
from agentrl.datastore.formats.annotations import Annotations, annotate, keep_refused
from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.redaction.rows import REDACTED, RowRedaction
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.arrow import from_table

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

ANNOTATIONS = "annotations.parquet"
"""File of an exported cut: a row for each annotation, with the columns of :class:`Annotation`."""
PAIRS = "pairs.parquet"
"""Beside it: the pairs that annotations are about, with the rows that are their sides (:data:`SIDES`)."""
ANNOTATION_LINES, PAIR_LINES = "annotations.jsonl", "pairs.jsonl"
"""The same beside rows in JSON, since ``datasets`` loads all tables of a folder by one reader."""


class Given(NamedTuple):
    """Annotations of one name by one kind of author, and the rows that they are about."""

    name: str
    author_kind: str
    annotations: int
    rows: int


@dataclass(frozen=True)
class Written:
    """What an export wrote of annotations, in which ``file``, of how many pairs in ``pairs_file``, and how many
    annotations it left out, by why."""

    given: list[Given]
    left_out: dict[str, int] = field(default_factory=dict)
    file: str = ANNOTATIONS
    pairs: int = 0
    pairs_file: str = PAIRS

    @property
    def total(self) -> int:
        return sum(each.annotations for each in self.given)


NOTHING = Written([])


def write_annotations(buffer: "TrajectoryBuffer", rows: pl.DataFrame, folder: Path, look: bool, lines: bool) -> Written:
    """Write what was ever said of ``rows`` (``trajectory_id`` and ``tags``), oldest first, and count it: as
    JSON Lines or as Parquet, and which rows the pairs are of that some are about. Those of pairs of which the cut lacks
    a side stay out. So do those in which a search finds secrets, if we are to ``look`` for them or a row of theirs was
    redacted: they may say what the row lost."""
    every = buffer.annotations.rows()
    ids = rows["trajectory_id"].to_arrow().cast(pa.string())
    of_rows = every.filter(pc.is_in(every["trajectory_id"], value_set=ids)).drop_columns([VERSION])
    sides = _sides(buffer, of_rows, ids)
    whole = pc.or_(of_rows["pair_id"].is_null(), pc.is_in(of_rows["pair_id"], value_set=sides["pair_id"]))
    logged = of_rows.filter(whole)
    redacted = rows.filter(pl.col("tags").list.contains(REDACTED))["trajectory_id"].to_arrow().cast(pa.string())
    searched = pa.chunked_array([pa.repeat(look, len(logged))])
    searched = pc.or_(searched, pc.is_in(logged["trajectory_id"], value_set=redacted))
    of_redacted = sides.filter(pc.is_in(sides["rejected_id"], value_set=redacted))["pair_id"]
    searched = pc.or_(searched, pc.is_in(logged["pair_id"], value_set=of_redacted, skip_nulls=True))
    kept = logged.filter(pa.array(_clean(buffer, logged, searched.to_pylist()), pa.bool_()))
    sides = sides.filter(pc.is_in(sides["pair_id"], value_set=kept["pair_id"]))
    files = (ANNOTATION_LINES, PAIR_LINES) if lines else (ANNOTATIONS, PAIRS)
    for table, file in zip((kept, sides), files, strict=True):
        _write(table, folder / file)
    counts = pl.DataFrame(kept.select(["name", "author_kind", "trajectory_id"])).group_by("name", "author_kind")
    totals = counts.agg(pl.len().alias("annotations"), pl.col("trajectory_id").n_unique().alias("rows"))
    given = [Given(*row) for row in totals.sort("name", "author_kind").rows()]
    left_out = {
        "since the cut has one side of their pair alone": len(of_rows) - len(logged),
        "since they hold secrets": len(logged) - len(kept),
    }
    return Written(given, {why: count for why, count in left_out.items() if count}, files[0], len(sides), files[1])


def _sides(buffer: "TrajectoryBuffer", annotations: pa.Table, ids: pa.Array) -> pa.Table:
    """The pairs that annotations are about and both sides of which are among these rows, sorted, each once."""
    about = annotations.filter(annotations["pair_id"].is_valid())
    sides = PreferredIn(Catalog(buffer.store)).sides(pc.unique(about["trajectory_id"]).sort().to_pylist())
    said_of = pl.DataFrame(about.select(["pair_id", "trajectory_id"])).unique()
    both = pl.DataFrame(sides.filter(pc.is_in(sides["rejected_id"], value_set=ids))).unique()
    kept = both.join(said_of, left_on=["pair_id", "chosen_id"], right_on=["pair_id", "trajectory_id"], how="semi")
    return kept.sort(SIDES.names).to_arrow().cast(SIDES)


def _write(table: pa.Table, path: Path) -> None:
    """Write a table that has rows, by the suffix of its path."""
    if len(table) and path.suffix == ".jsonl":
        write_lines(path, ({**row, **_time(row)} for row in table.to_pylist()))
    elif len(table):
        pq.write_table(table.combine_chunks(), path, compression="zstd")


def _time(row: dict[str, Any]) -> dict[str, str]:
    return {"created_at": row["created_at"].isoformat()} if "created_at" in row else {}


def _clean(buffer: "TrajectoryBuffer", logged: pa.Table, searched: list[bool]) -> list[bool]:
    """Which annotations hold no secret; those that are not ``searched`` count as such."""
    if not any(searched):
        return [True] * len(logged)
    redaction = RowRedaction(buffer.storage)
    each = zip(from_table(Annotation, logged), searched, strict=True)
    return [not look or redaction.annotation(annotation) is annotation for annotation, look in each]


def take_annotations(buffer: "TrajectoryBuffer", folder: Path) -> Annotations | None:
    """Append the annotations of an exported cut that the store lacks; None if it has none. Those that do not fit their
    row are set aside in the store's ``quarantine``. Those of pairs count when pairs of these ids are made here."""
    path = folder / ANNOTATIONS
    if not path.is_file():
        return None
    given = ((f"{ANNOTATIONS}[{number}]", fields) for number, fields in enumerate(pq.read_table(path).to_pylist()))
    pairs: defaultdict[str, list[str]] = defaultdict(list)
    for pair in pq.read_table(folder / PAIRS).to_pylist() if (folder / PAIRS).is_file() else []:
        pairs[pair["chosen_id"]].append(pair["pair_id"])
    done = annotate(buffer, given, source="cut", pairs=pairs)
    keep_refused(buffer, done.refused)
    return done

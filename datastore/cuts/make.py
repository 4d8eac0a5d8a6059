"""Writing a cut: the folder with its manifest, its rows and what its rules dropped. Nothing in it depends on the time,
the machine or the process."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.read import sql
from agentrl.datastore.redaction.rows import REDACTED
from agentrl.datastore.table.row_digests import combined
from agentrl.datastore.table.writer import SCALARS
from agentrl.schemas.cut import CUT_ROWS_SCHEMA, UNKNOWN_LICENCE, CutCounts, CutManifest, CutSource

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

MANIFEST, ROWS, DROPPED, HELDOUT = "cut.json", "rows.parquet", "dropped.parquet", "heldout.parquet"

CUT_DROPPED_SCHEMA = pa.schema(
    [pa.field("trajectory_id", pa.string(), nullable=False), pa.field("rule", pa.string(), nullable=False)]
)
"""``dropped.parquet``: the rows that were not taken, each with the rule that dropped it."""

_ORIGIN = ["licence", "source", "stage", "env", "model"]
_COUNTED = ["task_id", "episode_id", "n_steps", "n_tool_calls", "n_tokens", "n_action_tokens", "success"]


@contextmanager
def dropping(folder: Path) -> Iterator[Callable[[str, pa.Array], None]]:
    """A function that adds the ids that a rule dropped to ``dropped.parquet``, which is whole after the block."""
    with pq.ParquetWriter(folder / DROPPED, CUT_DROPPED_SCHEMA, compression="zstd") as writer:

        def add(rule: str, ids: pa.Array) -> None:
            writer.write_table(pa.table([ids, pa.repeat(rule, len(ids))], schema=CUT_DROPPED_SCHEMA))

        yield add


def write_rows(buffer: "TrajectoryBuffer", ids: pa.Array, folder: Path, name: str = ROWS) -> str:
    """Write the ids and digests of these rows, and return the digest of their content in this order."""

    def written() -> Iterator[pa.ChunkedArray]:
        start = 0
        for digests in buffer.digests(ids):
            columns = [ids.slice(start, len(digests)), digests.combine_chunks()]
            writer.write_table(pa.Table.from_arrays(columns, schema=CUT_ROWS_SCHEMA))
            start += len(digests)
            yield digests

    with pq.ParquetWriter(folder / name, CUT_ROWS_SCHEMA, compression="zstd") as writer:
        return combined(written())


def described(
    buffer: "TrajectoryBuffer", ids: pa.Array, version: int, licences: Mapping[str, str]
) -> tuple[CutCounts, list[CutSource]]:
    """Totals of these rows, and their sources. A row's licence is the first of ``licences`` (licence -> SQL condition)
    whose condition holds."""
    named = set(re.findall(r"\w+", " ".join(licences.values())))
    columns = [name for name in SCALARS if name in {*_ORIGIN, *_COUNTED, "trajectory_id", "policy"} | named]

    def read() -> pl.DataFrame:
        taken = pl.LazyFrame({"trajectory_id": ids}, schema={"trajectory_id": pl.String})
        redacted = pl.col("tags").list.contains(REDACTED).alias("redacted")
        return buffer.scan(version).select(*columns, redacted).join(taken, on="trajectory_id", how="semi").collect()

    rows = buffer.current(version, read)
    licence = _licences(rows, licences, lambda text: buffer.text.ids(text, version))
    rows = rows.join(licence, on="trajectory_id", how="left").with_columns(
        pl.col("licence").fill_null(UNKNOWN_LICENCE),
        pl.coalesce("model", pl.col("policy").replace("", None), pl.lit("unknown")).alias("model"),
    )
    totals = (pl.len().alias("rows"), pl.col("task_id").n_unique().alias("tasks"), _total("n_tokens", "tokens"))
    sources = rows.group_by(_ORIGIN).agg(*totals, _total("success", "successes")).sort(_ORIGIN)
    return _counts(rows), [CutSource.model_validate(row) for row in sources.to_dicts()]


def _total(column: str, name: str) -> pl.Expr:
    return pl.col(column).cast(pl.Int64).sum().alias(name)


def _counts(rows: pl.DataFrame) -> CutCounts:
    counts = rows.select(
        pl.col("task_id").n_unique().alias("tasks"),
        pl.col("episode_id").n_unique().alias("episodes"),
        _total("n_steps", "steps"),
        _total("n_tool_calls", "tool_calls"),
        _total("n_tokens", "tokens"),
        _total("n_action_tokens", "action_tokens"),
        _total("success", "successes"),
        (~pl.col("success")).cast(pl.Int64).sum().alias("failures"),
        pl.col("success").is_null().sum().alias("unscored"),
        _total("redacted", "redacted"),
    )
    return CutCounts.model_validate(counts.row(0, named=True))


def _licences(rows: pl.DataFrame, licences: Mapping[str, str], find: Callable[[str], pl.Series]) -> pl.DataFrame:
    """The licence of each row that has one."""
    left, parts = rows, [pl.DataFrame(schema={"trajectory_id": pl.String, "licence": pl.String})]
    for licence, where in licences.items():
        held = sql.matching(left.lazy(), where, f"licences.{licence}", find).select("trajectory_id").collect()
        parts.append(held.with_columns(pl.lit(licence).alias("licence")))
        left = left.join(held, on="trajectory_id", how="anti")
    return pl.concat(parts)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: CutManifest) -> CutManifest:
    """Write ``cut.json`` beside the other files of a cut, with their digests."""
    names = [name for name in (DROPPED, HELDOUT, ROWS) if (folder / name).is_file()]
    whole = manifest.model_copy(update={"files": {name: sha256(folder / name) for name in names}})
    (folder / MANIFEST).write_text(whole.text(), encoding="utf-8")
    return whole

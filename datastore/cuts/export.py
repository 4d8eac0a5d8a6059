"""Exporting a cut: a folder with its rows in any format, the cut itself, tasks, tokenizers, a card, and checksums."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts import tokenizers
from agentrl.datastore.cuts.annotations import NOTHING, write_annotations
from agentrl.datastore.cuts.card import card
from agentrl.datastore.cuts.folder import BATCH_ROWS, CutFolder
from agentrl.datastore.cuts.make import sha256
from agentrl.datastore.cuts.verify import CHECKSUMS, CUT, DATA, TASKS, TOKENIZERS, verify
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import named
from agentrl.datastore.formats.exports import export_rows, losses
from agentrl.datastore.formats.files import replaced
from agentrl.datastore.redaction.rows import REDACTED, holds_secrets

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

EXACT = "parquet"
"""The format that holds rows as they are: all columns, as the buffer has them. :func:`import_cut` takes it."""

SHARD_ROWS = 64 * BATCH_ROWS
LOADED = (".jsonl", ".json", ".parquet")
"""Files that the hub loads as a table."""


@dataclass
class ExportedCut:
    """What an export of a cut wrote. ``loses`` counts the rows that have something the format cannot hold,
    ``tasks_left_out`` the tasks that were not written beside the rows since they hold secrets, by how that is known,
    and ``annotations_left_out`` the annotations, by why."""

    path: str
    format: str
    rows: int
    records: int
    identity: str
    loses: dict[str, int] = field(default_factory=dict)
    tasks_left_out: dict[str, int] = field(default_factory=dict)
    annotations: int = 0
    annotations_left_out: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_cut(
    buffer: "TrajectoryBuffer",
    cut: CutFolder,
    name: str,
    path: Path,
    format: str = EXACT,
    *,
    force: bool = False,
    annotations: bool = True,
) -> ExportedCut:
    """Write a cut to a folder, which appears whole or not at all. What people and judges said of its rows lies beside
    them, unless ``annotations`` is false.

    Raises StoreError if the folder is there already (``force`` replaces it), if a row is not what the cut says, if the
    format is only read, or if no row gives a record.
    """
    if format != EXACT:
        named(format)
    if not cut.manifest.rows:
        raise StoreError(f"cut {name} has no rows to export")
    if path.exists() and not force:
        raise StoreError(f"{path} is there already; --force replaces it")
    checked = verify(buffer, cut, heldout=False)
    if not checked.ok:
        raise StoreError(f"cut {name} is not what it was, and was not exported: {'; '.join(checked.problems())}")
    ids = cut.ids()
    exported = ExportedCut(str(path), format, len(ids), len(ids), cut.identity)
    pattern: str | None = f"{DATA}/*.parquet"
    with replaced(path, force) as working:
        (working / DATA).mkdir(parents=True)
        if format == EXACT:
            _write_exact(buffer, ids, working / DATA)
        else:
            suffix = named(format).suffix
            data = export_rows(buffer, ids, working / DATA / f"rows{suffix}", format)
            exported.records, exported.loses = data.records, losses(buffer, ids, format)
            pattern = f"{DATA}/rows{suffix}" if suffix in LOADED else None
        shutil.copytree(cut.path, working / CUT)
        rows, look = _about(buffer, ids), cut.manifest.secrets is not None
        exported.tasks_left_out = _write_tasks(buffer, rows, working, look)
        _write_tokenizers(buffer, rows, working)
        beside = write_annotations(buffer, rows, working, look, _is_json(pattern)) if annotations else NOTHING
        exported.annotations, exported.annotations_left_out = beside.total, beside.left_out
        about = (exported.records, exported.loses, exported.tasks_left_out, beside)
        text = card(name, cut.manifest, cut.identity, format, pattern, *about)
        (working / "README.md").write_text(text, encoding="utf-8")
        files = sorted(file.relative_to(working).as_posix() for file in working.rglob("*") if file.is_file())
        lines = [f"{sha256(working / file)}  {file}\n" for file in files]
        (working / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    return exported


def _is_json(pattern: str | None) -> bool:
    """Whether the hub reads the rows as JSON."""
    return pattern is not None and pattern.endswith((".jsonl", ".json"))


def _about(buffer: "TrajectoryBuffer", ids: pa.Array) -> pl.DataFrame:
    """What says which tasks, tokenizers and annotations go with these rows."""
    return pl.DataFrame(buffer.read(ids, ["trajectory_id", "task_id", "tags", "tokenizer"]))


def _write_exact(buffer: "TrajectoryBuffer", ids: pa.Array, folder: Path) -> None:
    for number, start in enumerate(range(0, len(ids), SHARD_ROWS)):
        writer: pq.ParquetWriter | None = None
        for rows in _tables(buffer, ids.slice(start, SHARD_ROWS)):
            writer = writer or pq.ParquetWriter(folder / f"rows-{number:05d}.parquet", rows.schema, compression="zstd")
            writer.write_table(rows)
        assert writer is not None
        writer.close()


def _tables(buffer: "TrajectoryBuffer", ids: pa.Array) -> Iterator[pa.Table]:
    return (buffer.read(ids.slice(start, BATCH_ROWS)) for start in range(0, len(ids), BATCH_ROWS))


def _write_tasks(buffer: "TrajectoryBuffer", rows: pl.DataFrame, folder: Path, look: bool) -> dict[str, int]:
    """Write the tasks that the store has of these rows, for them to be scored again, and count those that stay out: a
    task still holds what redaction took from its rows, and others may hold secrets that no row shows, if we are to
    ``look`` for them."""
    redacted = rows.filter(pl.col("tags").list.contains(REDACTED))["task_id"].unique().to_arrow().cast(pa.string())
    stored = buffer.tasks(rows["task_id"].unique().to_list())
    kept = stored.filter(pc.invert(pc.is_in(stored["task_id"], value_set=redacted)))
    left_out = {"of rows in which placeholders stand for secrets": len(stored) - len(kept)}
    if look and len(kept):
        clean = kept.filter(pa.array([not holds for holds in holds_secrets(kept.to_pylist())]))
        left_out["in which a search found secrets"] = len(kept) - len(clean)
        kept = clean
    if len(kept):
        pq.write_table(kept.sort_by("task_id"), folder / TASKS, compression="zstd")
    return {why: count for why, count in left_out.items() if count}


def _write_tokenizers(buffer: "TrajectoryBuffer", rows: pl.DataFrame, folder: Path) -> None:
    """Write the tokenizers of the tokens of these rows, for them to be read again."""
    for fingerprint in sorted(filter(None, rows["tokenizer"].unique())):
        if (text := tokenizers.kept(buffer.storage, fingerprint)) is not None:
            (folder / TOKENIZERS).mkdir(exist_ok=True)
            (folder / TOKENIZERS / f"{fingerprint}.json").write_bytes(text)

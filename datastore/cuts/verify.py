"""Verifying a cut: every file and every row against the digests that its manifest vouches for. Digests are computed
anew from the content; what the store remembers of a row is not trusted."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.cuts.annotations import ANNOTATIONS, PAIRS
from agentrl.datastore.cuts.folder import BATCH_ROWS, CutFolder
from agentrl.datastore.cuts.make import sha256
from agentrl.datastore.errors import StoreError, UnknownTrajectoryError
from agentrl.datastore.table.older_schemas import upgrade
from agentrl.datastore.table.row_digests import contents
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

CUT, DATA, CHECKSUMS, TASKS, TOKENIZERS = "cut", "data", "checksums.txt", "tasks.parquet", "tokenizers"
"""What an exported cut consists of: the cut itself, its rows, the SHA-256 of every file as ``sha256sum`` writes them,
and what rows need to be scored and read again."""


@dataclass
class CutCheck:
    """What is wrong with a cut: ids of rows that are ``missing`` or whose content ``changed``, and ``files`` that are
    not as they were written. ``beyond`` has the rows of an export that the cut does not name, the tasks and
    tokenizers that no row of it names, and what is said of other rows: anybody can write the checksums anew, and only
    the cut vouches for what is its own. ``heldout`` has the held-out rows that they were compared with, and that are
    gone or say something else now. ``rows`` were compared; an export in a format that loses something compares none."""

    identity: str
    rows: int = 0
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    heldout: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.changed or self.files or self.beyond or self.heldout)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def problems(self) -> list[str]:
        """A line for each kind of fault, with the first of them."""
        return [
            f"{len(names)} {what}: {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
            for what, names in (
                ("rows are missing", self.missing),
                ("rows have other content", self.changed),
                ("files are not as they were written", self.files),
                ("rows, tasks, tokenizers or annotations are beyond the cut", self.beyond),
                ("held-out rows that it was compared with are gone or have other content", self.heldout),
            )
            if names
        ]


def verify(
    buffer: "TrajectoryBuffer",
    cut: CutFolder,
    progress: Callable[[int, int], None] | None = None,
    *,
    heldout: bool = True,
) -> CutCheck:
    """Compare every row of the newest version of the table with a cut, and the held-out rows too, unless ``heldout`` is
    false or the cut is of another table, which had them."""
    checked = CutCheck(cut.identity, files=cut.damaged())
    if checked.files:
        return checked
    for batch in cut.batches():
        _compare(checked, batch, _stored(buffer, batch.column("trajectory_id")))
        if progress:
            progress(checked.rows, cut.manifest.rows)
    if heldout and cut.manifest.heldout and str(buffer.table().metadata().id) == cut.manifest.table.id:
        held = CutCheck(cut.identity)
        for batch in cut.heldout():
            _compare(held, batch, _stored(buffer, batch.column("trajectory_id")))
        checked.heldout = sorted(held.missing + held.changed)
    return checked


def _stored(buffer: "TrajectoryBuffer", ids: pa.Array) -> pa.Table:
    """Those of these rows that are there."""
    try:
        return buffer.read(ids)
    except UnknownTrajectoryError as error:
        return buffer.read(ids.filter(pc.invert(pc.is_in(ids, value_set=pa.array(error.missing, pa.string())))))


def _compare(checked: CutCheck, batch: pa.RecordBatch, rows: pa.Table) -> None:
    ids, digests = batch.column("trajectory_id"), batch.column("digest")
    positions = pc.index_in(ids, value_set=rows["trajectory_id"].combine_chunks())
    checked.missing += ids.filter(positions.is_null()).to_pylist()
    now = contents(rows).combine_chunks().take(positions)
    checked.changed += ids.filter(pc.fill_null(pc.not_equal(now, digests), False)).to_pylist()
    checked.rows += len(ids)


def exported_cut(folder: Path) -> CutFolder:
    """The cut of a folder that an export wrote. Raises StoreError if it is none."""
    if not (folder / CUT).is_dir():
        raise StoreError(f"{folder} is no exported cut: it has no folder {CUT}; `agentrl cut export` writes one")
    return CutFolder(folder / CUT)


def verify_export(folder: Path) -> CutCheck:
    """Compare every file of an exported cut with its checksums and, if it holds rows as they are, every row with the
    cut."""
    cut = exported_cut(folder)
    checked = CutCheck(cut.identity, files=[f"{CUT}/{name}" for name in cut.damaged()] + _unlike(folder))
    if checked.files or not is_exact(folder):
        return checked
    rows, held = rows_of(folder), TRAJECTORY_SCHEMA.empty_table()
    tasks, fingerprints = set[str](), set[str]()
    for batch in cut.batches():
        while len(held) < len(batch) and (more := next(rows, None)) is not None:
            held = pa.concat_tables([held, more])
        compared = held.slice(0, len(batch))
        _compare(checked, batch, compared)
        tasks.update(pc.unique(compared["task_id"]).to_pylist())
        fingerprints.update(pc.unique(compared["tokenizer"]).to_pylist())
        held = held.slice(len(batch))
    for more in (held, *rows):
        checked.beyond += [f"{DATA}: {trajectory_id}" for trajectory_id in more["trajectory_id"].to_pylist()]
    checked.beyond += [*_unnamed(folder, tasks, fingerprints), *_said_of_others(folder, cut.ids())]
    return checked


def _said_of_others(folder: Path, ids: pa.Array) -> list[str]:
    """The rows that annotations of an exported cut, and pairs that these name, are about, and that are none of its
    own."""
    others = []
    for file, columns in ((ANNOTATIONS, ["trajectory_id"]), (PAIRS, ["chosen_id", "rejected_id"])):
        table = pq.read_table(folder / file, columns=columns) if (folder / file).is_file() else None
        for named in (pc.unique(column) for column in table.columns) if table is not None else ():
            strange = named.filter(pc.invert(pc.is_in(named, value_set=ids)))
            others += [f"{file}: {other}" for other in strange.to_pylist()]
    return others


def _unnamed(folder: Path, tasks: set[str], fingerprints: set[str]) -> list[str]:
    """The tasks and tokenizers of an exported cut that none of its rows names."""
    path = folder / TASKS
    stored = pq.read_table(path, columns=["task_id"])["task_id"].to_pylist() if path.is_file() else []
    names = {path.stem for path in (folder / TOKENIZERS).glob("*.json")}
    return [
        *(f"{TASKS}: {task}" for task in sorted({*stored} - tasks)),
        *(f"{TOKENIZERS}/{name}.json" for name in sorted(names - fingerprints)),
    ]


def rows_of(folder: Path) -> Iterator[pa.Table]:
    """The rows of an exported cut, in its order, a bounded number at a time."""
    for path in sorted((folder / DATA).glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                yield upgrade(pa.Table.from_batches([batch]))


def is_exact(folder: Path) -> bool:
    """Whether an exported cut holds the rows as they are, so that another store can take them."""
    paths = sorted((folder / DATA).glob("*.parquet"))
    return bool(paths) and set(pq.read_schema(paths[0]).names) >= {"trajectory_id", "messages", "action_mask"}


def _unlike(folder: Path) -> list[str]:
    """Files that are not what the checksums say, or are not there, or of which they say nothing."""
    listed = (folder / CHECKSUMS).read_text(encoding="utf-8") if (folder / CHECKSUMS).is_file() else ""
    known = {name: digest for digest, _, name in (line.partition("  ") for line in listed.splitlines())}
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    hidden = {name for name in files if name == CHECKSUMS or name.startswith(".")}
    wrong = [name for name, digest in known.items() if name not in files or sha256(files[name]) != digest]
    return sorted({*wrong, *(files.keys() - known.keys() - hidden)})

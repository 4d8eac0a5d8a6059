"""Rows of a store as one file that a browser opens without a server: `agentrl view export`.

The file holds the viewer's own modules, and the answers that the server would give about these rows. What the server
computes for a filter, the modules compute in the page.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import polars as pl
import pyarrow as pa

from datastore.errors import StoreError
from datastore.writer import SCALARS
from flows.viewer import bundle, compare, facets, trajectory
from flows.viewer.reader import StoreReader
from flows.viewer.redaction import Redactor
from flows.viewer.refused import RefusedError
from flows.viewer.tables import COLUMNS, Snapshot, plain, stream
from flows.viewer.wire import RowAnswer
from flows.viewer.wire_export import Contents, ExportedColumn
from pipelines.execute import open_output
from pipelines.handles import Trajectories
from pipelines.lineage import find_artifact
from schemas.manifest import InputRecord, Kind

CAP = 25_000_000
"""Bytes of a file at most. Mails and issue trackers take so much; a browser opens it at once."""
PART = 2**20
"""Bytes of rows, before compression, that are unpacked together."""
AT_ONCE = 32
ENTRY = "contents.js"
READ = trajectory.CONTENT


@dataclass(frozen=True)
class Chosen:
    """Ids of rows, sorted, and what chose them in words."""

    ids: list[str]
    by: str


@dataclass(frozen=True)
class Exported:
    contents: Contents
    text: str


class TooLargeError(StoreError):
    """So many rows do not fit a file; ``fitting`` of them do."""

    def __init__(self, rows: int, fitting: int, cap: int) -> None:
        self.fitting = fitting
        remedy = f"add --rows {fitting}, which fit, or select fewer" if fitting else "the first row alone is too large"
        super().__init__(f"{rows:,} rows do not fit a file of {cap / 1e6:g} MB; {remedy}")


def choose(reader: StoreReader, text: str, snapshot: Snapshot) -> Chosen:
    """The rows that a text stands for: ids with commas between them, a stage, tag or STAGE/FINGERPRINT with
    trajectories, or a filter. Raises StoreError if it is none of these, or finds no row."""
    known = set(snapshot.columns(["trajectory_id"])["trajectory_id"])
    ids = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if known.issuperset([text]) or known.issuperset(ids):
        return Chosen(sorted([text] if text in known else ids), "rows named by their ids")
    try:
        manifest = find_artifact(reader.catalog, text)
    except LookupError as error:
        return _filtered(snapshot, text, str(error.args[0]))
    outputs = [name for name, one in manifest.outputs.items() if one.kind is Kind.TRAJECTORIES]
    if not outputs:
        raise StoreError(f"{text!r} has no trajectories among its outputs: {', '.join(manifest.outputs)}")
    stage = manifest.ingredients.stage
    handle = open_output(InputRecord(stage=stage, output=outputs[0], fingerprint=manifest.fingerprint), reader.catalog, reader.tables.buffer)
    assert isinstance(handle, Trajectories)
    found = sorted(known.intersection(handle.ids()))
    if not found:
        raise StoreError(f"{text} selects no row of version {snapshot.version}")
    return Chosen(found, f"{stage}/{manifest.fingerprint[:8]}")


def _filtered(snapshot: Snapshot, text: str, no_artifact: str) -> Chosen:
    try:
        places = snapshot.chosen(text, "trajectory_id", desc=False)
    except RefusedError as error:
        raise StoreError(f"{text!r} is neither the id of a row, nor an artifact ({no_artifact}), nor a filter ({error})") from None
    if not len(places):
        raise StoreError(f"no row of version {snapshot.version} fits the filter {text!r}")
    return Chosen(sorted(snapshot.columns(["trajectory_id"])["trajectory_id"][places]), f"filter: {text}")


def export(reader: StoreReader, chosen: Chosen, snapshot: Snapshot, redactor: Redactor, rows: int | None = None, cap: int = CAP) -> Exported:
    """The file with these rows, or the first ``rows`` of them. Raises TooLargeError if they do not fit ``cap``
    bytes."""
    ids = chosen.ids[:rows]
    if redactor:
        for row in _rows(reader, ids, snapshot):
            _learn(reader, row, redactor, snapshot)
        redactor.learned()
    scalars = snapshot.columns(SCALARS).filter(pl.col("trajectory_id").is_in(ids)).sort("trajectory_id")
    names, cleaned = _cleaned(scalars, redactor)
    own = Snapshot(snapshot.version, cleaned.lazy())
    spreads = facets.spreads(own)
    table = plain(cleaned)
    for spread in spreads:
        table = table.append_column(f"#{spread.column}", pa.array(spread.codes))
    blocks = {"rows": bundle.block(stream(table)), "tasks": bundle.block(stream(_tasks(own)))}
    about = Contents(
        agentrl=_version(),
        version=snapshot.version,
        selection=chosen.by if not redactor else "a filter" if chosen.by.startswith("filter") else chosen.by,
        rows=len(ids),
        selected=len(chosen.ids),
        tokens=0,
        columns=[ExportedColumn(name=name, kind=_kind(kind)) for name, kind in COLUMNS.items()],
        parts=[],
        redactions=None,
        facets=[spread.facet(None) for spread in spreads],
    )
    size = len(bundle.page(ENTRY, about.model_dump_json(), blocks).encode()) + 1000  # for the numbers of rows in parts
    for part in _parts(reader, ids, snapshot, redactor, names, cleaned, own, about):
        text = bundle.block(stream(part))
        size += len(text) + 100
        if size > cap:
            raise TooLargeError(len(ids), sum(about.parts), cap)
        blocks[f"part-{len(about.parts)}"] = text
        about.parts.append(part.num_rows)
    about.redactions = redactor.counts if redactor else None
    return Exported(about, bundle.page(ENTRY, about.model_dump_json(), blocks))


def _version() -> str:
    try:
        return version("agentrl-engine")
    except PackageNotFoundError:
        return "unknown"


def _kind(kind: pl.DataType) -> Literal["text", "number", "bool", "time"]:
    if kind == pl.Boolean:
        return "bool"
    return "number" if kind.is_numeric() else "time" if kind.is_temporal() else "text"


def _rows(reader: StoreReader, ids: Sequence[str], snapshot: Snapshot) -> Iterator[pa.Table]:
    """Each row as a table of one row."""
    for start in range(0, len(ids), AT_ONCE):
        batch = reader.read(list(ids[start : start + AT_ONCE]), READ, snapshot)
        yield from (batch.slice(number, 1) for number in range(batch.num_rows))


def _learn(reader: StoreReader, row: pa.Table, redactor: Redactor, snapshot: Snapshot) -> None:
    heavy = {*trajectory.TOKENS}
    redactor.learn({name: row[name][0].as_py() for name in row.column_names if name not in heavy})
    _, text = reader.tokens_of(row, snapshot.version)
    if text:
        redactor.learn(text.decode())


def _cleaned(scalars: pl.DataFrame, redactor: Redactor) -> tuple[dict[str, str], pl.DataFrame]:
    """New ids by old ones, which stay different, and the rows in the order of their old ids."""
    before = redactor.counts.places
    names, taken = {}, set()
    for name in scalars["trajectory_id"]:
        shown = str(redactor.clean(name)) if redactor else name
        number = 1
        while (unique := shown if number == 1 else f"{shown}-{number}") in taken:
            number += 1
        names[name] = unique
        taken.add(unique)
    if redactor:
        columns = [redactor.column(column) for column in scalars.get_columns() if column.name != "trajectory_id"]
        scalars = scalars.with_columns(pl.Series("trajectory_id", list(names.values())), *columns)
        redactor.counts.places = before  # they are counted where the rows are cleaned
    return names, scalars


def _tasks(own: Snapshot) -> pa.Table:
    """What the page of each task shows of these rows."""
    pairs = own.columns(["env", "task_id"]).unique(maintain_order=True).rows()
    answers = [compare.task(own, env, task_id).model_dump_json() for env, task_id in pairs]
    kinds = pa.schema([("env", pa.string()), ("task_id", pa.string()), ("answer", pa.string())])
    return pa.Table.from_arrays([[one[0] for one in pairs], [one[1] for one in pairs], answers], schema=kinds)


PART_SCHEMA = pa.schema(
    [("answer", pa.string()), ("tokenizer", pa.string()), ("tokens", pa.binary()), ("text", pa.binary())]
)
"""A row: what the server answers about it, the fingerprint of its tokenizer, and its tokens and their text."""


def _parts(reader: StoreReader, ids: Sequence[str], snapshot: Snapshot, redactor: Redactor, names: dict[str, str], cleaned: pl.DataFrame, own: Snapshot, about: Contents) -> Iterator[pa.Table]:
    held: list[dict[str, Any]] = []
    size = 0
    for number, row in enumerate(_rows(reader, ids, snapshot)):
        table, text = reader.tokens_of(row, snapshot.version)
        before = redactor.counts.places + redactor.counts.tokens + redactor.counts.rows_without_tokens
        answer = _answer(reader, row, snapshot, redactor, names, cleaned.row(number, named=True), own)
        if redactor:
            table, text = redactor.tokens(table, text)
            after = redactor.counts.places + redactor.counts.tokens + redactor.counts.rows_without_tokens
            redactor.counts.rows += after > before
        about.tokens += table.num_rows
        held.append({"answer": answer, "tokenizer": row["tokenizer"][0].as_py(), "tokens": stream(table), "text": text})
        size += len(answer) + len(held[-1]["tokens"]) + len(text or b"")
        if size >= PART:
            yield pa.Table.from_pylist(held, PART_SCHEMA)
            held, size = [], 0
    if held:
        yield pa.Table.from_pylist(held, PART_SCHEMA)


def _answer(reader: StoreReader, row: pa.Table, snapshot: Snapshot, redactor: Redactor, names: dict[str, str], cleaned: dict[str, Any], own: Snapshot) -> str:
    """What the server would answer about a row if the store had these rows alone, with all texts whole."""
    raw = trajectory.scalars_of(row)
    beside = trajectory.beside(cleaned, own)
    answer = RowAnswer(**trajectory.content(row, raw, reader.artifacts, whole=True), version=snapshot.version, neighbours=beside)
    if not redactor:
        return answer.model_dump_json()
    found = redactor.clean(answer.model_dump(exclude={"neighbours"}))
    for message, shown in zip(answer.messages, found["messages"], strict=True):
        shown |= {"role": message.role, "characters": len(shown["content"])}
    found["row"] |= {"trajectory_id": names[raw["trajectory_id"]]}
    if raw["parent_id"] in names:
        found["row"]["parent_id"] = names[raw["parent_id"]]
    return RowAnswer(**found, neighbours=beside).model_dump_json()

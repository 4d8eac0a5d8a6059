"""Rows of a store as one file that a browser opens without a server: `agentrl view export`.

The file holds the viewer's own modules, and the answers that the server would give about these rows. What the server
computes for a filter, nobody computes there: a file is filtered by the bars of its histograms and by words.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import polars as pl
import pyarrow as pa
from starlette.responses import Response

from agentrl.datastore.errors import StoreError
from agentrl.datastore.table.writer import SCALARS
from agentrl.flows.viewer.offline import bundle
from agentrl.flows.viewer.pages import task, tokens, trajectory
from agentrl.flows.viewer.pages.trajectory import RowAnswer
from agentrl.flows.viewer.query import facets, selections
from agentrl.flows.viewer.query.facets import Facet
from agentrl.flows.viewer.query.tables import COLUMNS, TEXT, Snapshot, plain, stream
from agentrl.flows.viewer.reader import CONTENT, StoreReader
from agentrl.flows.viewer.wire import Answer, Filtered, RefusedError
from agentrl.pipelines.results.lineage import find_artifact

CAP = 25_000_000
"""Bytes of a file at most. Mails and issue trackers take so much; a browser opens it at once."""
PART = 2**20
"""Bytes of rows, before compression, that are unpacked together."""
AT_ONCE = 32
ENTRY = "contents.js"
FILTER = "filter: "


class ExportedColumn(Answer):
    """A scalar column, and what its values are."""

    name: str
    kind: Literal["text", "number", "bool", "time"]


class Contents(Answer):
    """``rows`` of the ``selected`` ones are in the file, as they were at a ``version`` of the buffer. ``parts`` are the
    numbers of rows in each part of the file. The facets count all rows."""

    agentrl: str
    version: int
    selection: str
    rows: int
    selected: int
    tokens: int
    columns: list[ExportedColumn]
    parts: list[int]
    facets: list[Facet]


@dataclass(frozen=True)
class RowsOfFile:
    """Ids of rows, sorted, and what chose them in words."""

    ids: list[str]
    by: str


@dataclass(frozen=True)
class ExportedFile:
    contents: Contents
    text: str


class TooLargeError(StoreError):
    """So many rows do not fit a file; ``fitting`` of them do."""

    def __init__(self, rows: int, fitting: int, cap: int) -> None:
        self.fitting = fitting
        remedy = f"add --rows {fitting}, which fit, or select fewer" if fitting else "the first row alone is too large"
        super().__init__(f"{rows:,} rows do not fit a file of {cap / 1e6:g} MB; {remedy}")


def choose(reader: StoreReader, text: str, snapshot: Snapshot) -> RowsOfFile:
    """The rows that a text stands for: ids with commas between them, a stage, tag or STAGE/FINGERPRINT with
    trajectories, or a filter. Raises StoreError if it is none of these, or finds no row."""
    known = set(snapshot.columns(["trajectory_id"])["trajectory_id"])
    ids = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if known.issuperset([text]) or known.issuperset(ids):
        return RowsOfFile(sorted([text] if text in known else ids), "rows named by their ids")
    try:
        manifest = find_artifact(reader.catalog, text)
    except LookupError as error:
        return _filtered(snapshot, text, str(error.args[0]))
    stage, fingerprint = manifest.ingredients.stage, manifest.fingerprint
    chosen_ids = known.intersection(selections.chosen(reader.artifacts, manifest).to_pylist())
    if not chosen_ids:  # as of a stage that trains on what it samples, such as train.grpo
        rows = snapshot.columns(["trajectory_id", "stage", "fingerprint"])
        own = (pl.col("stage") == stage) & pl.col("fingerprint").str.starts_with(fingerprint)
        chosen_ids = set(rows.filter(own)["trajectory_id"])
    if not chosen_ids:
        raise StoreError(f"{text} has no row in version {snapshot.version} of the buffer")
    return RowsOfFile(sorted(chosen_ids), f"{stage}/{fingerprint[:8]}")


def _filtered(snapshot: Snapshot, text: str, no_artifact: str) -> RowsOfFile:
    try:
        places = snapshot.chosen(text, "trajectory_id", desc=False)
    except RefusedError as error:
        raise StoreError(
            f"{text!r} is neither the id of a row, nor an artifact ({no_artifact}), nor a filter ({error})"
        ) from None
    if not len(places):
        raise StoreError(
            f"{text!r} is neither the id of a row, nor an artifact ({no_artifact}), and as a filter no row of version "
            f"{snapshot.version} fits"
        )
    return RowsOfFile(sorted(snapshot.columns(["trajectory_id"])["trajectory_id"][places]), FILTER + text)


def export(
    reader: StoreReader,
    chosen: RowsOfFile,
    snapshot: Snapshot,
    rows: int | None = None,
    cap: int = CAP,
) -> ExportedFile:
    """The file with these rows, or the first ``rows`` of them. Raises TooLargeError if they do not fit ``cap``
    bytes."""
    return _Export(reader, snapshot, chosen.ids[:rows]).file(chosen, cap)


def answer(reader: StoreReader, question: Filtered) -> Response:
    """The file with the rows that a page shows. Raises RefusedError if there are none, or too many."""
    snapshot = reader.tables.at(question.at)
    ids = snapshot.columns(["trajectory_id"])["trajectory_id"]
    if (mask := reader.mask(question, snapshot)) is not None:
        ids = ids.filter(pl.Series(mask))
    if ids.is_empty():
        raise RefusedError("no row fits the filter", field="filter", following="choose other rows")
    by = FILTER + question.filter if question.filter else question.among or "all rows"
    try:
        file = export(reader, RowsOfFile(sorted(ids), by), snapshot)
    except TooLargeError as error:
        command = f"agentrl view export ROWS FILE --rows {error.fitting} --store {reader.store}"
        raise RefusedError(
            f"{len(ids):,} rows do not fit a file of {CAP / 1e6:g} MB; {error.fitting:,} do",
            field="filter",
            following=f"choose fewer rows, or: {command}",
            status=413,
        ) from None
    headers = {"content-disposition": f'attachment; filename="agentrl-{len(ids)}-rows.html"'}
    return Response(file.text.encode(), headers=headers, media_type="application/octet-stream")


class _Export:
    """Rows on their way into a file."""

    def __init__(self, reader: StoreReader, snapshot: Snapshot, ids: list[str]) -> None:
        self._reader = reader
        self._version = snapshot.version
        self._from = snapshot
        self._ids = ids
        self._scalars = snapshot.columns(SCALARS).filter(pl.col("trajectory_id").is_in(ids)).sort("trajectory_id")
        self._own = Snapshot(snapshot.version, self._scalars.lazy(), snapshot.find)

    def file(self, chosen: RowsOfFile, cap: int) -> ExportedFile:
        spreads = facets.spreads(self._own)
        table = plain(self._scalars)
        for spread in spreads:
            table = table.append_column(f"#{spread.column}", pa.array(spread.codes))
        blocks = {"rows": bundle.block(stream(table)), "tasks": bundle.block(stream(_tasks(self._own)))}
        about = Contents(
            agentrl=_installed(),
            version=self._version,
            selection=chosen.by,
            rows=len(self._ids),
            selected=len(chosen.ids),
            tokens=sum(self._scalars["n_tokens"]),
            columns=[ExportedColumn(name=name, kind=_kind(kind)) for name, kind in COLUMNS.items()],
            parts=[],
            facets=[spread.facet(None) for spread in spreads],
        )
        size = len(bundle.page(ENTRY, about.model_dump_json(), blocks).encode()) + 1000  # and numbers that grow
        for part in self._parts():
            text = bundle.block(stream(part))
            size += len(text) + 100
            if size > cap:
                raise TooLargeError(len(self._ids), sum(about.parts), cap)
            blocks[f"part-{len(about.parts)}"] = text
            about.parts.append(part.num_rows)
        return ExportedFile(about, bundle.page(ENTRY, about.model_dump_json(), blocks))

    def _rows(self) -> Iterator[pa.Table]:
        """Each row as a table of one row."""
        for start in range(0, len(self._ids), AT_ONCE):
            batch = self._reader.read(self._ids[start : start + AT_ONCE], CONTENT, self._from)
            yield from (batch.slice(number, 1) for number in range(batch.num_rows))

    def _parts(self) -> Iterator[pa.Table]:
        """Rows with :data:`PART_SCHEMA`, as many together as make a part."""
        held: list[dict[str, Any]] = []
        size = 0
        for row in self._rows():
            table = stream(tokens.tokens_of(self._reader, row, self._version))
            answer = self._answer(row)
            last = trajectory.last_words(row["messages"][0].as_py())[:TEXT]
            held.append({"answer": answer, "said": last, "tokens": table})
            size += len(answer) + len(table)
            if size >= PART:
                yield pa.Table.from_pylist(held, PART_SCHEMA)
                held, size = [], 0
        if held:
            yield pa.Table.from_pylist(held, PART_SCHEMA)

    def _answer(self, row: pa.Table) -> str:
        """What the server would answer about a row if the store had these rows alone, with all texts whole."""
        scalars, reader = trajectory.scalars_of(row), self._reader
        content = trajectory.content(row, scalars, reader.artifacts, reader.sampled(row), whole=True)
        beside = trajectory.beside(scalars, self._own)
        return RowAnswer(**content, version=self._version, neighbours=beside).model_dump_json()


def _installed() -> str:
    try:
        return version("agentrl-engine")
    except PackageNotFoundError:
        return "unknown"


def _kind(kind: pl.DataType) -> Literal["text", "number", "bool", "time"]:
    if kind == pl.Boolean:
        return "bool"
    return "number" if kind.is_numeric() else "time" if kind.is_temporal() else "text"


def _tasks(own: Snapshot) -> pa.Table:
    """What the page of each task shows of these rows."""
    pairs = own.columns(["env", "task_id"]).unique(maintain_order=True).rows()
    answers = [task.attempts_at(own, env, task_id).model_dump_json() for env, task_id in pairs]
    kinds = pa.schema([("env", pa.string()), ("task_id", pa.string()), ("answer", pa.string())])
    return pa.Table.from_arrays([[pair[0] for pair in pairs], [pair[1] for pair in pairs], answers], schema=kinds)


PART_SCHEMA = pa.schema([("answer", pa.string()), ("said", pa.string()), ("tokens", pa.binary())])
"""A row: what the server answers about it, what the policy said last, and its tokens."""

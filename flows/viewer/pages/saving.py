"""What the buffer page shows, saved as a selection with a name.

It is saved by `agentrl buffer select`, in a process of its own. Filters are SQL expressions, which that command puts
into a query. So a filter is passed on only if both choose the same rows.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
from pydantic import Field

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql
from agentrl.flows.viewer.processes import told_by
from agentrl.flows.viewer.query import filters
from agentrl.flows.viewer.query.tables import COLUMNS, Snapshot
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, Filtered, RefusedError

PATIENCE_S = 50.0
"""Seconds after which saving is given up."""


class SaveQuery(Filtered):
    """``ids`` are those of the rows that are saved; without any, all that the rest of the question is about."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=80)
    ids: list[str] = Field([], max_length=5000)


class SavedSelection(Answer):
    """``rows`` of a ``version`` of the buffer are saved as ``artifact``, STAGE/FINGERPRINT. ``again``: they were saved
    under this name before, and nothing was written. ``before`` are other selections of this name, newest first: they
    stay. ``other_splits`` of the rows are not of the train split, and ``absent`` ones of the part of the buffer that
    was asked for are not in this version. ``wiring`` is how a stage of a pipeline file reads them."""

    artifact: str
    rows: int
    version: int
    again: bool
    before: list[str]
    other_splits: int
    absent: int
    wiring: str


def save(reader: StoreReader, question: SaveQuery) -> SavedSelection:
    """Save the rows that a page shows, or those with ``ids`` among them. Raises RefusedError if there are none, if an
    id is unknown, or if the name stands for something else."""
    snapshot = reader.tables.at(question.at)
    where = filters.spelled_out(question.filter.strip(), COLUMNS)
    if where:
        _same_in_queries(snapshot, where)
    part = reader.part(question, snapshot)
    chosen = _chosen(reader, question, snapshot)
    if not chosen.height:
        raise RefusedError("there is no row to save", field="filter", following="clear the filter, or select rows")
    options = [f"--store={reader.store}", f"--at={snapshot.version}", "--split=all", "--json"]
    options += [f"--where={where}"] if where else []
    with TemporaryDirectory() as folder:
        if part is not None or question.ids:
            options.append(f"--ids={_written(Path(folder) / 'ids.txt', chosen['trajectory_id'])}")
        told = told_by(["buffer", "select", *options, "--", question.name], PATIENCE_S)
    if told.problem:
        raise RefusedError(told.problem, field="name", status=409)
    answer = told.answer
    reader.artifacts.forget()
    artifact = f"{question.name}/{answer['fingerprint'][:8]}"
    return SavedSelection(
        artifact=artifact,
        rows=answer["rows"],
        version=snapshot.version,
        again=answer["again"],
        before=answer["before"],
        other_splits=int((chosen["split"] != "train").sum()),
        absent=part.absent if part else 0,
        wiring=f"inputs: {{trajectories: {artifact}}}",
    )


def _chosen(reader: StoreReader, question: SaveQuery, snapshot: Snapshot) -> pl.DataFrame:
    """Ids and splits of the rows that a question is about."""
    rows = snapshot.columns(["trajectory_id", "split"])
    mask = reader.mask(question, snapshot)
    if mask is not None:
        rows = rows.filter(pl.Series(mask))
    ids = list(dict.fromkeys(question.ids))
    if not ids:
        return rows
    matches = rows.filter(pl.col("trajectory_id").is_in(ids))
    if matches.height < len(ids):
        lost = [row_id for row_id in ids if row_id not in set(matches["trajectory_id"])]
        reason = f"{len(lost)} of {len(ids)} rows are not there, in version {snapshot.version}: {lost[0][:100]!r}"
        raise RefusedError(reason, field="ids", status=404)
    return matches


def _written(path: Path, ids: pl.Series) -> Path:
    """A file with an id in each line."""
    for row_id in ids:
        if "\n" in row_id or "\r" in row_id:
            raise RefusedError(f"row {row_id[:100]!r} has a line break in its id, and cannot be saved", field="ids")
    path.write_text("\n".join(ids), encoding="utf-8", newline="\n")
    return path


def _same_in_queries(snapshot: Snapshot, where: str) -> None:
    """Raise RefusedError if a query, as selections ask it, would not choose the rows of a filter."""
    mask = snapshot.matching(where)
    _, names, asked = filters.with_words(where, COLUMNS)
    names = list(dict.fromkeys([*names, *(["trajectory_id"] if asked else [])]))
    rows = snapshot.columns(names or ["segment"]).lazy().with_row_index("place of row")
    try:
        matches = (
            sql.matching(rows, where, "the filter", snapshot.find).select("place of row").collect()["place of row"]
        )
    except (StoreError, pl.exceptions.PolarsError) as error:
        raise filters.bad(f"selections cannot hold this filter: {filters.first_line(error)}") from None
    if mask is None or not np.array_equal(np.sort(matches.to_numpy()), np.flatnonzero(mask)):
        raise filters.bad("selections would choose other rows by this filter; write it in another way")

"""What the buffer page shows, kept: saved as a selection with a name, or written as a rule of curation.

A selection is saved by `agentrl buffer select`, in a process of its own. Filters are SQL expressions; that command and
the rules put them into a query. So a filter is passed on only if both choose the same rows.
"""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from pydantic import Field

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql
from agentrl.flows.viewer.processes import command_of
from agentrl.flows.viewer.query import filters
from agentrl.flows.viewer.query.tables import COLUMNS, Snapshot
from agentrl.flows.viewer.wire import Answer, Filtered, RefusedError

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader

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


class RuleText(Answer):
    """A filter as a rule of curation in YAML, for `trajectories.curate` and `agentrl buffer curate`. It chooses the
    same ``rows`` of this ``version``; ``other_splits`` of them are left out unless ``split`` is null."""

    text: str
    rows: int
    version: int
    other_splits: int


def save(reader: "StoreReader", question: SaveQuery) -> SavedSelection:
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
        answer = _selected(options, question.name)
    reader.artifacts.forget()
    artifact = f"{question.name}/{answer['fingerprint'][:8]}"
    return SavedSelection(
        artifact=artifact,
        rows=answer["rows"],
        version=snapshot.version,
        again=answer["again"],
        before=answer["before"],
        other_splits=_of_other_splits(chosen),
        absent=part.absent if part else 0,
        wiring=f"inputs: {{trajectories: {artifact}}}",
    )


def rule(reader: "StoreReader", question: Filtered) -> RuleText:
    """A filter as a rule. Raises RefusedError if no rule chooses the same rows."""
    for name in ("among", "rule"):
        if getattr(question, name):
            reason = f"a rule is a filter alone, and cannot hold {name!r}"
            raise RefusedError(reason, field=name, following="save the rows by a name instead")
    where = filters.spelled_out(question.filter.strip(), COLUMNS)
    if not where:
        raise RefusedError("there is no filter to copy as a rule", field="filter", following="write a filter first")
    snapshot = reader.tables.at(question.at)
    _same_in_queries(snapshot, where)
    chosen = _chosen(reader, question, snapshot)
    return RuleText(
        text=_as_yaml(where), rows=chosen.height, version=snapshot.version, other_splits=_of_other_splits(chosen)
    )


def _chosen(reader: "StoreReader", question: Filtered, snapshot: Snapshot) -> pl.DataFrame:
    """Ids and splits of the rows that a question is about."""
    rows = snapshot.columns(["trajectory_id", "split"])
    mask = reader.mask(question, snapshot)
    if mask is not None:
        rows = rows.filter(pl.Series(mask))
    ids = list(dict.fromkeys(getattr(question, "ids", [])))
    if not ids:
        return rows
    matches = rows.filter(pl.col("trajectory_id").is_in(ids))
    if matches.height < len(ids):
        lost = [row_id for row_id in ids if row_id not in set(matches["trajectory_id"])]
        reason = f"{len(lost)} of {len(ids)} rows are not there, in version {snapshot.version}: {lost[0][:100]!r}"
        raise RefusedError(reason, field="ids", status=404)
    return matches


def _of_other_splits(rows: pl.DataFrame) -> int:
    return int((rows["split"] != "train").sum())


def _written(path: Path, ids: pl.Series) -> Path:
    """A file with an id in each line."""
    for row_id in ids:
        if "\n" in row_id or "\r" in row_id:
            raise RefusedError(f"row {row_id[:100]!r} has a line break in its id, and cannot be saved", field="ids")
    path.write_text("\n".join(ids), encoding="utf-8", newline="\n")
    return path


def _selected(options: list[str], name: str) -> dict[str, Any]:
    """What `agentrl buffer select --json` says. Raises RefusedError with its error."""
    try:
        done = command_of("buffer", "select", *options, "--", name, patience=PATIENCE_S)
    except subprocess.TimeoutExpired:
        reason = f"saving took more than {PATIENCE_S:g} s and was given up"
        raise RefusedError(reason, following="save again; what is there already is found", status=503) from None
    if done.returncode:
        _, _, error = done.stderr.strip().rpartition("error: ")
        raise RefusedError(error[:500] or "saving failed without a word", field="name", status=409)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _same_in_queries(snapshot: Snapshot, where: str) -> None:
    """Raise RefusedError if a query, as rules and selections ask it, would not choose the rows of a filter."""
    mask = snapshot.matching(where)
    _, names, asked = filters.with_words(where, COLUMNS)
    names = list(dict.fromkeys([*names, *(["trajectory_id"] if asked else [])]))
    rows = snapshot.columns(names or ["segment"]).lazy().with_row_index("place of row")
    try:
        matches = (
            sql.matching(rows, where, "the filter", snapshot.find).select("place of row").collect()["place of row"]
        )
    except (StoreError, pl.exceptions.PolarsError) as error:
        raise filters.bad(f"rules and selections cannot hold this filter: {filters.first_line(error)}") from None
    if mask is None or not np.array_equal(np.sort(matches.to_numpy()), np.flatnonzero(mask)):
        raise filters.bad("rules and selections would choose other rows by this filter; write it in another way")


def _as_yaml(where: str) -> str:
    """The rule as a mapping of YAML that reads back as the same. Raises RefusedError if none does."""
    from agentrl.datastore.curation.rules import Rules
    from agentrl.pipelines.file import yaml_text

    quoted = "".join(
        character if character.isprintable() else f"\\U{ord(character):08x}"
        for character in json.dumps(where, ensure_ascii=False)
    )
    text = f"{{rule: filter, where: {quoted}}}"
    wanted = {"rule": "filter", "where": where}
    try:
        same = yaml_text.plain(text) == wanted
        Rules.model_validate({"rules": [wanted]})
    except ValueError as error:
        raise filters.bad(f"no rule can hold this filter: {filters.first_line(error)}") from None
    if not same:
        raise filters.bad("this filter cannot be written as YAML")
    return text

"""The page of labels: which rows come next, what was said of a row, and saying something of it."""

import getpass
from contextlib import suppress
from typing import Any, Literal

import polars as pl
from pydantic import Field

from agentrl.datastore.annotations.current import current
from agentrl.datastore.formats.annotations import annotate
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, Filtered, Query, RefusedError
from agentrl.schemas.annotation import TARGET
from agentrl.schemas.json_text import loads

_FIELDS = ("name", *TARGET[1:], "value", "comment", "author", "author_kind")
MOST = 500
"""Rows of a queue that are named at once."""

Queue = Literal["unlabelled", "uncertain", "disagreements", "all"]


class LabelQuery(Filtered):
    queue: Queue = "unlabelled"
    name: str = Field("thumbs", min_length=1, max_length=1000)
    author: str = Field("", max_length=1000)


class LabelChoice(Answer):
    """A label, and the values of which one may be given."""

    name: str
    values: list[str]
    description: str


class LabelQueue(Answer):
    """The rows that come next, at most 500 of ``total``. ``author`` is who labels if nobody says otherwise: the user
    that the viewer runs as."""

    version: int
    ids: list[str]
    total: int
    author: str
    labels: list[LabelChoice]


class LabelledRow(Query):
    row: str = Field(min_length=1)


class GivenLabel(Answer):
    """An annotation. ``turn`` is the number of the assistant message, tokens are from ``token_start`` to ``token_end``
    (exclusive), ``pair_id`` is a pair that the row is preferred in; without any it is about the whole row.
    ``correction`` is the text of the answer that should have been there, with its calls. One that says nothing took
    back what its author had said."""

    name: str
    turn: int | None
    token_start: int | None
    token_end: int | None
    pair_id: str | None
    value: str | None
    comment: str
    correction: str | None
    author: str
    author_kind: str
    created_at: str


class RowLabels(Answer):
    """What counts of what was said of a row, and what was said ``earlier`` and counts no more, newest first.
    ``author`` is who labels if nobody says otherwise."""

    author: str
    annotations: list[GivenLabel]
    earlier: list[GivenLabel]


class AnnotationQuery(Query):
    """What is said of a row, of a ``turn``, of tokens from ``token_start`` to ``token_end`` (exclusive), or of a pair
    that the row is the chosen side of. ``annotation_id`` is new for each thing that is said, and the same if it is sent
    again."""

    annotation_id: str = Field(min_length=8, max_length=100)
    trajectory_id: str = Field(min_length=1)
    turn: int | None = Field(None, ge=0)
    token_start: int | None = Field(None, ge=0)
    token_end: int | None = Field(None, ge=1)
    pair_id: str | None = Field(None, min_length=1, max_length=1000)
    name: str = Field(min_length=1, max_length=1000)
    value: str | None = None
    comment: str = ""
    correction: str | None = None
    author: str = Field(min_length=1, max_length=1000)


class LabelGiven(Answer):
    """``added``: it was not there before. It is on the disk by now."""

    added: bool
    version: int


def queue(reader: StoreReader, question: LabelQuery) -> LabelQueue:
    """The rows of a filter in the order in which they are labelled.

    ``unlabelled`` are those that the author gave no label of this name, by id. ``uncertain`` are the same, those first
    whose chance of being good is nearest to one half: the mean that others gave the label, on a scale from 0 to 1, or
    else the share of successes of the row's task. ``disagreements`` are rows of whose whole two authors say
    differently, the most different first.
    """
    snapshot = reader.tables.at(question.at)
    rows = snapshot.columns(["trajectory_id", "task_id", "success"])
    mask = reader.mask(question, snapshot)
    chance = pl.col("success").cast(pl.Float64).mean().over("task_id").alias("chance")
    rows = rows.with_columns(chance)
    if mask is not None:
        rows = rows.filter(pl.Series(mask))
    given = current(reader.tables.buffer.annotations.frame()).filter(
        pl.col("turn").is_null(), pl.col("token_start").is_null(), pl.col("pair_id").is_null(), name=question.name
    )
    if question.queue == "disagreements":
        ranked = rows.join(_disagreements(given), on="trajectory_id").sort(
            "difference", "trajectory_id", descending=[True, False]
        )
    elif question.queue == "all":
        ranked = rows.sort("trajectory_id")
    else:
        own = given.filter(author=question.author or _user())
        ranked = rows.join(own, on="trajectory_id", how="anti").sort("trajectory_id")
        if question.queue == "uncertain":
            ranked = _most_uncertain(ranked, given)
    return LabelQueue(
        version=snapshot.version,
        ids=ranked["trajectory_id"].head(MOST).to_list(),
        total=ranked.height,
        author=_user(),
        labels=[LabelChoice(**label.model_dump()) for label in reader.labels.every],
    )


def _disagreements(given: pl.DataFrame) -> pl.DataFrame:
    """Rows of which authors say differently, with the share of pairs of authors that do."""
    counts = given.filter(pl.col("value").is_not_null()).group_by("trajectory_id", "value").len("same")
    total, same = pl.col("same").sum(), (pl.col("same") * (pl.col("same") - 1)).sum()
    shares = counts.group_by("trajectory_id").agg(total.alias("authors"), same.alias("agreed"))
    pairs = pl.col("authors") * (pl.col("authors") - 1)
    return shares.filter(pairs > pl.col("agreed")).select(
        "trajectory_id", (1 - pl.col("agreed") / pairs).alias("difference")
    )


def _most_uncertain(rows: pl.DataFrame, given: pl.DataFrame) -> pl.DataFrame:
    """Rows, those first whose chance is nearest to one half; last those of which nothing is known."""
    numbers = given.filter(pl.col("number").is_not_null())
    least, most = numbers["number"].min(), numbers["number"].max()
    low = min(0.0, float(least)) if isinstance(least, float) else 0.0
    high = max(1.0, float(most)) if isinstance(most, float) else 1.0
    others = numbers.group_by("trajectory_id").agg(((pl.col("number").mean() - low) / (high - low)).alias("said"))
    chance = pl.coalesce("said", "chance")
    return (
        rows.join(others, on="trajectory_id", how="left")
        .with_columns((chance - 0.5).abs().alias("from_half"))
        .sort("from_half", "trajectory_id", nulls_last=True)
    )


def row_labels(reader: StoreReader, question: LabelledRow) -> RowLabels:
    """What was ever said of a row, newest first: what counts, and what no longer does."""
    every = (
        reader.tables.buffer.annotations.frame()
        .filter(trajectory_id=question.row)
        .sort("created_at", maintain_order=True)
    )
    given = current(every)
    earlier = every.join(given, on="annotation_id", how="anti", maintain_order="left")
    counting, before = ([_shown(each) for each in reversed(rows.to_dicts())] for rows in (given, earlier))
    return RowLabels(author=_user(), annotations=counting, earlier=before)


def _shown(given: dict[str, Any]) -> GivenLabel:
    fields = {name: given[name] for name in _FIELDS}
    text = None if given["correction"] is None else _said_and_called(loads(given["correction"]))
    return GivenLabel(**fields, correction=text, created_at=given["created_at"].isoformat(timespec="seconds"))


def _said_and_called(message: dict[str, Any]) -> str:
    """The text of a message, and its calls in a line each."""
    calls = [f"{call['name']}({call['arguments']})" for call in message.get("tool_calls", [])]
    return "\n".join(filter(None, [message.get("content", ""), *calls]))


def give(reader: StoreReader, question: AnnotationQuery) -> LabelGiven:
    """Append what is said of a row. Raises RefusedError if it does not fit the row."""
    fields = question.model_dump(exclude_none=True)
    if fields["comment"] == "" and "correction" not in fields:
        fields["value"] = question.value  # None takes back what was said
    done = annotate(reader.tables.buffer, [("label", fields)], source="viewer")
    for refused in done.refused:
        raise RefusedError(f"{refused.key} {refused.reason}", field=refused.key)
    return LabelGiven(added=done.rows > 0, version=done.version)


def _user() -> str:
    """Who the viewer runs as."""
    with suppress(OSError, KeyError):
        return getpass.getuser()
    return "nobody"

"""What people say of rows on the page of labels, and which rows come next."""

from typing import Literal

from pydantic import Field

from agentrl.flows.viewer.wire import Answer
from agentrl.flows.viewer.wire.queries import Filtered, Query

Queue = Literal["unlabelled", "uncertain", "disagreements", "all"]

# GET /api/labels?queue=&name=&author=&filter=&at=


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


# GET /api/labels/row?row=


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


# POST /api/annotation


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

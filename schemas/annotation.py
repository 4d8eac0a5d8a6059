"""What a person or a judge says of a row, of a turn or some tokens of it, or of a preference pair.

Annotations are a table beside the buffer: none rewrites a row, and none is rewritten. Of those that one author gave the
same name on the same target, the newest counts; all are kept.
"""

import math
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentrl.schemas.arrow import Int32, Json, arrow_schema
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Message, Role

ANNOTATION_VERSION = 1

THUMBS, STARS, CORRECTION, COMMENT, PREFERENCE = "thumbs", "stars", "correction", "comment", "preference"
"""Names that the viewer and the recorder's clients write, and that stages read if they are told no other."""

LONGEST_TEXT = 2**20
"""Characters of a value, a comment or a correction."""
_Name = Annotated[str, Field(min_length=1, max_length=1000)]
_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]

_NUMBERS = {"up": 1.0, "true": 1.0, "yes": 1.0, "down": 0.0, "false": 0.0, "no": 0.0}


class AuthorKind(StrEnum):
    """Who says it."""

    PERSON = "person"
    JUDGE = "judge"


class Annotation(BaseModel):
    """``turn`` counts the assistant messages of the row from 0, as ``step`` does in the view ``steps`` of SQL; tokens
    are ``token_start`` to ``token_end`` (exclusive) of its ``input_ids``; ``pair_id`` is a pair of an
    artifact that ``trajectory_id`` is the preferred row of. Without these it is about the whole row.

    ``value`` is text, and ``number`` what it counts as (:func:`number_of`). An annotation without value, comment and
    correction takes back what its author said before under this name. ``correction`` is an assistant message: what
    should have been said at ``turn``, or as the last turn if that is None. ``source`` says what wrote it: ``python``,
    ``viewer``, ``recorder``, or a file's name.
    """

    model_config = ConfigDict(extra="forbid")

    annotation_id: _Name = Field(default_factory=lambda: uuid.uuid4().hex)
    trajectory_id: _Name
    turn: Annotated[Int32 | None, Field(ge=0)] = None
    token_start: Annotated[Int32 | None, Field(ge=0)] = None
    token_end: Annotated[Int32 | None, Field(ge=1)] = None
    pair_id: _Name | None = None
    name: _Name
    value: _Text | None = None
    number: float | None = None
    comment: _Text = ""
    correction: Json | None = None
    author: _Name
    author_kind: AuthorKind = AuthorKind.PERSON
    source: str = ""
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @field_validator("value", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return text_of(value)

    @field_validator("correction", mode="before")
    @classmethod
    def _message(cls, correction: Any) -> Any:
        return None if correction is None else message_json(correction)

    @field_validator("created_at")
    @classmethod
    def _zoned(cls, time: datetime) -> datetime:
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)

    @model_validator(mode="after")
    def _whole(self) -> "Annotation":
        if (self.token_start is None) != (self.token_end is None):
            raise ValueError("token_start and token_end go together: give both, or neither")
        if self.token_end is not None and self.token_start is not None and self.token_end <= self.token_start:
            raise ValueError(f"token_end {self.token_end} is not after token_start {self.token_start}")
        self.number = number_of(self.value)
        return self

    @property
    def withdraws(self) -> bool:
        """Whether it takes back what was said before."""
        return self.value is None and not self.comment and self.correction is None


ANNOTATION_SCHEMA = arrow_schema(Annotation, ANNOTATION_VERSION)

TARGET = ("trajectory_id", "turn", "token_start", "token_end", "pair_id")
"""Columns that say what an annotation is about."""


def text_of(value: Any) -> str | None:
    """A value as it is stored: true as ``true``, 3.0 as ``3``. Raises ValueError if it is no scalar."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and math.isfinite(value):
        return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
    raise ValueError(f"{value!r} is no value; give a text, a finite number, true, false or null")


def number_of(value: str | None) -> float | None:
    """What a value counts as: up, true and yes are 1; down, false and no are 0; a number is itself; else None."""
    if value is None:
        return None
    if (known := _NUMBERS.get(value.strip().lower())) is not None:
        return known
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def message_json(correction: Any) -> str:
    """A correction as JSON of an assistant message. It may be given as a message, as what one holds, or as a text: that
    is the message's content, unless it is JSON of an object whose ``role`` is ``assistant``. Raises ValueError if it is
    no message, or says and calls nothing."""
    given = correction
    if isinstance(correction, Message):
        given = correction.model_dump()
    elif isinstance(correction, str):
        given = _as_message(correction) or {"content": correction}
    if not isinstance(given, Mapping):
        raise ValueError("a correction is the text of an answer, or an assistant message")
    message = Message.model_validate({"role": "assistant", **given})
    if message.role is not Role.ASSISTANT or not (message.content.strip() or message.tool_calls):
        raise ValueError("a correction is an assistant message with a text or with calls of tools")
    return message.model_dump_json(exclude_defaults=True)


def _as_message(text: str) -> dict[str, Any] | None:
    if text.lstrip()[:1] != "{":
        return None
    try:
        read = loads(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) and read.get("role") == "assistant" else None

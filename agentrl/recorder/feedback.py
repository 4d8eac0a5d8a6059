"""What the users of an agent say of its answers: thumbs, stars, a corrected answer, a comment. It becomes annotations
of the episode's rows."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentrl.recorder.lines import lines
from agentrl.recorder.tree import SampledTurn
from agentrl.schemas.annotation import COMMENT, CORRECTION, LONGEST_TEXT, STARS, THUMBS, Annotation, message_json
from agentrl.schemas.trajectory import Role

SOURCE = "recorder"


class Place(NamedTuple):
    """Number of a row in its episode, and of an assistant message in that row. ``trained`` is False in side calls."""

    row: int
    turn: int
    trained: bool = True


class PostedFeedback(BaseModel):
    """``turn`` is the number at the end of the answer's id; None is the whole episode, and of a correction its last
    answer. ``correction`` is the text that should have been the answer, or an assistant message. Feedback that is sent
    again has the same ``id``, and is kept once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(min_length=1, max_length=900)] = Field(default_factory=lambda: uuid.uuid4().hex)
    turn: int | None = Field(None, ge=0, lt=2**31)
    thumbs: Literal["up", "down"] | None = None
    stars: int | None = Field(None, ge=1, le=5)
    correction: str | dict[str, Any] | None = None
    comment: str = Field("", max_length=LONGEST_TEXT)
    author: str = Field("user", min_length=1, max_length=1000)
    time: float = Field(default_factory=time.time)

    @field_validator("correction")
    @classmethod
    def _is_message(cls, correction: Any) -> Any:
        if correction is not None and len(message_json(correction)) > LONGEST_TEXT:
            raise ValueError(f"is longer than {LONGEST_TEXT:,} characters")
        return correction

    @model_validator(mode="after")
    def _says_something(self) -> "PostedFeedback":
        if self.thumbs is None and self.stars is None and self.correction is None and not self.comment:
            raise ValueError("says nothing: give thumbs, stars, a correction or a comment")
        return self

    def annotations(self, row: str, turn: int | None) -> Iterator[Annotation]:
        """An annotation of a row, or of one of its turns, for each thing that is said."""
        parts: dict[str, dict[str, Any]] = {
            THUMBS: {"value": self.thumbs} if self.thumbs else {},
            STARS: {"value": self.stars} if self.stars else {},
            CORRECTION: {"correction": self.correction} if self.correction is not None else {},
            COMMENT: {"comment": self.comment} if self.comment else {},
        }
        for name, fields in parts.items():
            if fields:
                yield Annotation.model_validate(
                    {
                        "annotation_id": f"{row}-{name}-{self.id}"[:1000],
                        "trajectory_id": row,
                        "turn": turn,
                        "name": name,
                        "author": self.author,
                        "source": SOURCE,
                        "created_at": datetime.fromtimestamp(self.time, UTC),
                        **fields,
                    }
                )


def places(turns: Sequence[SampledTurn]) -> dict[int, Place]:
    """Where each turn of an episode is in its rows, by its number: in the row that trains on it."""
    by_number: dict[int, Place] = {}
    for row, line in enumerate(lines(turns)):
        before = 0
        for number, turn in enumerate(line.turns):
            before += sum(message.role is Role.ASSISTANT for message in turn.heard)
            if number >= line.shared:
                by_number[turn.number] = Place(row, before, line.trained)
            before += 1
    return by_number


def of_rows(feedback: Sequence[PostedFeedback], ids: Sequence[str], turns: Mapping[int, Place]) -> Iterator[Annotation]:
    """The annotations of an episode's rows, whose ``ids`` are in order; ``turns`` are their :func:`places`."""
    last = max((number for number in turns if turns[number].trained), default=None)
    for posted in feedback:
        row, turn = (0, None) if posted.turn is None else turns.get(posted.turn, (0, None))[:2]
        if posted.turn is None and posted.correction is not None and last is not None:
            rest = posted.model_copy(update={"correction": None})
            yield from rest.annotations(ids[row], turn)
            posted = posted.model_copy(update={"thumbs": None, "stars": None, "comment": ""})
            row, turn = turns[last][:2]
        yield from posted.annotations(ids[row], turn)

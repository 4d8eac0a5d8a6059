"""Formats of the user's own."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.source import Row, Source
from agentrl.schemas.choice import OneOf
from agentrl.schemas.trajectory import Trajectory


class OwnFormat(BaseModel):
    """Files of a format that agentrl does not know. The fields of a class that is derived from this one are its
    settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suffix: ClassVar[str] = ".jsonl"
    """Extension of the file that is written; "" means a folder."""
    loses: ClassVar[frozenset[str]] = frozenset()
    """Parts of a row (``losses.PARTS``) that do not come back; an export says how many rows have them."""
    tokens: ClassVar[bool] = False
    training: ClassVar[bool] = False
    """Whether what is written is a training set: held-out rows are then left out unless they are asked for."""

    type: str

    def fits(self, source: Source) -> int:
        """A number above 0 if the file is of this format, else 0: then it is refused before it is read."""
        return 1

    @abstractmethod
    def rows(self, source: Source) -> Iterator[Row]:
        """The rows of a file; :func:`agentrl.datastore.formats.rows.make_row` makes one of messages."""

    def write(self, rows: Iterable[Trajectory], path: Path) -> int:
        """Write rows to a file or folder that is not there yet. Returns the number of records."""
        raise StoreError(f"{self} is only read; give the class a method write(rows, path)")

    def __str__(self) -> str:
        settings = self.model_dump_json(exclude={"type"}, exclude_defaults=True)
        return self.type + (settings if settings != "{}" else "")


OWN_FORMAT = OneOf("format", {}, OwnFormat)

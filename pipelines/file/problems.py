"""What is wrong with a pipeline file: all of it at once, each with its place and a suggestion."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.schemas.hints import did_you_mean as did_you_mean


@dataclass(frozen=True)
class Origin:
    """A file, or an option of the command line, and a line (from 1)."""

    source: str
    line: int | None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: a message, the place in a file or command, and the key that is at fault."""

    message: str
    place: Origin | None = None
    key: Sequence[str | int] = ()
    reference: str = ""
    """The page of the documentation, with the anchor of the setting: ``reference/stages/train.sft#optimizer.lr``."""

    def __str__(self) -> str:
        parts = [str(self.place) if self.place else "", ".".join(map(str, self.key)), self.message]
        return ": ".join(part for part in parts if part)

    def where(self) -> tuple[str, int]:
        """For sorting: by file, then by line."""
        return (self.place.source, self.place.line or 0) if self.place else ("", 0)

    def to_json(self) -> dict[str, str | int | None]:
        return {
            "source": self.place.source if self.place else None,
            "line": self.place.line if self.place else None,
            "key": ".".join(map(str, self.key)),
            "message": self.message,
            "reference": self.reference or None,
        }


class SpecError(ValueError):
    """A pipeline that cannot be run as it is written. ``problems`` holds everything that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

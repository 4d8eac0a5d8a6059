"""Everything that the command prints goes through here, so that no text of a row, a file or an error reaches the
terminal as anything but text. Colours are given as styles; ``[red]`` in a string is printed as it stands."""

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from agentrl.pipelines.printable import printable

PIPED_WIDTH = 160
"""Columns of tables that go to a file or another program."""


class SafeConsole(Console):
    """A console whose output holds no control characters but its own colours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            safe = segment.text if segment.control else printable(segment.text)
            yield segment if safe == segment.text else Segment(safe, segment.style)


def console(stderr: bool = False) -> SafeConsole:
    """Of the standard output or the standard error. Lines are never broken, tables fit the terminal."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return SafeConsole(
        stderr=stderr,
        soft_wrap=True,
        width=PIPED_WIDTH if piped else None,
        markup=False,
        emoji=False,
        highlight=False,
    )


def say(text: str, stderr: bool = False) -> None:
    """Print plain text."""
    print(printable(text), file=sys.stderr if stderr else sys.stdout)


def say_json(value: Any) -> None:
    """Print JSON in ASCII: other characters are escapes, and what JSON cannot hold is text."""
    print(json.dumps(value, indent=2, default=str))


def protect() -> None:
    """Characters that the terminal's encoding lacks are printed as escapes instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

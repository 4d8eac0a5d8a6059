"""What an actor of the storm did: one line of JSON for each thing, in a file of its own. A line that a kill has cut off
was not said."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = 20
"""In a shard."""


class Diary:
    """Appends to the diary ``<folder>/<name>.jsonl``."""

    def __init__(self, folder: Path, name: str) -> None:
        self._handle = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, what: str, **details: Any) -> None:
        os.write(self._handle, (json.dumps({"what": what, **details}, default=str) + "\n").encode())


def entries(folder: Path, name: str = "*") -> Iterator[dict[str, Any]]:
    """What all actors, or one, have said; ``actor`` names the diary."""
    for path in sorted(folder.glob(f"{name}.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield {"actor": path.stem, **json.loads(line)}


def shards(folder: Path, what: str) -> set[int]:
    """Numbers of the shards that were ``started`` or ``acknowledged``."""
    return {entry["shard"] for entry in entries(folder, "appender-*") if entry["what"] == what}

"""How the work of rules is divided: into which shards, what runs them, and where what they make lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.datastore.curation.pieces import Evidence, Kernel, Piece, pieces_of, shards_of
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

ROWS = 2**13
"""Rows of a shard, if no number of shards is asked for: those of a piece, so that few rows are divided evenly too."""

if TYPE_CHECKING:
    import polars as pl

    from agentrl.datastore.shards.divide import Run


@dataclass(frozen=True)
class Division:
    """``files`` are the data files of the version that is curated; below ``kept`` lies what outlives the curation, and
    below ``work`` what does not. ``shards``: into how many the work is divided; None: by its size."""

    storage: LocalStorage | S3Storage
    files: Sequence[str]
    kept: Path
    work: Path
    run: "Run"
    shards: int | None = None
    named: bool = False
    """Whether somebody named what runs shards: without it texts are embedded in this process, which has the model."""

    def rows_of(self, count: int) -> int:
        """Rows of a shard, of so many."""
        return ROWS if self.shards is None else -(-count // self.shards)

    def pieces(self, rows: "pl.DataFrame") -> list[Piece]:
        return pieces_of(self.storage, self.files, rows)

    def evidence(self, kernel: Kernel, pieces: Sequence[Piece]) -> Evidence:
        """What a rule makes of pieces. That of pieces which have it already is not made again."""
        size = self.rows_of(sum(piece.end - piece.start for piece in pieces))
        self.run(shards_of(kernel, pieces, self.storage.uri, self.kept, self.work, size), kernel.name)
        return Evidence(kernel, pieces, self.kept, self.work)

"""How the work of rules is divided: into which shards, what runs them, and where what they make lies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import polars as pl
from xxhash import xxh3_128

from agentrl.datastore.curation.pieces import Evidence, Kernel, Piece, pieces_of, shards_of
from agentrl.datastore.shards.shard import Shard
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

ROWS = 2**14
"""Rows of a shard, if no number of shards is asked for."""

Run: TypeAlias = Callable[[Sequence[Shard], str], None]
"""Runs shards until all are done; the text says what they do."""


def in_this_process(shards: Sequence[Shard], what: str) -> None:
    for shard in shards:
        shard()


@dataclass(frozen=True)
class Divide:
    """How work is to be divided. ``run`` runs shards; ``shards``: their number, None: by the size of the work;
    ``work``: a folder that survives a kill, so that finished shards count the next time; ``shared``: a folder that all
    workers see, where they do not see the store's own."""

    run: Run = in_this_process
    shards: int | None = None
    work: Path | None = None
    shared: Path | None = None


@dataclass(frozen=True)
class Division:
    """``files`` are the data files of the version that is curated; below ``kept`` lies what outlives the curation, and
    below ``work`` what does not. ``shards``: into how many the work is divided; None: by its size."""

    storage: LocalStorage | S3Storage
    files: Sequence[str]
    kept: Path
    work: Path
    run: Run
    shards: int | None = None

    def rows_of(self, count: int) -> int:
        """Rows of a shard, of so many."""
        return ROWS if self.shards is None else -(-count // self.shards)

    def pieces(self, rows: pl.DataFrame) -> list[Piece]:
        return pieces_of(self.storage, self.files, rows)

    def evidence(self, kernel: Kernel, pieces: Sequence[Piece]) -> Evidence:
        """What a rule makes of pieces. That of pieces which have it already is not made again."""
        size = self.rows_of(sum(piece.end - piece.start for piece in pieces))
        self.run(shards_of(kernel, pieces, self.storage.uri, self.kept, self.work, size), kernel.name)
        return Evidence(kernel, pieces, self.kept, self.work)


def digest_of(*given: object) -> str:
    """A name for work on what is given: arrays, texts and numbers."""
    digest = xxh3_128()
    for value in given:
        data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()

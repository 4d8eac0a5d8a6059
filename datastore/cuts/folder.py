"""Reading a cut: its manifest, its rows and what its rules dropped, from the folder that a stage or an export wrote."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from agentrl.datastore.cuts.make import DROPPED, HELDOUT, MANIFEST, ROWS, sha256
from agentrl.datastore.errors import StoreError
from agentrl.schemas.cut import CUT_VERSION, CutManifest

BATCH_ROWS = 1024


@dataclass(frozen=True)
class CutFolder:
    """A folder with ``cut.json``, ``rows.parquet``, ``dropped.parquet``, and ``heldout.parquet`` if rows of the buffer
    were held out."""

    path: Path

    @cached_property
    def manifest(self) -> CutManifest:
        """What ``cut.json`` says. Raises StoreError if there is none, or none that can be read."""
        try:
            return CutManifest.model_validate_json(self._text())
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "it"
            newer = f"; this package reads version {CUT_VERSION} of it, so upgrade agentrl if it is newer"
            raise StoreError(
                f"{self.path / MANIFEST} is no manifest of a cut: {field}: {first['msg']}{newer}"
            ) from None

    @cached_property
    def identity(self) -> str:
        """SHA-256 of ``cut.json``, which vouches for every row."""
        return hashlib.sha256(self._text()).hexdigest()

    def _text(self) -> bytes:
        try:
            return (self.path / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(f"{self.path} holds no cut: it has no {MANIFEST}") from None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Ids and digests of the rows, in order."""
        return self._batches(ROWS)

    def heldout(self) -> Iterator[pa.RecordBatch]:
        """Ids and digests of the rows that the others were compared with; none if no row of the buffer was held
        out."""
        return self._batches(HELDOUT) if self.manifest.heldout else iter(())

    def _batches(self, name: str) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self.path / name) as file:
            yield from file.iter_batches(batch_size=BATCH_ROWS)

    def ids(self) -> pa.Array:
        """The ids of the rows, in order."""
        return pq.read_table(self.path / ROWS, columns=["trajectory_id"])["trajectory_id"].combine_chunks()

    def rows(self) -> pl.LazyFrame:
        """Ids and digests of the rows, lazily."""
        return pl.scan_parquet(self.path / ROWS)

    def dropped(self) -> pl.LazyFrame:
        """Ids of the rows that were not taken, each with the rule that dropped it, lazily."""
        return pl.scan_parquet(self.path / DROPPED)

    def damaged(self) -> list[str]:
        """Names of the files that are not what ``cut.json`` says, or are not there."""
        return [
            name
            for name, digest in self.manifest.files.items()
            if not (self.path / name).is_file() or sha256(self.path / name) != digest
        ]

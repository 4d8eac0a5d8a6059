"""Hugging Face ``datasets``: every column, exactly, both ways; the schema version travels in the Arrow metadata."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from datastore.ingest import as_table
from datastore.optional import optional
from schemas.arrow import from_table
from schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory

if TYPE_CHECKING:
    from datasets import Dataset


def _library() -> Any:
    return optional("datasets", "formats")


def to_dataset(rows: Iterable[Trajectory] | pa.Table) -> "Dataset":
    """A ``Dataset`` with the buffer's columns, for use in memory."""
    table = rows if isinstance(rows, pa.Table) else as_table(list(rows)).cast(TRAJECTORY_SCHEMA)
    return _library().Dataset(table)


def from_dataset(dataset: "Dataset") -> pa.Table:
    """The rows of such a dataset, whatever was shuffled or selected in it, ready for ``append``."""
    flat = dataset.flatten_indices() if dataset._indices is not None else dataset
    return flat.data.table.select(TRAJECTORY_SCHEMA.names).cast(TRAJECTORY_SCHEMA)


def write(rows: Iterable[Trajectory], path: Path) -> int:
    """A folder as ``datasets.load_from_disk`` reads it."""
    dataset = to_dataset(rows)
    dataset.save_to_disk(str(path))
    return len(dataset)


def read(path: Path) -> Iterator[Trajectory]:
    yield from from_table(Trajectory, from_dataset(_library().load_from_disk(str(path))))


def push(rows: Iterable[Trajectory] | pa.Table, name: str, *, private: bool = True) -> None:
    """Push to the hub, with the login of ``huggingface-cli``."""
    to_dataset(rows).push_to_hub(name, private=private)

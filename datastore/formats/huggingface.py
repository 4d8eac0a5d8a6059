"""Hugging Face ``datasets``: every column, exactly, both ways; the schema version travels in the Arrow metadata."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import parts
from agentrl.datastore.formats.annotated import KEY, AnnotatedRow, in_record
from agentrl.datastore.formats.rows import batched
from agentrl.datastore.formats.source import Row, Source, Stretch
from agentrl.datastore.optional import optional
from agentrl.datastore.table.ingest import as_table
from agentrl.datastore.table.older_schemas import upgrade
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory

if TYPE_CHECKING:
    from datasets import Dataset

BATCH_ROWS = 256
_SAID = pa.field(KEY, pa.string())


def _library() -> Any:
    return optional("datasets", "formats")


def fits(source: Source) -> int:
    files = ("state.json", "dataset_info.json")
    return 2 if source.kind == "folder" and all((source.path / name).is_file() for name in files) else 0


def to_dataset(rows: Iterable[Trajectory] | pa.Table) -> "Dataset":
    """A ``Dataset`` with the buffer's columns, for use in memory."""
    table = rows if isinstance(rows, pa.Table) else as_table(list(rows)).cast(TRAJECTORY_SCHEMA)
    return _library().Dataset(table)


def from_dataset(dataset: "Dataset") -> pa.Table:
    """The rows of such a dataset, whatever was shuffled or selected in it, ready for ``append``. One that was written
    with an older schema has the columns of this one."""
    flat = dataset.flatten_indices() if dataset._indices is not None else dataset
    return upgrade(flat.data.table)


def write(rows: Iterable[Trajectory], path: Path) -> int:
    """A folder as ``datasets.load_from_disk`` reads it."""
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        file = Path(folder) / "rows.arrow"
        rows = iter(rows)
        first = list(islice(rows, 1))  # all rows carry annotations, or none
        more = [_SAID] if first and isinstance(first[0], AnnotatedRow) else []
        schema = pa.schema([*TRAJECTORY_SCHEMA, *more], TRAJECTORY_SCHEMA.metadata)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for batch in batched(chain(first, rows), BATCH_ROWS):
                table = as_table(batch).cast(TRAJECTORY_SCHEMA)
                texts = [[in_record(row, text=True)[KEY] for row in batch]] if more else []
                stream.write_table(pa.Table.from_arrays([*table.columns, *texts], schema=schema))
        dataset = _library().Dataset.from_file(str(file))
        dataset.save_to_disk(str(path))
        return len(dataset)


def read(source: Source) -> Iterator[Row]:
    dataset = _opened(source.path)
    required = [name for name, field in Trajectory.model_fields.items() if field.is_required()]
    if missing := [name for name in required if name not in dataset.column_names]:
        raise StoreError(f"{source.name} is no dataset of trajectories: it lacks the columns {', '.join(missing)}")
    first, end, source.number = source.span or (0, len(dataset), 0)
    said_of_rows = KEY in dataset.column_names
    for name in set(dataset.column_names) - {*TRAJECTORY_SCHEMA.names, KEY}:
        source.notes.ignored[name] += end - first
    for start in range(first, end, BATCH_ROWS):
        part = dataset.select(range(start, min(start + BATCH_ROWS, end)))
        texts = part[KEY] if said_of_rows else [None] * len(part)
        for row, text in zip(source.pylist(from_dataset(part)), texts, strict=True):
            source.number += 1
            source.record = {**row, KEY: text} if text else row
            yield row


def _opened(path: Path) -> Any:
    """The dataset of a folder. Its files are mapped: each part opens them anew, so that what was read of them leaves
    the memory of this process."""
    return _library().load_from_disk(str(path))


def cut(source: Source) -> Iterator[Stretch]:
    """Rows of about the size of a part."""
    dataset = _opened(source.path)
    size = dataset.data.nbytes // max(1, len(dataset))
    step = (1 + parts.PART_SIZE // (size + 1) // BATCH_ROWS) * BATCH_ROWS
    return (Stretch(start, min(start + step, len(dataset)), start) for start in range(0, len(dataset), step))


def push(rows: Iterable[Trajectory] | pa.Table, name: str, *, private: bool = True) -> None:
    """Push to the hub, with the login of ``huggingface-cli``."""
    to_dataset(rows).push_to_hub(name, private=private)

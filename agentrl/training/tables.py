"""Training rows as Arrow tables and Parquet files."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.training import TRAINING_SCHEMA, TrainingRow


def row_table(rows: Sequence[TrainingRow]) -> pa.Table:
    """Training rows as an Arrow table, column by column: rows have thousands of tokens."""
    columns = {name: [getattr(row, name) for row in rows] for name in TRAINING_SCHEMA.names}
    return pa.table(columns, schema=TRAINING_SCHEMA)


def save_rows(path: Path, rows: Sequence[TrainingRow]) -> Path:
    """Write training rows as Parquet, and return ``path``."""
    pq.write_table(row_table(rows), path, compression="zstd")
    return path


def step_table(iteration: int, steps: Sequence[tuple[int, Sequence[TrainingRow]]]) -> pa.Table:
    """Training rows of one online iteration, each with it and with the number of its optimiser ``step``."""
    table = row_table([row for _, rows in steps for row in rows])
    numbers = [number for number, rows in steps for _ in rows]
    columns = {"iteration": [iteration] * len(numbers), "step": numbers}
    for place, (name, values) in enumerate(columns.items()):
        table = table.add_column(place, pa.field(name, pa.int32(), nullable=False), pa.array(values, pa.int32()))
    return table

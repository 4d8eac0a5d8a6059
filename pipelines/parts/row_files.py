"""Rows of one episode in a file of the stage's scratch folder, which is whole or not there."""

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from agentrl.schemas.arrow import from_table, to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory


def write_rows(path: Path, rows: Sequence[Trajectory]) -> None:
    partial = path.with_suffix(".partial")
    with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, TRAJECTORY_SCHEMA) as writer:
        writer.write_table(to_table(rows, TRAJECTORY_SCHEMA))
    os.replace(partial, path)


def read_rows(path: Path) -> list[Trajectory]:
    with pa.OSFile(str(path), "rb") as file:
        return list(from_table(Trajectory, pa.ipc.open_file(file).read_all()))

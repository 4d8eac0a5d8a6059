"""Migration: a table of an older schema gets the current one, in one commit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from agentrl.datastore.table.delta_table import metadata, schema_version
from agentrl.datastore.table.maintenance import alone, live_files, read_parts
from agentrl.datastore.table.older_schemas import upgrade
from agentrl.datastore.table.row_digests import with_content
from agentrl.datastore.table.writer import FileWriter
from agentrl.datastore.upkeep.compaction import replace
from agentrl.schemas.trajectory import TRAJECTORY_VERSION

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer


def migrate(buffer: "TrajectoryBuffer") -> dict[str, int]:
    """Bring a table of an older schema to this one: columns that are new take the values that
    :func:`agentrl.datastore.table.older_schemas.upgrade` gives.

    Files and schema change in one commit; the old version stays readable by number until ``vacuum``.
    """
    with alone(buffer):
        table = buffer.table()
        stored = schema_version(table)
        if stored == TRAJECTORY_VERSION:
            return {"from": stored, "to": stored, "rows": 0}
        old = live_files(table)
        about = table.metadata()
        with FileWriter(buffer.storage, data_change=False) as files:
            adds = files.write(_upgraded(buffer, list(old)))
            actions = [metadata(str(about.id), dict(about.configuration)), *adds]
            operation = {"upkeep": f"migrate {stored} to {TRAJECTORY_VERSION}"}
            replace(buffer, files, actions, list(old), "MIGRATE", operation)
        return {"from": stored, "to": TRAJECTORY_VERSION, "rows": sum(rows for rows, _ in old.values())}


def _upgraded(buffer: "TrajectoryBuffer", names: list[str]) -> Iterator[pa.RecordBatch]:
    for name in names:
        for part in read_parts(buffer, name):
            yield from with_content(upgrade(part)).to_batches()

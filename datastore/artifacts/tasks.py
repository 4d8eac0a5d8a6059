"""Tasks, stored beside the buffer so that every row can be verified and scored again: ``tasks/<digest>.parquet``, each
set of tasks once, by its content. Nothing removes them; an artifact that held them may go."""

from collections.abc import Collection
from io import BytesIO
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.storage.digest import table_digest
from agentrl.schemas.task import TASK_SCHEMA

if TYPE_CHECKING:
    from agentrl.datastore.storage.object_store import ObjectStorage

FOLDER = "tasks"


def keep(storage: "ObjectStorage", tasks: pa.Table) -> str:
    """Store a set of tasks, unless one with equal content is there. Returns its key."""
    key = f"{FOLDER}/{table_digest([tasks])}.parquet"
    if tasks.num_rows and key not in set(storage.keys(FOLDER)):
        file = BytesIO()
        pq.write_table(tasks, file, compression="zstd")
        storage.write(key, file.getvalue())
    return key


def find(storage: "ObjectStorage", ids: Collection[str]) -> pa.Table:
    """The stored tasks with these ids, one set in memory at a time. Tasks of two sets that are equal come once."""
    wanted = pa.array(sorted(set(ids)), pa.string())
    tables = [TASK_SCHEMA.empty_table()]
    for key in sorted(storage.keys(FOLDER)):
        data = storage.read(key)
        if data is not None:
            tables.append(pq.read_table(BytesIO(data), filters=[("task_id", "in", wanted)]).cast(TASK_SCHEMA))
    table = pa.concat_tables(tables)
    return table.group_by(TASK_SCHEMA.names, use_threads=False).aggregate([]).cast(TASK_SCHEMA)

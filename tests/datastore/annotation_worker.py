"""Annotates a row again and again, and says of each annotation when it was acknowledged."""

import sys

from agentrl.datastore.annotations import table as module
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.formats.annotations import annotate

if __name__ == "__main__":
    store, row, name, first = sys.argv[1:]
    module.MERGE_PARTS = 4
    buffer = TrajectoryBuffer(store)
    for number in range(int(first), 100_000):
        fields = {"trajectory_id": row, "author": name, "annotation_id": f"{name}-{number}"}
        given = [
            ("thumb", fields | {"name": "thumbs", "value": "up"}),
            ("comment", fields | {"annotation_id": f"{name}-{number}-words", "name": "comment", "comment": "hm"}),
        ]
        annotate(buffer, given, source="python", strict=True)
        print(number, flush=True)

"""Routes of rows: which experts each token of a mixture of experts went to, in a side table that expires.

``routes/<fingerprint>/<version>-<shard>.parquet`` holds the turns of the rows that one append of a stage run added,
each as one ``binary``: token by token, a byte or two for each of ``k`` experts of each layer. ``version`` is the newest
of the policies that sampled them. They are needed until the rows are trained on, or too old for that: the stage run
removes its files by version, and all of them at its end, and :func:`agentrl.datastore.upkeep.retention.vacuum` those of
runs that were killed and not resumed. So they are no columns of the trajectories, which stay.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import CorruptError

if TYPE_CHECKING:
    from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

FOLDER = "routes"
AT_WORK = timedelta(days=1)
"""For so long a run may need routes that it wrote, if its rows wait for their group."""

SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("layers", pa.int32(), nullable=False),
        pa.field("k", pa.int32(), nullable=False),
        pa.field("routes", pa.binary(), nullable=False),
    ]
)
"""``start`` is the first of a turn's ``tokens`` in the row, prompts and observations before it included."""


def routes_table(rows: Mapping[str, Sequence[np.ndarray]]) -> pa.Table:
    """The routes [tokens, layers, k] of each turn of rows, by their ids, as a table."""
    columns = defaultdict(list)
    for name, turns in rows.items():
        start = 0
        for number, turn in enumerate(turns):
            little = turn.astype(turn.dtype.newbyteorder("<"), copy=False)
            values = (name, number, start, *turn.shape, little.tobytes())
            for field, value in zip(SCHEMA.names, values, strict=True):
                columns[field].append(value)
            start += len(turn)
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in SCHEMA}, SCHEMA)


def turns_of(table: pa.Table) -> dict[str, list[np.ndarray]]:
    """What :func:`routes_table` was given."""
    rows: dict[str, list[np.ndarray]] = {}
    for row in table.to_pylist():
        size = len(row["routes"]) // max(1, row["tokens"] * row["layers"] * row["k"])
        turn = np.frombuffer(row["routes"], f"<u{max(1, size)}").reshape(row["tokens"], row["layers"], row["k"])
        rows.setdefault(row["trajectory_id"], []).append(turn)
    return rows


class RouteTable:
    """The routes of one stage run, whose rows have this ``fingerprint``."""

    def __init__(self, storage: "LocalStorage | S3Storage", fingerprint: str) -> None:
        self.storage, self.folder = storage, f"{FOLDER}/{fingerprint}"

    def append(self, shard: int, version: int, rows: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Add those of rows, whole and durable, or not at all. What is added again under one number stays the same."""
        if rows:
            sink = BytesIO()
            pq.write_table(routes_table(rows), sink, compression="zstd")
            self.storage.write(f"{self.folder}/{version:06d}-{shard:09d}.parquet", sink.getvalue())

    def read(self, ids: Sequence[str]) -> dict[str, bytes]:
        """Those of rows by their ids, all turns after each other; rows that have none are left out."""
        wanted, joined = pa.array(list(ids), pa.string()), defaultdict(list)
        for key in self._keys():
            data = self.storage.read(key)
            if data is None:  # it expired meanwhile
                continue
            try:
                table = pq.read_table(BytesIO(data), columns=["trajectory_id", "routes"])
            except (pa.ArrowException, OSError) as error:
                raise CorruptError(key, str(error)) from None
            matches = table.filter(pc.is_in(table["trajectory_id"], wanted))
            for name, turn in zip(matches["trajectory_id"].to_pylist(), matches["routes"].to_pylist(), strict=True):
                joined[name].append(turn)
        return {name: b"".join(turns) for name, turns in joined.items()}

    def expire(self, version: int) -> int:
        """Remove the files whose rows are all of policies older than ``version``, and say how many."""
        old = [key for key in self._keys() if int(key.rpartition("/")[2].partition("-")[0]) < version]
        for key in old:
            self.storage.delete(key)
        return len(old)

    def forget(self) -> None:
        """Remove all of them, since the run is over."""
        for key in self._keys():
            self.storage.delete(key)

    def _keys(self) -> list[str]:
        return sorted(self.storage.keys(self.folder))


def left_over(storage: "LocalStorage | S3Storage", now: datetime, retention: timedelta) -> Iterator[str]:
    """Files of routes that are older than the retention, and than a run at work may need: their run was killed, and
    nobody resumed it."""
    for key, modified in storage.listing(FOLDER):
        if now - modified >= max(retention, AT_WORK):
            yield key

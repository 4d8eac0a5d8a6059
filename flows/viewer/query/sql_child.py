"""The process that answers one query of the console. It has the table in memory and cannot open a file.

Polars' SQL reads any file that ``read_csv('...')`` names. Before it sees the query, this process gives up what it would
need: no file can be opened any more, by it or by what it calls, and memory and processor time are limited. Whoever
started it waits for a limited time. All comes by its standard input, a line of JSON and an Arrow stream, and the answer
goes to its standard output in the same way.
"""

import io
import json
import math
import resource
import sys
import time
from typing import Any

import polars as pl

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql

TABLE = "trajectories"


def answered(rows: pl.DataFrame, query: str, most: int, characters: int) -> pl.DataFrame:
    """At most ``most`` rows of the answer as texts, numbers and truths; texts are cut, and times are ISO 8601. Raises
    StoreError if the query fails."""
    frame = sql.execute({TABLE: rows.lazy()}, query, unsafe=True)  # nothing is left that could be unsafe
    try:
        return _plain(frame.head(most).collect(), characters)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise sql.failed(error, {TABLE: rows.lazy()}, query) from None


def _plain(rows: pl.DataFrame, characters: int) -> pl.DataFrame:
    columns = []
    for name, kind in rows.schema.items():
        column = pl.col(name)
        if kind.is_nested() or kind in (pl.Binary, pl.Object):
            raise StoreError(f"column {name[:80]!r} is {kind}, which a table cannot show; take a part of it")
        if kind.is_integer():
            column = column.cast(pl.Int64, strict=False)
        elif isinstance(kind, pl.Datetime):
            column = column.dt.to_string("iso:strict")
        elif kind.is_decimal() or kind.is_float():
            column = column.cast(pl.Float64)
        elif kind != pl.Boolean:
            column = column.cast(pl.String).str.slice(0, characters)
        columns.append(column)
    return rows.select(columns)


def give_up(seconds: int, memory: int) -> None:
    """Give up opening and writing files, and all but so much processor time and so many bytes beyond those in use."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, used + memory),
        (resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(what, (limit, limit))


def _prepare() -> None:
    """Import, start and look up all that an answer or an error needs, as long as files can be opened."""
    rows = pl.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    joined = f"select l.b, count(*) as n from {TABLE} l join {TABLE} r on l.a = r.a group by l.b order by n"
    answered(rows, joined, 1, 1).write_ipc_stream(io.BytesIO(), compat_level=pl.CompatLevel.oldest())
    for wrong in ("select c from trajectories", "select", "select a from other"):
        try:
            answered(rows, wrong, 1, 1)
        except StoreError as error:
            json.dumps(str(error))


def main() -> None:
    """Answer: a line of JSON (``error``, or ``rows``), then the rows as an Arrow stream."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    asked: dict[str, Any] = json.loads(source.readline())
    rows = pl.read_ipc_stream(io.BytesIO(source.read()))
    _prepare()
    give_up(asked["seconds"], asked["memory"])
    body = io.BytesIO()
    try:
        frame = answered(rows, asked["query"], asked["most"], asked["characters"])
        frame.write_ipc_stream(body, compat_level=pl.CompatLevel.oldest())
        answer_head: dict[str, Any] = {"rows": frame.height}
    except (StoreError, OSError) as error:
        refused = isinstance(error, OSError) or "(os error 24)" in str(error)  # EMFILE
        answer_head = {"error": f"the query opens a file: only the table {TABLE} is there" if refused else str(error)}
    if len(body.getvalue()) > asked["bytes"]:
        answer_head = {
            "error": f"the answer has more than {asked['bytes']:,} bytes; ask for fewer columns or shorter texts"
        }
    sink.write(json.dumps(answer_head).encode() + b"\n")
    if "error" not in answer_head:
        sink.write(body.getvalue())
    sink.flush()


if __name__ == "__main__":
    main()

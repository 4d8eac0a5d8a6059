"""The SQL console: one SELECT over the scalar table, which comes from a browser.

It is checked against a list of what it may hold, and then asked in a process that cannot open a file
(:mod:`agentrl.flows.viewer.query.sql_child`). Either alone keeps Polars from reading files; the second also holds
against what Polars learns later, and against queries that never end or fill the memory.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from io import BytesIO

import polars as pl
import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql
from agentrl.flows.viewer.query import filters
from agentrl.flows.viewer.query.sql_child import TABLE
from agentrl.flows.viewer.query.tables import COLUMNS, TEXT, Tables, stream
from agentrl.flows.viewer.refused import RefusedError
from agentrl.flows.viewer.wire.queries import SQLQuery
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.schemas.installation import PACKAGE_ROOT

ROWS = 1000
"""Rows of an answer."""
BYTES = 8 * 2**20
"""Bytes of an answer."""
MEMORY = 2**30
"""Bytes that a query may take beyond the table."""
CPU_S = 10
"""Seconds of processor time, over all threads."""
WALL_S = 20.0
"""Seconds from the start of the process."""
_END = {
    -signal.SIGXCPU: "took more than {cpu_s} s of the processor",
    -signal.SIGKILL: "took more than {cpu_s} s of the processor",
    -signal.SIGABRT: "needs more than {memory:,} bytes",
}
"""What a limit does to a query, by how its process ended."""
_AT_ONCE = threading.BoundedSemaphore(2)
_PATIENCE_S = 5.0

FUNCTIONS = filters.FUNCTIONS - {"extract"} | {"count", "sum", "avg", "min", "max", "median", "stddev", "variance"}
FUNCTIONS |= {"corr", "quantile_cont", "first", "last", "row_number", "rank", "dense_rank", "lag", "lead"}
FUNCTIONS |= {"concat", "replace", "date"}
WORDS = filters.WORDS | {"select", "distinct", "from", "join", "on", "using", "where", "by", "having", "as", "over"}
WORDS |= {"union", "intersect", "except", "exists"}
"""Words that may stand before a parenthesis without being a function."""
_REFUSED = {"insert", "update", "delete", "drop", "create", "alter", "truncate", "show", "explain", "copy", "into"}
_REFUSED |= {"attach", "table", "values", "lateral", "unnest", "recursive", "set", "use", "call", "grant", "describe"}
_REFUSED |= {"natural"}  # it joins by all columns, also by those that no query names
_MARKS = frozenset("()=<>!+-*/%,.|:~")
_NEXT = "write one query, as in: select stage, count(*) as n from trajectories group by stage"


def bad(error: str, allowed: Sequence[str] = ()) -> RefusedError:
    """What is wrong with a query, and how one is written."""
    return RefusedError(error, field="query", allowed=allowed, following=_NEXT)


def check(query: str) -> str:
    """The query without a semicolon at its end. Raises RefusedError if it is anything but one SELECT over the table."""
    text = query.strip().removesuffix(";").strip()
    if len(text) > filters.MAX_CHARACTERS:
        raise bad(f"the query has {len(text):,} characters; at most {filters.MAX_CHARACTERS:,} are allowed")
    try:
        sql.check(text)
    except StoreError as error:
        raise bad(str(error).partition(". If you wrote")[0]) from None
    if filters.has_comment(text):
        raise bad("a query holds no comment here")
    token_list = filters.tokens(text)
    begins = token_list[0][1].lower() if token_list else ""
    if begins not in ("select", "with"):
        raise bad(f"a query begins with select or with, not with {begins[:40]!r}")
    tables = {TABLE, *_named_queries(token_list)}
    for (kind, value, end), (follows, after, _) in zip(token_list, [*token_list[1:], ("", "", 0)], strict=True):
        word = value.lower() if kind == "word" else ""
        if kind == "other" and value not in _MARKS:
            raise bad(f"{value!r} has no place in a query here: it is one SELECT", sorted(_MARKS))
        if word and not value.isascii():  # its capitals may spell a word of SQL, as those of "ſelect" do
            raise bad(f"{value[:80]!r} has letters that no column or word of SQL has")
        if word in _REFUSED:
            raise bad(f"{value!r} has no place in a query here: it is one SELECT over {TABLE}")
        if after == "(" and (kind in ("name", "literal") or (word and word not in FUNCTIONS | WORDS)):
            raise bad(f"a query has no function {value[:80]}", sorted(FUNCTIONS))
        if word and follows == "literal" and text[end] == "'":
            raise bad(f"{value[:80]}{after[:20]}: put a space before a text; texts have no prefix")
        if word in ("from", "join") and after != "(" and after.lower().strip('"') not in tables:
            raise bad(f"there is no table {after[:80]!r}", sorted(tables))
    return text


def _named_queries(token_list: list[tuple[str, str, int]]) -> list[str]:
    """Names that WITH gives to queries."""
    trios = zip(token_list, token_list[1:], token_list[2:], strict=False)
    return [name[1].lower().strip('"') for name, word, mark in trios if word[1].lower() == "as" and mark[1] == "("]


def ask(tables: Tables, question: SQLQuery) -> tuple[bytes, dict[str, str]]:
    """The answer as an Arrow stream, and the headers that go with it. Raises RefusedError if the query is not allowed,
    fails, or takes too long or too much memory."""
    text = check(question.query)
    snapshot = tables.at(question.at)
    began = time.monotonic()
    rows, body = answer(snapshot.columns(_named(text)), text)
    counts = {"x-rows": min(rows, ROWS), "x-cut": int(rows > ROWS), "x-version": snapshot.version}
    counts["x-milliseconds"] = round(1000 * (time.monotonic() - began))
    return body, {name: str(count) for name, count in counts.items()}


def _named(text: str) -> list[str]:
    """The columns that a query may look at: those whose names stand in it, or all if it asks for all."""
    words = set(re.findall(r"\w+", text.lower()))
    everything = re.search(r"[^(\s]\s*\*", text)  # not that of count(*)
    return [name for name in COLUMNS if everything or name.lower() in words] or ["segment"]


def answer(
    rows: pl.DataFrame, query: str, *, memory: int = MEMORY, cpu_s: int = CPU_S, wall_s: float = WALL_S
) -> tuple[int, bytes]:
    """How many rows there are, up to one more than :data:`ROWS`, and the first of them as an Arrow stream; from a
    process of its own, which has no more than that. Nothing is checked here."""
    asked = {"query": query, "most": ROWS + 1, "characters": TEXT, "bytes": BYTES, "seconds": cpu_s, "memory": memory}
    given = BytesIO(json.dumps(asked).encode() + b"\n")
    given.seek(0, 2)
    rows.write_ipc_stream(given, compat_level=pl.CompatLevel.oldest())
    if not _AT_ONCE.acquire(timeout=_PATIENCE_S):
        raise RefusedError("two other queries are at work", field="query", following="ask again", status=503)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl.flows.viewer.query.sql_child"],
            input=given.getvalue(),
            capture_output=True,
            check=False,
            timeout=wall_s,
            env={"PYTHONPATH": str(PACKAGE_ROOT), "PATH": os.defpath, "POLARS_MAX_THREADS": "2"},
        )
    except subprocess.TimeoutExpired:
        raise _too_much(f"took more than {wall_s:g} s") from None
    finally:
        _AT_ONCE.release()
    head, _, body = done.stdout.partition(b"\n")
    if not head:
        raise _too_much(_END.get(done.returncode, "ended its process").format(cpu_s=cpu_s, memory=memory))
    answer_head = json.loads(head)
    if "error" in answer_head:
        raise _failed(answer_head["error"])
    return answer_head["rows"], _first(body)


def _first(body: bytes) -> bytes:
    """Without the row that only says that there are more."""
    return stream(pa.ipc.open_stream(body).read_all().slice(0, ROWS))


def _failed(text: str) -> RefusedError:
    """What the process says of a query. It has not all columns, so names are looked up here."""
    reason = text.partition("\n")[0]
    if lost := re.search(r'unable to find column "([^"]+)"', reason):
        return bad(reason.partition("; did you mean")[0] + did_you_mean(lost[1], COLUMNS.names()), COLUMNS.names())
    return bad(reason)


def _too_much(what: str) -> RefusedError:
    return RefusedError(
        f"the query {what} and was given up", field="query", following="narrow it by where, or group it", status=408
    )

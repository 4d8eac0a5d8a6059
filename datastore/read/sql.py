"""Polars SQL over given tables only. Rules and filters may come from others, so a query that reads files is refused.

Polars reads any file that a table function such as ``read_csv('...')`` names. No other syntax of its SQL leaves the
tables that it is given (``COPY``, ``TABLE(...)`` and file names after ``from`` are errors), which a test asserts.
"""

import re
from collections.abc import Mapping

import polars as pl
from polars.exceptions import ColumnNotFoundError, PanicException, PolarsError

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read.matches import Find, as_tables
from agentrl.schemas.hints import nearest

MAX_CHARACTERS = 100_000
MAX_NESTING = 100
MAX_OPERATORS = 500
"""Polars overflows its stack, which ends the process, at some thousands."""

_READER = re.compile(r"\b(?:read|scan)_\w+", re.IGNORECASE)
_CALLED = re.compile(r"[^\w]*?\(")
_COMMENT = re.compile(r"--|/\*")
_OPERATOR = re.compile(r"\|\||[-+*/%]|\b(?:and|or|not|union|except|intersect|join|case)\b", re.IGNORECASE)
_LITERAL = re.compile(r"'[^']*'")
_COUNT = re.compile(r"\bcount\s*\(\s*\*\s*\)", re.IGNORECASE)


def execute(
    tables: Mapping[str, pl.LazyFrame], query: str, *, unsafe: bool = False, find: Find | None = None
) -> pl.LazyFrame:
    """The answer, still to be collected. ``unsafe`` allows table functions, which read files. ``find`` answers
    ``matches(messages, ...)``, which is refused without it.

    Raises StoreError if the query calls a table function, cannot be parsed, or names what is not there.
    """
    check(query, unsafe)
    asked, ids = as_tables(query, find)
    try:
        frame = pl.SQLContext({**tables, **ids}).execute(asked)
        names = frame.collect_schema().names()
    except (PolarsError, PanicException) as error:
        raise failed(error, tables, query) from None
    if "len" in names and "count" not in names and _COUNT.search(query) and not re.search(r"\blen\b", query, re.I):
        return frame.rename({"len": "count"})  # what SQL calls it
    return frame


def collect(
    tables: Mapping[str, pl.LazyFrame], query: str, *, unsafe: bool = False, find: Find | None = None
) -> pl.DataFrame:
    """The answer. Raises StoreError as :func:`execute` does, and if the query fails on the data."""
    frame = execute(tables, query, unsafe=unsafe, find=find)
    try:
        return frame.collect()
    except (PolarsError, PanicException) as error:
        raise failed(error, tables, query) from None


def matching(rows: pl.LazyFrame, where: str, name: str, find: Find | None = None) -> pl.LazyFrame:
    """Rows for which a SQL expression is true, still to be collected. An error begins with ``name``.

    Raises StoreError if it is no expression (``order by`` and ``limit`` are none) or names what is not there.
    """
    try:
        return execute({"rows": rows}, f"select * from rows where ({where})", find=find)
    except StoreError as error:
        raise StoreError(f"{name}: {error}") from None


def check(query: str, unsafe: bool = False) -> None:
    """Raise StoreError if a query reads files, or is so large or so deep that parsing it may crash."""
    if len(query) > MAX_CHARACTERS:
        raise StoreError(f"the query has {len(query):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    depth = deepest = 0
    for character in query:
        depth += {"(": 1, ")": -1}.get(character, 0)
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise StoreError(f"the query is nested {deepest} levels deep; at most {MAX_NESTING} are allowed")
    if (operators := len(_OPERATOR.findall(_LITERAL.sub("", query)))) > MAX_OPERATORS:
        raise StoreError(f"the query has {operators:,} operators; at most {MAX_OPERATORS} are allowed")
    if unsafe:
        return
    for match in _READER.finditer(query):
        # comments are refused too: with one, only Polars' own parser knows which functions are called
        if _CALLED.match(query, match.end()) or _COMMENT.search(query):
            raise StoreError(
                f"the query calls {match[0]}, which reads files: allowed are the tables of the buffer. "
                "If you wrote the query yourself and want this, add --unsafe-sql to `agentrl buffer query`"
            )


def failed(error: BaseException, tables: Mapping[str, pl.LazyFrame], query: str) -> StoreError:
    """What was wrong in one line, with the name that was probably meant, or the columns of the tables that the query
    names; never a query plan."""
    reason = " ".join(re.split(r"Resolved plan until failure|; valid columns|\n\s*\n", str(error))[0].split())
    if hint := _did_you_mean(reason, tables):
        return StoreError(f"query failed: {reason[:500]}{hint}")
    named = [name for name in tables if re.search(rf"\b{re.escape(name)}\b", query)] or list(tables)
    columns = ""
    if isinstance(error, ColumnNotFoundError) or "column" in reason or "found" in reason:
        listed = {name: tables[name].collect_schema().names() for name in named}
        columns = "".join(f"\ncolumns of {name}: {', '.join(names)}" for name, names in listed.items())
    return StoreError(f"query failed: {reason[:500]}{columns}")


def _did_you_mean(reason: str, tables: Mapping[str, pl.LazyFrame]) -> str:
    """Where a name is that Polars has not found, or what is most like it; empty if nothing is."""
    match = re.search(r"unable to find column \"([^\"]+)\"|column named '([^']+)'|relation '([^']+)'", reason)
    if not match:
        return ""
    *column, table = match.groups()
    if elsewhere := [name for name, frame in tables.items() if {*column} & {*frame.collect_schema().names()}]:
        return f"; it is a column of {elsewhere[0]}"
    columns = [name for frame in tables.values() for name in frame.collect_schema().names()]
    if "args" in column and "arguments" in columns:
        return "; name a key of the arguments, as in args.path"
    near = nearest(next(filter(None, [table, *column])), tables if table else columns, 1, 0.75)
    return f"; did you mean {near[0]!r}?" if near else ""

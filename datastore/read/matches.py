"""``matches(messages, 'refund -"gift card"')`` in SQL: whether words stand in what a row says and calls.

Polars' SQL has no such function, so before it sees a query each call becomes the question whether the row's id is in a
table of the ids that the full-text index finds. This is the one place that knows how the call is written.
"""

import re
from collections.abc import Callable

import polars as pl

from agentrl.datastore.errors import StoreError

Find = Callable[[str], pl.Series]
"""The ids of the rows in which the words of a text stand. Raises StoreError if the text is no question."""

FORM = "matches(messages, 'words \"a phrase\" -not')"
PREFIX = "rows that match "

_PART = re.compile(
    r"""
    '(?:[^']|'')*'
    | (?P<call>\bmatches\s*\()
      (?P<asked>\s*(?P<table>(?:\w+|"(?:[^"]|"")*")\s*\.\s*)?(?:messages\b|"messages")\s*,\s*(?P<text>'(?:[^']|'')*')\s*\))?
    | "(?:[^"]|"")*"
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)


def replaced(query: str, by: Callable[[str, int], str]) -> tuple[str, list[str]]:
    """The query with what ``by`` gives in place of each call, and the texts that the calls ask for, each once. ``by``
    gets the table with its dot, or nothing, and the number of the text.

    Raises StoreError if a call is not written as :data:`FORM`.
    """
    texts: list[str] = []

    def answered(match: re.Match[str]) -> str:
        if not match["call"]:
            return match[0]
        if not match["asked"]:
            wrong = query[match.start() : match.start() + 60]
            raise StoreError(f"{wrong!r}: matches takes the column messages and one text, as in {FORM}")
        text = match["text"][1:-1].replace("''", "'")
        if text not in texts:
            texts.append(text)
        return by(match["table"] or "", texts.index(text))

    return _PART.sub(answered, query), texts


def as_tables(query: str, find: Find | None) -> tuple[str, dict[str, pl.LazyFrame]]:
    """The query as Polars answers it, and the tables of ids that it asks for beside its own. ``find`` None is where
    there are no messages. Raises StoreError as :func:`replaced` does, and if ``find`` does."""

    def member(table: str, number: int) -> str:
        return f'({table}trajectory_id in (select trajectory_id from "{PREFIX}{number}"))'

    query, texts = replaced(query, member)
    if texts and find is None:
        raise StoreError("matches(messages, ...) is asked of rows; what this condition is about has no messages")
    tables = {f"{PREFIX}{number}": _table(find(text)) for number, text in enumerate(texts) if find}
    return query, tables


def _table(ids: pl.Series) -> pl.LazyFrame:
    return pl.LazyFrame({"trajectory_id": ids}, schema={"trajectory_id": pl.String})

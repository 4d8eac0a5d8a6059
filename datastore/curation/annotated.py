"""Rows by what people and judges say of them: what the rule ``annotated`` and the scores from feedback read."""

import polars as pl

from agentrl.datastore.annotations.current import current


def said(rows: pl.DataFrame, name: str, author_kind: str | None) -> pl.DataFrame:
    """The annotations of a name that count, of a kind of authors or of all; ``rows`` are those of a version of the
    table."""
    named = current(rows).filter(name=name)
    return named if author_kind is None else named.filter(author_kind=author_kind)


def said_of_rows(rows: pl.DataFrame, name: str, author_kind: str | None) -> pl.DataFrame:
    """Those of :func:`said` that are about whole rows."""
    return said(rows, name, author_kind).filter(
        pl.col("turn").is_null(), pl.col("token_start").is_null(), pl.col("pair_id").is_null()
    )

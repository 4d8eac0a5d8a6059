"""Rows by what people and judges say of them: what the rule ``annotated`` and the scores from feedback read."""

import polars as pl

from agentrl.datastore.annotations.current import current


def said_of_rows(rows: pl.DataFrame, name: str, author_kind: str | None) -> pl.DataFrame:
    """The annotations of a name that count and are about whole rows, of a kind of authors or of all; ``rows`` are those
    of a version of the table."""
    whole = current(rows).filter(
        pl.col("turn").is_null(), pl.col("token_start").is_null(), pl.col("pair_id").is_null(), name=name
    )
    return whole if author_kind is None else whole.filter(author_kind=author_kind)

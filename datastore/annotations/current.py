"""Which annotations count: of those with one author, one name and one target, the newest."""

import polars as pl

from agentrl.schemas.annotation import TARGET


def current(rows: pl.DataFrame) -> pl.DataFrame:
    """The annotations that count, in the order of their times. One that takes back what its author said leaves nothing.
    Of equal times the one that was appended last is the newer."""
    newest = (
        rows.with_row_index("appended")
        .sort("created_at", "appended")
        .unique([*TARGET, "name", "author"], keep="last", maintain_order=True)
        .drop("appended")
    )
    return newest.filter(pl.col("value").is_not_null() | (pl.col("comment") != "") | pl.col("correction").is_not_null())

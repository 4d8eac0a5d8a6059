"""How far authors of annotations agree."""

from collections import defaultdict
from itertools import combinations
from typing import Any

import polars as pl

from agentrl.datastore.annotations.current import current
from agentrl.datastore.errors import StoreError
from agentrl.schemas.annotation import TARGET
from agentrl.schemas.hints import did_you_mean
from agentrl.statistics.agreement import alpha_with_interval, kappa_with_interval


def agreement(rows: pl.DataFrame, name: str, *, numbers: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """How far authors agree on what they say under a ``name``: a line for all of them (``measure`` alpha, of
    Krippendorff), and one for each two (kappa, of Cohen). ``units`` are the rows, turns, tokens or pairs of which two
    or more of the authors say something, ``agreed`` the share of pairs of authors that say the same; ``low`` and
    ``high`` bound 95 % of bootstrap samples of the units. A value is None if all say the same everywhere, so that
    chance would agree as well. ``numbers`` counts for alpha how far apart numbers are (interval data); kappa compares
    words.

    Raises StoreError if there is no annotation of this name, or if ``numbers`` are asked of words.
    """
    given = current(rows)
    known = given["name"].unique().sort().to_list()
    column = "number" if numbers else "value"
    valued = given.filter(pl.col("value").is_not_null(), name=name)
    if not valued.height:
        hint = did_you_mean(name, known) or f"; there are {', '.join(known) or 'none'}"
        raise StoreError(f"no annotation says {name!r} with a value{hint}")
    if valued[column].null_count():
        word = valued.filter(pl.col("number").is_null())["value"][0]
        raise StoreError(f"--numbers: {name} has the value {word!r}, which is no number; leave it out")
    units: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(dict)
    for row in valued.select(*TARGET, "author", column).iter_rows(named=True):
        units[tuple(row[key] for key in TARGET)][row["author"]] = row[column]
    authors = sorted(valued["author"].unique().to_list())
    shared = [list(answers.values()) for answers in units.values() if len(answers) > 1]
    lines = [
        {
            "measure": "alpha",
            "authors": f"all {len(authors)}",
            **alpha_with_interval(shared, numbers=numbers, seed=seed),
        }
    ]
    for first, second in combinations(authors, 2):
        both = [
            (str(answers[first]), str(answers[second])) for answers in units.values() if {first, second} <= {*answers}
        ]
        if both:
            lines.append({"measure": "kappa", "authors": f"{first}, {second}", **kappa_with_interval(both, seed=seed)})
    return lines

"""How a store answers: with frames, and with its progress if the work may be long."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl


def shown_work(what: str, progress: bool) -> AbstractContextManager[Callable[..., None]]:
    """Shows work that may be long: in a notebook at once, elsewhere as lines if it is."""
    from agentrl.flows.showing import display_for, shown
    from agentrl.flows.terminal import console

    return shown(what, display_for(console(), quiet=not progress))


def frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> "pl.DataFrame":
    import polars as pl

    if not rows:
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
    return pl.DataFrame(rows, infer_schema_length=None, strict=False)

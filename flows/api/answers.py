"""How a store answers: with frames, and with its progress if the work may be long."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.formats.exports import Exported, OnSecrets


def shown_work(what: str, progress: bool) -> AbstractContextManager[Callable[..., None]]:
    """Shows work that may be long: in a notebook at once, elsewhere as lines if it is."""
    from agentrl.flows.showing import display_for, shown
    from agentrl.flows.terminal import console

    return shown(what, display_for(console(), quiet=not progress))


def indexed(
    buffer: "TrajectoryBuffer", embedder: str | None, rebuild: bool, progress: bool, shard_engine: Any
) -> "pl.DataFrame":
    """What a search index holds after it was brought up to date, by workers of an engine if one is given."""
    from agentrl.datastore.search.index import SearchIndex
    from agentrl.datastore.shards.divide import dividing_of

    with shown_work("search index", progress) as told:
        state = SearchIndex(buffer, embedder).refresh(rebuild, told, dividing_of(shard_engine, buffer.store, told))
    return frame([{name: value for name, value in vars(state).items() if name != "parts"}])


def frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> "pl.DataFrame":
    import polars as pl

    if not rows:
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
    return pl.DataFrame(rows, infer_schema_length=None, strict=False)


def exported(
    buffer: "TrajectoryBuffer",
    path: Path,
    format: str,
    where: str | None = None,
    split: str | None = None,
    secrets: "OnSecrets | None" = None,
    annotations: bool = False,
) -> "Exported":
    """What an export wrote; see :meth:`agentrl.Store.export`."""
    from agentrl.datastore.formats import named
    from agentrl.datastore.formats.exports import export_rows, losses
    from agentrl.pipelines.stages.select import in_split, matching

    taken = split or ("train" if named(format).training else "all")
    condition = in_split(where, None if taken == "all" else taken)
    ids = matching(buffer, condition)
    written = export_rows(buffer, ids, path, format, secrets=secrets, annotations=annotations)
    written.loses = losses(buffer, ids, format)
    return written

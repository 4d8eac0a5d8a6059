"""A stage whose work is divided into shards, which the engine of its ``execution`` runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from agentrl.pipelines.stage import Context

if TYPE_CHECKING:
    from agentrl.datastore.shards.divide import Divide
    from agentrl.schemas.shards import ShardsNow


@contextmanager
def dividing(context: Context, default: Literal["here"] | None = None) -> "Iterator[Divide]":
    """Yield how the work of a stage is divided; by ``default`` if no engine is named, None being what fits its size.
    What shards made lies in the stage's scratch folder, so that a run which goes on after a kill makes none of it
    again, and is removed when all is done."""
    from agentrl.datastore.shards.divide import dividing_by

    def tell(done: int, total: int, now: "ShardsNow") -> None:
        context.progress(done, total, shards=now)

    name = f"{context.stage}-{context.fingerprint}"
    engine = context.engine.model_copy(update={"type": context.engine.type or default})
    with dividing_by(engine, context.buffer.store, name, context.scratch, tell) as divide:
        yield divide

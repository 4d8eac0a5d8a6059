"""A stage whose work is divided into shards, which the engine of its ``execution`` runs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentrl.pipelines.stage import Context

if TYPE_CHECKING:
    from agentrl.datastore.curation.division import Divide


@contextmanager
def dividing(context: Context) -> "Iterator[Divide]":
    """Yield how the work of a stage is divided. What shards made lies in the stage's scratch folder, so that a run
    which goes on after a kill makes none of it again, and is removed when all is done."""
    from agentrl.datastore.curation.division import Divide
    from agentrl.datastore.shards.engines import running, shared_folder

    shared = shared_folder(context.engine, context.buffer.store)
    work = (shared / f"{context.stage}-{context.fingerprint}" if shared else context.scratch) / "shards"

    def tell(done: int, total: int, what: str) -> None:
        context.progress(done, total, shards=what)

    with running(context.engine, work, tell) as run:
        yield Divide(run, context.engine.shards, work, shared)
    shutil.rmtree(work, ignore_errors=True)

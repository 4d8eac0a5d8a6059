"""How work is to be divided, and names for what its shards make."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.datastore.shards.engine import Tell
from agentrl.datastore.shards.engines import engine_of, running, shared_folder
from agentrl.datastore.shards.shard import Shard
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.shards import ShardsNow

Run: TypeAlias = Callable[[Sequence[Shard], str], None]
"""Runs shards until all are done; the text says what they do."""


def in_this_process(shards: Sequence[Shard], what: str) -> None:
    for shard in shards:
        shard()


@dataclass(frozen=True)
class Divide:
    """How work is to be divided. ``run`` runs shards; ``shards``: their number, None: by the size of the work;
    ``work``: a folder that survives a kill, so that finished shards count the next time; ``shared``: a folder that all
    workers see, where they do not see the store's own. ``named``: whether somebody named an engine of other processes.
    What is not divided unless it is asked for, since a process of its own would load a model again, looks at it."""

    run: Run = in_this_process
    shards: int | None = None
    work: Path | None = None
    shared: Path | None = None
    named: bool = False


Dividing: TypeAlias = Callable[[str, Path], AbstractContextManager[Divide]]
"""Gives how work is divided, by a name for it and a folder in which what shards make may lie: :func:`dividing_by` with
an engine."""


@contextmanager
def dividing_by(engine: ShardEngine, store: str, name: str, own: Path, tell: Tell) -> Iterator[Divide]:
    """Yield how an engine divides work on a store. What shards make lies below ``own``, or as ``name`` in the folder
    that the engine names; it stays if the block fails, and is removed when all is done."""
    shared = shared_folder(engine, store)
    work = (shared / name if shared else own) / "shards"
    with running(engine, work, tell) as run:
        yield Divide(run, engine.shards, work, shared, engine.type is not None)
    shutil.rmtree(work, ignore_errors=True)


def dividing_of(
    given: ShardEngine | str | Mapping[str, Any] | None, store: str, progress: Callable[..., None]
) -> Dividing | None:
    """The same for work that is no stage: by what ``execution.engine`` of a pipeline takes, or a type alone; None if
    nothing is given. ``progress`` is called as that of a stage. Raises StoreError for an engine that there is not."""
    engine = engine_of(given)

    def tell(done: int, total: int, now: ShardsNow) -> None:
        progress(done, total, shards=now)

    return None if engine is None else partial(dividing_by, engine, store, tell=tell)


def in_groups(items: Sequence, count: int | None, most: int) -> Iterator[Sequence]:
    """Neighbours together, in ``count`` groups or fewer; None: ``most`` in each."""
    size = most if count is None else max(1, -(-len(items) // count))
    return (items[start : start + size] for start in range(0, len(items), size))

"""Results of several stages side by side."""

import os
from typing import TYPE_CHECKING

from agentrl.flows.api.run import StageResult
from agentrl.flows.api.store import Store

if TYPE_CHECKING:
    from agentrl.pipelines.results.compare import Comparison


def compare(
    *results: "str | StageResult", store: "Store | str | os.PathLike[str] | None" = None, greedy: bool = False
) -> "Comparison":
    """Evaluations, rollouts or models that were evaluated, side by side: success with intervals, paired differences to
    the first, and what each gained over the control for sharpening. ``results`` are results of stages
    (``run.stage("evaluation")``), or names in ``store``, which is theirs or ``store`` in the working directory if none
    is given.

    Raises LookupError if a name is unknown, and ValueError if results are of several stores.
    """
    stores = {result.catalog.storage.uri for result in results if isinstance(result, StageResult)}
    if store is not None:
        stores.add((store if isinstance(store, Store) else Store(store)).catalog.storage.uri)
    if len(stores) > 1:
        raise ValueError(f"results of several stores cannot be compared: {', '.join(sorted(stores))}")
    names = [r if isinstance(r, str) else f"{r.name}/{r.fingerprint}" for r in results]
    return Store(next(iter(stores), "store")).compare(*names, greedy=greedy)

"""Search over given rows alone. What is found is a function of these rows: neither the other rows of the store nor the
state of its index counts, so that a stage finds the same on every re-run."""

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from agentrl.datastore.errors import StoreError
from agentrl.datastore.search.embedding import EMBEDDED, Embedder, LatentEmbedder, pretrained
from agentrl.datastore.search.index import COLUMNS, Progress, SearchIndex, State, Where
from agentrl.datastore.shards.divide import Dividing

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.read.lookup import Ids


class PinnedIndex(SearchIndex):
    """The search of :class:`SearchIndex`, in memory, over the rows that ``ids`` name."""

    def __init__(self, buffer: "TrajectoryBuffer", ids: "Ids", embedder: str = EMBEDDED) -> None:
        super().__init__(buffer, embedder)
        rows = pl.DataFrame(buffer.read(ids, [*COLUMNS, "source"])).unique("trajectory_id", maintain_order=True)
        self._texts = rows["prompt"].unique().sort().to_list()
        if not self._texts:
            raise StoreError("there are no rows to search")
        numbers = pl.DataFrame({"prompt": self._texts, "__text": np.arange(len(self._texts))})
        self._own = rows.join(numbers, on="prompt", how="inner")
        self._keep(self.embedder.encode(self._texts))

    @cached_property
    def embedder(self) -> Embedder:
        return LatentEmbedder.fit(self._texts) if self.name == EMBEDDED else pretrained(self.name)

    def refresh(
        self, rebuild: bool = False, progress: Progress | None = None, dividing: Dividing | None = None
    ) -> State:
        """Nothing is new to given rows."""
        return State(
            self.embedder.identity, self.buffer.version or 0, len(self._texts), 0, self.embedder.cut(self._texts)
        )

    def _load(self) -> None:
        """It is in memory."""

    def _filtered(self, where: Where) -> pl.DataFrame:
        assert not isinstance(where, str)
        return self._own if where is None else self._own.filter(where)

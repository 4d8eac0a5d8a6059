"""The preference pairs of a store, which lie in the artifacts of stages."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import CorruptError
from agentrl.schemas.manifest import Kind, Manifest


class PreferredIn:
    """Which pairs rows are the preferred side of, in any artifact that there is at the first question."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    @cached_property
    def _files(self) -> list[tuple[Manifest, str]]:
        return [
            (manifest, output.path)
            for manifest in self._catalog.all()
            for output in manifest.outputs.values()
            if output.kind is Kind.PAIRS
        ]

    def __call__(self, ids: Sequence[str]) -> dict[str, list[str]]:
        """For each of these rows the ids of the pairs that it is preferred in, sorted. Of a file two columns are read,
        of the row groups alone that can hold one of the rows, by the least and the greatest id in their statistics.

        Raises CorruptError if a file cannot be read.
        """
        if not ids:
            return {}
        pairs: defaultdict[str, set[str]] = defaultdict(set)
        chosen = pc.field("chosen_id")
        wanted = (chosen >= min(ids)) & (chosen <= max(ids)) & chosen.isin(list(ids))
        for manifest, path in self._files:
            file = self._catalog.open(manifest, path)
            try:
                table = pq.read_table(file, columns=["pair_id", "chosen_id"], filters=wanted)
            except (pa.ArrowException, OSError) as error:
                raise CorruptError(f"{manifest.ingredients.stage}/{manifest.fingerprint}/{path}", str(error)) from error
            for pair in table.to_pylist():
                pairs[pair["chosen_id"]].add(pair["pair_id"])
        return {row: sorted(of_row) for row, of_row in pairs.items()}

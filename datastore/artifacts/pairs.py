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

SIDES = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("pair_id", "chosen_id", "rejected_id")])


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
        """For each of these rows the ids of the pairs that it is preferred in, sorted. Raises CorruptError as
        :meth:`sides` does."""
        pairs: defaultdict[str, set[str]] = defaultdict(set)
        for pair in self.sides(ids).to_pylist():
            pairs[pair["chosen_id"]].add(pair["pair_id"])
        return {row: sorted(of_row) for row, of_row in pairs.items()}

    def sides(self, ids: Sequence[str]) -> pa.Table:
        """The pairs that these rows are preferred in, as :data:`SIDES`. Of a file the three columns are read, of
        the row groups alone that can hold one of the rows, by the least and the greatest id in their statistics.

        Raises CorruptError if a file cannot be read.
        """
        tables = [SIDES.empty_table()]
        if not ids:
            return tables[0]
        chosen = pc.field("chosen_id")
        wanted = (chosen >= min(ids)) & (chosen <= max(ids)) & chosen.isin(list(ids))
        for manifest, path in self._files:
            file = self._catalog.open(manifest, path)
            try:
                tables.append(pq.read_table(file, columns=SIDES.names, filters=wanted).cast(SIDES))
            except (pa.ArrowException, OSError) as error:
                raise CorruptError(f"{manifest.ingredients.stage}/{manifest.fingerprint}/{path}", str(error)) from error
        return pa.concat_tables(tables)

"""The preference pairs of a store, which lie in the artifacts of stages."""

from collections import defaultdict
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.schemas.manifest import Kind


def preferred_in(catalog: Catalog, ids: Sequence[str]) -> dict[str, list[str]]:
    """For each of these rows the ids of the pairs of any artifact that it is the preferred side of, sorted."""
    pairs: defaultdict[str, set[str]] = defaultdict(set)
    wanted = pa.array(ids, pa.string())
    for manifest in catalog.all():
        for output in manifest.outputs.values():
            if output.kind is not Kind.PAIRS:
                continue
            table = pq.read_table(catalog.open(manifest, output.path), columns=["pair_id", "chosen_id"])
            for pair in table.filter(pc.is_in(table["chosen_id"], value_set=wanted)).to_pylist():
                pairs[pair["chosen_id"]].add(pair["pair_id"])
    return {row: sorted(of_row) for row, of_row in pairs.items()}

"""The cuts of a store, by the names that people use."""

from collections.abc import Iterator
from typing import Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.cuts.folder import CutFolder
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.schemas.cut import IMPORT_CUT, MAKE_CUT
from agentrl.schemas.manifest import Manifest


def find_cut(catalog: Catalog, text: str) -> tuple[Manifest, CutFolder]:
    """The cut that a tag, a name (its newest), NAME/FINGERPRINT or PIPELINE:NAME stands for.

    Raises LookupError if there is none.
    """
    manifest = find_artifact(catalog, text)
    if manifest.ingredients.uses not in (MAKE_CUT, IMPORT_CUT):
        known = sorted({each.ingredients.stage for each in all_cuts(catalog)})
        raise LookupError(
            f"{text!r} is no cut but made by {manifest.ingredients.uses}; cuts: {', '.join(known) or 'none'}"
        )
    return manifest, CutFolder(catalog.local(manifest, manifest.outputs["cut"].path))


def all_cuts(catalog: Catalog) -> Iterator[Manifest]:
    """Every cut, name by name, newest first in each."""
    return (manifest for manifest in catalog.all() if manifest.ingredients.uses in (MAKE_CUT, IMPORT_CUT))


def summary(manifest: Manifest) -> dict[str, Any]:
    """A cut in a row of a table."""
    return {
        "cut": f"{manifest.ingredients.stage}/{manifest.fingerprint[:8]}",
        "rows": manifest.outputs["trajectories"].rows,
        "sha256": str(manifest.metrics.get("sha256", ""))[:12],
        "made": manifest.created_at.isoformat(timespec="seconds"),
        "by": manifest.ingredients.uses,
    }

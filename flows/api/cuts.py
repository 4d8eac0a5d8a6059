"""Cuts in Python: made, opened, compared and written as data sets."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.cuts.folder import CutFolder
from agentrl.flows.api.run import StageResult
from agentrl.flows.showing import display_for, shown
from agentrl.flows.terminal import console
from agentrl.pipelines import displays

if TYPE_CHECKING:
    import polars as pl

    from agentrl.datastore.cuts.diff import CutDiff
    from agentrl.datastore.cuts.export import ExportedCut
    from agentrl.datastore.cuts.verify import CutCheck
    from agentrl.flows.api.store import Store
    from agentrl.schemas.cut import CutManifest


@dataclass(frozen=True)
class Cut(StageResult):
    """A set of rows to give to others, with the manifest that says how it came about."""

    @cached_property
    def folder(self) -> CutFolder:
        return CutFolder(self.catalog.local(self.manifest, self.manifest.outputs["cut"].path))

    @property
    def contents(self) -> "CutManifest":
        """What ``cut.json`` says: rows, table, rules, funnel, counts, sources with licences, evaluation sets."""
        return self.folder.manifest

    @property
    def sha256(self) -> str:
        """Of ``cut.json``, which vouches for every row."""
        return self.folder.identity

    @property
    def rows(self) -> "pl.LazyFrame":
        """``trajectory_id`` and ``digest`` of each row, in order."""
        return self.folder.rows()

    @property
    def dropped(self) -> "pl.LazyFrame":
        """``trajectory_id`` of each row that was not taken, with the ``rule`` that dropped it."""
        return self.folder.dropped()

    def verify(self) -> "CutCheck":
        """Compute the digest of every row and file again; ``.ok`` says whether all are as they were."""
        from agentrl.datastore.cuts.verify import verify

        return verify(self._buffer, self.folder)

    def diff(self, other: "Cut") -> "CutDiff":
        """What ``other`` has that this cut has not, and the other way round: ``.rows``, ``.counts()`` and ``.why``."""
        from agentrl.datastore.cuts.diff import diff

        return diff(self.folder, other.folder)

    def export(
        self, path: str | os.PathLike[str], format: str = "parquet", *, force: bool = False, annotations: bool = True
    ) -> "ExportedCut":
        """Write a folder with the rows in a format, what people and judges said of them unless ``annotations`` is
        false, the cut, tasks, tokenizers, checksums, and a card for the hub.

        Raises StoreError if the folder is there already, or if a row is not what it was.
        """
        from agentrl.datastore.cuts.export import export_cut

        options = {"force": force, "annotations": annotations}
        return export_cut(self._buffer, self.folder, self.name, Path(path), format, **options)

    @property
    def _buffer(self) -> TrajectoryBuffer:
        return TrajectoryBuffer(self.catalog.storage.uri)

    def _repr_html_(self) -> str:
        frame = displays.Frame()
        label = f"{self.name}/{self.fingerprint[:8]}: {self.contents.rows:,} rows, sha256 {self.sha256[:12]}"
        frame.block([("font-weight:600", label)], "")
        frame.add(displays.table([level.model_dump() for level in self.contents.funnel], ["rule", "before", "after"]))
        return frame.done()


def cut(
    name: str,
    rules: "str | os.PathLike[str] | dict[str, Any] | Sequence[dict[str, Any]] | None" = None,
    *,
    selection: str | None = None,
    split: str | None = "train",
    at: int | None = None,
    store: "Store | str | os.PathLike[str]" = "store",
    progress: bool = True,
) -> Cut:
    """Cut rows by rules (a YAML file, or what it holds) as a data set with a name; without ``rules``, the cut of this
    name (or NAME/FINGERPRINT, or a tag) as it is. ``selection`` names the rows that it is cut from, ``split`` None
    takes rows of any, ``at`` is a version of the table.

    Raises StoreError if a rule is wrong, and LookupError if there is no such cut.
    """
    from agentrl.flows.commands._cuts import make
    from agentrl.pipelines.results.cuts import find_cut

    location = os.fspath(store if isinstance(store, str | os.PathLike) else store.path)
    if rules is None:
        return Cut(Catalog(location), find_cut(Catalog(location), name)[0])
    with shown(name, display_for(console(), quiet=not progress)) as told:
        outcome = make(TrajectoryBuffer(location), name, rules, selection, split, at, told)
    return Cut(Catalog(location), outcome.manifest)


def import_cut(store: str, path: str | os.PathLike[str], name: str | None, progress: bool) -> Cut:
    """Take an exported cut into a store. Raises StoreError if it is none, or not what was exported."""
    from agentrl.flows.commands._cuts import bring_in

    chosen = name or Path(path).resolve().name
    with shown(chosen, display_for(console(), quiet=not progress)) as told:
        return Cut(Catalog(store), bring_in(TrajectoryBuffer(store), Path(path), chosen, told).manifest)


def cuts(store: str) -> "pl.DataFrame":
    """The cuts of a store, newest first under each name."""
    import polars as pl

    from agentrl.pipelines.results.cuts import all_cuts, summary

    columns = {"cut": pl.String, "rows": pl.Int64, "sha256": pl.String, "made": pl.String, "by": pl.String}
    return pl.DataFrame([summary(manifest) for manifest in all_cuts(Catalog(store))], schema=columns)

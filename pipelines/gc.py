"""Freeing what nothing needs any more. Rows of the buffer are never touched."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datastore.catalog import Catalog
from datastore.errors import LockTimeoutError
from pipelines.lineage import Artifact, lineage
from pipelines.runs import all_runs
from schemas.manifest import Manifest


@dataclass
class Garbage:
    """What may go: artifacts, and working folders of stages that were killed."""

    artifacts: list[Manifest] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    kept: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "artifacts": [{"stage": m.ingredients.stage, "fingerprint": m.fingerprint} for m in self.artifacts],
            "folders": [str(folder) for folder in self.folders],
            "kept": self.kept,
        }


def needed(catalog: Catalog, keep_runs: int) -> set[Artifact]:
    """Artifacts of the newest ``keep_runs`` runs, of runs at work, with a tag, and all that those were made from."""
    runs = all_runs(catalog)
    kept = runs[:keep_runs] + [run for run in runs if run["state"] == "running"]
    roots: set[Artifact] = set(catalog.tags().values())
    for run in kept:
        roots.update((name, stage["fingerprint"]) for name, stage in run["stages"].items())
    known: dict[Artifact, Any] = {}
    for stage, fingerprint in roots:
        lineage(catalog, stage, fingerprint, known)
    return set(known)


def find_garbage(catalog: Catalog, keep_runs: int) -> Garbage:
    """What :func:`collect` would free."""
    keep = needed(catalog, keep_runs)
    garbage = Garbage()
    for manifest in catalog.all():
        if (manifest.ingredients.stage, manifest.fingerprint) in keep:
            garbage.kept += 1
        else:
            garbage.artifacts.append(manifest)
    working = catalog.place.working_folder()
    garbage.folders = [*_abandoned(catalog, working), *_old_scratch(catalog, working, keep)]
    return garbage


def _abandoned(catalog: Catalog, working: Path) -> Iterable[Path]:
    """Half-built artifacts of runs that were killed: those whose stage nobody holds."""
    for folder in sorted((working / "staging").glob("*")):
        stage, digest, _ = folder.name.rsplit("-", 2)
        owners = list((working / "scratch" / stage).glob(f"{digest}*"))
        if all(_is_free(catalog, stage, owner.name) for owner in owners):
            yield folder


def _old_scratch(catalog: Catalog, working: Path, keep: set[Artifact]) -> Iterable[Path]:
    """Checkpoints of stages that no kept run wants to go on with."""
    for folder in sorted((working / "scratch").glob("*/*")):
        artifact = (folder.parent.name, folder.name)
        if artifact not in keep and _is_free(catalog, *artifact):
            yield folder


def _is_free(catalog: Catalog, stage: str, fingerprint: str) -> bool:
    try:
        with catalog.lock(stage, fingerprint, timeout=0):
            return True
    except LockTimeoutError:
        return False


def collect(catalog: Catalog, garbage: Garbage) -> None:
    """Free it."""
    for manifest in garbage.artifacts:
        catalog.remove(manifest.ingredients.stage, manifest.fingerprint)
    for folder in garbage.folders:
        shutil.rmtree(folder, ignore_errors=True)

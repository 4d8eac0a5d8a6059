"""Remove artifacts and leftovers that nothing needs any more. Rows of the buffer are never touched."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.datastore.artifacts import unfinished as leftovers
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.survey import Surveyed, survey
from agentrl.datastore.errors import LockTimeoutError
from agentrl.datastore.storage import ownership as owners
from agentrl.datastore.storage.lease import tidy
from agentrl.datastore.table.open_writers import marks
from agentrl.pipelines.results.lineage import Artifact
from agentrl.pipelines.run.runs import Run, all_runs
from agentrl.schemas.manifest import Manifest

BY_COMMAND = "command"
"""``run_id`` of artifacts that a command such as `agentrl buffer curate` published. No run says that it needs them."""


@dataclass
class Garbage:
    """What may go: artifacts, attempts that no manifest names, the live logs of these runs, and what killed processes
    left on this machine."""

    artifacts: list[Manifest] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    kept: int = 0
    damaged: list[str] = field(default_factory=list)
    at_work: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "artifacts": [{"stage": m.ingredients.stage, "fingerprint": m.fingerprint} for m in self.artifacts],
            "attempts": self.attempts,
            "live": self.live,
            "folders": [str(folder) for folder in self.folders],
            "kept": self.kept,
            "damaged": self.damaged,
        }


def find_garbage(catalog: Catalog, keep_runs: int) -> Garbage:
    """What :func:`collect` would free.

    A damaged run record or tag may name anything, so while there is one, every artifact is kept.
    """
    runs = all_runs(catalog)
    at_work = [run for run in runs if run["state"] == "running"]
    surveyed = survey(catalog)
    manifests = surveyed.artifacts
    kept = [*runs[:keep_runs], *at_work]
    keep = _needed(catalog, kept, manifests)
    garbage = Garbage(damaged=catalog.damaged(), at_work=bool(at_work))
    dead = [] if garbage.damaged else [catalog.manifest(*name) for name in manifests if name not in keep]
    garbage.artifacts = [artifact for artifact in dead if artifact is not None]
    garbage.kept = len(manifests) - len(garbage.artifacts)
    garbage.attempts = list(leftovers.unnamed_attempts(catalog, garbage.at_work, surveyed.unsettled))
    garbage.folders = leftovers.leftovers(catalog.storage, surveyed.unsettled)
    if not garbage.damaged:
        garbage.folders += _old_scratch(catalog, keep)
        named = {run["run_id"] for run in kept}
        garbage.live = [run_id for run_id in catalog.storage.children("runs")[0] if run_id not in named]
    if not at_work:
        garbage.folders += leftovers.old_downloads(catalog.storage, manifests)
    return garbage


def _needed(catalog: Catalog, runs: Iterable[Run], manifests: Mapping[Artifact, Surveyed]) -> set[Artifact]:
    """Artifacts that these runs, a tag or a command named, and all that those were made from."""
    todo: list[Artifact] = list(catalog.tags().values())
    todo += [name for name, manifest in manifests.items() if manifest.run_id == BY_COMMAND]
    # a stage has no fingerprint yet if the run ended before its inputs were made
    todo += [
        (name, stage["fingerprint"]) for run in runs for name, stage in run["stages"].items() if stage["fingerprint"]
    ]
    needed: set[Artifact] = set()
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += manifests[name].inputs if name in manifests else ()
    return needed


def _old_scratch(catalog: Catalog, keep: set[Artifact]) -> Iterable[Path]:
    """Checkpoints of stages that no kept run needs."""
    for folder in sorted((catalog.storage.working_folder() / "scratch").glob("*/*")):
        artifact = (folder.parent.name, folder.name)
        if artifact not in keep and _is_free(catalog, *artifact):
            yield folder


def _is_free(catalog: Catalog, stage: str, fingerprint: str) -> bool:
    try:
        with catalog.lock(stage, fingerprint, timeout=0):
            return True
    except LockTimeoutError:
        return False


def collect(catalog: Catalog, keep_runs: int) -> Garbage:
    """Free it, and return what was freed. Damaged records are set aside, so that the next time they do not count.

    A run records what it needs under a lock. The same lock is held here, from the decision what is needed until the
    rest has lost its manifests.
    """
    storage = catalog.storage
    dead = owners.dead(storage.working_folder())
    with catalog.lock_garbage():
        garbage = find_garbage(catalog, keep_runs)
        if garbage.damaged:
            warnings.warn(
                f"{', '.join(garbage.damaged)} cannot be read, so nobody knows which artifacts it named: none was "
                "freed this time. Tag what you want to keep; the next gc goes by the rest",
                stacklevel=2,
            )
        for key in garbage.damaged:
            catalog.set_aside(key)
        removed = []
        for manifest in garbage.artifacts:
            try:
                with catalog.lock(manifest.ingredients.stage, manifest.fingerprint, timeout=0):
                    catalog.remove(manifest)
                removed.append(manifest)
            except LockTimeoutError:  # somebody makes it again right now
                garbage.kept += 1
        garbage.artifacts = removed
        for key in garbage.attempts:
            catalog.remove_attempt(key)
        for run_id in garbage.live:
            storage.delete(f"runs/{run_id}")
        tidy(storage)
    leftovers.remove(garbage.folders)
    if not garbage.at_work and not garbage.damaged:  # otherwise something of a dead owner may be left
        owners.forget(storage.working_folder(), dead - {mark.owner for mark in marks(storage)})
    return garbage

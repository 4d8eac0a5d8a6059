"""What ``gc`` and ``vacuum`` need to know of every artifact, kept between calls.

A folder changes its time when a name in it is made, replaced or removed, so an artifact whose folder did not change
since is not opened again: one look at each folder is left of what grows with a store. On S3 every manifest is read.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.storage import ownership as owners
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.schemas.manifest import Manifest

FILE = "survey.json"
"""In the working folder. It may be deleted at any time."""

_SETTLED_NS = 2 * 10**9
"""A folder that changed so recently may change again at the same time, by the clock of the file system."""

_FIELDS = 6
"""Of an artifact that is kept: the time and the number of its folder, and the fields of :class:`Surveyed`."""

Artifact = tuple[str, str]
"""Stage and fingerprint."""


@dataclass(frozen=True)
class Surveyed:
    """A published artifact: the run that made it, its attempt, the version of the buffer that it names, and what it was
    made from."""

    run_id: str
    attempt: str
    buffer_version: int | None
    inputs: tuple[Artifact, ...]


@dataclass(frozen=True)
class Survey:
    """All published artifacts. ``unsettled``: folders that hold something besides, or no manifest that can be read."""

    artifacts: dict[Artifact, Surveyed]
    unsettled: list[Artifact]


def survey(catalog: Catalog) -> Survey:
    """Every artifact of the store; a manifest that cannot be read is named in a warning, as in the catalog."""
    if not isinstance(catalog.storage, LocalStorage):
        artifacts = {(manifest.ingredients.stage, manifest.fingerprint): _of(manifest) for manifest in catalog.all()}
        return Survey(artifacts, [(stage, name) for stage in catalog.stages() for name in catalog.fingerprints(stage)])
    path = catalog.storage.working_folder() / FILE
    known, kept = _kept(path), {}
    result = Survey({}, [])
    for artifact, folder in _folders(catalog, catalog.storage.root):
        now = time.time_ns()
        try:
            stamp = os.stat(folder)
        except FileNotFoundError:  # removed meanwhile
            continue
        key, times = "/".join(artifact), [stamp.st_mtime_ns, stamp.st_ino]
        if key in known and known[key][:2] == times:
            kept[key] = known[key]
            run_id, attempt, version, inputs = known[key][2:]
            result.artifacts[artifact] = Surveyed(run_id, attempt, version, tuple(map(tuple, inputs)))
            continue
        manifest = catalog.manifest(*artifact)
        if manifest is not None:
            result.artifacts[artifact] = surveyed = _of(manifest)
            if _is_settled(folder, manifest):
                if now - stamp.st_mtime_ns > _SETTLED_NS:
                    kept[key] = [*times, surveyed.run_id, surveyed.attempt, surveyed.buffer_version, surveyed.inputs]
                continue
        result.unsettled.append(artifact)
    if kept != known:
        _keep(path, kept)
    return result


def _folders(catalog: Catalog, root: Path) -> Iterator[tuple[Artifact, str]]:
    for stage in catalog.stages():
        for fingerprint in catalog.fingerprints(stage):
            yield (stage, fingerprint), f"{root}/artifacts/{stage}/{fingerprint}"


def _of(manifest: Manifest) -> Surveyed:
    records = (record for several in manifest.ingredients.inputs.values() for record in several)
    inputs = tuple(dict.fromkeys((record.stage, record.fingerprint) for record in records))
    return Surveyed(manifest.run_id, manifest.attempt, manifest.buffer_version, inputs)


def _is_settled(folder: str, manifest: Manifest) -> bool:
    """Whether a folder holds no other attempt than the manifest's, and nothing temporary."""
    names = os.listdir(folder)
    return all(name[:1] != "." and (name == manifest.attempt or not owners.owner_in(name)) for name in names)


def _kept(path: Path) -> dict[str, list[Any]]:
    try:
        times_of_path = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(times_of_path, dict):
        return {}
    return {key: value for key, value in times_of_path.items() if isinstance(value, list) and len(value) == _FIELDS}


def _keep(path: Path, kept: dict[str, list[Any]]) -> None:
    """Write it for the next call; a disk that takes nothing only makes that one slower."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{owners.mark(path.parent)}.tmp"
        try:
            temporary.write_text(json.dumps(kept, separators=(",", ":")))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

"""What dead processes left behind: temporary files, half-moved folders, half-built and replaced artifacts.

Names carry their owner (:mod:`agentrl.datastore.storage.ownership`), which tells whether somebody still works on
something. If a name has no owner of this machine (on S3, or written by an older version), its age decides, by the
place's clock.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.survey import FILE as SURVEY
from agentrl.datastore.artifacts.survey import Artifact, Surveyed, survey
from agentrl.datastore.storage import ownership as owners
from agentrl.datastore.storage.object_store import TRASH, LocalStorage, S3Storage
from agentrl.datastore.storage.ownership import Owner
from agentrl.schemas.manifest import Manifest

GRACE = timedelta(days=1)
"""A leftover of an unknown owner is removed once it is older than this."""

_OTHERS = ("prefect", "logs")
"""Folders of the store that hold no names of ours."""
_KEPT = ("owners", "scratch", "artifacts", "tokens", "scalars", "rows", "prefect", "logs", SURVEY)
"""Folders of the working folder that hold what is used again."""


def leftovers(storage: LocalStorage | S3Storage, artifacts: Iterable[Artifact] | None = None) -> list[Path]:
    """Local files and folders, temporary by their name, that nobody uses any more. ``artifacts``: those to look into;
    default: all."""
    working = storage.working_folder()
    paths = set(_in_working(working))
    if isinstance(storage, LocalStorage):
        paths |= set(
            _temporaries(storage.root, (*_OTHERS, working.name, *([] if artifacts is None else ["artifacts"])))
        )
        for artifact in artifacts or ():
            paths |= set(_temporaries(storage.root.joinpath("artifacts", *artifact)))
    for name in ("scratch", "artifacts", "tokens", "scalars", "rows"):
        paths |= set(_temporaries(working / name))
    return sorted(path for path in paths if _is_over(working, path))


def remove(paths: list[Path]) -> None:
    """Remove files and folders of this machine."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def old_downloads(storage: LocalStorage | S3Storage, manifests: Mapping[Artifact, Surveyed]) -> list[Path]:
    """Downloaded attempts at artifacts that no manifest names any more."""
    if isinstance(storage, LocalStorage):
        return []
    folders = []
    for folder in sorted((storage.working_folder() / "artifacts").glob("*/*")):
        manifest = manifests.get((folder.parent.name, folder.name))
        if manifest is None:
            folders.append(folder)
        else:
            folders += [
                path for path in folder.iterdir() if owners.owner_in(path.name) and path.name != manifest.attempt
            ]
    return folders


def abandoned_attempts(catalog: Catalog, stage: str, fingerprint: str, counts: Manifest | None) -> list[str]:
    """Keys of attempts at an artifact that were never published and whose process is dead.

    ``counts`` is the manifest that is published now, or None. The caller holds the artifact's lock. On S3 the
    list is empty, because nobody can tell whether a process of another machine lives.
    """
    if counts is not None or not isinstance(catalog.storage, LocalStorage):
        return []
    key = catalog.folder(stage, fingerprint)
    return [
        f"{key}/{name}" for name in catalog.storage.children(key)[0] if _dead(catalog.storage.working_folder(), name)
    ]


def unnamed_attempts(catalog: Catalog, at_work: bool, among: Iterable[Artifact] | None = None) -> Iterator[str]:
    """Keys of attempts that no manifest names and nobody will publish: killed ones, and those that a forced run
    replaced. With ``at_work``, a run may still read the latter, so they stay. ``among``: the artifacts to look into;
    default: all.

    Attempts stay, too, if their manifest cannot be read.
    """
    storage = catalog.storage
    working = storage.working_folder()
    for stage, fingerprint in survey(catalog).unsettled if among is None else among:
        key = catalog.folder(stage, fingerprint)
        attempts = [name for name in storage.children(key)[0] if owners.owner_in(name)]
        if not attempts:
            continue
        manifest = catalog.manifest(stage, fingerprint)
        if manifest is None and storage.read(f"{key}/manifest.json") is not None:
            continue
        if manifest is not None and at_work:
            continue
        for name in attempts:
            named = manifest is not None and manifest.attempt == name
            if not named and (_dead(working, name) or _is_old_at(storage, f"{key}/{name}", working, name)):
                yield f"{key}/{name}"


def _dead(working: Path, name: str) -> bool:
    owner = owners.owner_in(name)
    return owner is not None and owners.state(working, owner) is Owner.DEAD


def _is_old_at(storage: LocalStorage | S3Storage, key: str, working: Path, name: str) -> bool:
    """Whether an attempt of an owner that is not known here was last changed long ago."""
    if owners.state(working, owners.owner_in(name) or "") is not Owner.UNKNOWN:
        return False
    newest = max((changed for _, changed in storage.listing(key)), default=None)
    return newest is not None and _now(storage) - newest > GRACE


def _now(storage: LocalStorage | S3Storage) -> datetime:
    """The time by the clock that stamps the place's objects: on S3 the lock that the caller holds was just written."""
    if isinstance(storage, LocalStorage):
        return datetime.now(UTC)
    return max((changed for _, changed in storage.listing("locks")), default=datetime.now(UTC))


def _in_working(working: Path) -> Iterator[Path]:
    """Everything in the working folder that is not kept there for later use."""
    for path in working.glob("*"):
        if path.name in ("trash", "staging"):
            yield from path.iterdir()
        elif path.name not in _KEPT:
            yield path


def _temporaries(root: Path, but: tuple[str, ...] = ()) -> Iterator[Path]:
    """Files and folders that are temporary by their name."""
    for folder, folders, files in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in but]
        for name in [name for name in folders if name.startswith(TRASH)]:
            folders.remove(name)
            yield Path(folder, name)
        yield from (Path(folder, name) for name in files if name.startswith(".") and name.endswith(".tmp"))


def _is_over(working: Path, path: Path) -> bool:
    owner = owners.owner_in(path.name)
    known = owners.state(working, owner) if owner else Owner.UNKNOWN
    if known is not Owner.UNKNOWN:
        return known is Owner.DEAD
    try:
        changed = datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    except FileNotFoundError:
        return False
    return datetime.now(UTC) - changed > GRACE

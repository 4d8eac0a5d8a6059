"""The artifact catalog: what each stage run left, found by stage and fingerprint.

``artifacts/<stage>/<fingerprint>/<attempt>/`` holds the files of one try at a stage, and
``artifacts/<stage>/<fingerprint>/manifest.json`` says which try counts. It comes last, by a conditional put, so an
artifact either is there whole or does not exist, and of several tries one wins. Reading never creates anything.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from agentrl.datastore.errors import LeaseLostError, StoreError
from agentrl.datastore.storage import ownership as owners
from agentrl.datastore.storage.lease import Check, hold
from agentrl.datastore.storage.object_store import LocalStorage, make_folder, storage_of, sync, sync_tree
from agentrl.schemas.manifest import Manifest
from agentrl.schemas.records import RunRecord, TagRecord

_NAME = re.compile(r"[^/\\\0.][^/\\\0]*")

DAMAGED = "damaged"
"""Folder of the store for records that cannot be read and were set aside."""

_RECORDS: dict[str, type[BaseModel]] = {"runs": RunRecord, "tags": TagRecord}

COMPLETE = ".complete-"
"""Prefix of the files that mark a download as complete."""


def checked_name(field: str, name: str) -> str:
    """``name``, which becomes part of a key. Raises StoreError, with the field's name, if it could lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise StoreError(f"{field} {name!r} cannot name a folder: it is empty, starts with a dot or holds a slash")
    return name


class Catalog:
    """Artifacts, runs and tags of one store, a local folder or ``s3://bucket/prefix``."""

    def __init__(self, store: str | Path) -> None:
        self.storage = storage_of(store)

    @staticmethod
    def folder(stage: str, fingerprint: str) -> str:
        """Key of an artifact's folder."""
        return f"artifacts/{checked_name('stage', stage)}/{checked_name('fingerprint', fingerprint)}"

    # artifacts

    def manifest(self, stage: str, fingerprint: str) -> Manifest | None:
        """The artifact's manifest. None if there is none, or (with a warning) if it cannot be read."""
        key = f"{self.folder(stage, fingerprint)}/manifest.json"
        data = self.storage.read(key)
        if data is None:
            return None
        manifest = _manifest(data)
        if isinstance(manifest, str):
            warnings.warn(f"{self.storage.uri}/{key} is corrupt and counts as absent: {manifest}", stacklevel=2)
            return None
        return manifest

    def manifests(self, stage: str) -> list[Manifest]:
        """All artifacts of one stage, newest first."""
        manifests = (self.manifest(stage, name) for name in self.fingerprints(stage))
        return sorted(
            (manifest for manifest in manifests if manifest), key=lambda manifest: manifest.created_at, reverse=True
        )

    def all(self) -> Iterator[Manifest]:
        """Every artifact of the store, stage by stage, newest first in each."""
        for stage in self.stages():
            yield from self.manifests(stage)

    def stages(self) -> list[str]:
        """Names of the folders below ``artifacts``; what else lies there is named in a warning."""
        return self._folders("artifacts")

    def fingerprints(self, stage: str) -> list[str]:
        """Names of the folders of one stage; what else lies there is named in a warning."""
        return self._folders(f"artifacts/{checked_name('stage', stage)}")

    def _folders(self, prefix: str) -> list[str]:
        folders, strays = self.storage.children(prefix)
        self._say_strays(prefix, strays)
        return [name for name in folders if _NAME.fullmatch(name)]

    def _say_strays(self, prefix: str, strays: list[str]) -> None:
        if strays:
            names = ", ".join(strays[:3]) + (f" and {len(strays) - 3} more" if len(strays) > 3 else "")
            warnings.warn(
                f"{self.storage.uri}/{prefix} holds files that agentrl did not write: {names}; they are left alone",
                stacklevel=4,
            )

    def staging(self, stage: str, fingerprint: str) -> Path:
        """A fresh local folder to build the artifact in. Its name is the attempt's.

        Locally it is the folder in which the artifact will stay, so it lies on the right filesystem.
        """
        key = self.folder(stage, fingerprint)
        working = self.storage.working_folder()
        attempt = owners.mark(working)
        folder = (self.storage.root / key if isinstance(self.storage, LocalStorage) else working / "staging") / attempt
        while not folder.exists():
            with suppress(FileNotFoundError):  # somebody removed the folder above, which was empty
                make_folder(folder)
        return folder

    def scratch(self, stage: str, fingerprint: str) -> Path:
        """A local folder for an unfinished stage's checkpoints. It survives kills and is removed when the artifact is
        published."""
        folder = self._scratch(stage, fingerprint)
        make_folder(folder)
        return folder

    def _scratch(self, stage: str, fingerprint: str) -> Path:
        self.folder(stage, fingerprint)
        return self.storage.working_folder() / "scratch" / stage / fingerprint

    def publish(
        self, manifest: Manifest, folder: Path, *, instead_of: Manifest | None = None, check: Check | None = None
    ) -> Manifest:
        """Publish what is in ``folder``, which :meth:`staging` gave, as the manifest's artifact.

        Returns the manifest as published. If that artifact exists already, it is kept and returned, and ``folder`` is
        thrown away; only the one that ``instead_of`` names is replaced, whose files stay until
        :mod:`agentrl.pipelines.results.gc`. ``check`` is called right before the manifest is written. Raises StoreError
        if an output is missing.
        """
        stage, fingerprint = manifest.ingredients.stage, manifest.fingerprint
        for name, output in manifest.outputs.items():
            if not (folder / output.path).exists():
                raise StoreError(f"output {name!r} of stage {stage!r} is missing: no {folder / output.path}")
        ours = manifest.model_copy(update={"attempt": folder.name})
        prefix = f"{self.folder(stage, fingerprint)}/{ours.attempt}"
        published = _standing(self.storage.read(self._key(ours)), instead_of)
        if published is None:
            self._move_in(prefix, folder)
            if check:
                try:
                    check()
                except LeaseLostError:
                    self.storage.delete(prefix)
                    raise
            published = self._decide(ours, instead_of)
        if published.attempt != ours.attempt:
            self.storage.delete(prefix)
        self.discard(stage, fingerprint, folder)
        shutil.rmtree(self._scratch(stage, fingerprint), ignore_errors=True)
        return published

    def discard(self, stage: str, fingerprint: str, folder: Path) -> None:
        """Throw away what :meth:`staging` gave, unless it is what the published manifest names."""
        if isinstance(self.storage, LocalStorage):
            there = self.storage.read(f"{self.folder(stage, fingerprint)}/manifest.json")
            manifest = None if there is None else _manifest(there)
            if isinstance(manifest, Manifest) and manifest.attempt == folder.name:
                return
        shutil.rmtree(folder, ignore_errors=True)
        self._remove_if_empty(self.folder(stage, fingerprint))

    def _key(self, manifest: Manifest) -> str:
        return f"{self.folder(manifest.ingredients.stage, manifest.fingerprint)}/manifest.json"

    def _move_in(self, prefix: str, folder: Path) -> None:
        """Make an attempt's files durable in the store. Nobody reads them before the manifest names them."""
        if isinstance(self.storage, LocalStorage):
            sync_tree(folder)
            sync(folder.parent)
            return
        for file in sorted(item for item in folder.rglob("*") if item.is_file()):
            self.storage.upload(f"{prefix}/{file.relative_to(folder).as_posix()}", file)

    def _decide(self, ours: Manifest, instead_of: Manifest | None) -> Manifest:
        """Write the manifest unless another attempt was faster; return the one that counts."""
        key, body = self._key(ours), ours.model_dump_json(indent=2).encode()
        while True:
            data, tag = self.storage.tagged(key) or (None, None)
            if standing := _standing(data, instead_of):
                return standing
            if data is not None and isinstance(_manifest(data), str):
                self._set_aside(key, data)
            if self.storage.put_if(key, body, tag):
                return ours

    def local(self, manifest: Manifest, path: str) -> Path:
        """Local path of a file or folder of an artifact; what lies on S3 is downloaded once per attempt and kept."""
        stage, fingerprint = manifest.ingredients.stage, manifest.fingerprint
        key = "/".join(part for part in (self.folder(stage, fingerprint), manifest.attempt, path) if part).rstrip("/")
        if isinstance(self.storage, LocalStorage):
            target = self.storage.root / key
            if not target.exists():
                raise StoreError(f"artifact {stage}/{fingerprint} has no {path!r} at {target}")
            return target
        working = self.storage.working_folder()
        done = working / self.folder(stage, fingerprint) / f"{COMPLETE}{_mark_of(manifest, path)}"
        if not done.exists():
            for name in list(self.storage.keys(key)) or [key]:
                try:
                    self.storage.download(name, working / name)
                except FileNotFoundError:
                    raise StoreError(f"artifact {stage}/{fingerprint} has no {path!r} at {self.storage.uri}") from None
            done.touch()
        return working / key

    def open(self, manifest: Manifest, path: str) -> Any:
        """A file of an artifact, as a path or an Arrow file of which only the ranges asked for are read."""
        if isinstance(self.storage, LocalStorage):
            return self.local(manifest, path)
        folder = self.folder(manifest.ingredients.stage, manifest.fingerprint)
        return self.storage.open("/".join(part for part in (folder, manifest.attempt, path) if part))

    def remove(self, manifest: Manifest) -> None:
        """Remove an artifact: its manifest, then the files of the attempt that it names. Rows in the buffer stay."""
        stage, fingerprint = manifest.ingredients.stage, manifest.fingerprint
        key = self.folder(stage, fingerprint)
        self.storage.delete(f"{key}/manifest.json")
        if not isinstance(self.storage, LocalStorage):
            for complete in (self.storage.working_folder() / key).glob(f"{COMPLETE}*"):
                complete.unlink(missing_ok=True)
            shutil.rmtree(self.storage.working_folder() / key, ignore_errors=True)
        for part in [manifest.attempt] if manifest.attempt else [output.path for output in manifest.outputs.values()]:
            self.storage.delete(f"{key}/{part}")
        self._remove_if_empty(key)

    def remove_attempt(self, key: str) -> None:
        """Remove the files of an attempt that no manifest names, by its key."""
        self.storage.delete(key)
        self._remove_if_empty(key.rpartition("/")[0])

    def _remove_if_empty(self, key: str) -> None:
        """Remove an artifact's folder, and its stage's, if nothing is in it."""
        if isinstance(self.storage, LocalStorage):
            with suppress(OSError):
                (self.storage.root / key).rmdir()
                (self.storage.root / key).parent.rmdir()

    def lock(self, stage: str, fingerprint: str, timeout: float = -1) -> AbstractContextManager[Check]:
        """Hold an artifact's name, among processes, so that no two runs compute it twice. ``timeout`` in seconds."""
        self.folder(stage, fingerprint)
        return hold(self.storage, f"locks/{stage}-{fingerprint}.lock", timeout)

    def lock_garbage(self, timeout: float = -1) -> AbstractContextManager[Check]:
        """A lock that a run holds while it records what it needs, and ``gc`` while it decides what nobody needs."""
        return hold(self.storage, "locks/gc.lock", timeout)

    # tags

    def tag(self, name: str, stage: str, fingerprint: str) -> None:
        """Give an artifact a name of the user's choice. ``gc`` never removes a tagged artifact."""
        if self.manifest(stage, fingerprint) is None:
            raise StoreError(f"cannot tag {stage}/{fingerprint}: no such artifact; `agentrl status` lists them")
        body = json.dumps({"stage": stage, "fingerprint": fingerprint}).encode()
        self.storage.write(f"tags/{checked_name('tag', name)}.json", body)

    def tags(self) -> dict[str, tuple[str, str]]:
        """Name -> (stage, fingerprint)."""
        tags = self._records("tags")
        return {name: (tag["stage"], tag["fingerprint"]) for name, tag in tags.items()}

    # runs

    def write_run(self, run: dict[str, Any]) -> None:
        """Create or replace ``runs/<run_id>.json``."""
        body = json.dumps(run, indent=2, default=str).encode()
        self.storage.write(f"runs/{checked_name('run_id', run['run_id'])}.json", body)

    def run(self, run_id: str) -> dict[str, Any] | None:
        """A run's record. None if there is none, or (with a warning) if it cannot be read."""
        checked_name("run_id", run_id)
        return self._record(f"runs/{run_id}.json")

    def runs(self) -> list[dict[str, Any]]:
        """All runs, by name, which begins with the time they started."""
        return list(self._records("runs").values())

    # records: small JSON objects that people and power failures may damage

    def _records(self, folder: str) -> dict[str, dict[str, Any]]:
        """Name -> content of the records of a folder. What cannot be read, or is no record, is named in a warning."""
        folders, files = self.storage.children(folder)
        names = [name for name in files if name.endswith(".json")]
        beside = [folder for folder in folders if f"{folder}.json" not in names]  # a run has a folder beside its record
        self._say_strays(folder, [*beside, *(name for name in files if name not in names)])
        records = {name.removesuffix(".json"): self._record(f"{folder}/{name}") for name in names}
        return {name: record for name, record in records.items() if record is not None}

    def _record(self, key: str) -> dict[str, Any] | None:
        data = self.storage.read(key)
        if data is None:
            return None
        record = _record(key, data)
        if isinstance(record, str):
            warnings.warn(f"{self.storage.uri}/{key} is damaged and passed over: {record}", stacklevel=4)
            return None
        return record

    def damaged(self) -> list[str]:
        """Keys of run records and tags that cannot be read."""
        damaged = []
        for folder in _RECORDS:
            for name in self.storage.children(folder)[1]:
                key = f"{folder}/{name}"
                data = self.storage.read(key) if name.endswith(".json") else None
                if data is not None and isinstance(_record(key, data), str):
                    damaged.append(key)
        return damaged

    def set_aside(self, key: str) -> str:
        """Move a damaged record to ``damaged/``, where it no longer counts, and return its new key."""
        aside = self._set_aside(key, self.storage.read(key) or b"")
        self.storage.delete(key)
        return aside

    def _set_aside(self, key: str, data: bytes) -> str:
        aside = f"{DAMAGED}/{key}.{owners.mark(self.storage.working_folder())}"
        self.storage.write(aside, data)
        warnings.warn(f"{self.storage.uri}/{key} is damaged; it was set aside as {aside}", stacklevel=3)
        return aside


def _standing(data: bytes | None, instead_of: Manifest | None) -> Manifest | None:
    """The published manifest that may not be replaced, or None."""
    manifest = None if data is None else _manifest(data)
    if not isinstance(manifest, Manifest) or (instead_of and manifest.attempt == instead_of.attempt):
        return None
    return manifest


def _mark_of(manifest: Manifest, path: str) -> str:
    """Differs for each attempt, also for those of version 1, which have no name."""
    return hashlib.blake2b(f"{manifest.model_dump_json()}\0{path}".encode(), digest_size=12).hexdigest()


def _manifest(data: bytes) -> Manifest | str:
    """A manifest, or why it is none."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        return str(error.errors()[0]["msg"])


def _record(key: str, data: bytes) -> dict[str, Any] | str:
    """The record under a key, or why it is none."""
    try:
        record: dict[str, Any] = json.loads(data)
        _RECORDS[key.partition("/")[0]].model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        return str(error) if data.strip() else "it is empty"
    return record

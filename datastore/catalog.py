"""The artifact catalog: what each stage run left, found by stage and fingerprint.

``artifacts/<stage>/<fingerprint>/manifest.json`` is published last and in one step, so an artifact either is there
whole or does not exist. Questions never create anything on disk.
"""

import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from datastore.errors import StoreError
from datastore.lease import hold
from datastore.places import LocalPlace, place, sync_folder, sync_tree
from schemas.manifest import Manifest

_NAME = re.compile(r"[^/\\\0.][^/\\\0]*")


def _checked(field: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise StoreError(f"{field} {name!r} cannot name a folder: it is empty, starts with a dot or holds a slash")
    return name


class Catalog:
    """Artifacts, runs and tags of one store, a local folder or ``s3://bucket/prefix``."""

    def __init__(self, store: str | Path) -> None:
        self.place = place(store)

    @staticmethod
    def _folder(stage: str, fingerprint: str) -> str:
        return f"artifacts/{_checked('stage', stage)}/{_checked('fingerprint', fingerprint)}"

    # artifacts

    def manifest(self, stage: str, fingerprint: str) -> Manifest | None:
        """The artifact's manifest. None where there is none, or (with a warning) where it cannot be read."""
        key = f"{self._folder(stage, fingerprint)}/manifest.json"
        data = self.place.read(key)
        if data is None:
            return None
        try:
            return Manifest.model_validate_json(data)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            warnings.warn(f"{self.place.uri}/{key} is corrupt and counts as absent: {reason}", stacklevel=2)
            return None

    def manifests(self, stage: str) -> list[Manifest]:
        """All artifacts of one stage, newest first."""
        _checked("stage", stage)
        found = (self.manifest(stage, name) for name in self._fingerprints(stage))
        return sorted((one for one in found if one), key=lambda one: one.created_at, reverse=True)

    def all(self) -> Iterator[Manifest]:
        """Every artifact of the store, stage by stage, newest first in each."""
        for stage in self._children("artifacts"):
            yield from self.manifests(stage)

    def _fingerprints(self, stage: str) -> list[str]:
        return self._children(f"artifacts/{stage}")

    def _children(self, prefix: str) -> list[str]:
        if isinstance(self.place, LocalPlace):
            folder = self.place.root / prefix
            return sorted(item.name for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else []
        return sorted({key.removeprefix(prefix + "/").split("/")[0] for key in self.place.keys(prefix)})

    def staging(self, stage: str, fingerprint: str) -> Path:
        """A fresh local folder to build the artifact in, on the store's own filesystem."""
        name = f"{_checked('stage', stage)}-{_checked('fingerprint', fingerprint)[:8]}-{uuid.uuid4().hex[:8]}"
        folder = self.place.working_folder() / "staging" / name
        folder.mkdir(parents=True)
        return folder

    def scratch(self, stage: str, fingerprint: str) -> Path:
        """A local folder for an unfinished stage's checkpoints. It survives kills and goes at publishing."""
        folder = self._scratch(stage, fingerprint)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _scratch(self, stage: str, fingerprint: str) -> Path:
        self._folder(stage, fingerprint)
        return self.place.working_folder() / "scratch" / stage / fingerprint

    def publish(self, manifest: Manifest, folder: Path) -> Manifest:
        """Publish what is in ``folder`` as the manifest's artifact; the folder is gone afterwards.

        Where that artifact exists already, it is kept and returned, and ``folder`` is thrown away.
        """
        stage, fingerprint = manifest.ingredients.stage, manifest.fingerprint
        for name, output in manifest.outputs.items():
            if not (folder / output.path).exists():
                raise StoreError(f"output {name!r} of stage {stage!r} is missing: no {folder / output.path}")
        with hold(self.place, f"locks/publish-{stage}-{fingerprint}.lock"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a corrupt manifest is about to be replaced
                existing = self.manifest(stage, fingerprint)
            if existing is None:
                self._move_in(manifest, folder)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._scratch(stage, fingerprint), ignore_errors=True)
        return existing or manifest

    def _move_in(self, manifest: Manifest, folder: Path) -> None:
        key = self._folder(manifest.ingredients.stage, manifest.fingerprint)
        self.place.delete(key)  # remains of a publication that was cut short
        body = manifest.model_dump_json(indent=2).encode()
        if isinstance(self.place, LocalPlace):
            (folder / "manifest.json").write_bytes(body)
            sync_tree(folder)
            target = self.place.root / key
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, target)  # data and manifest appear in one step
            sync_folder(target.parent)
            return
        for file in sorted(item for item in folder.rglob("*") if item.is_file()):
            self.place.upload(f"{key}/{file.relative_to(folder).as_posix()}", file)
        self.place.write(f"{key}/manifest.json", body)

    def local(self, stage: str, fingerprint: str, path: str) -> Path:
        """Local path of a file or folder of an artifact; what lies on S3 is downloaded once and kept."""
        key = f"{self._folder(stage, fingerprint)}/{path}".rstrip("/")
        if isinstance(self.place, LocalPlace):
            target = self.place.root / key
            if not target.exists():
                raise StoreError(f"artifact {stage}/{fingerprint} has no {path!r} at {target}")
            return target
        target = self.place.working_folder() / key
        done = self.place.working_folder() / "cached" / f"{key.replace('/', '+')}"
        if not done.exists():
            names = list(self.place.keys(key)) or [key]
            for name in names:
                try:
                    self.place.download(name, self.place.working_folder() / name)
                except FileNotFoundError:
                    raise StoreError(f"artifact {stage}/{fingerprint} has no {path!r} at {self.place.uri}") from None
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()
        return target

    def remove(self, stage: str, fingerprint: str) -> None:
        """Remove an artifact. Its rows in the buffer stay."""
        self.place.delete(self._folder(stage, fingerprint))
        if not isinstance(self.place, LocalPlace):
            for cached in (self.place.working_folder() / "cached").glob(f"artifacts+{stage}+{fingerprint}*"):
                cached.unlink()
            shutil.rmtree(self.place.working_folder() / self._folder(stage, fingerprint), ignore_errors=True)

    def lock(self, stage: str, fingerprint: str, timeout: float = -1) -> AbstractContextManager[None]:
        """Hold an artifact's name, among processes, so that no two runs compute it twice. ``timeout`` in seconds."""
        self._folder(stage, fingerprint)
        return hold(self.place, f"locks/{stage}-{fingerprint}.lock", timeout)

    # tags

    def tag(self, name: str, stage: str, fingerprint: str) -> None:
        """Give an artifact a name of the user's choice; a tagged artifact is never garbage."""
        if self.manifest(stage, fingerprint) is None:
            raise StoreError(f"cannot tag {stage}/{fingerprint}: no such artifact; `agentrl status` lists them")
        body = json.dumps({"stage": stage, "fingerprint": fingerprint}).encode()
        self.place.write(f"tags/{_checked('tag', name)}.json", body)

    def tags(self) -> dict[str, tuple[str, str]]:
        """Name -> (stage, fingerprint)."""
        found = {Path(key).stem: json.loads(self.place.read(key) or b"{}") for key in self.place.keys("tags")}
        return {name: (tag["stage"], tag["fingerprint"]) for name, tag in sorted(found.items()) if tag}

    # runs

    def write_run(self, run: dict[str, Any]) -> None:
        """Create or replace ``runs/<run_id>.json``."""
        body = json.dumps(run, indent=2, default=str).encode()
        self.place.write(f"runs/{_checked('run_id', run['run_id'])}.json", body)

    def run(self, run_id: str) -> dict[str, Any] | None:
        data = self.place.read(f"runs/{_checked('run_id', run_id)}.json")
        return json.loads(data) if data is not None else None

    def runs(self) -> list[dict[str, Any]]:
        """All runs, by name, which begins with the time they started."""
        found = (self.place.read(key) for key in sorted(self.place.keys("runs")))
        return [json.loads(data) for data in found if data]

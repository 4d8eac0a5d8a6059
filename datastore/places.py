"""Where a store lives: a local folder or an S3 bucket, behind the same few operations on whole objects.

A write is all or nothing at both. Locally: a temporary file, fsync, rename. On S3 a put is atomic by itself, and
``If-None-Match`` makes the creation of a name exclusive. Credentials and endpoint come from the usual variables
(``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``).
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from datastore.errors import StoreError


class Place(Protocol):
    uri: str

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None where there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Create or replace one object."""

    def create(self, key: str, data: bytes) -> bool:
        """Create one object; False, and nothing changed, where it exists."""

    def keys(self, prefix: str) -> Iterator[str]:
        """Names of the objects under a folder, in any order."""

    def listing(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """The same with the time of each object's last change."""

    def delete(self, prefix: str) -> None:
        """Remove an object, or a folder with all that is in it."""

    def working_folder(self) -> Path:
        """A local folder for what is not finished; on the store's own filesystem where it is local."""


class LocalPlace:
    """A folder. Nothing is created before the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def read(self, key: str) -> bytes | None:
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, key: str, data: bytes) -> None:
        temporary = self._temporary(key, data)
        os.replace(temporary, self.root / key)
        sync_folder((self.root / key).parent)

    def create(self, key: str, data: bytes) -> bool:
        temporary = self._temporary(key, data)
        try:
            os.link(temporary, self.root / key)  # unlike rename, link refuses to replace
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        sync_folder((self.root / key).parent)
        return True

    def _temporary(self, key: str, data: bytes) -> Path:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def keys(self, prefix: str) -> Iterator[str]:
        folder = self.root / prefix
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not file.name.endswith(".tmp"):
                yield file.relative_to(self.root).as_posix()

    def listing(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        for key in self.keys(prefix):
            with suppress(FileNotFoundError):  # removed while we look
                yield key, datetime.fromtimestamp((self.root / key).stat().st_mtime, UTC)

    def delete(self, prefix: str) -> None:
        target = self.root / prefix
        if target.is_dir():
            # a half-deleted artifact must not look whole: move it out of sight first
            trash = self.working_folder() / "trash" / uuid.uuid4().hex
            trash.parent.mkdir(parents=True, exist_ok=True)
            os.replace(target, trash)
            shutil.rmtree(trash)
        else:
            target.unlink(missing_ok=True)

    def working_folder(self) -> Path:
        return self.root / "tmp"


class S3Place:
    """A bucket and a prefix in it."""

    def __init__(self, uri: str) -> None:
        from obstore.store import S3Store

        self.uri = uri.rstrip("/")
        bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise StoreError(f"store {uri!r} names no bucket; write it as s3://bucket/prefix")
        options = storage_options(uri)
        self._endpoint, self._region = options.get("aws_endpoint_url", ""), options["aws_region"]
        self._files: Any = None
        allow_http = options.pop("aws_allow_http", "false") == "true"
        self._store = S3Store(bucket, prefix=prefix or None, config=options, client_options={"allow_http": allow_http})  # type: ignore[arg-type]

    def read(self, key: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(self._store, key).bytes())
        except (FileNotFoundError, obstore.exceptions.NotFoundError):
            return None

    def write(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self._store, key, data)

    def create(self, key: str, data: bytes) -> bool:
        import obstore

        try:
            obstore.put(self._store, key, data, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def open(self, key: str) -> Any:
        """An Arrow file that reads only the ranges asked for."""
        from pyarrow.fs import S3FileSystem

        if self._files is None:
            scheme, _, host = self._endpoint.rpartition("://")
            self._files = S3FileSystem(region=self._region, endpoint_override=host or None, scheme=scheme or "https")
        return self._files.open_input_file(f"{self.uri.removeprefix('s3://')}/{key}")

    def upload(self, key: str, path: Path) -> None:
        import obstore

        with path.open("rb") as file:
            obstore.put(self._store, key, file)

    def download(self, key: str, path: Path) -> None:
        import obstore

        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        with temporary.open("wb") as file:
            for chunk in obstore.get(self._store, key):
                file.write(chunk)
        os.replace(temporary, path)

    def keys(self, prefix: str) -> Iterator[str]:
        return (key for key, _ in self.listing(prefix))

    def listing(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        import obstore

        for page in obstore.list(self._store, prefix=prefix):
            for meta in page:
                yield meta["path"], meta["last_modified"]

    def delete(self, prefix: str) -> None:
        import obstore

        names = sorted(self.keys(prefix))
        if not names and self.read(prefix) is not None:
            names = [prefix]
        # the manifest first: without it the rest does not exist, so a kill in between leaves no half artifact
        names.sort(key=lambda name: not name.endswith("manifest.json"))
        for name in names:
            obstore.delete(self._store, name)

    def working_folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "agentrl" / hashlib.blake2b(self.uri.encode(), digest_size=8).hexdigest()


def is_remote(store: str | Path) -> bool:
    return "://" in str(store)


def place(store: str | Path) -> LocalPlace | S3Place:
    """The place that a store's name means."""
    text = str(store)
    if text.startswith("s3://"):
        return S3Place(text)
    if is_remote(text) and not text.startswith("file://"):
        raise StoreError(f"store {text!r} is neither a folder nor s3://bucket/prefix")
    return LocalPlace(Path(text.removeprefix("file://")).expanduser().absolute())


def storage_options(uri: str | Path) -> dict[str, str]:
    """Options for delta-rs, Polars and obstore, from the environment. Empty for a local folder."""
    if not str(uri).startswith("s3://"):
        return {}
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
    )
    options = {name.lower(): os.environ[name] for name in names if os.environ.get(name)}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3"):
        options["aws_endpoint_url"] = endpoint
    if options.get("aws_endpoint_url", "").startswith("http://") or os.environ.get("AWS_ALLOW_HTTP"):
        options["aws_allow_http"] = "true"
    options.setdefault("aws_region", options.pop("aws_default_region", "us-east-1"))
    options.pop("aws_default_region", None)
    return options


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make a folder's files and names durable."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)

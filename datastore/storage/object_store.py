"""Where a store lives: a local folder or an S3 bucket, behind the same few operations on whole objects.

A write is all or nothing at both, and durable when it returns. Locally: a temporary file, fsync, rename, fsync of the
folder. On S3 a put is atomic by itself, and ``If-None-Match`` and ``If-Match`` let only one of several writers win.
Credentials and endpoint come from the usual variables (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_REGION``, ``AWS_ENDPOINT_URL``).
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

from agentrl.datastore.errors import StoreError
from agentrl.datastore.storage.credentials import missing_credentials, storage_options
from agentrl.datastore.storage.ownership import mark

TRASH = ".trash-"


class ObjectStorage(Protocol):
    """Objects of a store, under keys such as ``runs/a.json``."""

    uri: str

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None if there is none."""

    def size(self, key: str) -> int | None:
        """The object's size in bytes, or None if there is none."""

    def tagged(self, key: str) -> tuple[bytes, str] | None:
        """The object's bytes and the tag of this version of it, or None if there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Create or replace one object."""

    def writing(self, key: str) -> AbstractContextManager[Path]:
        """A path of this machine to write an object to that is too large to be held. It becomes the object when the
        block ends, unless by an error."""

    def put_if(self, key: str, data: bytes, tag: str | None) -> str | None:
        """Create one object (``tag`` None), or replace the version of it that has this tag, and return the new tag.

        Returns None, and changes nothing, if another writer was faster. If only one of several writers may win,
        ``data`` must differ between them, because after a lost answer only what is stored tells who won.
        """

    def keys(self, prefix: str) -> Iterator[str]:
        """Names of the objects under a folder, in any order."""

    def listing(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """The same with the time of each object's last change."""

    def beside(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """The same for the objects directly below a folder."""

    def children(self, prefix: str) -> tuple[list[str], list[str]]:
        """Names of the folders and of the objects directly below a folder, each sorted, without hidden ones."""

    def delete(self, prefix: str) -> None:
        """Remove an object, or a folder with all that is in it."""

    def working_folder(self) -> Path:
        """A local folder for what is not finished."""


class LocalStorage:
    """A folder. Nothing is created before the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def read(self, key: str) -> bytes | None:
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def size(self, key: str) -> int | None:
        try:
            return (self.root / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def tagged(self, key: str) -> tuple[bytes, str] | None:
        data = self.read(key)
        return None if data is None else (data, _tag(data))

    def write(self, key: str, data: bytes) -> None:
        temporary = self._temporary(key, data)
        os.replace(temporary, self.root / key)
        sync((self.root / key).parent)

    @contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        target = self.root / key
        make_folder(target.parent)
        temporary = target.parent / f".{target.name}.{mark(self.working_folder())}.tmp"
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def put_if(self, key: str, data: bytes, tag: str | None) -> str | None:
        if tag is not None:
            from filelock import FileLock

            make_folder(self.root / "locks")
            with FileLock(self.root / "locks/replace.lock"):
                current = self.tagged(key)
                if current is None or current[1] != tag:
                    return None
                self.write(key, data)
                return _tag(data)
        temporary = self._temporary(key, data)
        try:
            os.link(temporary, self.root / key)  # unlike rename, link refuses to replace
        except FileExistsError:
            return None
        finally:
            temporary.unlink()
        sync((self.root / key).parent)
        return _tag(data)

    def _temporary(self, key: str, data: bytes) -> Path:
        target = self.root / key
        make_folder(target.parent)
        temporary = target.parent / f".{target.name}.{mark(self.working_folder())}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(target)  # a disk that is full does not say which one it is
            raise
        return temporary

    def keys(self, prefix: str) -> Iterator[str]:
        for folder, folders, files in os.walk(self.root / prefix):  # what vanishes meanwhile is left out
            folders[:] = sorted(name for name in folders if not name.startswith(TRASH))
            for name in sorted(files):
                if not name.endswith(".tmp"):
                    yield (Path(folder) / name).relative_to(self.root).as_posix()

    def listing(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        for key in self.keys(prefix):
            with suppress(FileNotFoundError):  # removed while we look
                yield key, datetime.fromtimestamp((self.root / key).stat().st_mtime, UTC)

    def beside(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        for name in self.children(prefix)[1]:
            with suppress(FileNotFoundError):
                yield f"{prefix}/{name}", datetime.fromtimestamp((self.root / prefix / name).stat().st_mtime, UTC)

    def children(self, prefix: str) -> tuple[list[str], list[str]]:
        try:
            entries = sorted(os.scandir(self.root / prefix), key=lambda item: item.name)
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        shown = [item for item in entries if not item.name.startswith(".")]
        return [item.name for item in shown if item.is_dir()], [item.name for item in shown if not item.is_dir()]

    def delete(self, prefix: str) -> None:
        target = self.root / prefix
        if not target.is_dir():
            target.unlink(missing_ok=True)
            return
        # a half-deleted folder must not look whole: it is moved out of sight first, on its own filesystem
        trash = target.parent / f"{TRASH}{mark(self.working_folder())}"
        try:
            os.replace(target, trash)
        except OSError:  # a mount point cannot be moved
            trash = target
        shutil.rmtree(trash, ignore_errors=True)

    def working_folder(self) -> Path:
        return self.root / "tmp"


class S3Storage:
    """A bucket and a prefix in it. Raises StoreError if there are no credentials."""

    def __init__(self, uri: str) -> None:
        from obstore.store import S3Store

        self.uri = uri.rstrip("/")
        bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise StoreError(f"store {uri!r} names no bucket; write it as s3://bucket/prefix")
        if lacking := missing_credentials():
            raise StoreError(f"store {uri!r} cannot be used: {lacking}")
        options = storage_options(uri)
        self._endpoint, self._region = options.get("aws_endpoint_url", ""), options["aws_region"]
        self._files: Any = None
        allow_http = options.pop("aws_allow_http", "false") == "true"
        self._store = S3Store(bucket, prefix=prefix or None, config=options, client_options={"allow_http": allow_http})  # type: ignore[arg-type]

    def read(self, key: str) -> bytes | None:
        tagged = self.tagged(key)
        return tagged[0] if tagged else None

    def size(self, key: str) -> int | None:
        import obstore

        try:
            return int(obstore.head(self._store, key)["size"])
        except (FileNotFoundError, obstore.exceptions.NotFoundError):
            return None

    def tagged(self, key: str) -> tuple[bytes, str] | None:
        import obstore

        try:
            answer = obstore.get(self._store, key)
            return bytes(answer.bytes()), str(answer.meta["e_tag"])
        except (FileNotFoundError, obstore.exceptions.NotFoundError):
            return None

    def write(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self._store, key, data)

    @contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        make_folder(self.working_folder())
        name = key.rpartition("/")[2]
        temporary = self.working_folder() / f".{name}.{mark(self.working_folder())}.tmp"
        try:
            yield temporary
            self.upload(key, temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def put_if(self, key: str, data: bytes, tag: str | None) -> str | None:
        import obstore

        errors = obstore.exceptions
        try:
            mode = "create" if tag is None else {"e_tag": tag}
            return str(obstore.put(self._store, key, data, mode=mode)["e_tag"])  # type: ignore[arg-type]
        except (errors.AlreadyExistsError, errors.PreconditionError, errors.NotFoundError, FileNotFoundError):
            # a second try is told the same if the first one succeeded and its answer was lost
            current = self.tagged(key)
            return current[1] if current and current[0] == data else None

    def open(self, key: str) -> Any:
        """An Arrow file that reads only the ranges asked for. This is Arrow's own client: it fetches the ranges of a
        Parquet file's columns at once. A file of obstore is a Python object, of which Arrow reads one range after
        another."""
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
        temporary = path.parent / f".{path.name}.{mark(self.working_folder())}.tmp"
        try:
            with temporary.open("wb") as file:
                for chunk in obstore.get(self._store, key):
                    file.write(chunk)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def keys(self, prefix: str) -> Iterator[str]:
        return (key for key, _ in self.listing(prefix))

    def listing(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        import obstore

        for page in obstore.list(self._store, prefix=prefix):
            for meta in page:
                yield meta["path"], meta["last_modified"]

    def beside(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        import obstore

        for meta in obstore.list_with_delimiter(self._store, prefix=prefix)["objects"]:
            yield meta["path"], meta["last_modified"]

    def children(self, prefix: str) -> tuple[list[str], list[str]]:
        import obstore

        listing = obstore.list_with_delimiter(self._store, prefix=prefix)
        folders = sorted(name.rstrip("/").rpartition("/")[2] for name in listing["common_prefixes"])
        files = sorted(meta["path"].rpartition("/")[2] for meta in listing["objects"])
        return [folder for folder in folders if folder[:1] != "."], [name for name in files if name[:1] != "."]

    def delete(self, prefix: str) -> None:
        import obstore

        names = sorted(self.keys(prefix))
        if not names and self.read(prefix) is not None:
            names = [prefix]
        for name in names:
            obstore.delete(self._store, name)

    def working_folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "agentrl" / hashlib.blake2b(self.uri.encode(), digest_size=8).hexdigest()


def is_remote(store: str | Path) -> bool:
    return "://" in str(store)


def storage_of(store: str | Path) -> LocalStorage | S3Storage:
    """The place that a store's name means. Raises StoreError if it means none.

    A path is taken letter by letter; in a ``file://`` URI, ``%20`` is a space.
    """
    text = str(store)
    if not text.strip():
        raise StoreError(f"store {text!r} is empty; name a folder (the default is `store`) or s3://bucket/prefix")
    if text.startswith("s3://"):
        return S3Storage(text)
    if text.startswith("file://"):
        host, _, path = text.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise StoreError(
                f"store {text!r} names the host {host!r}; write a folder of this machine as file:///folder"
            )
        return LocalStorage(Path("/" + unquote(path)))
    if is_remote(text):
        raise StoreError(f"store {text!r} is neither a folder nor s3://bucket/prefix")
    path = text if not text.startswith("~/") and text != "~" else os.path.expanduser(text)
    return LocalStorage(Path(path).absolute())


def _tag(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; their names are durable."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        sync(parent.parent)


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make a folder's files and names durable."""
    for path in folder.rglob("*"):
        if path.is_file() or path.is_dir():
            sync(path)
    sync(folder)

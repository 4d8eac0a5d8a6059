"""The Delta table that holds the buffer's rows: created once, opened at any version, followed as it grows."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from agentrl.datastore.errors import CorruptError, NewerSchemaError, NoBufferError, OlderSchemaError, StoreError
from agentrl.datastore.storage.credentials import storage_options
from agentrl.datastore.storage.delta_paths import FOLDER, opened_as
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.table.delta_log import commit_key, is_torn, mend
from agentrl.datastore.table.row_digests import STORED_SCHEMA
from agentrl.datastore.table.writer import STATISTICS, Action
from agentrl.schemas.trajectory import TRAJECTORY_VERSION

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from agentrl.datastore.table.checkpoints import Tail

VERSION_PROPERTY = "agentrl.schema_version"

PROPERTIES = {
    VERSION_PROPERTY: str(TRAJECTORY_VERSION),
    "delta.dataSkippingStatsColumns": ",".join(STATISTICS),
    # artifacts point at old versions, so `vacuum` decides which files may be removed
    "delta.logRetentionDuration": "interval 36500 days",
    "delta.deletedFileRetentionDuration": "interval 36500 days",
}


LEAST_ADDRESSES = 2**32
"""Bytes of address space that a process needs for the buffer: a query reserves 3 GB on two cores, and more on more.
With less, threads and allocations of the native libraries fail, which ends the process, or lets it wait for ever."""


def _check_limits() -> None:
    """Raise StoreError if `ulimit -v` allows less than :data:`LEAST_ADDRESSES`."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESSES:
        raise StoreError(
            f"this process may reserve {limit // 2**20:,} MiB of addresses (ulimit -v), and the native libraries that "
            f"read the buffer need {LEAST_ADDRESSES // 2**20:,} MiB; nothing was done. Raise it, or limit memory by "
            "a cgroup"
        )


class BufferTable:
    """The table of one store."""

    def __init__(self, storage: LocalStorage | S3Storage) -> None:
        _check_limits()
        self.storage = storage
        self.uri = f"{storage.uri.rstrip('/')}/{FOLDER}"
        self.options = storage_options(storage.uri)
        self.known: int | None = None
        """The version that :meth:`following` gave last; None before its first call."""
        self.tail: Tail | None = None
        """Commits since the last checkpoint, as this process has counted them; kept by the module for checkpoints."""
        self._newest: DeltaTable | None = None
        self._born: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def open(self, version: int | datetime | None = None) -> "DeltaTable":
        """The table at a version or a time. Raises if there is none, or if it is newer than we can read.

        A newest commit or a checkpoint that a power loss left torn is set aside, with a warning.
        """
        from deltalake.exceptions import DeltaError

        table = self._open()
        self._check(table)
        if version is not None:
            try:
                table.load_as_version(version)
            except (DeltaError, ValueError) as error:
                raise StoreError(
                    f"the buffer at {self.uri} has no version {version!s}: {error}; `agentrl buffer history` lists them"
                ) from None
        return table

    def _open(self, mended: bool = False) -> "DeltaTable":
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            table = DeltaTable(opened_as(self.storage, FOLDER), storage_options=self.options)
        except TableNotFoundError:
            raise NoBufferError(self.uri) from None
        except DeltaError as error:
            with suppress(OSError):  # a store that cannot be written to
                if not mended and mend(self.storage):
                    return self._open(mended=True)
            raise CorruptError(f"the log of the buffer at {self.uri}", str(error)) from None
        # delta-rs takes an empty commit for one that does nothing
        if not mended and isinstance(self.storage, LocalStorage) and is_torn(self.storage, table.version()):
            mend(self.storage)
            return self._open(mended=True)
        return table

    @contextmanager
    def following(self) -> "Iterator[DeltaTable]":
        """The newest version, for one thread at a time and only within the block. Locally it is one handle, which
        reads only what was committed since the last time: opening a table takes longer than most look-ups."""
        from deltalake.exceptions import DeltaError

        with self._lock:
            birth = self._birth(self._newest)
            if self._newest is None or birth is None or birth != self._born:
                self._newest = self.open()
                self._born = self._birth(self._newest)
            else:
                try:
                    self._newest.update_incremental()
                except DeltaError:
                    self._newest = self.open()  # which says what is wrong, or mends it
                self._check(self._newest)
            self.known = self._newest.version()
            yield self._newest

    def _birth(self, table: "DeltaTable | None") -> tuple[int, int] | None:
        """What distinguishes this table from a new one at the same place. None if that is not known, as on S3, or if
        the newest commit that ``table`` knows is gone."""
        if table is None or not isinstance(self.storage, LocalStorage):
            return None
        log = self.storage.root / FOLDER / "_delta_log"
        try:
            (log / f"{table.version():020d}.json").stat()
            first = (log / f"{0:020d}.json").stat()
        except OSError:
            return None
        return first.st_ino, first.st_mtime_ns

    def _check(self, table: "DeltaTable") -> None:
        if (stored := schema_version(table)) > TRAJECTORY_VERSION:
            raise NewerSchemaError(self.uri, stored, TRAJECTORY_VERSION)

    def ensure(self) -> None:
        """Create the table if there is none. Raises as :meth:`refuse_older` does."""
        try:
            self.refuse_older()
        except NoBufferError:
            self._create()

    def refuse_older(self) -> None:
        """Raise OlderSchemaError if the table's schema is older than ours, since it then takes no appends, and
        NoBufferError if there is none."""
        with self.following() as table:
            stored = schema_version(table)
        if stored < TRAJECTORY_VERSION:
            raise OlderSchemaError(self.uri, stored, TRAJECTORY_VERSION)

    def _create(self) -> None:
        """Commit the empty table. If another process is faster, its table is the one."""
        actions: list[Action] = [
            {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
            metadata(str(uuid.uuid4()), {}),
            {"commitInfo": {"timestamp": _now(), "operation": "CREATE TABLE", "operationParameters": {}}},
        ]
        self.storage.put_if(commit_key(0), "\n".join(map(json.dumps, actions)).encode(), None)


def metadata(table_id: str, configuration: dict[str, Any]) -> Action:
    """The action that gives a table our schema and properties."""
    from deltalake import Schema

    return {
        "metaData": {
            "id": table_id,
            "name": None,
            "description": "agentrl trajectory buffer",
            "format": {"provider": "parquet", "options": {}},
            "schemaString": Schema.from_arrow(STORED_SCHEMA).to_json(),
            "partitionColumns": [],
            "createdTime": _now(),
            "configuration": configuration | PROPERTIES,
        }
    }


def _now() -> int:
    return int(time.time() * 1000)


def schema_version(table: "DeltaTable") -> int:
    """The version of our schema that a table was written with."""
    return int(table.metadata().configuration.get(VERSION_PROPERTY) or 1)

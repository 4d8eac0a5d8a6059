"""The Delta table that holds the buffer's rows: created once, opened at any version, followed as it grows."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from datastore.delta_paths import opened_as
from datastore.errors import CorruptError, NewerSchemaError, NoBufferError, OlderSchemaError, StoreError
from datastore.lease import hold
from datastore.places import LocalPlace, S3Place, make_folder, storage_options
from datastore.writer import FOLDER, SCALARS
from schemas.trajectory import TRAJECTORY_SCHEMA, TRAJECTORY_VERSION

if TYPE_CHECKING:
    from deltalake import DeltaTable

VERSION_PROPERTY = "agentrl.schema_version"

PROPERTIES = {
    VERSION_PROPERTY: str(TRAJECTORY_VERSION),
    "delta.dataSkippingStatsColumns": ",".join(SCALARS),
    # artifacts point at old versions for ever; `vacuum` decides by them what may go
    "delta.logRetentionDuration": "interval 36500 days",
    "delta.deletedFileRetentionDuration": "interval 36500 days",
}


class BufferTable:
    """The table of one store."""

    def __init__(self, place: LocalPlace | S3Place) -> None:
        self._place = place
        self.uri = f"{place.uri.rstrip('/')}/{FOLDER}"
        self.options = storage_options(place.uri)
        self._newest: DeltaTable | None = None
        self._born: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def open(self, version: int | datetime | None = None) -> "DeltaTable":
        """The table at a version or a time. Raises where there is none, or a newer one than we can read."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            table = DeltaTable(opened_as(self._place, FOLDER), storage_options=self.options)
        except TableNotFoundError:
            raise NoBufferError(self.uri) from None
        except DeltaError as error:
            raise CorruptError(f"the log of the buffer at {self.uri}", str(error)) from None
        self._check(table)
        if version is not None:
            try:
                table.load_as_version(version)
            except (DeltaError, ValueError) as error:
                raise StoreError(
                    f"the buffer at {self.uri} has no version {version!s}: {error}; `agentrl buffer history` lists them"
                ) from None
        return table

    @contextmanager
    def following(self) -> "Iterator[DeltaTable]":
        """The newest version, for one thread at a time and within the block alone. Locally it is one handle, which
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
                except DeltaError as error:
                    raise CorruptError(f"the log of the buffer at {self.uri}", str(error)) from None
                self._check(self._newest)
            yield self._newest

    def _birth(self, table: "DeltaTable | None") -> tuple[int, int] | None:
        """What tells this table from one made in its place; None where that cannot be told, as on S3, or where the
        newest commit that ``table`` knows is gone."""
        if table is None or not isinstance(self._place, LocalPlace):
            return None
        log = self._place.root / FOLDER / "_delta_log"
        try:
            (log / f"{table.version():020d}.json").stat()
            first = (log / f"{0:020d}.json").stat()
        except OSError:
            return None
        return first.st_ino, first.st_mtime_ns

    def _check(self, table: "DeltaTable") -> None:
        if (found := schema_version(table)) > TRAJECTORY_VERSION:
            raise NewerSchemaError(self.uri, found, TRAJECTORY_VERSION)

    def writable(self) -> "DeltaTable":
        """The table to write to, created where there is none. Raises where its schema is not exactly ours."""
        try:
            table = self.open()
        except NoBufferError:
            self._create()
            table = self.open()
        if (found := schema_version(table)) < TRAJECTORY_VERSION:
            raise OlderSchemaError(self.uri, found, TRAJECTORY_VERSION)
        return table

    def _create(self) -> None:
        """Create the empty table, once: a second creation would conflict with appends that are under way."""
        from deltalake import DeltaTable

        with hold(self._place, "locks/create-trajectories.lock"):
            try:
                self.open()
            except NoBufferError:
                if isinstance(self._place, LocalPlace):
                    make_folder(self._place.root / FOLDER / "_delta_log")
                DeltaTable.create(
                    opened_as(self._place, FOLDER),
                    TRAJECTORY_SCHEMA,
                    description="agentrl trajectory buffer",
                    configuration=PROPERTIES,
                    storage_options=self.options,
                    raise_if_key_not_exists=False,
                )


def schema_version(table: "DeltaTable") -> int:
    """The version of our schema that a table was written with."""
    return int(table.metadata().configuration.get(VERSION_PROPERTY) or 1)

"""Appends: one commit each, idempotent by (fingerprint, shard), which the commit carries as Delta's application
transaction, so that a stage that is killed and resumed neither loses nor doubles a row."""

from dataclasses import dataclass

from datastore.errors import StoreError
from datastore.ingest import Ingest, OnError, Rows
from datastore.places import LocalPlace, S3Place
from datastore.table import BufferTable
from datastore.writer import FileWriter


@dataclass(frozen=True)
class AppendResult:
    """``version`` of the table after the append; ``skipped``: this (fingerprint, shard) was there already."""

    version: int
    rows: int
    skipped: bool
    quarantined: int = 0


def append(
    to: BufferTable, place: LocalPlace | S3Place, rows: Rows, lineage: dict[str, str], shard: int, on_error: OnError
) -> AppendResult:
    """Append ``rows``; ``lineage`` holds stage, fingerprint and run_id. See :meth:`TrajectoryBuffer.append`."""
    from deltalake import CommitProperties, Transaction
    from deltalake.exceptions import CommitFailedError, DeltaError

    name = transaction(lineage["fingerprint"], shard)
    table = to.writable()
    before = table.transaction_version(name)
    if is_appended(before):
        return AppendResult(table.version(), 0, skipped=True)
    checked = Ingest(rows, lineage, on_error, place, f"{lineage['stage']}-{lineage['fingerprint'][:8]}-{shard}")
    writer = FileWriter(place)
    try:
        table.create_write_transaction(
            writer.write(checked.batches()),  # type: ignore[arg-type]
            mode="append",
            schema=table.schema(),
            commit_properties=CommitProperties(
                custom_metadata=lineage | {"shard": str(shard), "rows": str(checked.rows)},
                max_commit_retries=1000,
                app_transactions=[Transaction(name, 0 if before is None else before + 1)],
            ),
        )
    except BaseException as error:
        if _is_committed(to, writer):  # interrupted, or cut off from the answer, after the commit was written
            if not isinstance(error, Exception):
                raise
            return AppendResult(to.open().version(), checked.rows, skipped=False, quarantined=checked.quarantined)
        writer.discard()
        if isinstance(error, CommitFailedError):
            table = to.open()
            if is_appended(table.transaction_version(name)):  # the same shard, from another process, was faster
                return AppendResult(table.version(), 0, skipped=True)
            raise
        if isinstance(error, DeltaError | OSError):
            raise StoreError(f"append to {to.uri} failed, the table is as it was: {error}") from error
        raise
    table.update_incremental()
    return AppendResult(table.version(), checked.rows, skipped=False, quarantined=checked.quarantined)


def _is_committed(to: BufferTable, writer: FileWriter) -> bool:
    """Whether the table holds the files that were written. Files of an unknown fate are kept: ``vacuum`` finds them."""
    if not writer.names:
        return False
    return any(uri.rpartition("/")[2] in writer.names for uri in to.open().file_uris())


def is_appended(version: int | None) -> bool:
    """Whether a shard's rows are in the table: appending it gives its transaction an even number, dropping it
    (after a loss of files) the next odd one."""
    return version is not None and version % 2 == 0


def transaction(fingerprint: str, shard: int) -> str:
    """Name of a shard's application transaction."""
    if not fingerprint:
        raise StoreError("fingerprint is empty; it makes the append idempotent, give one that names this content")
    return f"{fingerprint}/{shard}"

"""Appends: one commit each, idempotent by (fingerprint, shard), which the commit carries as Delta's application
transaction, so that a stage that is killed and resumed neither loses nor doubles a row. No id is ever in the table
twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.datastore.errors import InvalidRowsError, StoreError
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.table.commit import commit
from agentrl.datastore.table.delta_table import BufferTable
from agentrl.datastore.table.ids import KnownIds
from agentrl.datastore.table.ingest import MAX_PROBLEMS, Ingest, OnError, Rows
from agentrl.datastore.table.row_digests import with_content
from agentrl.datastore.table.writer import Action, FileWriter

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass(frozen=True)
class AppendResult:
    """``version`` of the table after the append; ``skipped``: this (fingerprint, shard) was there already."""

    version: int
    rows: int
    skipped: bool
    quarantined: int = 0


class _AlreadyThereError(Exception):
    """Another process appended the same shard first."""


def append(
    to: BufferTable,
    known: KnownIds,
    storage: LocalStorage | S3Storage,
    rows: Rows,
    lineage: dict[str, str],
    shard: int,
    on_error: OnError,
) -> AppendResult:
    """Append ``rows``; ``lineage`` holds pipeline, stage, fingerprint and run_id. See
    :meth:`TrajectoryBuffer.append`."""
    name = transaction(lineage["fingerprint"], shard)
    to.ensure()
    with to.following() as table:
        if is_appended(table.transaction_version(name)):
            return AppendResult(table.version(), 0, skipped=True)
        checked_files = known.follow(table)

    def refuse_if_appended() -> None:
        with to.following() as table:
            if is_appended(table.transaction_version(name)):
                raise _AlreadyThereError

    with FileWriter(storage) as files:
        label = f"{lineage['stage']}-{lineage['fingerprint'][:8]}-{shard}"
        checked = Ingest(rows, lineage, on_error, storage, label, known, refuse_if_appended)

        def build(table: "DeltaTable") -> Sequence[Action]:
            before = table.transaction_version(name)
            if is_appended(before):
                raise _AlreadyThereError
            if new := known.follow(table) - checked_files:
                _refuse_clashes(known, checked, new)
            return [*adds, {"txn": {"appId": name, "version": 0 if before is None else before + 1}}]

        try:
            adds = _write(to, files, checked)
            info = lineage | {"shard": str(shard), "rows": str(checked.rows)}
            version = commit(to, files, build, "WRITE", info)
        except _AlreadyThereError:
            with to.following() as table:
                return AppendResult(table.version(), 0, skipped=True)
    return AppendResult(version, checked.rows, skipped=False, quarantined=checked.quarantined)


def _write(to: BufferTable, files: FileWriter, checked: Ingest) -> list[Action]:
    """Add actions of the rows' files."""
    try:
        return files.write(checked.batches(), with_content)
    except Exception as error:
        if error is checked.error and not isinstance(error, OSError):
            raise
        raise StoreError(f"append to {to.uri} failed, and the table is unchanged: {error}") from error


def _refuse_clashes(known: KnownIds, checked: Ingest, new: frozenset[str]) -> None:
    """Raise if files that came into the table since the rows were checked hold one of their ids."""
    if clashes := known.clashes(checked.ids, new):
        reason = "was appended by another process in the meantime"
        problems = [(-1, row_id, "trajectory_id", f"{reason} ({file})") for row_id, file in sorted(clashes.items())]
        raise InvalidRowsError(problems[:MAX_PROBLEMS])


def is_appended(version: int | None) -> bool:
    """Whether a shard's rows are in the table: appending it gives its transaction an even number, dropping it
    (after a loss of files) the next odd one."""
    return version is not None and version % 2 == 0


def transaction(fingerprint: str, shard: int) -> str:
    """Name of a shard's application transaction."""
    if not fingerprint:
        raise StoreError("fingerprint is empty; it makes the append idempotent, give one that names this content")
    return f"{fingerprint}/{shard}"

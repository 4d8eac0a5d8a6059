"""Upkeep of the buffer's table: compaction, removal of dead files, checks, and migration of old schemas."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from datastore.catalog import Catalog
from datastore.errors import CorruptError, StoreError
from datastore.places import LocalPlace
from datastore.validation import LENIENT_SCHEMA, conform, validate
from datastore.writer import FILE_ROWS, FOLDER, FileWriter
from schemas.trajectory import TRAJECTORY_SCHEMA, TRAJECTORY_VERSION

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from datastore.buffer import TrajectoryBuffer

DEFAULT_RETENTION_HOURS = 168
APPEND_GRACE = timedelta(hours=1)
"""Files that no commit names may belong to an append that is under way, if they are younger than this."""


@dataclass(frozen=True)
class Fault:
    """``kind``: missing, corrupt, rows, doubled, orphan, log or manifest. ``advice`` is the next step."""

    kind: str
    what: str
    advice: str


def _data_files(table: "DeltaTable") -> dict[str, int]:
    """Live files and their rows, in the table's order."""
    actions = pa.table(table.get_add_actions(flatten=True))
    names = (unquote(path) for path in actions["path"].to_pylist())
    return dict(zip(names, actions["num_records"].to_pylist(), strict=True))


def _open(buffer: "TrajectoryBuffer", name: str) -> pq.ParquetFile:
    place = buffer.place
    source: Any = place.root / FOLDER / name if isinstance(place, LocalPlace) else place.open(f"{FOLDER}/{name}")
    return pq.ParquetFile(source)


# compaction


def compact(buffer: "TrajectoryBuffer") -> dict[str, int]:
    """Merge small files into files of some thousands of rows, ordered by id. No row changes; old versions stay readable
    until ``vacuum``. An append at the same time goes through; of two compactions one fails and changes nothing."""
    from deltalake import CommitProperties
    from deltalake.exceptions import CommitFailedError

    table = buffer.writable()
    small = {name: rows for name, rows in _data_files(table).items() if rows is None or rows < FILE_ROWS // 2}
    if len(small) < 2:
        return {"files_before": len(small), "files_after": len(small), "version": table.version()}
    sizes = dict(zip(*(_column(table, name) for name in ("path", "size_bytes")), strict=True))
    writer = FileWriter(buffer.place, data_change=False)
    try:
        actions = writer.write(_merged(buffer, list(small)))
        table.create_write_transaction(
            [*actions, *(_remove(name, sizes[name]) for name in small)],
            mode="append",
            schema=table.schema(),
            commit_properties=CommitProperties(custom_metadata={"upkeep": "compact"}, max_commit_retries=1000),
        )
    except BaseException as error:
        writer.discard()
        if isinstance(error, CommitFailedError):
            raise StoreError(f"another compaction was faster, nothing was changed: {error}") from None
        raise
    return {"files_before": len(small), "files_after": len(actions), "version": table.version()}


def _column(table: "DeltaTable", name: str) -> list[Any]:
    values = pa.table(table.get_add_actions(flatten=True))[name].to_pylist()
    return [unquote(value) for value in values] if name == "path" else values


def _remove(name: str, size: int) -> Any:
    from deltalake.transaction import RemoveAction

    now = int(datetime.now(UTC).timestamp() * 1000)
    return RemoveAction(path=name, data_change=False, deletion_timestamp=now, size=size, partition_values={})


def _merged(buffer: "TrajectoryBuffer", names: list[str]) -> Iterator[pa.RecordBatch]:
    """Rows of some files, a bounded number at a time, each stretch sorted by id."""
    held: list[pa.Table] = []
    rows = 0
    for name in names:
        with _open(buffer, name) as file:
            held.append(file.read().cast(TRAJECTORY_SCHEMA))
        rows += held[-1].num_rows
        if rows >= FILE_ROWS:
            yield from pa.concat_tables(held).sort_by("trajectory_id").to_batches(max_chunksize=1024)
            held, rows = [], 0
    if held:
        yield from pa.concat_tables(held).sort_by("trajectory_id").to_batches(max_chunksize=1024)


# dead files


def vacuum(
    buffer: "TrajectoryBuffer", *, retention_hours: float = DEFAULT_RETENTION_HOURS, dry_run: bool = True
) -> list[str]:
    """Remove files that no version needs which an artifact points at, or which is younger than ``retention_hours``.

    Kept are: all files of the newest version, of each version that a manifest names as its ``buffer_version``, of each
    version younger than the retention, and files too young to tell (an append may be about to commit them). Returns
    the names; with ``dry_run`` nothing is removed.
    """
    if retention_hours < 0:
        raise StoreError(f"retention_hours {retention_hours} is negative; 0 keeps only what artifacts need")
    table = buffer.table()
    limit = datetime.now(UTC) - timedelta(hours=retention_hours)
    commits = table.history()
    pinned = {one.buffer_version for one in Catalog(buffer.store).all() if one.buffer_version is not None}
    wanted = {version for version in pinned if version <= table.version()} | {table.version()}
    for commit, following in zip(commits[1:], commits[:-1], strict=True):
        # a version was the newest one until the commit after it
        if datetime.fromtimestamp(following["timestamp"] / 1000, UTC) >= limit:
            wanted.add(commit["version"])
    kept: set[str] = set()
    for version in wanted:
        kept |= set(_data_files(buffer.table(version)))
    committed = {name for commit in _log(buffer) for name in commit.adds}
    young = datetime.now(UTC) - APPEND_GRACE
    dead = sorted(
        name
        for name, modified in _stored_files(buffer)
        if name not in kept and modified < (limit if name in committed else min(limit, young))
    )
    if not dry_run:
        for name in dead:
            buffer.place.delete(f"{FOLDER}/{name}")
    return dead


def _stored_files(buffer: "TrajectoryBuffer") -> Iterator[tuple[str, datetime]]:
    for key, modified in buffer.place.listing(FOLDER):
        name = key.removeprefix(f"{FOLDER}/")
        if not name.startswith("_delta_log/") and name.endswith(".parquet"):
            yield name, modified


# checks


def check(buffer: "TrajectoryBuffer") -> list[Fault]:
    """Everything that is wrong with the table, with what to do. An empty list: all files are there and readable, all
    rows keep the contract, no id is there twice, and each artifact finds the rows it names."""
    try:
        table = buffer.table()
    except CorruptError as error:
        return [_broken_log(buffer, str(error))]
    stored = dict(_stored_files(buffer))
    live = _data_files(table)
    findings = [
        Fault("missing", name, "restore it from a backup, or run `agentrl buffer check --drop` and re-run its stage")
        for name in live
        if name not in stored
    ]
    ids: dict[str, str] = {}
    for name in live:
        if name in stored:
            findings += _check_file(buffer, name, ids)
    known = {name for commit in _log(buffer) for name in commit.adds}
    findings += [
        Fault("orphan", name, "left by an append that was killed; `agentrl buffer vacuum` removes it")
        for name in sorted(stored)
        if name not in known
    ]
    return findings + _check_manifests(buffer, ids)


def _broken_log(buffer: "TrajectoryBuffer", reason: str) -> Fault:
    """Which commit of the log cannot be read."""
    for key in sorted(buffer.place.keys(f"{FOLDER}/_delta_log")):
        if not key.endswith(".json"):
            continue
        try:
            for line in (buffer.place.read(key) or b"").splitlines():
                json.loads(line)
        except ValueError:
            return Fault(
                "log",
                key,
                "this commit is corrupt: restore it from a backup; if it is the newest one and no later commit exists, "
                "remove it: its append is undone and its stage appends again",
            )
    return Fault("log", f"{FOLDER}/_delta_log", f"the log cannot be read: {reason}; restore it from a backup")


def _check_file(buffer: "TrajectoryBuffer", name: str, ids: dict[str, str]) -> list[Fault]:
    findings = []
    try:
        with _open(buffer, name) as file:
            for batch in file.iter_batches(batch_size=1024):
                rows = conform(pa.Table.from_batches([batch]))
                findings += [
                    Fault("rows", f"{one.trajectory_id} in {name}", f"{one.field} {one.reason}; leave it out by its id")
                    for one in validate(rows)
                ]
                for row in rows["trajectory_id"].to_pylist():
                    if row in ids:
                        advice = f"also in {ids[row]}; two stage runs gave one id, select by fingerprint"
                        findings.append(Fault("doubled", f"{row} in {name}", advice))
                    ids[row] = name
    except (pa.ArrowException, OSError, StoreError) as error:
        advice = f"cannot be read ({str(error).splitlines()[0][:99]}); restore it, or `agentrl buffer check --drop`"
        findings.append(Fault("corrupt", name, advice + " and re-run its stage"))
    return findings


def _check_manifests(buffer: "TrajectoryBuffer", ids: dict[str, str]) -> list[Fault]:
    catalog = Catalog(buffer.store)
    findings = []
    for manifest in catalog.all():
        stage, fingerprint = manifest.ingredients.stage, manifest.fingerprint
        for output in manifest.outputs.values():
            if output.kind != "trajectories":
                continue
            try:
                named = pq.read_table(catalog.local(manifest, output.path), columns=["trajectory_id"])
            except (StoreError, OSError, pa.ArrowException) as error:
                findings.append(Fault("manifest", f"{stage}/{fingerprint}", f"run {stage} again: {error}"))
                continue
            if lost := [one for one in named["trajectory_id"].to_pylist() if one not in ids]:
                advice = f"names {len(lost)} rows that are not in the buffer, such as {lost[0]}; run {stage} again"
                findings.append(Fault("manifest", f"{stage}/{fingerprint}", advice))
    return findings


@dataclass(frozen=True)
class _Commit:
    """What one commit of the log did to files, and the shard that it appended."""

    adds: frozenset[str]
    shard: str | None


def _log(buffer: "TrajectoryBuffer") -> list[_Commit]:
    """All commits, oldest first. Logs are kept for ever, so this knows every file that was ever committed."""
    commits = []
    for key in sorted(buffer.place.keys(f"{FOLDER}/_delta_log")):
        if key.endswith(".json"):
            actions = [json.loads(line) for line in (buffer.place.read(key) or b"").splitlines()]
            adds = frozenset(unquote(one["add"]["path"]) for one in actions if "add" in one)
            shard = next((one["txn"]["appId"] for one in actions if "txn" in one), None)
            commits.append(_Commit(adds, shard))
    return commits


@dataclass(frozen=True)
class Dropped:
    """Files taken out of the table, and shards (fingerprint/number) that may be appended again."""

    files: list[str]
    shards: list[str]


def drop_unreadable(buffer: "TrajectoryBuffer") -> Dropped:
    """Take files that are missing or corrupt out of the table, so that everything else can be read.

    Where such a file is as its append wrote it, the whole shard goes, and its stage may append it again. Rows that
    were compacted together with others are lost until they are restored or made under another fingerprint.
    """
    from deltalake import CommitProperties, Transaction

    table = buffer.writable()
    live = set(_data_files(table))
    gone = {one.what for one in check(buffer) if one.kind in ("missing", "corrupt")}
    shards: dict[str, int] = {}
    for commit in _log(buffer):
        if commit.shard and commit.adds & gone and commit.adds <= live:
            gone |= commit.adds
            shards[commit.shard] = (table.transaction_version(commit.shard) or 0) + 1
    if gone:
        sizes = dict(zip(*(_column(table, name) for name in ("path", "size_bytes")), strict=True))
        table.create_write_transaction(
            [_remove(name, sizes[name]) for name in sorted(gone)],
            mode="append",
            schema=table.schema(),
            commit_properties=CommitProperties(
                custom_metadata={"upkeep": "drop", "files": json.dumps(sorted(gone))},
                app_transactions=[Transaction(shard, number) for shard, number in shards.items()],
            ),
        )
    return Dropped(sorted(gone), sorted(shards))


# schema


def migrate(buffer: "TrajectoryBuffer") -> dict[str, int]:
    """Bring a table of an older schema to this one: columns that are new take the model's default in all old rows.

    Rewrites the files in one commit; the old version stays readable by number until ``vacuum``.
    """
    from deltalake import CommitProperties

    from datastore.table import PROPERTIES, schema_version

    table = buffer.table()
    found = schema_version(table)
    if found == TRAJECTORY_VERSION:
        return {"from": found, "to": found, "rows": 0}
    files = _data_files(table)
    sizes = dict(zip(*(_column(table, name) for name in ("path", "size_bytes")), strict=True))
    writer = FileWriter(buffer.place, data_change=False)
    try:
        actions = writer.write(_upgraded(buffer, list(files)))
        from deltalake import Field, Schema

        have = {one.name for one in table.schema().fields}
        target = Schema.from_arrow(TRAJECTORY_SCHEMA)
        new: list[Field] = [Field(one.name, one.type, nullable=True) for one in target.fields if one.name not in have]
        if new:
            table.alter.add_columns(new)
        loose = {one.name for one in target.fields if one.nullable}
        for one in table.schema().fields:
            if one.name in loose and not one.nullable:
                table.alter.drop_column_not_null(one.name)
        table.create_write_transaction(
            [*actions, *(_remove(name, sizes[name]) for name in files)],
            mode="append",
            schema=table.schema(),
            commit_properties=CommitProperties(custom_metadata={"upkeep": f"migrate {found} to {TRAJECTORY_VERSION}"}),
        )
    except BaseException:
        writer.discard()
        raise
    # the version last: a migration that is killed before this line is simply run again
    table.alter.set_table_properties(PROPERTIES, raise_if_not_exists=False)
    return {"from": found, "to": TRAJECTORY_VERSION, "rows": sum(files.values())}


def _upgraded(buffer: "TrajectoryBuffer", names: list[str]) -> Iterator[pa.RecordBatch]:
    for name in names:
        with _open(buffer, name) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from upgrade(pa.Table.from_batches([batch])).to_batches()


def upgrade(table: pa.Table) -> pa.Table:
    """Rows of an older schema with the columns and values that they have in this one."""
    from schemas.trajectory import Trajectory

    columns = []
    for field in LENIENT_SCHEMA:
        if field.name in table.schema.names:
            columns.append(table[field.name].cast(field.type))
            continue
        default = Trajectory.model_fields[field.name].get_default(call_default_factory=True)
        if (default is None and not TRAJECTORY_SCHEMA.field(field.name).nullable) or repr(
            default
        ) == "PydanticUndefined":
            raise StoreError(f"old rows lack {field.name!r}, which has no default; this schema cannot be migrated")
        columns.append(pa.array([default] * table.num_rows, field.type))
    return pa.Table.from_arrays(columns, schema=LENIENT_SCHEMA).cast(TRAJECTORY_SCHEMA)

"""Checks: everything that is wrong with the table, each with the next step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import CorruptError, StoreError
from agentrl.datastore.table import delta_log as log
from agentrl.datastore.table.delta_table import schema_version
from agentrl.datastore.table.ids import hashes, ids_of
from agentrl.datastore.table.maintenance import live_files, read_parts
from agentrl.datastore.table.row_digests import CONTENT, contents
from agentrl.datastore.table.validation import conform, validate
from agentrl.datastore.upkeep.lost_rows import losses
from agentrl.datastore.upkeep.retention import is_orphan, stored_files, writers
from agentrl.schemas.trajectory import TRAJECTORY_VERSION

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

_REPAIR = (
    "restore it from a backup; else `agentrl buffer check --repair` looks for its rows in old files, and "
    "`agentrl buffer check --drop` gives up what is not there"
)


@dataclass(frozen=True)
class Fault:
    """``kind``: missing, corrupt, rows, doubled, orphan, log, schema, lost or manifest. ``advice`` is the next step."""

    kind: str
    what: str
    advice: str


def check(buffer: "TrajectoryBuffer") -> list[Fault]:
    """All that is wrong. The list is empty if all files are there and readable, all rows fulfil the contract, no id is
    there twice, all losses are accepted, and all rows that artifacts name are there."""
    try:
        table = buffer.table()
    except CorruptError as error:
        return [_broken_log(buffer, str(error))]
    stored = dict(stored_files(buffer))
    live = list(live_files(table))
    old = schema_version(table) < TRAJECTORY_VERSION
    findings = []
    ids: dict[str, np.ndarray] = {}
    for name in live:
        if name not in stored:
            findings.append(Fault("missing", name, _REPAIR))
        elif not old:
            findings += _check_file(buffer, name, ids)
    if findings:  # a compaction and a vacuum may have happened meanwhile
        now = live_files(buffer.table())
        findings = [
            finding for finding in findings if finding.kind not in ("missing", "corrupt") or finding.what in now
        ]
    if old:
        advice = "run `agentrl buffer migrate`; until then rows can be read, and neither checked nor appended"
        findings.insert(0, Fault("schema", f"schema_version {schema_version(table)}", advice))
    else:
        findings += _doubled(buffer, ids)
    living, _ = writers(buffer, datetime.now(UTC))
    try:
        commits = log.read(buffer.storage)
    except CorruptError as error:
        return [*findings, _broken_log(buffer, str(error))]
    findings += _orphans(stored, living, commits)
    findings += [
        Fault("lost", loss.what, "make the rows again, or accept the loss with `agentrl buffer check --accept-losses`")
        for loss in losses(buffer, commits)
        if not loss.accepted
    ]
    return findings if old else findings + _check_manifests(buffer, ids)


def _broken_log(buffer: "TrajectoryBuffer", reason: str) -> Fault:
    """Which commit of the log cannot be read."""
    advice = "restore it from a backup: it is not the newest commit, so others build on what it held"
    for version in log.versions(buffer.storage):
        try:
            log.parse(version, buffer.storage.read(log.commit_key(version)) or b"")
        except log.TornError as error:
            return Fault("log", log.commit_key(version), f"this commit is corrupt ({error}): {advice}")
    return Fault("log", log.LOG, f"the log cannot be read: {reason}; restore it from a backup")


def _check_file(buffer: "TrajectoryBuffer", name: str, ids: dict[str, np.ndarray]) -> list[Fault]:
    findings = []
    hashes_of_batches: list[np.ndarray] = []
    try:
        for part in read_parts(buffer, name):
            if CONTENT not in part.schema.names:
                raise StoreError(f"lacks the column {CONTENT}")
            rows = conform(part.drop_columns([CONTENT]))
            changed = rows.filter(pc.not_equal(contents(rows), part[CONTENT]))["trajectory_id"].to_pylist()
            advice = f"is not what was appended; {_REPAIR}"
            findings += [Fault("rows", f"{change} in {name}", advice) for change in changed]
            findings += [
                Fault(
                    "rows",
                    f"{problem.trajectory_id} in {name}",
                    f"{problem.field} {problem.reason}; leave it out by its id",
                )
                for problem in validate(rows)
            ]
            hashes_of_batches.append(hashes(rows["trajectory_id"].to_pylist()))
        ids[name] = np.concatenate([np.zeros(0, np.uint64), *hashes_of_batches])
    except (pa.ArrowException, OSError, StoreError) as error:
        findings.append(Fault("corrupt", name, f"cannot be read ({str(error).splitlines()[0][:99]}); {_REPAIR}"))
    return findings


def doubled_ids(ids: dict[str, np.ndarray]) -> np.ndarray:
    """Hashes that are there more than once, sorted."""
    every = np.sort(np.concatenate([np.zeros(0, np.uint64), *ids.values()]))
    return np.unique(every[1:][every[1:] == every[:-1]])


def _doubled(buffer: "TrajectoryBuffer", ids: dict[str, np.ndarray]) -> list[Fault]:
    twice = doubled_ids(ids)
    first: dict[str, str] = {}
    pairs: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for name in ids if len(twice) else ():
        if not np.isin(ids[name], twice).any():
            continue
        names = ids_of(buffer.storage, name)
        for row in np.flatnonzero(np.isin(ids[name], twice)).tolist():
            if names[row] in first:
                pair = (first[names[row]], name)
                pairs[pair] += 1
                examples.setdefault(pair, names[row])
            first.setdefault(names[row], name)
    advice = "`agentrl buffer check --repair` keeps equal rows once, and sets others aside in quarantine"
    return [
        Fault("doubled", f"{count} ids of {later} are in {earlier} too, such as {examples[earlier, later]}", advice)
        for (earlier, later), count in pairs.items()
    ]


def _orphans(stored: Mapping[str, datetime], living: set[str], commits: list[log.Commit]) -> list[Fault]:
    """What ``vacuum`` removes of the files that are in no version."""
    known = {name for commit in commits for name in commit.adds}
    now = datetime.now(UTC)
    advice = (
        "in no version, left by a writer that was killed; `agentrl buffer vacuum --yes --retention-hours 0` removes it "
        "now, `agentrl buffer vacuum --yes` once it is older than --retention-hours"
    )
    return [
        Fault("orphan", name, advice)
        for name, modified in sorted(stored.items())
        if name not in known and is_orphan(name, now - modified, living)
    ]


def _check_manifests(buffer: "TrajectoryBuffer", ids: dict[str, np.ndarray]) -> list[Fault]:
    catalog = Catalog(buffer.store)
    every = np.sort(np.concatenate([np.zeros(0, np.uint64), *ids.values()]))
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
            asked = named["trajectory_id"].to_pylist()
            lost = np.flatnonzero(~np.isin(hashes(asked), every))
            if len(lost):
                advice = (
                    f"names {len(lost)} rows that are not in the buffer, such as {asked[lost[0]]}; run {stage} again"
                )
                findings.append(Fault("manifest", f"{stage}/{fingerprint}", advice))
    return findings

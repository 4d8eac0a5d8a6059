"""Rows of the buffer as the audit of rewards reads them, whoever asks for it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.doctor.audit import COLUMNS, RewardAudit, audit_rewards, stateful_envs
from agentrl.doctor.case import Finding
from agentrl.schemas.manifest import Kind

AT_ONCE = 512
"""Rows that are read at once."""


def _untold(done: int, total: int) -> None:
    pass


def audit_of(
    buffer: TrajectoryBuffer,
    ids: pa.Array,
    judged: dict[str, list[float]],
    progress: Callable[[int, int], None] = _untold,
) -> RewardAudit:
    """The audit of these rows. ``judged`` has values of judges by the id of a row."""

    def rows() -> Iterator[dict[str, Any]]:
        for start in range(0, len(ids), AT_ONCE):
            yield from buffer.read(ids.slice(start, AT_ONCE), COLUMNS).to_pylist()
            progress(min(start + AT_ONCE, len(ids)), len(ids))

    states = (buffer.read(ids.slice(start, AT_ONCE), ["env", "final_state"]) for start in range(0, len(ids), AT_ONCE))
    pairs = (
        (env, state not in ("null", "", "{}"))
        for table in states
        for env, state in zip(table["env"].to_pylist(), table["final_state"].to_pylist(), strict=True)
    )
    return audit_rewards(rows(), judged, stateful_envs(pairs))


def judged_by(tables: Iterable[pa.Table]) -> dict[str, list[float]]:
    """The rewards that scorers gave, by the id of a row."""
    judged: dict[str, list[float]] = defaultdict(list)
    for table in tables:
        for name, reward in zip(table["trajectory_id"].to_pylist(), table["reward"].to_pylist(), strict=True):
            if reward is not None:
                judged[name].append(reward)
    return judged


def audit_run(store: str, run: dict[str, Any]) -> dict[str, list[Finding]]:
    """What the audit finds in the rows that each stage of a run made, by the stage's name. Scores that the run's stages
    gave are compared with the success of rows."""
    import pyarrow.parquet as pq

    catalog, buffer = Catalog(store), TrajectoryBuffer(store)
    manifests = {
        name: manifest
        for name, stage in run["stages"].items()
        if stage.get("fingerprint") and (manifest := catalog.manifest(name, stage["fingerprint"])) is not None
    }
    judged = judged_by(
        pq.read_table(catalog.local(manifest, output.path))
        for manifest in manifests.values()
        for output in manifest.outputs.values()
        if output.kind is Kind.SCORES
    )
    findings = {}
    for name, manifest in manifests.items():
        if any(output.kind is Kind.TRAJECTORIES for output in manifest.outputs.values()):
            ids = pa.array(buffer.ids(manifest.row_fingerprint), pa.string())
            if len(ids):
                findings[name] = audit_of(buffer, ids, judged).findings()
    return findings

"""The stage that looks through stored rows for success that was not earned."""

from collections import Counter
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from agentrl.doctor.gaming import told
from agentrl.pipelines.handles import Scores, Table, Trajectories
from agentrl.pipelines.parts.audited import audit_of, judged_by
from agentrl.pipelines.parts.common import count
from agentrl.pipelines.parts.distinct import distinct, weights_of
from agentrl.pipelines.stage import Context, StageConfig, stage

SUSPICIONS = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("evidence", pa.string(), nullable=False),
        pa.field("message", pa.int32()),
        pa.field("token", pa.int32()),
    ]
)
"""Doubts of single rows: what was done, in which message (from 0), and where that begins in the row's tokens."""

FINDINGS = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("evidence", pa.string(), nullable=False),
        pa.field("threshold", pa.string(), nullable=False),
        pa.field("remedy", pa.string(), nullable=False),
        pa.field("rows", pa.list_(pa.string()), nullable=False),
    ]
)


class AuditConfig(StageConfig):
    """There is nothing to set."""


class Audited(NamedTuple):
    trajectories: Trajectories
    suspicions: Table
    findings: Table


@stage("rewards.audit", version=1)
def audit(
    context: Context,
    config: AuditConfig,
    trajectories: list[Trajectories],
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Audited:
    """Look through stored rows for success that was not earned: tests edited or skipped, exit codes forged, answers
    read, hidden results printed, empty or unchanged final states, failures of the verifier, and judges that disagree:
    components of the reward named like a judge, and ``scores``. Of all rows together it says whether length or format
    predicts the reward, and whether success rises on train tasks alone.

    ``suspicions`` names row, message and token of each doubt, ``findings`` has a row for each kind. The output
    ``trajectories`` selects the rows without a suspicion, with their weights.
    """
    given, weights = distinct(trajectories), weights_of(trajectories)
    result = audit_of(context.buffer, given, judged_by(table.table() for table in scores), context.progress)
    kinds = Counter(suspicion.kind for suspicion in result.suspicions)
    suspected = pa.array(sorted({suspicion.trajectory_id for suspicion in result.suspicions}), pa.string())
    kept = given.filter(pc.invert(pc.is_in(given, suspected)))
    count(context, {"rows": len(given), "suspected": len(suspected), **dict(sorted(kinds.items()))})
    findings = result.findings()
    for finding in findings:
        print(told(finding))
    table = [vars(suspicion) for suspicion in result.suspicions]
    by_kind = [
        {
            "kind": finding.name,
            "evidence": finding.evidence,
            "threshold": finding.threshold,
            "remedy": finding.remedy,
            "rows": list(finding.rows),
        }
        for finding in findings
    ]
    return Audited(
        context.select(kept, [weights[name] for name in kept.to_pylist()]),
        context.table(pa.Table.from_pylist(table, SUSPICIONS), "suspicions"),
        context.table(pa.Table.from_pylist(by_kind, FINDINGS), "findings"),
    )

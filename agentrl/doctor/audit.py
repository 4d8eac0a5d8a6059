"""The audit of rewards: stored rows one after the other, and then what they show together."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentrl.doctor.case import SHOWN, Finding, Row
from agentrl.doctor.gaming import Outline, gaming
from agentrl.doctor.hacks import Suspicion, suspicions

COLUMNS = ["trajectory_id", "task_id", "env", "split", "prompt", "reward", "success", "termination"]
COLUMNS += ["policy_version", "reward_components", "messages", "final_state"]
"""Columns of the buffer that an audit reads."""

REMEDIES = {
    "tests edited": "run the tests as they were given, from outside the workspace",
    "tests skipped": "count the tests that ran, and compare with those that were given",
    "exit code forged": "read results of single tests, not the exit code; run them in a process of their own",
    "answer read": "keep what the verifier knows out of the sandbox and out of its process",
    "hidden results printed": "say nothing of hidden tests before the episode has ended",
    "empty state": "let the verifier fail what hands nothing in",
    "unchanged state": "compare with the state as it was; a task that asks for no change should say so",
    "verifier exception": "leave such rows unscored: they are failures of the verifier",
    "judge disagrees": "read some of them; one of the two is wrong",
}
"""Kind of a suspicion of one row -> what to do about it."""


@dataclass
class RewardAudit:
    """What was found in ``rows`` rows: doubts of single ones, and what they show together."""

    suspicions: list[Suspicion] = field(default_factory=list)
    together: list[Finding] = field(default_factory=list)
    rows: int = 0

    def findings(self) -> list[Finding]:
        """One finding for each kind of suspicion, and those of all rows together."""
        by_kind: dict[str, list[Suspicion]] = defaultdict(list)
        for suspicion in self.suspicions:
            by_kind[suspicion.kind].append(suspicion)
        single = [
            Finding(
                kind,
                f"{len(by_kind[kind])} of {self.rows} rows; {by_kind[kind][0]}",
                "none",
                remedy,
                rows=tuple(suspicion.trajectory_id for suspicion in by_kind[kind][:SHOWN]),
                tokens=_tokens(by_kind[kind][:SHOWN]),
            )
            for kind, remedy in REMEDIES.items()
            if kind in by_kind
        ]
        return [*single, *self.together]


def _tokens(suspicions: list[Suspicion]) -> tuple[int, ...]:
    """Where each begins in its row's tokens; none if some rows have no tokens."""
    known = tuple(suspicion.token for suspicion in suspicions if suspicion.token is not None)
    return known if len(known) == len(suspicions) else ()


def audit_rewards(rows: Iterable[Row], judged: Mapping[str, list[float]], stateful: frozenset[str]) -> RewardAudit:
    """Look through rows (:data:`COLUMNS`). ``judged`` has values of judges from 0 to 1 by the id of a row; ``stateful``
    are the environments most of whose rows have a final state."""
    audit, outlines = RewardAudit(), []
    for row in rows:
        audit.rows += 1
        known = {**row, "judged": judged.get(row["trajectory_id"], []), "stateful": row["env"] in stateful}
        audit.suspicions += suspicions(known)
        if row["success"] is not None or row["reward"] is not None:
            outlines.append(Outline.of(row))
    audit.together = gaming(outlines)
    return audit


def stateful_envs(pairs: Iterable[tuple[str, bool]]) -> frozenset[str]:
    """The environments most of whose rows have a final state, from (environment, whether it has one) of each row."""
    total, having = Counter[str](), Counter[str]()
    for env, has in pairs:
        total[env] += 1
        having[env] += has
    return frozenset(env for env in total if 2 * having[env] > total[env])

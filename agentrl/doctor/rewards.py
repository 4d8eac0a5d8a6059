"""Checks of rewards, and of success on other tasks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from agentrl.doctor.case import FEW, SHOWN, Case, Finding, Row, share_of, thirds
from agentrl.statistics.excluded import MOST_EXCLUDED, said_of_excluded
from agentrl.statistics.intervals import wilson


def reward_zero(case: Case) -> Finding | None:
    """Every rollout has reward 0."""
    rows = case.rollouts
    if len(rows) < FEW or any(row["reward"] != 0 for row in rows):
        return None
    return Finding(
        "reward is always zero",
        f"all {len(rows)} rollouts have reward 0",
        "at least one rollout with another reward",
        "check the verifier on a known good answer; warm up with supervised training; use easier tasks or hints",
        rows=tuple(row["trajectory_id"] for row in rows[:SHOWN]),
    )


def reward_constant(case: Case) -> Finding | None:
    """Every rollout of a training stage has the same reward, which is not 0. Distillation learns from them all the
    same."""
    rows = case.rollouts
    if len(rows) < FEW or not case.metrics or case.algorithm == "distill" or len({row["reward"] for row in rows}) > 1:
        return None
    if rows[0]["reward"] == 0:
        return None  # said by reward_zero
    return Finding(
        "the reward never varies",
        f"all {len(rows)} rollouts have reward {rows[0]['reward']:g}",
        "at least two rewards",
        "take harder tasks if all are solved; else check that the score reads what the policy did",
        rows=tuple(row["trajectory_id"] for row in rows[:SHOWN]),
    )


def infrastructure(case: Case) -> Finding | None:
    """More than 5 % of the attempts failed by no doing of the policy: environments, tools, sandboxes or servers did."""
    doubt = said_of_excluded(len(case.failed), len(case.failed) + len(case.rollouts))
    if not doubt:
        return None
    ends = Counter(str(row["termination"]) for row in case.failed)
    return Finding(
        "many attempts failed by no doing of the policy",
        f"{doubt}; {', '.join(f'{end} {number}' for end, number in ends.most_common())}",
        f"{MOST_EXCLUDED:.0%} of the attempts",
        "read the last tag of such a row (`agentrl buffer show ID`) and mend what failed; set limits.retry.attempts "
        "higher for what comes and goes",
        rows=tuple(row["trajectory_id"] for row in case.failed[:SHOWN]),
    )


def no_control(case: Case) -> Finding | None:
    """A trained policy was evaluated, and the control for sharpening was not run."""
    if case.control:
        return None
    return Finding(
        "the control for sharpening was not run",
        "success at temperature 1 may rise because training made the policy surer, as a lower temperature does",
        "success at the temperature that is best on dev tasks",
        "set inputs.dev of the evaluation, and of that of the policy before it, as in dev: tasks.dev",
    )


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rollouts of each group with more than one."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row["group_id"] or row["task_id"], index // 4096].append(row)
    return [members for members in groups.values() if len(members) > 1]


def spread_of(rows: Sequence[Row]) -> float:
    """Mean over groups of the standard deviation of their rewards; 0 if there are no groups."""
    return fmean([pstdev(row["reward"] for row in members) for members in groups(rows)] or [0.0])


def zero_std(case: Case) -> Finding | None:
    """In more than 80 % of the late groups all rewards are equal. Algorithms whose baseline is not the group's, or
    that have a teacher, learn from them all the same."""
    if case.algorithm in ("distill", "remax", "ppo", "vapo"):
        return None
    late = groups(thirds(case.rollouts)[1]) if case.rollouts else []
    flat = [members for members in late if len({row["reward"] for row in members}) == 1]
    if len(late) < FEW // 2 or len(flat) <= 0.8 * len(late):
        return None
    solved = sum(members[0]["reward"] > 0 for members in flat)
    remedy = "harder tasks" if solved > len(flat) / 2 else "easier tasks, hints, or more samples per task"
    return Finding(
        "groups without a difference",
        f"{len(flat)} of the last {len(late)} groups have equal rewards throughout ({solved} all solved)",
        "80 %",
        f"{remedy}; dynamic sampling (algorithm dapo, or resample: 2)",
        rows=tuple(row["trajectory_id"] for members in flat for row in members)[:SHOWN],
    )


def format_gaming(case: Case) -> Finding | None:
    """Reward components for the format rise by 0.2 or more while success rises by at most 0.02."""
    gain, outcome = _rises(case, "format")
    if gain < 0.2 or outcome > 0.02:
        return None
    return Finding(
        "format gaming",
        f"the format reward rose by {gain:.2f} while success changed by {outcome:+.2f}",
        "a rise of 0.2 with success up by less than 0.02",
        "lower the weight of the format reward, or give it only if the outcome is right",
    )


def surer(case: Case) -> Finding | None:
    """The policy's confidence rises by 0.03 or more, or the agreement of its rollouts by 0.1, while success rises by at
    most 0.02."""
    for name, least in {"confidence": 0.03, "self_consistency": 0.1}.items():
        gain, outcome = _rises(case, name)
        if gain >= least and outcome <= 0.02:
            return Finding(
                "the policy became surer, and no better",
                f"{name} rose by {gain:.2f} while success changed by {outcome:+.2f}",
                f"a rise of {least} with success up by less than 0.02",
                "take a verifier, or fewer iterations; compare evaluate.policy with that of the policy before at its "
                "best temperature (inputs.dev)",
            )
    return None


def _rises(case: Case, name: str) -> tuple[float, float]:
    """What components with ``name`` in theirs, and success, gained from early to late rollouts; 0 of too few."""
    if len(case.rollouts) < 6 * FEW:
        return 0.0, 0.0
    early, late = thirds(case.rollouts)

    def mean(rows: Sequence[Row]) -> float:
        values = [part["value"] for row in rows for part in row["reward_components"] or [] if name in part["name"]]
        return fmean(values) if values else 0.0

    outcome = share_of(row["success"] for row in late) - share_of(row["success"] for row in early)
    return mean(late) - mean(early), outcome


def generalisation_gap(case: Case) -> Finding | None:
    """Success on late training rollouts is more than 0.15 above that on held-out tasks, beyond both intervals."""
    late = [row for row in (thirds(case.rollouts)[1] if case.rollouts else []) if row["split"] == "train"]
    if case.heldout is None or len(late) < FEW or case.heldout[1] < FEW:
        return None
    solved = sum(row["success"] for row in late)
    low, high = wilson(solved, len(late))[0], wilson(*case.heldout)[1]
    train, heldout = solved / len(late), case.heldout[0] / case.heldout[1]
    if train - heldout <= 0.15 or low <= high:
        return None
    return Finding(
        "gap between train and held-out",
        f"success {train:.2f} on the last training rollouts, {heldout:.2f} on {case.heldout[1]} held-out tasks",
        "0.15, with intervals apart",
        "more, and more varied, training tasks; fewer steps; check that splits are disjoint in kind, not in wording",
    )

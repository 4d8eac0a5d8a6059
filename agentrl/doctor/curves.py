"""Checks of the curves of training."""

from statistics import fmean

from agentrl.doctor.case import FEW, Case, Finding, curve, thirds
from agentrl.doctor.rewards import spread_of


def kl_blow_up(case: Case) -> Finding | None:
    """The divergence from the reference (without one: from the policy that sampled) exceeds 0.5 nats per token."""
    series = curve(case, "reference_kl") or (curve(case, "behaviour_kl") if case.updates > 1 else [])
    if len(series) < 3 or max(series) <= 0.5:
        return None
    return Finding(
        "the policy runs away (KL blow-up)",
        f"divergence went from {series[0]:.3g} to {max(series):.3g} nats per token",
        "0.5",
        "lower lr, raise kl.coef, or take fewer updates per iteration",
    )


def collapse(case: Case) -> Finding | None:
    """Mean success, over windows of an eighth of the steps, ends more than 0.2 below its maximum."""
    series = curve(case, "success")
    width = max(2, len(series) // 8)
    if len(series) < 4 * width:
        return None
    windows = [fmean(series[start : start + width]) for start in range(len(series) - width + 1)]
    if max(windows) - windows[-1] <= 0.2:
        return None
    return Finding(
        "success collapsed",
        f"mean success fell from {max(windows):.2f} to {windows[-1]:.2f} (over {width} steps)",
        "a fall of 0.2",
        "go back to the checkpoint before the fall with a lower lr; clip harder; add kl",
    )


def echo_trap(case: Case) -> Finding | None:
    """Entropy and the spread of rewards fall while the reward does not rise (RAGEN: Wang et al. 2025)."""
    entropy = curve(case, "entropy")
    if len(entropy) < 6 or len(case.rollouts) < 6 * FEW:
        return None
    before, after = (fmean(part) for part in thirds(entropy))
    early, late = ([row["reward"] for row in part] for part in thirds(case.rollouts))
    spread = spread_of(thirds(case.rollouts)[0]), spread_of(thirds(case.rollouts)[1])
    if spread[0] == 0 or after > 0.5 * before or spread[1] > 0.5 * spread[0] or fmean(late) > fmean(early) + 0.02:
        return None
    return Finding(
        "echo trap",
        f"entropy {before:.3g} -> {after:.3g}, spread of rewards within groups {spread[0]:.3g} -> {spread[1]:.3g}, "
        f"reward {fmean(early):.3g} -> {fmean(late):.3g}",
        "entropy and spread halve while the reward rises by less than 0.02",
        "keep uncertain groups (keep_uncertain: 0.25), clip higher (clip_high: 0.28), add an entropy bonus, vary tasks",
    )


def low_ess(case: Case) -> Finding | None:
    """The mean effective sample size is below 0.3 of the rows."""
    series = curve(case, "ess")
    if not series or fmean(series) >= 0.3:
        return None
    return Finding(
        "low effective sample size",
        f"mean {fmean(series):.2f} of the rows, lowest {min(series):.2f}",
        "0.3",
        "use fresher rollouts (max_staleness), fewer updates per iteration, truncated weights, or min_ess",
    )

"""Checks of the curves of training."""

from collections.abc import Sequence
from statistics import fmean, median

from agentrl.doctor.case import FEW, Case, Finding, curve, step_of, thirds
from agentrl.doctor.rewards import spread_of

KL = 0.5
"""Nats per token that the policy may be away from the reference."""

KL_OF_UPDATES = {"gspo": 0.05}
"""Nats per token by which updates of one iteration may leave the policy that sampled, if it is not 0.5. GSPO clips
ratios at a thousandth of the usual."""

CLIP_SHARE = {"gspo": 0.6}
"""Share of action tokens whose ratios may be clipped, if it is not 0.3. GSPO clips whole rows, about a hundred times as
many tokens as GRPO (Zheng et al. 2025, section 5.3)."""


STILL = 1e-5
"""Nats per token below which the policy has not moved."""

FALL = 0.2
"""How far success may fall below its maximum, both means over windows of steps, see :func:`means`."""

ESS = 0.3
"""Share of the rows that the mean effective sample size has at least."""


def kl_bound(case: Case) -> tuple[str, float]:
    """The metric that says how far the policy went, and its bound in nats per token: from the reference; without one,
    from the policy that sampled."""
    if case.updates > 1 and not curve(case, "reference_kl"):
        return "behaviour_kl", KL_OF_UPDATES.get(case.algorithm, KL)
    return "reference_kl", KL


def clip_bound(case: Case) -> float:
    """Share of the action tokens whose ratios may be clipped."""
    return CLIP_SHARE.get(case.algorithm, 0.3)


def means(series: Sequence[float]) -> list[float]:
    """Means over windows of an eighth of the steps, at least 2; none if there are fewer than four windows."""
    width = max(2, len(series) // 8)
    if len(series) < 4 * width:
        return []
    return [fmean(series[start : start + width]) for start in range(len(series) - width + 1)]


def kl_blow_up(case: Case) -> Finding | None:
    """The divergence from the reference exceeds 0.5 nats per token; without one, that from the policy that sampled
    exceeds what the algorithm allows."""
    name, bound = kl_bound(case)
    series = curve(case, name)
    if len(series) < 3 or max(series) <= bound:
        return None
    return Finding(
        "the policy runs away (KL blow-up)",
        f"divergence went from {series[0]:.3g} to {max(series):.3g} nats per token",
        f"{bound}",
        f"lower optimizer.lr ({rates(case)}), raise kl.coef, or take fewer updates per iteration",
        step=step_of(case, name, max),
    )


def no_movement(case: Case) -> Finding | None:
    """The policy is where it began: its divergence from the reference, or if an iteration takes several updates, from
    the policy that sampled, stays below 0.00001 nats per token."""
    name = "behaviour_kl" if case.updates > 1 and not curve(case, "reference_kl") else "reference_kl"
    series = curve(case, name)
    if len(series) < 3 or max(map(abs, series[1:])) >= STILL:
        return None
    return Finding(
        "the policy does not move",
        f"{name} is at most {max(map(abs, series[1:])):.2g} nats per token over {len(series)} steps; {rates(case)}",
        f"{STILL:g}",
        "raise optimizer.lr (three times as high is a good try); check that rewards differ within groups",
        step=int(case.metrics[-1]["step"]),
    )


def entropy_collapse(case: Case) -> Finding | None:
    """The entropy of the first steps falls to less than a twentieth within the run, and success does not rise by more
    than 0.02. A supervised stage has no success: there it is the aim that entropy falls."""
    entropy, success = curve(case, "entropy"), curve(case, "success")
    if len(entropy) < 6 or not success:
        return None
    before, after = entropy[0], fmean(thirds(entropy)[1])
    if before <= 0 or after > before / 20 or fmean(thirds(success)[1]) > fmean(thirds(success)[0]) + 0.02:
        return None
    return Finding(
        "the policy collapsed onto one answer",
        f"entropy {before:.3g} -> {after:.3g} nats per token, and success did not rise; {rates(case)}",
        "a twentieth of the first step's entropy",
        "lower optimizer.lr (a third of it is a good try); add kl or an entropy bonus; keep more samples per task",
        step=step_of(case, "entropy", min),
    )


def collapse(case: Case) -> Finding | None:
    """Mean success, over windows of an eighth of the steps, ends more than 0.2 below its maximum."""
    series = curve(case, "success")
    windows = means(series)
    if not windows or max(windows) - windows[-1] <= FALL:
        return None
    width = len(series) - len(windows) + 1
    return Finding(
        "success collapsed",
        f"mean success fell from {max(windows):.2f} to {windows[-1]:.2f} (over {width} steps); {rates(case)}",
        "a fall of 0.2",
        "lower optimizer.lr (a third of it is a good try), go on from output `best` of the stage (wire its input "
        "`dev` to have one); clip harder; add kl",
        step=int(case.metrics[-1]["step"]),
    )


def sudden_fall(case: Case) -> Finding | None:
    """Success of one iteration is more than 0.3 below the mean of the three before it."""
    rows = [row for row in case.metrics if row.get("success") is not None]
    falls = [
        (fmean(row["success"] for row in rows[max(0, index - 3) : index]) - rows[index]["success"], index)
        for index in range(1, len(rows))
    ]
    if len(rows) < 3 or (worst := max(falls))[0] <= 0.3:
        return None
    fall, index = worst
    step = rows[index]["step"]
    return Finding(
        "success fell in one iteration",
        f"by {fall:.2f} to {rows[index]['success']:.2f} at iteration {step:.0f}; {rates(case, index)}",
        "a fall of 0.3 below the three iterations before",
        "lower optimizer.lr (a third of it is a good try), raise warmup, or lower clip_norm to the usual gradient norm",
        step=int(step),
    )


def rates(case: Case, index: int | None = None) -> str:
    """The learning rate and the gradient norm of the update before the row of metrics at ``place``, or the highest of
    all, with the median of the norms, as text."""
    rows = [row for row in case.metrics if row.get("lr") is not None and row.get("grad_norm") is not None]
    if index is not None:
        before = case.metrics[index]["step"]
        chosen = [row for row in rows if row["step"] < before][-1:]
    else:
        chosen = rows
    if not chosen:
        return "learning rate and gradient norm are not recorded"
    lr, norm = max(row["lr"] for row in chosen), max(row["grad_norm"] for row in chosen)
    usual = median(row["grad_norm"] for row in rows)
    when = "before it" if index is not None else "at most"
    return f"lr {lr:.2g} and gradient norm {norm:.2g} {when}, usually {usual:.2g}"


def clipping(case: Case) -> Finding | None:
    """In late steps the ratios of more action tokens are out of bounds than the algorithm is made for."""
    series, bound = curve(case, "clip_share"), clip_bound(case)
    if len(series) < 3 or fmean(thirds(series)[1]) <= bound:
        return None
    return Finding(
        "most updates are clipped",
        f"{fmean(thirds(series)[1]):.0%} of the action tokens of the last third of steps; {rates(case)}",
        f"{bound:.0%} for {case.algorithm or 'this algorithm'}",
        "lower lr, take fewer updates per iteration, or use fresher rollouts",
        step=step_of(case, "clip_share", max),
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
    if not series or fmean(series) >= ESS:
        return None
    return Finding(
        "low effective sample size",
        f"mean {fmean(series):.2f} of the rows, lowest {min(series):.2f}",
        f"{ESS}",
        "use fresher rollouts (max_staleness), fewer updates per iteration, truncated weights, or min_ess",
        step=step_of(case, "ess", min),
    )

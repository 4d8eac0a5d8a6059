"""Checks of lengths, action masks and log-probs."""

import math
from statistics import fmean

from agentrl.doctor.case import FEW, SHOWN, Case, Finding, curve, names, share_of, thirds

DRIFT = 0.01
"""Nats per token by which the policy may differ, before its update, from the one that sampled."""

ROUTED = 0.01
"""Mean distance of log-probs, in nats, of a mixture of experts from those of its engine: in bfloat16 that of routes
replayed is less than this (benchmarks/results/exactness.md)."""


def drift_metric(case: Case) -> str | None:
    """The metric that says how far the policy is, before its update, from the one that sampled; None if none does."""
    if curve(case, "sampler_kl"):
        return "sampler_kl"
    return "behaviour_kl" if case.updates == 1 else None


def truncation(case: Case) -> Finding | None:
    """More than 20 % of the rollouts ended because they reached a limit of tokens."""
    cut = [row["trajectory_id"] for row in case.rollouts if row["termination"] == "max_tokens"]
    share = share_of(row["termination"] == "max_tokens" for row in case.rollouts)
    if len(case.rollouts) < FEW or share <= 0.2:
        return None
    return Finding(
        "rollouts are cut off",
        f"{share:.0%} of {len(case.rollouts)} rollouts ended by max_tokens",
        "20 %",
        "raise max_tokens or max_turn_tokens, or punish length softly (overlong: {limit, buffer})",
        rows=tuple(cut[:SHOWN]),
    )


def format_errors(case: Case) -> Finding | None:
    """More than 10 % of the late rollouts ended in a turn whose tool calls cannot be read."""
    late = thirds(case.rollouts)[1] if case.rollouts else []
    broken = [row["trajectory_id"] for row in late if row["termination"] == "format_error"]
    if len(late) < FEW or len(broken) <= 0.1 * len(late):
        return None
    return Finding(
        "format errors",
        f"{len(broken)} of the last {len(late)} rollouts ended in a tool call that cannot be read ({names(broken)})",
        "10 %",
        "look at one with `agentrl buffer show ID`; warm up with demonstrations in the model's own dialect; raise "
        "max_turn_tokens if calls are cut off; lower lr if they came up in training",
        rows=tuple(broken[:SHOWN]),
    )


def length_explosion(case: Case) -> Finding | None:
    """Late rollouts have more than twice as many tokens as early ones."""
    if len(case.rollouts) < 6 * FEW:
        return None
    early, late = (fmean([row["n_tokens"] for row in part]) for part in thirds(case.rollouts))
    if not early or late <= 2 * early:
        return None
    longest = sorted(thirds(case.rollouts)[1], key=lambda row: -row["n_tokens"])
    return Finding(
        "length explosion",
        f"tokens per rollout went from {early:.0f} to {late:.0f}",
        "twice the early length",
        "aggregate: constant (Dr. GRPO) or token (DAPO), and overlong: {limit, buffer}",
        rows=tuple(row["trajectory_id"] for row in longest[:SHOWN]),
    )


def masks(case: Case) -> Finding | None:
    """Action tokens outside assistant spans, or none at all."""
    outside, places, none = [], [], []
    for row in case.sample:
        if not row["input_ids"]:
            continue
        spans = [
            (m["token_start"], m["token_end"])
            for m in row["messages"]
            if m["role"] == "assistant" and m["token_start"] is not None
        ]
        inside = [False] * len(row["input_ids"])
        for start, end in spans:
            inside[start:end] = [True] * (end - start)
        if not any(row["action_mask"]):
            none.append(row["trajectory_id"])
        else:
            wrong = (action and not within for action, within in zip(row["action_mask"], inside, strict=False))
            position = next((token for token, is_wrong in enumerate(wrong) if is_wrong), None)
            if position is not None:
                outside.append(row["trajectory_id"])
                places.append(position)
    if not outside and not none:
        return None
    return Finding(
        "wrong action masks",
        f"{len(outside)} rows with action tokens outside assistant messages ({names(outside) or '-'}), "
        f"{len(none)} without any ({names(none) or '-'}), of {len(case.sample)} looked at",
        "none",
        "look at one with `agentrl buffer show ID --tokens`; fix the chat template or the import that made the mask",
        rows=tuple([*outside, *none][:SHOWN]),
        tokens=tuple([*places, *(0 for _ in none)][:SHOWN]),
    )


def logprobs(case: Case) -> Finding | None:
    """Log-probs that are not finite or are positive, that differ from those of the policy that sampled, or of the
    policy that is updated."""
    broken, places, gaps = [], [], []
    for row in case.sample:
        known = [value for value, action in zip(row["logprobs"], row["action_mask"], strict=False) if action]
        if not all(map(_possible, known)):
            broken.append(row["trajectory_id"])
            sampled = zip(row["logprobs"], row["action_mask"], strict=False)
            places.append(
                next(position for position, (value, action) in enumerate(sampled) if action and not _possible(value))
            )
        elif known and row["trajectory_id"] in case.recomputed:
            again = case.recomputed[row["trajectory_id"]]
            new = [value for value, action in zip(again, row["action_mask"], strict=True) if action]
            gaps.append(fmean(abs(a - b) for a, b in zip(known, new, strict=True)))
    gap = fmean(gaps) if gaps else 0.0
    drift = max(curve(case, drift_metric(case) or ""), default=0.0)
    if not broken and drift <= DRIFT and gap <= 0.05:
        return None
    return Finding(
        "log-probs do not match the policy",
        f"{len(broken)} rows with log-probs that are not finite or above 0 ({names(broken) or '-'}); "
        f"computed again under the policy that sampled, those of {len(gaps)} rows differ by {gap:.3g} a token; "
        f"divergence of the trained policy, before its update, from the one that sampled is up to {drift:.3g}",
        f"none; 0.05; {DRIFT}",
        "sample and train with the same weights, precision and temperature, or set off_policy: {truncate: 2}",
        rows=tuple(broken[:SHOWN]),
        tokens=tuple(places[:SHOWN]),
    )


def routes(case: Case) -> Finding | None:
    """Of a mixture of experts whose routers choose anew in training, log-probs of fresh rollouts that are far from
    those of the engine."""
    fresh = [row for row in case.metrics if row.get("own_routes_dlogp") is not None and not row.get("max_staleness")]
    if any(row.get("replayed_routes_dlogp") is not None for row in case.metrics) or not fresh:
        return None
    worst = max(fresh, key=lambda row: row["own_routes_dlogp"])
    if worst["own_routes_dlogp"] <= ROUTED:
        return None
    return Finding(
        "routes of experts are not replayed",
        "before an update, log-probs of fresh rollouts differ from the engine's by "
        f"{worst['own_routes_dlogp']:.3g} nats a token on average, and by up to {worst['own_routes_max_dlogp']:.3g}: "
        "routers may choose other experts in training than in sampling, which cannot be told without their routes",
        f"{ROUTED}",
        "set routes: replay, which says how much of it the routes are; or sample in the precision that you train in",
        step=int(worst["step"]),
    )


def _possible(logprob: float) -> bool:
    return math.isfinite(logprob) and logprob <= 1e-4

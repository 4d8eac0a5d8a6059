"""The doctor's bounds as bands beside the curves of training: where a metric counts as sick."""

from dataclasses import dataclass

from agentrl.doctor.case import Case, curve
from agentrl.doctor.curves import ESS, FALL, clip_bound, kl_bound, means
from agentrl.doctor.tokens import DRIFT, drift_metric


@dataclass(frozen=True)
class Band:
    """``metric`` counts as sick ``above`` the bound, or below it. ``counts`` is what is compared with it."""

    metric: str
    bound: float
    above: bool
    counts: str


def bands(case: Case) -> list[Band]:
    """The bounds on metrics that a stage recorded, in the order of the checks."""
    name, bound = kl_bound(case)
    watched = [
        Band(name, bound, True, "its highest value"),
        Band("clip_share", clip_bound(case), True, "the last third"),
    ]
    if best := max(means(curve(case, "success")), default=0.0):
        watched.append(Band("success", best - FALL, False, "the mean of the last eighth of the steps"))
    if drift := drift_metric(case):
        watched.append(Band(drift, DRIFT, True, "its highest value"))
    watched.append(Band("ess", ESS, False, "the mean of all steps"))
    return [band for band in watched if curve(case, band.metric)]

"""Measures of a reward model's scores beside what they should be."""

from statistics import fmean
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from agentrl.statistics.calibration import CalibrationBin, auc, auc_within, brier, calibration, ece

ENOUGH = 0.5
"""A state that is worth at least this counts as good where a measure needs two classes."""


class ScoredLabels(NamedTuple):
    """Scores, labels and tasks, one of each for each labelled token."""

    scores: list[float]
    labels: list[float]
    tasks: list[str]


def measures(scored: ScoredLabels) -> dict[str, float | int | None]:
    """How well scores rank and how well they hold. ``brier_base`` is that of the best constant, the mean label. What
    cannot be measured, such as ranks where all labels are equal, is None."""
    scores, labels, tasks = scored
    if not scores:
        return dict.fromkeys(("base_rate", "auc", "auc_within", "brier", "brier_base", "ece"))
    good = [label >= ENOUGH for label in labels]
    within = auc_within(scores, good, tasks)
    return {
        "base_rate": fmean(labels),
        "auc": auc(scores, good),
        "auc_within": fmean(within) if within else None,
        "tasks_with_both": len(within),
        "brier": brier(scores, labels),
        "brier_base": brier([fmean(labels)] * len(labels), labels),
        "ece": ece(calibration(scores, labels)),
    }


def error(scored: ScoredLabels) -> float | None:
    """What 95 % of the errors are below; None if nothing was measured."""
    if not scored.scores:
        return None
    return float(np.quantile(np.abs(np.subtract(scored.scores, scored.labels)), 0.95))


def calibration_table(scored: ScoredLabels) -> pa.Table:
    """The bins of :func:`agentrl.statistics.calibration.calibration`, [at most 10]."""
    schema = pa.schema([(name, pa.int64() if name == "rows" else pa.float64()) for name in CalibrationBin._fields])
    bins = calibration(scored.scores, scored.labels) if scored.scores else []
    return pa.Table.from_pylist([each._asdict() for each in bins], schema)

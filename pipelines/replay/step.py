"""Replay one training step from Parquet: the policy is trained again from its start on the recorded rows, without
sampling anything, and the step's loss and gradient norm stand beside the recorded ones."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.replay.compared import Turned, cosine, gradient, trained_on, turned
from agentrl.pipelines.replay.recorded import (
    RowsOfStep,
    StepRows,
    config_of,
    metrics_of,
    start_of,
    steps_of,
    table_of,
)
from agentrl.pipelines.replay.rollouts import Again
from agentrl.pipelines.replay.settings import ReplayError, StepChange, changed_by, objective_of
from agentrl.pipelines.replay.stored import StoredRows
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.pipelines.stages.train import OfflineConfig, TrainConfig
from agentrl.schemas.manifest import THREADS, Manifest

if TYPE_CHECKING:
    from agentrl.algorithms.base import Objective

ALWAYS = ("reward", "dropped_groups", "unscored")
"""Metrics of rollouts that are shown if rows were made again, even if they are as they were."""


@dataclass(frozen=True)
class Replayed:
    """One step: what was ``recorded`` and what was computed again, for the metrics that both have.

    With other settings ``replayed`` has the ``cosine`` of its gradient and the recorded one, both over all rows of the
    step at the policy before it. If rows were made again from rollouts, both have what they train on, and ``turned``
    has the rollouts whose advantage has another sign.
    """

    step: int
    rows: int
    recorded: dict[str, float]
    replayed: dict[str, float]
    changed: tuple[str, ...]
    turned: tuple[Turned, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether loss and gradient norm agree to six digits; on the machine that trained they agree to the last."""
        pairs = [(self.recorded.get(name), self.replayed[name]) for name in ("loss", "grad_norm")]
        return all(old is not None and abs(old - new) <= 1e-6 * max(1e-3, abs(old)) for old, new in pairs)

    @property
    def turns(self) -> dict[str, int]:
        """How many rollouts went from one sign of the advantage to another, such as ``+ to 0``."""
        return dict(Counter(row.signs for row in self.turned).most_common())

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "turned": [vars(row) for row in self.turned], "equal": self.equal}


def replay(catalog: Catalog, manifest: Manifest, step: int, settings: Sequence[str] = ()) -> Replayed:
    """Compute optimiser step ``step`` (of an online stage: iteration) of a training artifact again. ``settings``, such
    as ``beta=0.3`` or ``algorithm.clip_high=0.3``, apply to that step only. Those that act on the advantages, rewards
    or filters of ``train.online``, or the advantages and scores of ``train.offline``, take its rows from the stored
    rollouts again. It is computed with as many threads as it was, so that its last bits are the same.

    Raises ReplayError if the artifact is of no training stage, the step was never taken, a setting is unknown or cannot
    be computed from what is stored, or the model that it started from is not there as it was.
    """
    import torch

    config = config_of(manifest)
    if threads := manifest.environment.get(THREADS):
        torch.set_num_threads(int(threads))
    if getattr(config, "routes", None):
        warnings.warn(
            "the stage replayed routes of experts, which were removed at its end: here routers choose anew, so numbers "
            "differ from the recorded ones by more than rounding",
            stacklevel=2,
        )
    change = changed_by(config, settings)
    metrics = metrics_of(catalog, manifest, step)
    training = Retraining(catalog, manifest, config, change)
    for number, batches, lr_scale in steps_of(catalog, manifest, config):
        if number < step:
            training.earlier(number, batches, lr_scale)
        if number == step:
            return _step(training, batches, lr_scale, metrics, settings)
    raise ReplayError(f"step {step} has no recorded rows; run the stage again to record them")


def _step(
    training: "Retraining", batches: StepRows, lr_scale: float, metrics: dict[str, float], settings: Sequence[str]
) -> Replayed:
    """The step that comes next, with its changed settings, beside the recorded ``batches`` and ``metrics``."""
    from agentrl.training.batch import TrainingError

    step, change = int(metrics["step"]), training.change
    made = training.made(step, batches, lr_scale)
    if not made.batches:
        settled = f" with {' '.join(settings)}" if change.of_rows else ""
        raise ReplayError(f"step {step} updated nothing{settled}: all its groups were dropped, or it was skipped")
    before = gradient(training.trainer, batches) if settings and batches else None
    training.take(change)
    training.check_reference(made.batches)
    means = {}
    try:
        if before is not None:
            means["cosine"] = cosine(before, gradient(training.trainer, made.batches))
        means |= training.steps(step, made)
    except TrainingError as error:
        raise ReplayError(f"{' '.join(settings)}: {error}" if settings else str(error)) from error
    recorded = made.recorded | {name: metrics[name] for name in means if metrics.get(name) is not None}
    return Replayed(step, sum(map(len, made.batches)), recorded, made.replayed | means, tuple(settings), made.turned)


class Retraining:
    """A stage that is trained again, step by step."""

    def __init__(self, catalog: Catalog, manifest: Manifest, config: Any, change: StepChange) -> None:
        from agentrl.training.step import Trainer

        self.catalog, self.manifest, self.config, self.change = catalog, manifest, config, change
        self.updates = config.updates if isinstance(config, OnlineConfig) else 1
        self.policy = start_of(catalog, manifest, config)
        online = isinstance(config, OnlineConfig)
        self.again = Again(catalog, manifest, config, change, self.policy) if change.of_rows and online else None
        self.stored = (
            StoredRows(catalog, manifest, config, change, self.policy) if change.of_rows and not online else None
        )
        self.scale = float(manifest.metrics.get("lr_scale") or 1.0) if isinstance(config, OfflineConfig) else 1.0
        total = config.steps if isinstance(config, TrainConfig) else config.iterations * config.updates
        optimizer = config.optimizer.model_copy(update={"lr": config.optimizer.lr * self.scale})
        self.trainer = (
            self.again.trainer
            if self.again
            else Trainer(self.policy, objective_of(config), optimizer, total, seed=manifest.ingredients.seed)
        )

    def earlier(self, number: int, batches: StepRows, lr_scale: float) -> None:
        """Take a step before the one that is replayed, as it was recorded."""
        if self.again:
            self.again.earlier(number, batches, lr_scale)
            return
        self.steps(number, RowsOfStep(batches, lr_scale))

    def steps(self, number: int, made: RowsOfStep) -> dict[str, float]:
        """Take the optimiser steps of a step, and return the means of their metrics."""
        first = number * self.updates
        history = [self.trainer.step(batch, made.lr_scale, index) for index, batch in enumerate(made.batches, first)]
        names = history[0] if history else ()
        return {name: sum(metrics[name] for metrics in history) / len(history) for name in names}

    def made(self, number: int, batches: StepRows, lr_scale: float) -> RowsOfStep:
        """What the step trains on with the changed settings, given what it was recorded to train on."""
        if self.stored:
            return self.stored.made(number, batches)
        if self.again is None:
            return RowsOfStep(batches, lr_scale)
        made, rows = self.again.made(number, batches)
        steps = table_of(self.catalog, self.manifest, "steps")
        records = steps.filter(pc.equal(steps["step"], number)).to_pylist()
        metrics = metrics_of(self.catalog, self.manifest, number)
        shown = {
            name: value
            for name, value in made.metrics.items()
            if name in ALWAYS or abs(value - (metrics.get(name) or 0.0)) > 1e-9
        }
        old = {name: metrics[name] for name in shown if metrics.get(name) is not None}
        return RowsOfStep(
            [rows_of_step for _, rows_of_step in made.parts],
            made.lr_scale,
            old | trained_on(records, rows, self.again.group_of),
            shown | trained_on(made.records, rows, self.again.group_of),
            turned(records, made.records),
        )

    def take(self, change: StepChange) -> None:
        """Minimise by the changed settings from now on."""
        optimizer = change.config.optimizer
        self.trainer.objective = objective_of(change.config)
        self.policy.prepare(optimizer.precision)
        if self.stored:
            self.scale = self.stored.lr_scale
        self.trainer.config = optimizer.model_copy(update={"lr": optimizer.lr * self.scale})

    def check_reference(self, batches: StepRows) -> None:
        """Raise ReplayError if the loss compares with a reference whose log-probs the rows do not have."""
        objective: Objective = self.trainer.objective
        kl = getattr(objective, "kl", None)
        needed = getattr(objective, "reference", False) or (kl is not None and kl.where == "loss")
        if needed and not all((np.diff(rows.lists("ref_logprobs")[0]) > 0).all() for rows in batches):
            raise ReplayError(
                f"{getattr(objective, 'type', 'this loss')} compares with a reference policy, whose log-probs this "
                "stage did not record; replay it with a loss without one, or run the stage again with this loss"
            )

"""Replay one training step from Parquet: the policy is trained again from its start on the recorded rows, without
sampling anything, and the step's loss and gradient norm stand beside the recorded ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.replay.recorded import StepRows, config_of, metrics_of, start_of, steps_of
from agentrl.pipelines.replay.settings import ReplayError, changed_by, objective_of
from agentrl.pipelines.stages.grpo import OnlineConfig
from agentrl.pipelines.stages.train import OfflineConfig, TrainConfig
from agentrl.schemas.manifest import Manifest

if TYPE_CHECKING:
    from agentrl.algorithms.base import Objective


@dataclass(frozen=True)
class Replayed:
    """One step: what was ``recorded`` and what was computed again, for the metrics that both have."""

    step: int
    rows: int
    recorded: dict[str, float]
    replayed: dict[str, float]
    changed: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether loss and gradient norm agree to six digits; on the machine that trained they agree to the last."""
        names = ("loss", "grad_norm")
        return all(abs(self.recorded[n] - self.replayed[n]) <= 1e-6 * max(1e-3, abs(self.recorded[n])) for n in names)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "equal": self.equal}


def replay(catalog: Catalog, manifest: Manifest, step: int, settings: Sequence[str] = ()) -> Replayed:
    """Compute optimiser step ``step`` (of an online stage: iteration) of a training artifact again. ``settings``, such
    as ``beta=0.3`` or ``algorithm.clip_high=0.3``, apply to that step only.

    Raises ReplayError if the artifact is of no training stage, the step was never taken, a setting is unknown, or the
    model that it started from is not there as it was.
    """
    from agentrl.training.step import Trainer

    config = config_of(manifest)
    changed = changed_by(config, settings)
    metrics = metrics_of(catalog, manifest, step)
    policy = start_of(catalog, manifest, config)
    total = config.steps if isinstance(config, TrainConfig) else config.iterations * config.updates
    scale = float(manifest.metrics.get("lr_scale") or 1.0) if isinstance(config, OfflineConfig) else 1.0
    optimizer = config.optimizer.model_copy(update={"lr": config.optimizer.lr * scale})
    trainer = Trainer(policy, objective_of(config), optimizer, total, seed=manifest.ingredients.seed)
    updates = config.updates if isinstance(config, OnlineConfig) else 1
    for number, batches, lr_scale in steps_of(catalog, manifest, config):
        first = number * updates
        if number < step:
            for index, batch in enumerate(batches, first):
                trainer.step(batch, lr_scale, index)
        elif number == step:
            trainer.objective = objective_of(changed)
            _check_reference(trainer.objective, batches)
            policy.prepare(changed.optimizer.precision)
            trainer.config = changed.optimizer.model_copy(update={"lr": changed.optimizer.lr * scale})
            history = [trainer.step(batch, lr_scale, number) for number, batch in enumerate(batches, first)]
            means = {
                name: sum(metrics_of_batch[name] for metrics_of_batch in history) / len(history) for name in history[0]
            }
            recorded = {name: metrics[name] for name in means if metrics.get(name) is not None}
            return Replayed(step, sum(map(len, batches)), recorded, means, tuple(settings))
    raise ReplayError(f"step {step} updated nothing: all its groups were dropped, or it was skipped")


def _check_reference(objective: "Objective", batches: StepRows) -> None:
    kl = getattr(objective, "kl", None)
    needed = getattr(objective, "reference", False) or (kl is not None and kl.where == "loss")
    if needed and not all((np.diff(rows.lists("ref_logprobs")[0]) > 0).all() for rows in batches):
        raise ReplayError(
            f"{getattr(objective, 'type', 'this loss')} compares with a reference policy, whose log-probs this stage "
            "did not record; replay it with a loss without one, or run the stage again with this loss"
        )

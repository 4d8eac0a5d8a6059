"""Replay one training step from Parquet: the policy is trained again from its start on the recorded rows, without
sampling anything, and the step's loss and gradient norm stand beside the recorded ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow.compute as pc
from pydantic import BaseModel, ValidationError

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file import yaml_text
from agentrl.pipelines.file.external import pinned, with_paths
from agentrl.pipelines.file.library import resolve
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.parts.common import ModelConfig, outside_policy
from agentrl.pipelines.stages.grpo import OnlineConfig
from agentrl.pipelines.stages.train import DPOConfig, KTOConfig, OfflineConfig, PreferenceConfig, SFTConfig, TrainConfig
from agentrl.schemas.manifest import Manifest

if TYPE_CHECKING:
    from agentrl.algorithms.base import Objective
    from agentrl.models.policy import Policy
    from agentrl.training.rows import TrainingRows

KNOBS = ("algorithm", "objective", "optimizer", "beta", "nll", "length_normalized")
"""What ``--set`` may change: what acts on a step whose rows, with their advantages, are recorded."""

IN_ADVANTAGES = (
    *("advantage", "degenerate", "keep_uncertain", "resample", "overlong", "credit", "per_level", "off_policy"),
    *("level", "gamma", "lam", "critic_lam", "adaptive_alpha", "whiten", "critic", "coef", "outcome"),
)
"""Settings of an algorithm that act before the step: they decide which rows there are, and their advantages."""

StepRows: TypeAlias = "list[TrainingRows]"


class ReplayError(ValueError):
    """What cannot be replayed, and why."""


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

    config = _config(manifest)
    changed = _changed(config, settings)
    metrics = _metrics(catalog, manifest, step)
    policy = _start(catalog, manifest, config)
    total = config.steps if isinstance(config, TrainConfig) else config.iterations * config.updates
    scale = float(manifest.metrics.get("lr_scale") or 1.0) if isinstance(config, OfflineConfig) else 1.0
    optimizer = config.optimizer.model_copy(update={"lr": config.optimizer.lr * scale})
    trainer = Trainer(policy, objective_of(config), optimizer, total, seed=manifest.ingredients.seed)
    updates = config.updates if isinstance(config, OnlineConfig) else 1
    for number, batches, lr_scale in _steps(catalog, manifest, config):
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


def _config(manifest: Manifest) -> Any:
    """The config of a training stage. Models outside the store are at the very content that they had."""
    ingredients = manifest.ingredients
    stage = resolve(ingredients.uses)
    try:
        config = stage.config.model_validate(with_paths(ingredients.config, manifest.environment))
    except ValidationError as error:
        raise ReplayError(
            f"the config of {ingredients.stage} cannot be read any more: {_first(error)}; if it names a class of your "
            "own or a relative path, replay in the folder where it ran"
        ) from None
    if not isinstance(config, TrainConfig | OnlineConfig):
        raise ReplayError(f"{ingredients.stage} is of stage {stage.name}, which trains nothing")
    try:
        return pinned(config, ingredients.externals)
    except LookupError as error:
        raise ReplayError(f"{ingredients.stage} cannot be replayed: {error.args[0]}") from None


def _check_reference(objective: "Objective", batches: StepRows) -> None:
    kl = getattr(objective, "kl", None)
    needed = getattr(objective, "reference", False) or (kl is not None and kl.where == "loss")
    if needed and not all((np.diff(rows.lists("ref_logprobs")[0]) > 0).all() for rows in batches):
        raise ReplayError(
            f"{getattr(objective, 'type', 'this loss')} compares with a reference policy, whose log-probs this stage "
            "did not record; replay it with a loss without one, or run the stage again with this loss"
        )


def objective_of(config: BaseModel) -> "Objective":
    """What a training stage with this config minimises."""
    from agentrl.algorithms.dpo import DPO
    from agentrl.algorithms.sft import SFT

    if isinstance(config, SFTConfig):
        return SFT()
    if isinstance(config, DPOConfig):
        return DPO(beta=config.beta, nll=config.nll, length_normalized=config.length_normalized)
    if isinstance(config, PreferenceConfig | KTOConfig):
        return config.objective
    assert isinstance(config, OfflineConfig | OnlineConfig)
    return config.algorithm


def _family(config: BaseModel) -> type[BaseModel]:
    """The config class of the stage that takes any algorithm, or any loss over pairs, if this stage takes only one."""
    return next((family for family in (OnlineConfig, PreferenceConfig) if isinstance(config, family)), type(config))


def _changed(config: Any, settings: Sequence[str]) -> Any:
    if isinstance(config, DPOConfig):
        own = ("beta", "nll", "length_normalized")
        shared = {name: getattr(config, name) for name in TrainConfig.model_fields}
        settings = [f"objective.{setting}" if setting.partition("=")[0] in own else setting for setting in settings]
        config = PreferenceConfig.model_validate(shared | {"objective": objective_of(config)})
    document = config.model_dump(mode="json")
    for setting in sorted(settings, key=lambda setting: not setting.partition("=")[0].endswith(".type")):
        path, equals, text = setting.partition("=")
        keys = path.split(".")
        if not equals or keys[0] not in KNOBS or keys[0] not in document:
            allowed = [knob for knob in KNOBS if knob in document]
            hint = did_you_mean(keys[0], allowed)
            raise ReplayError(f"--set {setting}: allowed are NAME=VALUE of {', '.join(allowed)}{hint}")
        if keys[0] == "algorithm" and keys[1:] and keys[1] in IN_ADVANTAGES:
            raise ReplayError(
                f"--set {setting}: {keys[1]} acted on the recorded advantages; run the stage again with it"
            )
        if keys[1:] == ["type"]:  # choosing a type with no other key is the published algorithm
            document[keys[0]] = {}
        level = document
        for key in keys[:-1]:
            inside = level.get(key) or {}
            if not isinstance(inside, dict):
                raise ReplayError(f"--set {path}: {key} holds a value, not a mapping")
            level[key] = dict(inside)
            level = level[key]
        try:
            level[keys[-1]] = yaml_text.plain(text)
        except yaml_text.YamlError as error:
            raise ReplayError(f"--set {path}: the value {error.message}") from None
    try:
        return _family(config).model_validate(document)
    except ValidationError as error:
        raise ReplayError(f"--set {' '.join(settings)}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _file(catalog: Catalog, manifest: Manifest, output: str) -> Path:
    if output not in manifest.outputs:
        raise ReplayError(f"{manifest.ingredients.stage} has no output {output!r}; run the stage again to record it")
    return catalog.local(manifest, manifest.outputs[output].path)


def _table(catalog: Catalog, manifest: Manifest, output: str) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(_file(catalog, manifest, output))


def _metrics(catalog: Catalog, manifest: Manifest, step: int) -> dict[str, float]:
    rows = _table(catalog, manifest, "metrics").to_pylist()
    matches = [row for row in rows if row["step"] == step]
    if not matches:
        raise ReplayError(f"step {step} was never taken; steps are 0 to {len(rows) - 1}")
    return matches[0]


def _start(catalog: Catalog, manifest: Manifest, config: Any) -> "Policy":
    """The policy that training started from."""
    from agentrl.models.policy import Policy
    from agentrl.models.tiny import init_model

    for record in manifest.ingredients.inputs.get("model", []):
        upstream = catalog.manifest(record.stage, record.fingerprint)
        if upstream is None:
            raise ReplayError(f"the model it started from, {record.stage}/{record.fingerprint[:8]}, was removed")
        return Policy.load(catalog.local(upstream, upstream.outputs[record.output].path))
    model: ModelConfig = config.model
    if model.path is not None:
        return outside_policy(model.path)
    path = catalog.local(manifest, manifest.outputs["model"].path)
    tokenizer = Policy.load(path).tokenizer
    return Policy(init_model(tokenizer, manifest.ingredients.seed, model.size), tokenizer, name="tiny")


def _steps(catalog: Catalog, manifest: Manifest, config: Any) -> Iterator[tuple[int, StepRows, float]]:
    """The rows of every step in order: its number in the metrics, its optimiser steps, and the guard's factor on lr."""
    from agentrl.training.loop import epochs
    from agentrl.training.rows import TrainingRows, parquet_batches, write_rows

    if isinstance(config, TrainConfig):
        with TemporaryDirectory(prefix="agentrl-replay-") as folder:
            path = write_rows(Path(folder) / "rows.arrow", parquet_batches(_file(catalog, manifest, "rows")))
            rows = TrainingRows.open(path)
            batches = epochs(rows, config.batch, manifest.ingredients.seed)
            for number, positions in zip(range(config.steps), batches, strict=False):
                yield number, [rows.take(positions)], 1.0
        return
    scales = {row["step"]: row.get("lr_scale") or 1.0 for row in _table(catalog, manifest, "metrics").to_pylist()}
    batches = _table(catalog, manifest, "batches")
    for iteration in pc.unique(batches["iteration"]).sort().to_pylist():
        made = batches.filter(pc.equal(batches["iteration"], iteration))
        steps = [made.filter(pc.equal(made["step"], step)) for step in pc.unique(made["step"]).sort().to_pylist()]
        yield iteration, [TrainingRows.of_table(step) for step in steps], scales[iteration]

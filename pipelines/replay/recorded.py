"""What a training stage recorded of its steps, and the model that it started from."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow.compute as pc
from pydantic import ValidationError

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.external import pinned, with_paths
from agentrl.pipelines.file.library import resolve
from agentrl.pipelines.parts.common import ModelConfig, outside_policy
from agentrl.pipelines.replay.compared import Turned
from agentrl.pipelines.replay.settings import ReplayError, first_problem
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.pipelines.stages.train import TrainConfig
from agentrl.schemas.manifest import Manifest

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.training.rows import TrainingRows


StepRows: TypeAlias = "list[TrainingRows]"

AGREE = 1e-3
"""How far rows that are made again may be off the recorded ones, relative to them: log-probs of other hardware."""


@dataclass(frozen=True)
class RowsOfStep:
    """What a step trains on: the rows of its optimiser steps, the factor on the learning rate, and if they were made
    again from rollouts, metrics of these."""

    batches: StepRows
    lr_scale: float
    recorded: dict[str, float] = field(default_factory=dict)
    replayed: dict[str, float] = field(default_factory=dict)
    turned: tuple[Turned, ...] = ()


def config_of(manifest: Manifest) -> Any:
    """The config of a training stage. Models outside the store are at the very content that they had."""
    ingredients = manifest.ingredients
    stage = resolve(ingredients.uses)
    try:
        config = stage.config.model_validate(with_paths(ingredients.config, manifest.environment))
    except ValidationError as error:
        raise ReplayError(
            f"the config of {ingredients.stage} cannot be read any more: {first_problem(error)}; if it names a "
            "class of your own or a relative path, replay in the folder where it ran"
        ) from None
    if not isinstance(config, TrainConfig | OnlineConfig):
        raise ReplayError(f"{ingredients.stage} is of stage {stage.name}, which trains nothing")
    try:
        return pinned(config, ingredients.externals)
    except LookupError as error:
        raise ReplayError(f"{ingredients.stage} cannot be replayed: {error.args[0]}") from None


def _file(catalog: Catalog, manifest: Manifest, output: str) -> Path:
    if output not in manifest.outputs:
        raise ReplayError(f"{manifest.ingredients.stage} has no output {output!r}; run the stage again to record it")
    return catalog.local(manifest, manifest.outputs[output].path)


def table_of(catalog: Catalog, manifest: Manifest, output: str) -> Any:
    """The table that a stage put out. Raises ReplayError if it has no such output."""
    import pyarrow.parquet as pq

    return pq.read_table(_file(catalog, manifest, output))


def metrics_of(catalog: Catalog, manifest: Manifest, step: int) -> dict[str, float]:
    rows = table_of(catalog, manifest, "metrics").to_pylist()
    matches = [row for row in rows if row["step"] == step]
    if not matches:
        raise ReplayError(f"step {step} was never taken; steps are 0 to {len(rows) - 1}")
    return matches[0]


def start_of(catalog: Catalog, manifest: Manifest, config: Any) -> "Policy":
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


def steps_of(catalog: Catalog, manifest: Manifest, config: Any) -> Iterator[tuple[int, StepRows, float]]:
    """The rows of every step in order: its number in the metrics, its optimiser steps, and the guard's factor on lr. An
    iteration of an online stage that updated nothing has no rows."""
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
    scales = {row["step"]: row.get("lr_scale") or 1.0 for row in table_of(catalog, manifest, "metrics").to_pylist()}
    batches = table_of(catalog, manifest, "batches")
    for iteration, scale in sorted(scales.items()):
        made = batches.filter(pc.equal(batches["iteration"], int(iteration)))
        steps = [made.filter(pc.equal(made["step"], step)) for step in pc.unique(made["step"]).sort().to_pylist()]
        yield int(iteration), [TrainingRows.of_table(step) for step in steps], scale


def check_equal(recorded: StepRows, made: StepRows, number: int) -> None:
    """Raise ReplayError unless the rows that a stage's own settings make of its rollouts again are the recorded
    ones."""
    if [rows.ids() for rows in made] == [rows.ids() for rows in recorded]:
        pairs = [(old.lists("weights")[1], new.lists("weights")[1]) for old, new in zip(recorded, made, strict=True)]
        if all(np.allclose(old, new, rtol=AGREE, atol=1e-6) for old, new in pairs):
            return
    raise ReplayError(
        f"step {number}: its rollouts no longer give the rows that it trained on, by its own settings: the code of the "
        "algorithm, or the rollouts, changed since; run the stage again to compare advantages, rewards and filters"
    )

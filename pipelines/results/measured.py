"""What was measured: the outcome of each task in an evaluation or in rollouts, and the settings that it was made
by."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.results.lineage import Lineage, lineage
from agentrl.pipelines.run.execute import open_output
from agentrl.schemas.manifest import InputRecord, Kind, Manifest
from agentrl.schemas.trajectory import CONTROL
from agentrl.statistics.excluded import excluded, said_of_excluded

Task = tuple[str, str, str]
"""(environment, task id, prompt): the seeds of two arms may have drawn different tasks under one id."""

KeyPath = tuple[str, ...]
"""Where a value stands: the inputs that lead from the evaluation to a stage, and the key in that stage."""


@dataclass(frozen=True)
class Measured:
    """One evaluated artifact: the outcome of each task, and the settings of all that it was made from by their
    place."""

    manifest: Manifest
    policy: str
    outcomes: Mapping[Task, float]
    settings: Mapping[KeyPath, Any]
    unscored: int = 0
    counts: Mapping[Task, tuple[int, int]] = field(default_factory=dict)
    """Attempts at each task, and how many of them succeeded."""
    excluded: int = 0
    """Of the unscored rows, those that failed by no doing of the policy."""

    @property
    def label(self) -> str:
        return f"{self.manifest.ingredients.stage}/{self.manifest.fingerprint[:8]}"

    @property
    def doubtful(self) -> str:
        """What the outcomes are worth, if many attempts failed by no doing of the policy; else the empty text."""
        doubt = said_of_excluded(self.excluded, self.unscored + sum(attempts for attempts, _ in self.counts.values()))
        return f"{self.label}: {doubt}" if doubt else ""


def has_outcomes(manifest: Manifest) -> bool:
    return any(output.kind is Kind.TRAJECTORIES for output in manifest.outputs.values())


def attempts_of(catalog: Catalog, buffer: TrajectoryBuffer, manifest: Manifest) -> Trajectories:
    output = next(name for name, output in manifest.outputs.items() if output.kind is Kind.TRAJECTORIES)
    record = InputRecord(stage=manifest.ingredients.stage, output=output, fingerprint=manifest.fingerprint)
    handle = open_output(record, catalog, buffer)
    assert isinstance(handle, Trajectories)
    return handle


ROWS = ("env", "task_id", "prompt", "success", "tags", "segment", "termination")


def drawn_as(rows: Sequence[Mapping[str, Any]], decoding: str) -> list[Mapping[str, Any]]:
    """Those of rows with the columns :data:`ROWS` that an evaluation drew as ``sampled``, ``greedy`` or ``control``,
    the first segment of each episode. Attempts at dev tasks are none of these; rows without such a tag are
    ``sampled``."""
    first = [row for row in rows if not row["segment"] and "dev" not in row["tags"]]
    usual = [row for row in first if CONTROL not in row["tags"]]
    if decoding == CONTROL:
        return [row for row in first if CONTROL in row["tags"]]
    return [row for row in usual if ("greedy" in row["tags"]) == (decoding == "greedy")]


def counts_of(rows: Sequence[Mapping[str, Any]]) -> dict[Task, tuple[int, int]]:
    """Attempts at each task that were scored, and how many of them succeeded."""
    counts: dict[Task, tuple[int, int]] = {}
    for row in rows:
        if row["success"] is not None:
            task = (row["env"], row["task_id"], row["prompt"])
            attempts, successes = counts.get(task, (0, 0))
            counts[task] = (attempts + 1, successes + row["success"])
    return counts


def measure(catalog: Catalog, handle: Trajectories, *, greedy: bool = False) -> Measured:
    """Outcomes of rollouts, and the settings of all that they were made from. Rows without an outcome are left out and
    counted.

    Raises LookupError if no row is left.
    """
    rows = drawn_as(handle.table(ROWS).to_pylist(), "greedy" if greedy else "sampled")
    counts = counts_of(rows)
    root = lineage(catalog, handle.stage, handle.fingerprint)
    if root.manifest is None:
        raise LookupError(f"artifact {root.label} is gone; run stage {handle.stage} again")
    if not counts:
        what = "greedy rows" if greedy else "rows sampled at a temperature"
        raise LookupError(f"{root.label} has no {what} with an outcome")
    unscored = sum(row["success"] is None for row in rows)
    outcomes = {task: successes / attempts for task, (attempts, successes) in counts.items()}
    models = [record.stage for record in root.manifest.ingredients.inputs.get("model", [])]
    failed = excluded(row["termination"] for row in rows if row["success"] is None)
    return Measured(root.manifest, (models or [handle.stage])[0], outcomes, settings_of(root), unscored, counts, failed)


def settings_of(root: Lineage) -> dict[KeyPath, Any]:
    """Config, seed, code and outside content of an artifact and of all below it, each artifact at its first place."""
    values: dict[KeyPath, Any] = {}
    seen = {root.key}
    todo: list[tuple[KeyPath, Lineage]] = [((), root)]
    while todo:
        key_path, node = todo.pop(0)
        if node.manifest:
            values |= {(*key_path, key): value for key, value in _own_settings(node.manifest).items()}
        counts: dict[str, int] = {}
        for name, below in node.inputs:
            number = counts[name] = counts.get(name, -1) + 1
            if below.key not in seen:
                seen.add(below.key)
                todo.append(((*key_path, f"{name}[{number}]" if number else name), below))
    return values


def _own_settings(manifest: Manifest) -> dict[str, Any]:
    ingredients = manifest.ingredients
    outside = {name.removeprefix("path of "): path for name, path in manifest.environment.items() if "path of " in name}
    values = {"uses": ingredients.uses, "version": ingredients.uses_version, "seed": ingredients.seed, **outside}
    code = hashlib.blake2b(repr(sorted(ingredients.code.items())).encode(), digest_size=3).hexdigest()
    return values | flat_config(ingredients.config) | {"code": code}


def flat_config(value: Any, key: str = "") -> dict[str, Any]:
    """A config as dotted keys and plain values; a list is one value."""
    if isinstance(value, dict) and value:
        inner = (flat_config(item, f"{key}.{name}" if key else name) for name, item in value.items())
        return {name: leaf for part in inner for name, leaf in part.items()}
    return {key: value} if key else {}

"""Arms of an experiment side by side: what varies between their configs, how often each solves the tasks, and the
paired differences on the same tasks."""

import fnmatch
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines import displays
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.results.lineage import Lineage, find_artifact, lineage
from agentrl.pipelines.results.passes import pass_differences
from agentrl.pipelines.run.execute import open_output
from agentrl.schemas.manifest import InputRecord, Kind, Manifest
from agentrl.schemas.trajectory import CONTROL
from agentrl.statistics.intervals import wilson
from agentrl.statistics.paired import Difference, Estimate, difference, pooled

Task = tuple[str, str, str]
"""(environment, task id, prompt): the seeds of two arms may have drawn different tasks under one id."""

Place = tuple[str, ...]
"""Where a value stands: the inputs that lead from the evaluation to a stage, and the key in that stage."""


@dataclass(frozen=True)
class Measured:
    """One evaluated artifact: the outcome of each task, and the settings of all that it was made from by their
    place."""

    manifest: Manifest
    policy: str
    outcomes: Mapping[Task, float]
    settings: Mapping[Place, Any]
    unscored: int = 0
    counts: Mapping[Task, tuple[int, int]] = field(default_factory=dict)
    """Attempts at each task, and how many of them succeeded."""

    @property
    def label(self) -> str:
        return f"{self.manifest.ingredients.stage}/{self.manifest.fingerprint[:8]}"


@dataclass(frozen=True)
class Arm:
    """Artifacts that differ by their seeds alone. ``varied`` holds the settings in which other arms differ from it."""

    runs: tuple[Measured, ...]
    seeds: tuple[str, ...]
    varied: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tells this arm from the others, in one line."""
        settings = ", ".join(f"{key} {value}" for key, value in self.varied.items())
        return settings or self.runs[0].policy

    @property
    def estimate(self) -> Estimate:
        """Success over seeds and tasks, with its interval. One run with one attempt at each task has Wilson's interval,
        as in an evaluation."""
        [first, *more] = self.runs
        outcomes = list(first.outcomes.values())
        if not more and all(outcome in (0.0, 1.0) for outcome in outcomes):
            return Estimate(sum(outcomes) / len(outcomes), *wilson(int(sum(outcomes)), len(outcomes)))
        return pooled([run.outcomes for run in self.runs])

    def minus(self, other: "Arm") -> Difference:
        """How this arm differs from another one. Raises ValueError if they share no task."""
        before, after = ([run.outcomes for run in arm.runs] for arm in (other, self))
        return difference(before, after, same_seeds=len(before) == len(after) and self.seeds == other.seeds)

    def beside(self, other: "Arm") -> dict[Task, tuple[float, float]]:
        """Success of the other arm and of this one on each task that both attempted, as means over runs."""
        before, after = (_by_task(arm.runs) for arm in (other, self))
        return {task: (before[task], after[task]) for task in before if task in after}


def _by_task(runs: Sequence[Measured]) -> dict[Task, float]:
    outcomes: dict[Task, list[float]] = {}
    for run in runs:
        for task, outcome in run.outcomes.items():
            outcomes.setdefault(task, []).append(outcome)
    return {task: fmean(each) for task, each in outcomes.items()}


@dataclass(frozen=True)
class Comparison:
    """``arms`` in the order in which they were named; each one after the first is compared with the first."""

    arms: list[Arm]
    keys: list[str]

    def differences(self) -> list[tuple[Arm, Difference]]:
        return [(arm, arm.minus(self.arms[0])) for arm in self.arms[1:]]

    def _repr_html_(self) -> str:
        content = self.to_json()
        columns = [*(self.keys or ["policy"]), "tasks", "success", "95 % interval"]
        rows = [
            {
                **(arm["settings"] if self.keys else {"policy": ", ".join(dict.fromkeys(arm["policies"]))}),
                "tasks": arm["tasks"],
                "success": f"{arm['success']['mean']:.3f}",
                "95 % interval": f"{arm['success']['low']:.3f} to {arm['success']['high']:.3f}",
            }
            for arm in content["arms"]
        ]
        frame = displays.Frame()
        frame.add(displays.table(rows, columns))
        for contrast in content["differences"]:
            lists = {name: contrast[f"tasks_{name}"] for name in ("gained", "lost")}
            names = [
                f"{name}: {', '.join(tasks[:20])}{' …' if len(tasks) > 20 else ''}" for name, tasks in lists.items()
            ]
            frame.block([("font-weight:600", contrast["verdict"]), ("", "".join(f"\n{line}" for line in names))], "")
        return frame.done()

    def to_json(self) -> dict[str, Any]:
        return {
            "varied": self.keys,
            "arms": [
                {
                    "arm": arm.name,
                    "artifacts": [run.label for run in arm.runs],
                    "policies": [run.policy for run in arm.runs],
                    "seeds": list(arm.seeds),
                    "settings": arm.varied,
                    "tasks": len({task for run in arm.runs for task in run.outcomes}),
                    "unscored": sum(run.unscored for run in arm.runs),
                    "success": vars(arm.estimate),
                }
                for arm in self.arms
            ],
            "differences": [
                {
                    "arm": arm.name,
                    "than": self.arms[0].name,
                    **vars(contrast),
                    "verdict": verdict(arm, self.arms[0], contrast),
                    "passes": [vars(passed) for passed in pass_differences(arm, self.arms[0])],
                    "tasks_gained": _changed(arm, self.arms[0], gained=True),
                    "tasks_lost": _changed(arm, self.arms[0], gained=False),
                }
                for arm, contrast in self.differences()
            ],
        }


def _changed(arm: Arm, than: Arm, *, gained: bool) -> list[str]:
    """Ids of the tasks that an arm gained, or lost."""
    return [
        task_id
        for (_, task_id, _), (before, after) in arm.beside(than).items()
        if (after > before if gained else after < before)
    ]


def verdict(arm: Arm, than: Arm, contrast: Difference) -> str:
    """What a difference says, in words."""
    points = (
        f"{contrast.mean * 100:+.1f} points (95 % interval {contrast.low * 100:+.1f} to {contrast.high * 100:+.1f})"
    )
    tasks = f"{contrast.gained} of {contrast.tasks} tasks gained, {contrast.lost} lost"
    tasks += "" if contrast.p is None else f", McNemar p = {contrast.p:.2g}"
    unshared = f"; {contrast.unshared} tasks that only one of both attempted are left out" if contrast.unshared else ""
    if contrast.shown:
        word = "better" if contrast.mean > 0 else "worse"
        return f"{arm.name} is {word} than {than.name}: {points}, {tasks}{unshared}"
    if contrast.low > 0 or contrast.high < 0:
        few = f"{contrast.gained + contrast.lost} tasks that changed are too few to say"
        return f"no difference shown between {arm.name} and {than.name}: {points}, {tasks}{unshared}; {few}"
    unseen = 1 - 0.05 ** (1 / contrast.tasks)  # the largest share of tasks that may change, though none of these did
    wide = max(abs(contrast.low), abs(contrast.high), unseen if not contrast.gained + contrast.lost else 0) * 100
    return (
        f"no difference shown between {arm.name} and {than.name}: {points}, {tasks}{unshared}; "
        f"this comparison cannot see differences of less than about {wide:.1f} points"
    )


def regressions(catalog: Catalog, evaluations: Iterable[Manifest]) -> list[str]:
    """What training made worse, in words: one line for each of ``evaluations`` whose policy solves fewer tasks at
    temperature 1 than the policy that it was trained from, by more than chance explains, if that was evaluated on the
    same tasks. Stages without ``results``, such as retries with a hint, are no evaluations, and are passed over."""
    buffer = TrajectoryBuffer(catalog.place.uri)
    by_model = {}
    for evaluation in evaluations:
        inputs = evaluation.ingredients.inputs
        measured = "results" in evaluation.outputs and _has_outcomes(evaluation)
        if measured and len(inputs.get("model", [])) == 1 and inputs.get("tasks"):
            [model] = inputs["model"]
            by_model[model.stage, model.fingerprint, inputs["tasks"][0].digest] = evaluation
    warnings_found = []
    for (stage, fingerprint, tasks), evaluation in by_model.items():
        trained = catalog.manifest(stage, fingerprint)
        for parent in trained.ingredients.inputs.get("model", []) if trained else []:
            before = by_model.get((parent.stage, parent.fingerprint, tasks))
            if before is not None:
                warnings_found += _worse(
                    stage,
                    parent.stage,
                    *(measure(catalog, _attempts(catalog, buffer, m)) for m in (evaluation, before)),
                )
    return warnings_found


def _worse(stage: str, parent: str, after: Measured, before: Measured) -> list[str]:
    change = difference([before.outcomes], [after.outcomes])
    if change.mean >= 0 or not change.shown:
        return []
    points = f"{change.mean * 100:+.1f} points (95 % interval {change.low * 100:+.1f} to {change.high * 100:+.1f})"
    tasks = f"{change.lost} of {change.tasks} tasks lost, {change.gained} gained"
    return [f"{stage} made the policy worse than {parent}, which it trained: {points}, {tasks}"]


def compare(catalog: Catalog, names: Sequence[str], *, greedy: bool = False) -> Comparison:
    """The arms that names stand for: evaluations or rollouts, models that were evaluated, by tag, stage,
    STAGE/FINGERPRINT, or a pattern; the name of a stage with a matrix stands for all its copies.

    Raises LookupError with a message for the user if a name stands for nothing that was measured.
    """
    buffer = TrajectoryBuffer(catalog.place.uri)
    manifests = {(m.ingredients.stage, m.fingerprint): m for name in names for m in _measured(catalog, name)}
    handles = [_attempts(catalog, buffer, manifest) for manifest in manifests.values()]
    return compared([measure(catalog, handle, greedy=greedy) for handle in handles])


def compared(measured: Sequence[Measured]) -> Comparison:
    """Arms from artifacts: those that differ by seeds alone are one arm."""
    varied = _varied(measured)
    keys = [key for key in varied if not _is_seed(key)]
    seeds = [key for key in varied if _is_seed(key)]
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(measured):
        same = [str(varied[key][number]) for key in keys] if _alike(measured) else [run.label]
        groups.setdefault("\0".join(same), []).append(number)
    arms = []
    for numbers in groups.values():
        ordered = sorted(numbers, key=lambda number: [str(varied[key][number]) for key in seeds])
        of_seeds = tuple(", ".join(dict.fromkeys(str(varied[key][n]) for key in seeds)) for n in ordered)
        settings = {key: varied[key][numbers[0]] for key in keys}
        arms.append(Arm(tuple(measured[n] for n in ordered), of_seeds if seeds else (), settings))
    return Comparison(arms, keys)


def sweeps(measured: Sequence[Measured]) -> list[Comparison]:
    """A comparison for each set of two artifacts or more that are made in the same way."""
    groups: dict[Any, list[Measured]] = {}
    for run in measured:
        groups.setdefault(_shape(run), []).append(run)
    return [compared(group) for group in groups.values() if len(group) > 1]


def _measured(catalog: Catalog, name: str) -> list[Manifest]:
    """Artifacts with outcomes that a name stands for."""
    stages = catalog.stages()
    copies = fnmatch.filter(stages, name) if "*" in name else []
    if not copies and name not in stages and name not in catalog.tags() and "/" not in name:
        copies = [stage for stage in stages if stage.startswith(f"{name}-")]
    if "*" in name and not copies:
        raise LookupError(f"no stage is called like {name!r}{did_you_mean(name.replace('*', ''), stages)}")
    if copies:
        manifests = [manifest for copy in copies for manifest in catalog.manifests(copy)[:1]]
        return [manifest for manifest in manifests if _has_outcomes(manifest)] or _refuse(name, manifests[0])
    manifest = find_artifact(catalog, name)
    if _has_outcomes(manifest):
        return [manifest]
    readers = [
        reader
        for reader in catalog.all()
        if reader.ingredients.uses == "evaluate.policy"
        and any(_same(record, manifest) for record in reader.ingredients.inputs.get("model", []))
    ]
    return sorted(readers, key=lambda manifest: manifest.created_at)[-1:] or _refuse(name, manifest)


def _same(record: InputRecord, manifest: Manifest) -> bool:
    return (record.stage, record.fingerprint) == (manifest.ingredients.stage, manifest.fingerprint)


def _refuse(name: str, manifest: Manifest) -> list[Manifest]:
    raise LookupError(
        f"{name!r} ({manifest.ingredients.uses}) was not measured; name an evaluation, rollouts, or a model that an "
        "evaluation has read"
    )


def _has_outcomes(manifest: Manifest) -> bool:
    return any(output.kind is Kind.TRAJECTORIES for output in manifest.outputs.values())


def _attempts(catalog: Catalog, buffer: TrajectoryBuffer, manifest: Manifest) -> Trajectories:
    output = next(name for name, output in manifest.outputs.items() if output.kind is Kind.TRAJECTORIES)
    record = InputRecord(stage=manifest.ingredients.stage, output=output, fingerprint=manifest.fingerprint)
    handle = open_output(record, catalog, buffer)
    assert isinstance(handle, Trajectories)
    return handle


def measure(catalog: Catalog, handle: Trajectories, *, greedy: bool = False) -> Measured:
    """Outcomes of rollouts, and the settings of all that they were made from. Rows without an outcome are left out and
    counted.

    Raises LookupError if no row is left.
    """
    rows = handle.table(["env", "task_id", "prompt", "success", "tags", "segment"]).to_pylist()
    rows = [row for row in rows if not row["segment"] and CONTROL not in row["tags"]]
    rows = [row for row in rows if ("greedy" in row["tags"]) == greedy]
    by_task: dict[Task, list[bool]] = {}
    for row in rows:
        if row["success"] is not None:
            by_task.setdefault((row["env"], row["task_id"], row["prompt"]), []).append(row["success"])
    root = lineage(catalog, handle.stage, handle.fingerprint)
    if root.manifest is None:
        raise LookupError(f"artifact {root.label} is gone; run stage {handle.stage} again")
    if not by_task:
        what = "greedy rows" if greedy else "rows sampled at a temperature"
        raise LookupError(f"{root.label} has no {what} with an outcome")
    unscored = sum(row["success"] is None for row in rows)
    outcomes = {task: sum(each) / len(each) for task, each in by_task.items()}
    models = [record.stage for record in root.manifest.ingredients.inputs.get("model", [])]
    counts = {task: (len(each), sum(each)) for task, each in by_task.items()}
    return Measured(root.manifest, (models or [handle.stage])[0], outcomes, _settings(root), unscored, counts)


def _settings(root: Lineage) -> dict[Place, Any]:
    """Config, seed, code and outside content of an artifact and of all below it, each artifact at its first place."""
    settings: dict[Place, Any] = {}
    seen = {root.key}
    todo: list[tuple[Place, Lineage]] = [((), root)]
    while todo:
        at, node = todo.pop(0)
        if node.manifest:
            settings |= {(*at, key): value for key, value in _own_settings(node.manifest).items()}
        counts: dict[str, int] = {}
        for name, below in node.inputs:
            number = counts[name] = counts.get(name, -1) + 1
            if below.key not in seen:
                seen.add(below.key)
                todo.append(((*at, f"{name}[{number}]" if number else name), below))
    return settings


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


def _alike(measured: Sequence[Measured]) -> bool:
    """Whether all are made by the same stages in the same places, so that their settings can be compared."""
    return len({_shape(run) for run in measured}) == 1


def _shape(measured: Measured) -> frozenset[tuple[Place, Any]]:
    """Which stages it is made by."""
    return frozenset((key, value) for key, value in measured.settings.items() if key[-1] == "uses")


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2].rpartition(" ")[2] == "seed"


def _varied(measured: Sequence[Measured]) -> dict[str, list[Any]]:
    """Key -> the value of each artifact, for what is not the same in all; nothing if they are made in different
    ways. A key is as short as it can be: ``beta``, or ``model.beta`` if another stage varies its ``beta`` too."""
    if not _alike(measured):
        return {}
    places = dict.fromkeys(key for run in measured for key in run.settings)
    by_key = {key: [run.settings.get(key) for run in measured] for key in places}
    by_key = {key: values for key, values in by_key.items() if len(set(map(repr, values))) > 1}
    return {_short(key, by_key): values for key, values in by_key.items()}


def _short(setting: Place, among: Iterable[Place]) -> str:
    others = [other for other in among if other != setting]
    *path, key = setting
    for name in (key.rpartition(".")[2], key):
        if not any(other[-1] == key or other[-1].rpartition(".")[2] == name for other in others):
            return name
    return " ".join([*path, key])

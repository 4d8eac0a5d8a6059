"""Arms of an experiment side by side: what varies between their configs, how often each solves the tasks, and the
paired differences on the same tasks."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines import displays
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.results.arms import Arm, arms_of, is_seed, shape_of
from agentrl.pipelines.results.gains import Gain, gain, policy_outcomes
from agentrl.pipelines.results.lineage import Lineage, find_artifact, lineage
from agentrl.pipelines.results.measured import KeyPath, Measured, attempts_of, has_outcomes, measure, settings_of
from agentrl.pipelines.results.passes import pass_differences
from agentrl.schemas.manifest import InputRecord, Manifest
from agentrl.statistics.paired import Difference, difference
from agentrl.statistics.sharpening import Learned, said_p


@dataclass(frozen=True)
class Comparison:
    """``arms`` in the order in which they were named; each one after the first is compared with the first. ``gains``
    says of each of these what it gained over the control for sharpening, which is the first at its best temperature,
    with its seeds pooled and of each seed; it is empty if the arms are no evaluations of policies. ``notes`` say what
    was left out, and which evaluations many attempts of failed by no doing of the policy."""

    arms: list[Arm]
    keys: list[str]
    gains: Mapping[str, "ArmGain"] = field(default_factory=dict)
    notes: Sequence[str] = ()
    greedy: bool = False

    def differences(self) -> list[tuple[Arm, Difference]]:
        return [(arm, arm.minus(self.arms[0])) for arm in self.arms[1:]]

    def said(self, arm: Arm, contrast: Difference) -> str:
        """The verdict on an arm: what it gained over the control, or why nobody can tell."""
        plain = verdict(arm, self.arms[0], contrast)
        gained = self.gains.get(arm.name)
        if gained is None:
            return plain
        if gained.pooled.word is Learned.CANNOT_TELL:
            plain = plain.replace(
                " is better than ", f" is better {'greedily' if self.greedy else 'at temperature 1'} than ", 1
            )
            return f"{plain}; {gained.pooled.verdict}: {gained.pooled.judgement.why}"
        return str(gained.pooled)

    def _gained(self, arm: Arm) -> dict[str, Any]:
        gained = self.gains.get(arm.name)
        by_seed = gained.by_seed if gained else {}
        return {
            "gain": gained.pooled.to_json() if gained else None,
            "by_seed": [{"seed": seed, **gain_of_seed.to_json()} for seed, gain_of_seed in by_seed.items()],
        }

    def _repr_html_(self) -> str:
        told = self.to_json()
        columns = [*(self.keys or ["policy"]), "tasks", "success", "95 % interval"]
        rows = [
            {
                **(arm["settings"] if self.keys else {"policy": ", ".join(dict.fromkeys(arm["policies"]))}),
                "tasks": arm["tasks"],
                "success": f"{arm['success']['mean']:.3f}",
                "95 % interval": f"{arm['success']['low']:.3f} to {arm['success']['high']:.3f}",
            }
            for arm in told["arms"]
        ]
        frame = displays.Frame()
        frame.add(displays.table(rows, columns))
        for contrast in told["differences"]:
            lists = {name: contrast[f"tasks_{name}"] for name in ("gained", "lost")}
            names = [
                f"{name}: {', '.join(tasks[:20])}{' …' if len(tasks) > 20 else ''}" for name, tasks in lists.items()
            ]
            names = [*(f"seed {seed['seed']}: {seed['word']}" for seed in contrast["by_seed"]), *names]
            frame.block([("font-weight:600", contrast["verdict"]), ("", "".join(f"\n{line}" for line in names))], "")
        return frame.done()

    def to_json(self) -> dict[str, Any]:
        return {
            "varied": self.keys,
            "notes": list(self.notes),
            "arms": [
                {
                    "arm": arm.name,
                    "artifacts": [run.label for run in arm.runs],
                    "policies": [run.policy for run in arm.runs],
                    "seeds": list(arm.seeds),
                    "settings": arm.varied,
                    "tasks": len({task for run in arm.runs for task in run.outcomes}),
                    "unscored": sum(run.unscored for run in arm.runs),
                    "excluded": sum(run.excluded for run in arm.runs),
                    "success": vars(arm.estimate),
                    "by_seed": [
                        {"seed": seed, "artifact": run.label, "success": fmean(run.outcomes.values())}
                        for seed, run in zip(arm.seeds, arm.runs, strict=False)
                    ],
                }
                for arm in self.arms
            ],
            "differences": [
                {
                    "arm": arm.name,
                    "than": self.arms[0].name,
                    **vars(contrast),
                    "verdict": self.said(arm, contrast),
                    **self._gained(arm),
                    "passes": [vars(passed) for passed in pass_differences(arm, self.arms[0])],
                    "tasks_gained": _changed(arm, self.arms[0], gained=True),
                    "tasks_lost": _changed(arm, self.arms[0], gained=False),
                }
                for arm, contrast in self.differences()
            ],
        }


@dataclass(frozen=True)
class ArmGain:
    """What an arm gained over the first one: with the seeds of both pooled, and of each seed if there are several."""

    pooled: Gain
    by_seed: Mapping[str, Gain]


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
    tasks += "" if contrast.p is None else f", McNemar {said_p(contrast.p)}"
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
    buffer = TrajectoryBuffer(catalog.storage.uri)
    by_model = {}
    for evaluation in evaluations:
        inputs = evaluation.ingredients.inputs
        measured = "results" in evaluation.outputs and has_outcomes(evaluation)
        if measured and len(inputs.get("model", [])) == 1 and inputs.get("tasks"):
            [model] = inputs["model"]
            by_model[model.stage, model.fingerprint, inputs["tasks"][0].digest] = evaluation
    losses = []
    for (stage, fingerprint, tasks), evaluation in by_model.items():
        trained = catalog.manifest(stage, fingerprint)
        for parent in trained.ingredients.inputs.get("model", []) if trained else []:
            before = by_model.get((parent.stage, parent.fingerprint, tasks))
            if before is not None:
                losses += _worse(
                    stage,
                    parent.stage,
                    *(measure(catalog, attempts_of(catalog, buffer, m)) for m in (evaluation, before)),
                )
    return losses


def _worse(stage: str, parent: str, after: Measured, before: Measured) -> list[str]:
    contrast = difference([before.outcomes], [after.outcomes])
    if contrast.mean >= 0 or not contrast.shown:
        return []
    points = (
        f"{contrast.mean * 100:+.1f} points (95 % interval {contrast.low * 100:+.1f} to {contrast.high * 100:+.1f})"
    )
    tasks = f"{contrast.lost} of {contrast.tasks} tasks lost, {contrast.gained} gained"
    return [f"{stage} made the policy worse than {parent}, which it trained: {points}, {tasks}"]


def compare(catalog: Catalog, names: Sequence[str], *, greedy: bool = False) -> Comparison:
    """The arms that names stand for: evaluations or rollouts, models that were evaluated, by tag, stage,
    STAGE/FINGERPRINT, or a pattern; the name of a stage with a matrix stands for all its copies.

    Raises LookupError with a message for the user if a name stands for nothing that was measured, or for what was
    measured on other tasks than the first.
    """
    buffer = TrajectoryBuffer(catalog.storage.uri)
    named = [_measured(catalog, name) for name in names]
    manifests = {(m.ingredients.stage, m.fingerprint): m for each, _ in named for m in each}
    handles = [attempts_of(catalog, buffer, manifest) for manifest in manifests.values()]
    comparison = compared([measure(catalog, handle, greedy=greedy) for handle in handles])
    for arm in comparison.arms[1:]:
        if not arm.beside(first := comparison.arms[0]):
            raise LookupError(
                f"{arm.runs[0].label} and {first.runs[0].label} share no task, so they cannot be compared; name "
                "evaluations of the same tasks"
            )
    doubts = [run.doubtful for arm in comparison.arms for run in arm.runs]
    notes = [note for note in (*(note for _, note in named), *doubts) if note]
    return replace(with_gains(catalog, comparison), notes=notes, greedy=greedy)


def compared(measured: Sequence[Measured]) -> Comparison:
    """Arms from artifacts: those that differ by seeds alone are one arm. Settings are compared between arms that are
    made by the same stages in the same places."""
    groups: dict[Any, list[Measured]] = {}
    for run in measured:
        groups.setdefault(shape_of(run), []).append(run)
    parts = [arms_of(group) for group in groups.values()]
    if len(parts) == 1:
        return Comparison(*parts[0])
    order = {run.label: position for position, run in enumerate(measured)}
    arms = [replace(arm, varied={}) if len(group) == 1 else arm for group, _ in parts for arm in group]
    return Comparison(sorted(arms, key=lambda arm: min(order[run.label] for run in arm.runs)), [])


def with_gains(catalog: Catalog, comparison: Comparison) -> Comparison:
    """A comparison with what each arm after the first gained over the first, if both are evaluations of policies."""
    arms, gained = comparison.arms, {}
    for arm in arms[1:]:
        pairs = _pairs(arms[0], arm)
        if not all("results" in run.manifest.outputs for pair in pairs for run in pair):
            continue
        sides = [
            (
                policy_outcomes(catalog, before.manifest, arms[0].name),
                policy_outcomes(catalog, after.manifest, arm.name),
            )
            for before, after in pairs
        ]
        pooled_gain = gain([before for before, _ in sides], [after for _, after in sides])
        seeds = arm.seeds if len(pairs) == len(arm.runs) > 1 else ()
        by_seed = {seed: gain([before], [after]) for seed, (before, after) in zip(seeds, sides, strict=False)}
        gained[arm.name] = ArmGain(pooled_gain, by_seed)
    return replace(comparison, gains=gained)


def _pairs(before: Arm, after: Arm) -> list[tuple[Measured, Measured]]:
    """Runs of the same seed, those of the second arm in their order; if there are no seeds, runs in their order."""
    if before.seeds and after.seeds:
        by_seed = dict(zip(before.seeds, before.runs, strict=True))
        return [(by_seed[seed], run) for seed, run in zip(after.seeds, after.runs, strict=True) if seed in by_seed]
    return list(zip(before.runs, after.runs, strict=False))


def sweeps(measured: Sequence[Measured]) -> list[Comparison]:
    """A comparison for each set of two artifacts or more that are made in the same way."""
    groups: dict[Any, list[Measured]] = {}
    for run in measured:
        groups.setdefault(shape_of(run), []).append(run)
    return [compared(group) for group in groups.values() if len(group) > 1]


def _measured(catalog: Catalog, name: str) -> tuple[list[Manifest], str]:
    """Artifacts with outcomes that a name stands for, and what was left out of them: a stage stands for its newest
    artifact, and for those that differ from it by seeds alone."""
    stages = catalog.stages()
    copies = fnmatch.filter(stages, name) if "*" in name else []
    if not copies and name not in stages and name not in catalog.tags() and "/" not in name:
        copies = [stage for stage in stages if stage.startswith(f"{name}-")]
    if "*" in name and not copies:
        raise LookupError(f"no stage is called like {name!r}{did_you_mean(name.replace('*', ''), stages)}")
    if copies:
        manifests = [manifest for copy in copies for manifest in catalog.manifests(copy)[:1]]
        return [manifest for manifest in manifests if has_outcomes(manifest)] or _refuse(name, manifests[0]), ""
    manifest = find_artifact(catalog, name)
    if not has_outcomes(manifest):
        readers = [
            reader
            for reader in catalog.all()
            if reader.ingredients.uses == "evaluate.policy"
            and any(_same(record, manifest) for record in reader.ingredients.inputs.get("model", []))
        ]
        [manifest] = sorted(readers, key=lambda reader: reader.created_at)[-1:] or _refuse(name, manifest)
    if name not in stages:
        return [manifest], ""
    return _with_other_seeds(catalog, manifest)


def _with_other_seeds(catalog: Catalog, newest: Manifest) -> tuple[list[Manifest], str]:
    """An artifact, and those of its stage that differ from it by seeds alone, the newest of each seed; and how many
    others were left out."""
    known: dict[Any, Lineage] = {}
    stage = newest.ingredients.stage

    def settings(artifact: Manifest) -> tuple[dict[KeyPath, Any], str]:
        settings_found = settings_of(lineage(catalog, stage, artifact.fingerprint, known))
        seeds = {key_path: value for key_path, value in settings_found.items() if is_seed(key_path[-1])}
        return {key_path: value for key_path, value in settings_found.items() if key_path not in seeds}, repr(seeds)

    others = [
        artifact
        for artifact in catalog.manifests(stage)
        if artifact.fingerprint != newest.fingerprint and has_outcomes(artifact)
    ]
    same, seed = settings(newest)
    chosen, left = {seed: newest}, 0
    for artifact in others:
        theirs, seed = settings(artifact)
        if theirs == same:
            chosen.setdefault(seed, artifact)
        else:
            left += 1
    note = f"{stage}: {left} older artifacts with other settings are left out; name them as {stage}/FINGERPRINT"
    return list(chosen.values()), note if left else ""


def _same(record: InputRecord, manifest: Manifest) -> bool:
    return (record.stage, record.fingerprint) == (manifest.ingredients.stage, manifest.fingerprint)


def _refuse(name: str, manifest: Manifest) -> list[Manifest]:
    raise LookupError(
        f"{name!r} ({manifest.ingredients.uses}) was not measured; name an evaluation, rollouts, or a model that an "
        "evaluation has read"
    )

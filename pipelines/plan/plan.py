"""What a run would do, and why: decided before anything starts, from fingerprints and stored manifests only."""

import json
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines import displays
from agentrl.pipelines.file.document import default_store
from agentrl.pipelines.file.load import Edge, Node, ResolvedPipeline
from agentrl.pipelines.file.problems import Origin, Problem, SpecError, did_you_mean
from agentrl.pipelines.file.readiness import store_problem
from agentrl.pipelines.plan.code import CodeGraph, Sources
from agentrl.pipelines.plan.fingerprint import Fingerprinter, UnhashableError, fingerprint
from agentrl.pipelines.plan.proved import unspeakable
from agentrl.pipelines.secrets import shown_setting
from agentrl.schemas.cut import IMPORT_CUT, MAKE_CUT, NEWEST
from agentrl.schemas.manifest import Ingredients, InputRecord, Kind, Manifest

if TYPE_CHECKING:
    import polars as pl


class Status(StrEnum):
    CACHED = "cached"
    RUN = "run"
    BLOCKED = "blocked"  # selected, but something that it reads is neither cached nor selected
    SKIPPED = "skipped"  # out of date, but not selected


@dataclass(frozen=True)
class Selection:
    """Which stages may run. Empty fields select everything. ``force`` runs what is selected though it is cached."""

    only: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    until: tuple[str, ...] = ()
    force: bool = False

    def arguments(self) -> list[str]:
        """As options of the command line."""
        named = (("--only", self.only), ("--from", self.first), ("--until", self.until))
        chosen = [part for option, names in named for name in names for part in (option, name)]
        return [*chosen, "--force"] if self.force else chosen

    def names(self, pipeline: ResolvedPipeline) -> set[str]:
        """Names of the selected stages. Raises SpecError if a name is not a stage."""
        problems = []
        for option, names in (("--only", self.only), ("--from", self.first), ("--until", self.until)):
            for name in names:
                if name not in pipeline.nodes:
                    hint = did_you_mean(name, pipeline.nodes) or f"; stages: {', '.join(pipeline.nodes)}"
                    problems.append(Problem(f"there is no stage {name!r}{hint}", Origin(option, None)))
        if problems:
            raise SpecError(problems)
        chosen = set(pipeline.nodes)
        if self.only:
            chosen &= set(self.only)
        if self.first:
            chosen &= pipeline.downstream(self.first)
        if self.until:
            chosen &= pipeline.ancestors(self.until)
        return chosen


@dataclass
class PlannedStage:
    """One stage of a plan. ``manifest`` is the artifact that is already there. ``fingerprint`` is empty as long as an
    input is still to be made, see :func:`settle`. ``may_be_reused``: it is re-used if those inputs have the same
    content as before."""

    node: Node
    fingerprint: str
    ingredients: Ingredients
    status: Status
    reasons: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    forced: bool = False
    may_be_reused: bool = False
    sources: Sources | None = None

    @property
    def name(self) -> str:
        return self.node.name

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "uses": self.node.stage.name,
            "status": str(self.status),
            "reasons": self.reasons,
            "may_be_reused": self.may_be_reused,
            "fingerprint": self.fingerprint or None,
            "inputs": {name: list(map(str, edges)) for name, edges in self.node.inputs.items()},
            "created_at": self.manifest.created_at.isoformat() if self.manifest else None,
            "duration_s": self.manifest.duration_s if self.manifest else None,
        }


@dataclass
class Plan:
    """Steps in an order in which they can run."""

    pipeline: ResolvedPipeline
    store: str
    selection: Selection
    steps: dict[str, PlannedStage]

    def having(self, status: Status) -> list[PlannedStage]:
        return [step for step in self.steps.values() if step.status is status]

    @property
    def to_run(self) -> list[PlannedStage]:
        return self.having(Status.RUN)

    def command(self, verb: str = "run", selection: Iterable[str] | None = None) -> str:
        """The command that does this again; ``selection`` stands in for --only, --from and --until."""
        parts = ["agentrl", verb, self.pipeline.reference]
        if self.pipeline.profile:
            parts += ["--profile", self.pipeline.profile]
        for setting in self.pipeline.settings:
            parts += ["--set", shown_setting(setting)]
        if self.store != default_store(self.pipeline.path):
            parts += ["--store", self.store]
        parts += self.selection.arguments() if selection is None else selection
        return shlex.join(parts)

    @property
    def frame(self) -> "pl.DataFrame":
        """One row for each stage: what it uses, its status and the reasons."""
        import polars as pl

        rows = [
            {
                "stage": step.name,
                "uses": step.node.stage.name,
                "status": str(step.status),
                "reasons": "; ".join(step.reasons),
                "fingerprint": step.fingerprint or None,
            }
            for step in self.steps.values()
        ]
        return pl.DataFrame(rows, schema_overrides={"fingerprint": pl.String})

    def _repr_html_(self) -> str:
        frame = displays.Frame()
        counts = ", ".join(f"{len(self.having(status))} {status}" for status in Status if self.having(status))
        frame.block([("font-weight:600", f"{self.pipeline.name}: {counts}; store {self.store}")], "")
        frame.add(displays.table(self.frame.to_dicts(), ["stage", "uses", "status", "reasons"]))
        return frame.done()

    def to_json(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline.name,
            "file": str(self.pipeline.path),
            "store": self.store,
            "counts": {str(status): len(self.having(status)) for status in Status},
            "stages": [step.to_json() for step in self.steps.values()],
        }


def make_plan(pipeline: ResolvedPipeline, catalog: Catalog, store: str, selection: Selection | None = None) -> Plan:
    """Compare a pipeline with what the catalog holds.

    Raises SpecError with all problems: an unknown name in the selection, a missing model, an unhashable config.
    """
    selection = selection or Selection()
    chosen = selection.names(pipeline)
    if problem := store_problem(store, write=False):
        raise SpecError([Problem(problem, Origin("--store", None))])
    fingerprinter = Fingerprinter(CodeGraph(pipeline.folders))
    plan = Plan(pipeline, store, selection, {})
    problems: list[Problem] = []
    for node in pipeline.nodes.values():
        if any(name not in plan.steps for name in node.upstream):
            continue  # what it reads has a problem already
        try:
            inputs = _records(node, plan, catalog)
        except LookupError as error:
            message = str(error.args[0])
            problems.append(Problem(f"stage {node.name}: inputs.{message}", Origin(str(pipeline.path), None)))
            continue
        try:
            flowing = pipeline.flowing(node.name)
            ingredients = fingerprinter.ingredients(node, inputs, flowing, pipeline.name)
        except (UnhashableError, LookupError) as error:
            message = str(error.args[0])
            problems.append(Problem(f"stage {node.name}: with.{message}", Origin(str(pipeline.path), None)))
            continue
        step = plan.steps[node.name] = _decided(node, ingredients, plan, chosen, catalog)
        step.sources = fingerprinter.sources[node.name]
    if plan.to_run and (problem := store_problem(store, write=True)):
        problems.append(Problem(problem, Origin("--store", None)))
    problems += unspeakable(pipeline, [step.node for step in plan.to_run])
    if problems:
        raise SpecError(problems)
    return plan


def _records(node: Node, plan: Plan, catalog: Catalog) -> dict[str, list[InputRecord]]:
    """What is known of the inputs of a stage. Raises LookupError if an artifact that it names is not in the store."""
    return {
        name: [
            _stored(edge, name, node.stage.inputs[name].kind, catalog) if edge.is_stored else _record(edge, plan)
            for edge in edges
        ]
        for name, edges in node.inputs.items()
    }


def _stored(edge: Edge, name: str, kind: Kind, catalog: Catalog) -> InputRecord:
    """An output of an artifact that the store has. Raises LookupError if it has none of this kind."""
    stage, _, beginning = edge.stage.partition("/")
    every = _newest_cut(stage, name, catalog) if beginning == NEWEST else catalog.manifests(stage)
    matches = [manifest for manifest in every if beginning == NEWEST or manifest.fingerprint.startswith(beginning)]
    if len(matches) != 1:
        known = ", ".join(match.fingerprint[:12] for match in matches or every[:5])
        what = "is the beginning of several" if matches else "is not in the store"
        raise LookupError(f"{name}: artifact {edge.stage} {what}; fingerprints of {stage}: {known or 'none'}")
    [manifest] = matches
    fitting = [name for name, output in manifest.outputs.items() if output.kind is kind and edge.output in ("", name)]
    if len(fitting) != 1:
        listed = ", ".join(f"{edge.stage}.{name} ({output.kind})" for name, output in manifest.outputs.items())
        raise LookupError(f"{name}: the input takes one output of kind {kind}, not {edge}; the artifact has: {listed}")
    digest = manifest.outputs[fitting[0]].digest
    return InputRecord(stage=stage, output=fitting[0], fingerprint=manifest.fingerprint, digest=digest)


def _newest_cut(cut: str, name: str, catalog: Catalog) -> list[Manifest]:
    """The newest cut of a name. Raises LookupError if there is none."""
    cuts = (MAKE_CUT, IMPORT_CUT)
    if newest := [manifest for manifest in catalog.manifests(cut) if manifest.ingredients.uses in cuts][:1]:
        return newest
    known = sorted({manifest.ingredients.stage for manifest in catalog.all() if manifest.ingredients.uses in cuts})
    hint = did_you_mean(cut, known) or f"; cuts: {', '.join(known) or 'none'}"
    raise LookupError(f"{name}: there is no cut {cut!r} in the store{hint}")


def _record(edge: Edge, plan: Plan) -> InputRecord:
    """What is known of an input. Its digest is empty if the input is not cached."""
    step = plan.steps[edge.stage]
    digest = step.manifest.outputs[edge.output].digest if step.manifest and step.status is Status.CACHED else ""
    return InputRecord(stage=edge.stage, output=edge.output, fingerprint=step.fingerprint, digest=digest)


def _decided(
    node: Node, ingredients: Ingredients, plan: Plan, chosen: Collection[str], catalog: Catalog
) -> PlannedStage:
    """Whether a stage runs. If its inputs are made in this run, its fingerprint is not known yet."""
    step = PlannedStage(node, "", ingredients, Status.RUN)
    changing = [plan.steps[name] for name in node.upstream if plan.steps[name].status is not Status.CACHED]
    if not changing:
        step.fingerprint = fingerprint(ingredients)
        step.manifest = catalog.manifest(node.name, step.fingerprint)
    selected, force = node.name in chosen, plan.selection.force
    if step.manifest and not (selected and force):
        step.status = Status.CACHED
        return step
    step.forced = selected and force
    step.reasons = ["--force"] if step.manifest else _reasons(step, changing, catalog)
    unmet = [other for other in changing if other.status is not Status.RUN]
    if not selected:
        step.status = Status.SKIPPED
    elif unmet:
        step.status = Status.BLOCKED
        step.reasons = [_unmet(other, plan) for other in unmet]
    return step


def settle(step: PlannedStage, plan: Plan, catalog: Catalog) -> None:
    """Give a step its fingerprint, now that everything that it reads is there.

    Raises LookupError if something is not.
    """
    if step.fingerprint:
        return
    inputs: dict[str, list[InputRecord]] = {}
    for name, edges in step.node.inputs.items():
        inputs[name] = []
        for known, edge in zip(step.ingredients.inputs[name], edges, strict=True):
            if edge.is_stored:
                inputs[name].append(known)
                continue
            before = plan.steps[edge.stage]
            manifest = catalog.manifest(edge.stage, before.fingerprint) if before.fingerprint else None
            if manifest is None:
                raise LookupError(f"input {edge.stage} of stage {step.name} is not there; run it first")
            digest = manifest.outputs[edge.output].digest
            inputs[name].append(
                InputRecord(stage=edge.stage, output=edge.output, fingerprint=manifest.fingerprint, digest=digest)
            )
    step.ingredients = step.ingredients.model_copy(update={"inputs": inputs})
    step.fingerprint = fingerprint(step.ingredients)


def _unmet(other: PlannedStage, plan: Plan) -> str:
    if other.status is Status.BLOCKED:
        return f"input {other.name} is blocked"
    command = plan.command(selection=["--until", other.name])
    return f"input {other.name} is not cached ({'; '.join(other.reasons)}); make it first in {plan.store}: {command}"


def _reasons(step: PlannedStage, changing: list[PlannedStage], catalog: Catalog) -> list[str]:
    """Why a stage is not known to be cached: what differs from the newest artifact that this pipeline made. If the only
    difference is that inputs are made again, the step may be re-used."""
    pipeline = step.ingredients.pipeline
    earlier = [manifest for manifest in catalog.manifests(step.name) if manifest.ingredients.pipeline == pipeline]
    if not earlier:
        return ["never ran"]
    again = [
        f"input {other.name} is {'made again' if other.status is Status.RUN else 'out of date'}" for other in changing
    ]
    unlike = [differences(manifest.ingredients, step.ingredients) for manifest in earlier]
    if again and not step.forced and [] in unlike:
        step.may_be_reused = True
        return [*again, "may be re-used if their content is equal"]
    return [*unlike[0], *again] or ["inputs, code and config are as before, and the artifact is gone"]


def differences(old: Ingredients, new: Ingredients) -> list[str]:
    """What differs between two sets of ingredients, one line for each. Content that is not made yet does not count."""
    if old.scheme != new.scheme:
        return [f"fingerprint scheme {old.scheme} -> {new.scheme}"]
    changes = []
    if old.uses != new.uses:
        changes.append(f"uses {old.uses} -> {new.uses}")
    elif old.uses_version != new.uses_version:
        changes.append(f"version of {new.uses} {old.uses_version} -> {new.uses_version}")
    changes += [f"config {line}" for line in _changes(_flat(old.config), _flat(new.config))]
    if old.seed != new.seed:
        changes.append(f"seed {old.seed} -> {new.seed}")
    changes += _input_changes(old, new)
    changes += [f"{line} changed" for line in _keys(old.externals, new.externals)]
    changes += [f"version of {line}" for line in _changes(old.choices, new.choices)]
    changes += [f"code {line}" for line in _keys(old.code, new.code, " changed", " added", " no longer used")]
    changes += [f"package {line}" for line in _changes(old.packages, new.packages)]
    return changes


def _input_changes(old: Ingredients, new: Ingredients) -> list[str]:
    changes = []
    for name in sorted(old.inputs.keys() | new.inputs.keys()):
        before, after = old.inputs.get(name, []), new.inputs.get(name, [])
        edges_before, edges_after = ([f"{i.stage}.{i.output}" for i in records] for records in (before, after))
        if edges_before != edges_after:
            changes.append(f"input {name} {', '.join(edges_before) or 'none'} -> {', '.join(edges_after) or 'none'}")
            continue
        pairs = zip(before, after, strict=True)
        changes += [f"input {new_.stage} changed" for old_, new_ in pairs if old_.digest != new_.digest and new_.digest]
    return list(dict.fromkeys(changes))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. A list of mappings counts item by item, other lists as a whole."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        return {key: leaf for name, item in value.items() for key, leaf in _flat(item, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): value}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for each key that differs; ``unset`` if a side lacks it."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = (_short(side[key]) if key in side else "unset" for side in (old, new))
        if key not in old or key not in new or old[key] != new[key]:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def _keys(
    old: Mapping[str, str], new: Mapping[str, str], changed: str = "", added: str = "", removed: str = ""
) -> list[str]:
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old:
            lines.append(key + added)
        elif key not in new:
            lines.append(key + removed)
        elif old[key] != new[key]:
            lines.append(key + changed)
    return lines

"""From a pipeline file to a pipeline that can be planned: every name resolved, every edge typed, every config checked.

Loading does not stop at the first problem: :class:`agentrl.pipelines.file.problems.SpecError` holds all that were
found.
"""

import graphlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from agentrl.pipelines.file import library
from agentrl.pipelines.file.choices import Chosen, choices, chosen, named
from agentrl.pipelines.file.document import Document, Key, find, read, with_profile, with_settings
from agentrl.pipelines.file.expand import Expanded, StageDraft, expand
from agentrl.pipelines.file.external import missing, outside
from agentrl.pipelines.file.graph import in_order, twins, unverified
from agentrl.pipelines.file.invalid import anchor, explained
from agentrl.pipelines.file.machines import undivided, unsplittable, wrong
from agentrl.pipelines.file.problems import Problem, SpecError, did_you_mean
from agentrl.pipelines.file.readiness import missing_packages
from agentrl.pipelines.secrets import is_reference
from agentrl.pipelines.stage import Stage
from agentrl.placement.base import LaunchError
from agentrl.schemas.annotations import markers
from agentrl.schemas.installation import missing as absent
from agentrl.schemas.manifest import Kind
from agentrl.schemas.pipeline import Execution, PipelineSpec
from agentrl.schemas.secret_names import names_a_secret

_STORED = re.compile(r"([A-Za-z][^/\\]*/(?:[0-9a-f]{8,32}|newest))(?:\.(\w+))?")


class Edge(NamedTuple):
    """An output of a stage of the pipeline, or of an artifact of the store: then ``stage`` is STAGE/FINGERPRINT, or
    NAME/newest for a cut, and an empty ``output`` is the only one of the wanted kind."""

    stage: str
    output: str

    @property
    def is_stored(self) -> bool:
        return "/" in self.stage  # which no stage's name has

    def __str__(self) -> str:
        return f"{self.stage}.{self.output}" if self.output else self.stage


@dataclass(frozen=True)
class Node:
    """One stage of a pipeline, ready to be planned. ``inputs`` keeps the order of declaration of the stage."""

    name: str
    stage: Stage
    config: BaseModel
    inputs: dict[str, tuple[Edge, ...]]
    seed: int
    execution: Execution

    @property
    def choices(self) -> list[Chosen]:
        """What its config chooses by name."""
        return choices(self.config)

    @property
    def upstream(self) -> list[str]:
        """Stages of the pipeline that it reads from."""
        return list(dict.fromkeys(edge.stage for edges in self.inputs.values() for edge in edges if not edge.is_stored))


@dataclass(frozen=True)
class ResolvedPipeline:
    """``nodes`` are in an order in which they can run. ``folders`` are searched for the user's own modules."""

    name: str
    path: Path
    description: str
    nodes: dict[str, Node]
    folders: tuple[Path, ...]
    reference: str
    profile: str | None = None
    settings: tuple[str, ...] = ()

    def downstream(self, names: Iterable[str]) -> set[str]:
        """These stages and all that read from them, directly or not."""
        reached = set(names)
        for node in self.nodes.values():
            if reached.intersection(node.upstream):
                reached.add(node.name)
        return reached

    def flowing(self, name: str) -> set[Chosen]:
        """What upstream stages chose by name for tasks or trajectories that flow into this stage."""
        reached: set[Chosen] = set()
        for edges in self.nodes[name].inputs.values():
            for edge in edges:
                if edge.is_stored:
                    continue
                before = self.nodes[edge.stage]
                if before.stage.outputs[edge.output] in (Kind.TASKS, Kind.TRAJECTORIES):
                    reached |= {*before.choices, *self.flowing(edge.stage)}
        return reached

    def ancestors(self, names: Iterable[str]) -> set[str]:
        """These stages and all that they read from, directly or not."""
        reached = set(names)
        for node in reversed(self.nodes.values()):
            if node.name in reached:
                reached.update(node.upstream)
        return reached


@dataclass
class _Loader:
    document: Document
    problems: list[Problem] = field(default_factory=list)

    def problem(self, key: Key, message: str, more: Key = (), reference: str = "") -> None:
        self.problems.append(Problem(message, self.document.place((*key, *more)), (*key, *more), reference))

    def invalid(self, error: ValidationError, model: type[BaseModel], key: Key = (), page: str = "") -> None:
        for item in error.errors(include_url=False):
            location, message = explained(dict(item), model, self.document.value, key)
            self.problem(key, message, location, reference=page and f"{page}#{anchor(model, location)}".rstrip("#"))


def load(
    name: str, *, profile: str | None = None, settings: Iterable[str] = (), runs_here: bool = True
) -> ResolvedPipeline:
    """Read a pipeline, by path or by its name in the library. ``runs_here`` False asks for no optional packages: it is
    read for other machines.

    Raises SpecError with everything that is wrong with it.
    """
    path = find(name)
    settings = tuple(settings)
    document = read(path)
    if profile:
        document = with_profile(document, profile)
    document = with_settings(document, settings)
    return resolve(document, name, profile, settings, runs_here)


def resolve(
    document: Document, reference: str, profile: str | None, settings: tuple[str, ...], runs_here: bool = True
) -> ResolvedPipeline:
    """Names, edges and configs of a document. Raises SpecError with all problems."""
    loader = _Loader(document)
    try:
        spec = PipelineSpec.model_validate(document.value)
    except ValidationError as error:
        loader.invalid(error, PipelineSpec)
        raise SpecError(loader.problems) from None
    for key in _secrets_in_env(document):
        loader.problem(key, "is kept in records and logs; export a secret before the run instead, stages inherit it")
    folders = (document.path.parent.resolve(), Path.cwd())
    library.search_in(folders)
    expanded, problems = expand(spec)
    for key, message in problems:
        loader.problem(key, message)
    stages = {draft.name: stage for draft in expanded.drafts.values() if (stage := _stage(loader, draft))}
    nodes = {}
    for name, stage in stages.items():
        draft = expanded.drafts[name]
        inputs = _inputs(loader, draft, stage, expanded, stages)
        config = _config(loader, draft, stage)
        execution = _execution(spec, draft)
        if config is not None:
            seed = spec.seed if draft.spec.seed is None else draft.spec.seed
            if runs_here and execution.pool is None:  # a work pool has packages of its own
                _packages(loader, draft, execution, config)
            given = draft.spec.execution.model_fields_set
            for key, message in (*wrong(execution, given, config), *undivided(stage.name, given, config)):
                loader.problem((*draft.key, "execution"), message, key)
            nodes[name] = Node(name, stage, config, inputs, seed, execution)
    for node in nodes.values():
        draft = expanded.drafts[node.name]
        _scorer(loader, node, draft, nodes)
        if message := _model_and_engine(node):
            loader.problem(draft.key, message, ("inputs",))
        if message := unverified(node, nodes):
            loader.problem((*draft.key, "with"), message, ("rewards",))
        for message in _unsplittable(node, nodes):
            loader.problem((*draft.key, "with"), message, ("deepspeed", "sequence_parallel"))
    ordered: dict[str, Node] = {}
    if not loader.problems:
        try:
            ordered = in_order(nodes)
        except graphlib.CycleError as error:
            loader.problem(("stages",), f"stages wait for each other: {' -> '.join(error.args[1])}")
    for name, field_name, message in twins(ordered):
        loader.problem(expanded.drafts[name].key, message, ("inputs", field_name))
    if loader.problems:
        raise SpecError(sorted(dict.fromkeys(loader.problems), key=Problem.where))
    return ResolvedPipeline(spec.name, document.path, spec.description, ordered, folders, reference, profile, settings)


def _secrets_in_env(document: Document) -> list[Key]:
    """Keys of ``execution.env`` that are named like a secret. They are refused, because ``execution.env`` is
    recorded."""
    return [
        key
        for key in document.places
        if len(key) > 2 and key[-3:-1] == ("execution", "env") and names_a_secret(key[-1:])
    ]


def _stage(loader: _Loader, draft: StageDraft) -> Stage | None:
    try:
        return library.resolve(draft.spec.uses)
    except LookupError as error:
        loader.problem(draft.key, str(error.args[0]), ("uses",))
        return None


def _execution(spec: PipelineSpec, draft: StageDraft) -> Execution:
    """The stage's ``execution`` merged over the pipeline's."""
    merged = spec.execution.model_dump(exclude_unset=True) | draft.spec.execution.model_dump(exclude_unset=True)
    return Execution.model_validate(merged)


def _config(loader: _Loader, draft: StageDraft, stage: Stage) -> BaseModel | None:
    try:
        config = stage.config.model_validate(draft.spec.with_)
    except ValidationError as error:
        page = "" if ":" in draft.spec.uses else f"reference/stages/{stage.name}"
        loader.invalid(error, stage.config, (*draft.key, "with"), page)
        return None
    for key in variables(config):
        message = "environment variables are for secrets only; this field is not one"
        loader.problem((*draft.key, "with"), message, key)
    for key, marker, name in outside(config):
        if reason := missing(name, marker.what):
            loader.problem((*draft.key, "with"), reason, key)
    for key, kind, name in named(config):
        try:
            chosen(kind, name)
        except LookupError as error:
            loader.problem((*draft.key, "with"), str(error.args[0]), key)
    return config


def _packages(loader: _Loader, draft: StageDraft, execution: Execution, config: BaseModel) -> None:
    for key, message in missing_packages(config):
        loader.problem((*draft.key, "with"), message, key)
    if execution.launcher == "ray" and (why := absent("ray", "ray")):
        loader.problem((*draft.key, "execution"), why, ("launcher",))
    kind = execution.engine.type
    if kind in ("ray", "prefect") and (why := absent(kind, kind)):
        loader.problem((*draft.key, "execution"), why, ("engine", "type"))


def variables(config: BaseModel) -> list[Key]:
    """Keys of a config that hold ``${NAME}`` though they are no secrets."""
    names: list[Key] = []

    def walk(value: Any, key: Key, secret: bool) -> None:
        if isinstance(value, BaseModel):
            for name, info in type(value).model_fields.items():
                walk(getattr(value, name), (*key, name), "secret" in markers(info))
        elif isinstance(value, Mapping):
            for name, item in value.items():
                walk(item, (*key, name), secret)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                walk(item, (*key, number), secret)
        elif is_reference(value) and not secret:
            names.append(key)

    walk(config, (), False)
    return names


def _inputs(
    loader: _Loader, draft: StageDraft, stage: Stage, expanded: Expanded, stages: Mapping[str, Stage]
) -> dict[str, tuple[Edge, ...]]:
    written = draft.spec.inputs
    for name in written.keys() - stage.inputs.keys():
        hint = did_you_mean(name, stage.inputs) or f"; it has: {', '.join(stage.inputs) or 'none'}"
        loader.problem((*draft.key, "inputs"), f"{stage.name} has no input {name!r}{hint}", (name,))
    wired: dict[str, tuple[Edge, ...]] = {}
    for name, declared in stage.inputs.items():
        if name not in written:
            if declared.required:
                what = f"{stage.name} needs input {name!r} ({declared.kind}); wire it: inputs: {{{name}: STAGE}}"
                loader.problem(draft.key, what, ("inputs",))
            continue
        edges: list[Edge] = []
        texts = written[name]
        for text in [texts] if isinstance(texts, str) else texts:
            try:
                edges_read = expanded.edges(text, draft)
                known = [edge for edge in edges_read if edge[0] in stages or "/" in edge[0]]
                edges += [_edge(other, output, declared.kind, stages) for other, output in known]
            except LookupError as error:
                loader.problem((*draft.key, "inputs"), str(error.args[0]), (name,))
        if len(edges) > 1 and not declared.many:
            names = ", ".join(map(str, edges))
            loader.problem(
                (*draft.key, "inputs"), f"takes one {declared.kind}, but is given {names}; name one", (name,)
            )
        wired[name] = tuple(edges)
    return wired


def _edge(name: str, output: str | None, kind: Kind, stages: Mapping[str, Stage]) -> Edge:
    """Check one edge. Raises LookupError if the output is missing, ambiguous or of another kind. Whether an artifact is
    in the store is seen by the plan."""
    if "/" in name:
        match = _STORED.fullmatch(name)
        if match is None:
            raise LookupError(
                f"{name!r} names no artifact: write STAGE/FINGERPRINT, with at least eight digits of the fingerprint, "
                "or newest for a cut, as `agentrl status` and `agentrl buffer select` print it"
            )
        return Edge(match[1], match[2] or "")
    outputs = stages[name].outputs
    if output is None:
        fitting = [out for out, kind_of in outputs.items() if kind_of is kind]
        if len(fitting) == 1:
            return Edge(name, fitting[0])
        listed = ", ".join(f"{name}.{out} ({kind_of})" for out, kind_of in outputs.items())
        what = f"{len(fitting)} outputs of kind {kind}; name one of" if fitting else f"no output of kind {kind}; it has"
        raise LookupError(f"{name!r} has {what}: {listed}")
    if output not in outputs:
        hint = did_you_mean(output, outputs) or f"; it has: {', '.join(outputs)}"
        raise LookupError(f"{name!r} has no output {output!r}{hint}")
    if outputs[output] is not kind:
        fitting = [f"{name}.{out}" for out, kind_of in outputs.items() if kind_of is kind]
        hint = f"; did you mean {fitting[0]!r}?" if fitting else ""
        raise LookupError(f"{name}.{output} is {outputs[output]}, but the input takes {kind}{hint}")
    return Edge(name, output)


def _scorer(loader: _Loader, node: Node, draft: StageDraft, nodes: Mapping[str, Node]) -> None:
    """Report a scorer if no stage that is wired to the input ``scores`` has its name. A stage of the user's may name
    its scorers freely."""
    scorer, edges = getattr(node.config, "scorer", None), node.inputs.get("scores", ())
    if "scores" not in node.stage.inputs:
        return
    if scorer is None or not edges:
        if scorer or edges:
            missing = "set with.scorer to one of them" if edges else f"wire inputs.scores to a stage that is {scorer!r}"
            loader.problem((*draft.key, "with"), f"{node.stage.name} reads scores by name: {missing}", ("scorer",))
        return
    known = [getattr(nodes[edge.stage].config, "scorer", "") or edge.stage for edge in edges if edge.stage in nodes]
    ours = all(edge.stage in nodes and nodes[edge.stage].stage.name == "trajectories.score" for edge in edges)
    if ours and scorer not in known:
        hint = did_you_mean(scorer, known) or f"; there are: {', '.join(known)}"
        loader.problem((*draft.key, "with"), f"no stage of inputs.scores is the scorer {scorer!r}{hint}", ("scorer",))


_OF_A_MODEL_OR_AN_ENDPOINT = ("evaluate.policy", "trajectories.sample")


def _model_and_engine(node: Node) -> str:
    """What is wrong if a stage that samples from its input, or from an endpoint, has neither or both."""
    engine, wired = getattr(node.config, "engine", None), bool(node.inputs.get("model"))
    if engine is None or node.stage.name not in _OF_A_MODEL_OR_AN_ENDPOINT:
        return ""
    if engine.exact and not wired:
        return f"engine {engine.type} samples from a model; wire inputs.model, or set with.engine to an endpoint"
    return f"engine {engine.type} samples from its own model; leave inputs.model out" if wired > engine.exact else ""


def _unsplittable(node: Node, nodes: Mapping[str, Node]) -> list[str]:
    """Why the rows that a stage trains on cannot be split over its ranks."""
    first, seen = node, {node.name}
    while (edges := first.inputs.get("model")) and edges[0].stage in nodes.keys() - seen:
        first = nodes[edges[0].stage]
        seen.add(first.name)
    try:
        return list(unsplittable(node.execution, node.config, getattr(first.config, "model", None)))
    except LaunchError:
        return []  # a bad hostfile is said where it stands

"""Artifacts by the names that people use, and what they were made from."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.run.runs import all_runs
from agentrl.schemas.manifest import Manifest

Artifact = tuple[str, str]
"""(stage, fingerprint)."""


def find_artifact(catalog: Catalog, text: str) -> Manifest:
    """A tag, ``stage`` (its newest artifact), ``stage/abcd`` (the beginning of a fingerprint), or ``pipeline:stage``
    (what the newest run of that pipeline made or re-used).

    Raises LookupError with a message for the user if there is none, or more than one. If pipelines share the stage's
    name, a warning says whose artifact the newest is.
    """
    tags = catalog.tags()
    pipeline, of_a_pipeline, name = text.rpartition(":")
    if of_a_pipeline and text not in tags:
        return _of_pipeline(catalog, pipeline, name)
    stage, _, prefix = "/".join(tags[text]).partition("/") if text in tags else text.partition("/")
    every = catalog.manifests(stage) if stage else []
    matches = [manifest for manifest in every if manifest.fingerprint.startswith(prefix)]
    if not matches:
        stages = sorted({manifest.ingredients.stage for manifest in catalog.all()})
        hint = did_you_mean(stage, [*stages, *tags]) if stage not in stages else ""
        known = f"; its fingerprints: {', '.join(m.fingerprint[:8] for m in every[:5])}"
        hint = hint or (known if stage in stages else f"; artifacts of: {', '.join(stages) or 'no stage yet'}")
        raise LookupError(f"there is no artifact or tag {text!r}{hint}; store {catalog.storage.uri}")
    if prefix and len(matches) > 1:
        names = ", ".join(manifest.fingerprint[:12] for manifest in matches)
        raise LookupError(f"{text!r} is the beginning of several: {names}; write more of it")
    makers = list(dict.fromkeys(manifest.ingredients.pipeline for manifest in matches))
    if len(makers) > 1:
        first, *others = (pipeline or "no pipeline" for pipeline in makers)
        warnings.warn(
            f"{text} is {stage}/{matches[0].fingerprint[:8]} of {first}; there are others of {', '.join(others)}: to "
            f"choose, write PIPELINE:{stage} or {stage}/FINGERPRINT",
            stacklevel=2,
        )
    return matches[0]


def _of_pipeline(catalog: Catalog, pipeline: str, stage: str) -> Manifest:
    """What the newest run of a pipeline that had this stage made or re-used, also if another pipeline made it first."""
    runs = all_runs(catalog, pipeline)
    for run in runs:
        fingerprint = run["stages"].get(stage, {}).get("fingerprint")
        if fingerprint and (manifest := catalog.manifest(stage, fingerprint)):
            return manifest
    if not runs:
        names = sorted({run["pipeline"] for run in all_runs(catalog)})
        hint = did_you_mean(pipeline, names) or f"; pipelines that ran: {', '.join(names) or 'none'}"
        raise LookupError(f"no run of pipeline {pipeline!r} is in this store{hint}")
    stages = sorted({name for run in runs for name in run["stages"]})
    hint = did_you_mean(stage, stages) or f"; its stages: {', '.join(stages)}"
    raise LookupError(f"pipeline {pipeline!r} has no artifact of stage {stage!r}{hint}")


@dataclass
class Lineage:
    """One artifact and, below it, what it read. ``manifest`` None: it was removed since.

    Artifacts that are read twice are one object, so the whole is a graph; :meth:`walk` walks it without recursion.
    """

    stage: str
    fingerprint: str
    manifest: Manifest | None
    inputs: list[tuple[str, "Lineage"]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.stage}/{self.fingerprint[:8]}"

    @property
    def key(self) -> Artifact:
        return self.stage, self.fingerprint

    def walk(self) -> Iterator["Lineage"]:
        """This artifact and all below it, each once, readers before what they read first."""
        seen = {self.key}
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            for _, below in reversed(node.inputs):
                if below.key not in seen:
                    seen.add(below.key)
                    todo.append(below)

    def to_json(self) -> dict[str, Any]:
        """This artifact; ``artifacts`` lists all below it, each once. ``inputs`` name them by stage and fingerprint."""
        root, *below = (node._record() for node in self.walk())
        return {**root, "artifacts": below}

    def _record(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "uses": manifest.ingredients.uses if manifest else None,
            "run_id": manifest.run_id if manifest else None,
            "created_at": manifest.created_at.isoformat() if manifest else None,
            "externals": manifest.ingredients.externals if manifest else {},
            "inputs": [
                {"input": n, "stage": record.stage, "fingerprint": record.fingerprint} for n, record in self.inputs
            ],
        }


def lineage(catalog: Catalog, stage: str, fingerprint: str, known: dict[Artifact, Lineage] | None = None) -> Lineage:
    """What an artifact was made from, down to artifacts without inputs. Each manifest is read once; ``known`` holds
    the manifests that were read before; those read now are added to it."""
    known = {} if known is None else known
    root = known.get((stage, fingerprint))
    if root is not None:
        return root
    root = known[stage, fingerprint] = Lineage(stage, fingerprint, catalog.manifest(stage, fingerprint))
    todo = [root]
    while todo:
        node = todo.pop()
        for name, records in node.manifest.ingredients.inputs.items() if node.manifest else ():
            for record in records:
                below = known.get((record.stage, record.fingerprint))
                if below is None:
                    manifest = catalog.manifest(record.stage, record.fingerprint)
                    below = known[record.stage, record.fingerprint] = Lineage(
                        record.stage, record.fingerprint, manifest
                    )
                    todo.append(below)
                node.inputs.append((name, below))
    return root


def mermaid(root: Lineage) -> str:
    """A Mermaid flow chart, data flowing from left to right."""
    nodes = {node.key: f"n{number}" for number, node in enumerate(root.walk())}
    boxes = [f'  {nodes[node.key]}["{node.label}"]' for node in root.walk()]
    edges = dict.fromkeys(
        f"  {nodes[below.key]} -->|{label}| {nodes[node.key]}" for node in root.walk() for label, below in node.inputs
    )
    return "\n".join(["flowchart LR", *boxes, *edges])


def tag(catalog: Catalog, artifact: str, name: str) -> Manifest:
    """Give an artifact a name, which keeps it from gc. Raises ValueError if the name cannot be one, LookupError if
    there is no such artifact."""
    from pydantic import TypeAdapter, ValidationError

    from agentrl.schemas.pipeline import Name

    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError:
        message = f"{name!r} cannot name a tag: write up to 80 letters, digits, _ and -, a letter first"
        raise ValueError(message) from None
    manifest = find_artifact(catalog, artifact)
    catalog.tag(name, manifest.ingredients.stage, manifest.fingerprint)
    return manifest

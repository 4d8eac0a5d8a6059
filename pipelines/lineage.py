"""Artifacts by the names that people use, and what they were made from."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from datastore.catalog import Catalog
from pipelines.problems import did_you_mean
from schemas.manifest import Manifest

Artifact = tuple[str, str]
"""(stage, fingerprint)."""


def find_artifact(catalog: Catalog, text: str) -> Manifest:
    """A tag, ``stage`` (its newest artifact) or ``stage/abcd`` (the beginning of a fingerprint).

    Raises LookupError with a message for the user where there is none, or more than one.
    """
    tags = catalog.tags()
    stage, _, prefix = "/".join(tags[text]).partition("/") if text in tags else text.partition("/")
    found = (
        [manifest for manifest in catalog.manifests(stage) if manifest.fingerprint.startswith(prefix)] if stage else []
    )
    if not found:
        stages = sorted({manifest.ingredients.stage for manifest in catalog.all()})
        hint = did_you_mean(stage, [*stages, *tags]) if stage not in stages else ""
        known = f"; its fingerprints: {', '.join(m.fingerprint[:8] for m in catalog.manifests(stage)[:5])}"
        hint = hint or (known if stage in stages else f"; artifacts of: {', '.join(stages) or 'no stage yet'}")
        raise LookupError(f"there is no artifact or tag {text!r}{hint}")
    if prefix and len(found) > 1:
        names = ", ".join(manifest.fingerprint[:12] for manifest in found)
        raise LookupError(f"{text!r} is the beginning of several: {names}; write more of it")
    return found[0]


@dataclass
class Lineage:
    """One artifact and, below it, what it read. ``manifest`` None: it was removed since."""

    stage: str
    fingerprint: str
    manifest: Manifest | None
    inputs: list[tuple[str, "Lineage"]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.stage}/{self.fingerprint[:8]}"

    def to_json(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "uses": manifest.ingredients.uses if manifest else None,
            "run_id": manifest.run_id if manifest else None,
            "created_at": manifest.created_at.isoformat() if manifest else None,
            "externals": manifest.ingredients.externals if manifest else {},
            "inputs": [{"input": name, **below.to_json()} for name, below in self.inputs],
        }

    def walk(self) -> Iterator["Lineage"]:
        """This artifact and all below it; what is shared comes again."""
        yield self
        for _, below in self.inputs:
            yield from below.walk()


def lineage(catalog: Catalog, stage: str, fingerprint: str, known: dict[Artifact, Lineage] | None = None) -> Lineage:
    """What an artifact was made from, down to artifacts without inputs. Shared parts are the same objects."""
    known = {} if known is None else known
    if (stage, fingerprint) in known:
        return known[stage, fingerprint]
    node = known[stage, fingerprint] = Lineage(stage, fingerprint, catalog.manifest(stage, fingerprint))
    if node.manifest:
        for name, records in node.manifest.ingredients.inputs.items():
            node.inputs += [(name, lineage(catalog, r.stage, r.fingerprint, known)) for r in records]
    return node


def mermaid(root: Lineage) -> str:
    """A Mermaid flow chart, data flowing from left to right."""
    nodes: dict[str, str] = {}
    edges: dict[str, None] = {}

    def visit(node: Lineage) -> str:
        seen = node.label in nodes
        name = nodes.setdefault(node.label, f"n{len(nodes)}")
        if not seen:
            for label, below in node.inputs:
                edges[f"  {visit(below)} -->|{label}| {name}"] = None
        return name

    visit(root)
    return "\n".join(["flowchart LR", *(f'  {name}["{label}"]' for label, name in nodes.items()), *edges])

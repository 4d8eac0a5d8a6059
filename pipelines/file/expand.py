"""Repeated groups unrolled into rounds, and matrices into one stage per combination."""

import fnmatch
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.pipelines.file.document import Key, merge
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.file.yaml_text import MAX_DEPTH
from agentrl.schemas.pipeline import Carry, GroupSpec, PipelineSpec, StageSpec

MAX_STAGES = 5_000
"""Stages of a pipeline once groups are unrolled and matrices are multiplied out."""

MAX_LABEL = 60
"""Characters of a matrix value in a stage's name, which becomes the name of a folder; longer values are hashed."""


@dataclass(frozen=True)
class StageDraft:
    """One stage under its final name, before its edges are looked up. ``key`` is its place in the file."""

    name: str
    spec: StageSpec
    key: Key
    group: str | None = None
    round: int = 0


@dataclass
class Expanded:
    """``variants`` maps the name of a stage with a matrix to the names of its copies."""

    drafts: dict[str, StageDraft] = field(default_factory=dict)
    variants: dict[str, list[str]] = field(default_factory=dict)
    groups: dict[str, GroupSpec] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [*self.drafts, *self.variants]

    def _scoped(self, name: str, group: str | None, number: int) -> str:
        """The final name of what a stage of this round calls ``name``; outside a group, its last round is meant."""
        if group and name in self.groups[group].stages:
            return f"{name}-{number}"
        for other in self.groups.values():
            if name in other.stages:
                return f"{name}-{other.repeat}"
        return name

    def edges(self, text: str, draft: StageDraft) -> list[tuple[str, str | None]]:
        """(stage, output or None) of an edge as written; several for a pattern or a stage with a matrix.

        Raises LookupError with a message for the user.
        """
        return list(self._edges(text, draft.group, draft.round, draft.name))

    def _edges(self, text: str, group: str | None, number: int, reader: str) -> Iterator[tuple[str, str | None]]:
        if text.startswith("carry."):
            yield from self._carried(text.removeprefix("carry."), group, number, reader)
            return
        if "/" in text:  # an artifact of the store
            yield text, None
            return
        for name, output in ((text, None), text.rpartition(".")[::2]):
            scoped = self._scoped(name, group, number)
            names = [scoped] if scoped in self.drafts else self.variants.get(scoped, [])
            if not names and "*" in name:
                names = [other for other in fnmatch.filter(self.drafts, name) if other != reader]
            if names:
                yield from ((other, output) for other in names)
                return
        stage = text if "." not in text else text.partition(".")[0]
        raise LookupError(f"there is no stage {stage!r}" + self._near(stage, group))

    def _near(self, name: str, group: str | None) -> str:
        known = [*(self.groups[group].stages if group else ()), *self.names()]
        known += [member for other in self.groups.values() for member in other.stages]
        return did_you_mean(name, known) or f"; stages: {', '.join(dict.fromkeys(known))}"

    def _carried(self, name: str, group: str | None, number: int, reader: str) -> Iterator[tuple[str, str | None]]:
        carry: dict[str, Carry] = self.groups[group].carry if group else {}
        base, _, output = name.partition(".")
        if base not in carry:
            hint = did_you_mean(base, carry) or f"; carried: {', '.join(carry) or 'nothing (carry is for groups)'}"
            raise LookupError(f"carry.{base} is not carried by a group that this stage is in{hint}")
        edge = carry[base].first if number == 1 else carry[base].then
        scope = (None, 0) if number == 1 else (group, number - 1)
        for text in [edge] if isinstance(edge, str) else edge:
            yield from self._edges(f"{text}.{output}" if output else text, *scope, reader)


def expand(spec: PipelineSpec) -> tuple[Expanded, list[tuple[Key, str]]]:
    """All stages under their final names, and what is wrong with names and matrices as (key, message)."""
    expanded, problems = Expanded(), []
    for name, entry in spec.stages.items():
        if isinstance(entry, GroupSpec):
            expanded.groups[name] = entry
    if problem := _too_many(spec):
        return expanded, [problem]
    for draft in _rounds(spec):
        if draft.name in expanded.drafts or draft.name in expanded.variants:
            problems.append((draft.key, f"two stages are called {draft.name!r}; rename one"))
            continue
        try:
            copies = list(_matrix(draft, expanded)) if draft.spec.matrix else [draft]
        except ValueError as error:
            problems.append(((*draft.key, "matrix"), str(error)))
            continue
        if draft.spec.matrix:
            expanded.variants[draft.name] = [copy.name for copy in copies]
        expanded.drafts.update((copy.name, copy) for copy in copies)
        if len(expanded.drafts) > MAX_STAGES:
            count = f"{len(expanded.drafts):,}"
            problems.append(
                (draft.key, f"makes {count} stages with those before it; at most {MAX_STAGES:,} are allowed")
            )
            break
    return expanded, problems


def _too_many(spec: PipelineSpec) -> tuple[Key, str] | None:
    """The first stage or group that makes too many stages by itself, before any of them is made."""
    for name, entry in spec.stages.items():
        members = {(): entry} if isinstance(entry, StageSpec) else {("stages", n): m for n, m in entry.stages.items()}
        rounds = 1 if isinstance(entry, StageSpec) else entry.repeat
        total = 0
        for where, member in members.items():
            sizes = [len(values) for values in member.matrix.values()]
            copies = math.prod(sizes)
            total += copies
            if copies * rounds > MAX_STAGES:
                times = " x ".join(map(str, [*([rounds] if rounds > 1 else []), *sizes]))
                key = ("stages", name, *where, "matrix") if sizes else ("stages", name, "repeat")
                return key, f"{times} is {copies * rounds:,} stages; at most {MAX_STAGES:,} are allowed"
        if total * rounds > MAX_STAGES:
            what = f"{rounds} rounds of {total} stages are {total * rounds:,}; at most {MAX_STAGES:,} are allowed"
            return ("stages", name, "repeat"), what
    return None


def _rounds(spec: PipelineSpec) -> Iterator[StageDraft]:
    for name, entry in spec.stages.items():
        if isinstance(entry, StageSpec):
            yield StageDraft(name, entry, ("stages", name))
            continue
        for number in range(1, entry.repeat + 1):
            for member, member_spec in entry.stages.items():
                key = ("stages", name, "stages", member)
                yield StageDraft(f"{member}-{number}", member_spec, key, group=name, round=number)


def _matrix(draft: StageDraft, expanded: Expanded) -> Iterator[StageDraft]:
    """One copy per combination, named by its values, so that adding a value renames no other copy."""
    axes: list[list[tuple[str, Any]]] = []
    for key, values in draft.spec.matrix.items():
        if not values:
            raise ValueError(f"{key} has no values")
        if key.startswith("inputs."):
            values = [variant for value in values for variant in expanded.variants.get(str(value), [value])]
        if key == "seed" and not all(type(value) is int for value in values):
            raise ValueError(f"seed takes whole numbers, not {values}; a config field of that name is with.seed")
        if key.count(".") > MAX_DEPTH:
            raise ValueError(f"a key of {key.count('.') + 1} parts; at most {MAX_DEPTH} are allowed")
        axes.append([(key, value) for value in values])
    if (count := math.prod(map(len, axes))) > MAX_STAGES:
        raise ValueError(f"makes {count:,} stages; at most {MAX_STAGES:,} are allowed")
    seen: set[str] = set()
    for combination in itertools.product(*axes):
        name = "-".join([draft.name, *(_label(value) for _, value in combination)])
        if name in seen:
            raise ValueError(f"two combinations are called {name!r}; values must differ")
        seen.add(name)
        inputs, config, seed = dict(draft.spec.inputs), dict(draft.spec.with_), draft.spec.seed
        for key, value in combination:
            if key == "seed":
                seed = value
                continue
            if key.startswith("inputs."):
                inputs[key.removeprefix("inputs.")] = value
                continue
            nested: Any = value
            for part in reversed(key.removeprefix("with.").split(".")):
                nested = {part: nested}
            config = merge(config, nested)
        yield replace(
            draft, name=name, spec=draft.spec.model_copy(update={"inputs": inputs, "with_": config, "seed": seed})
        )


def _label(value: Any) -> str:
    if isinstance(value, dict | list):
        return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=3).hexdigest()
    label = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(value))
    return label if len(label) <= MAX_LABEL else f"{label[:8]}-{_label([label])}"

"""A pipeline file as text: YAML with the place of every key, files that extend others, profiles and ``--set``.

Everything here works on plain values; what they mean is :mod:`pipelines.load`'s business.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from pipelines.problems import Place, Problem, SpecError, did_you_mean

LIBRARY = Path(__file__).parent / "specs"

Key = tuple[str | int, ...]


@dataclass
class Document:
    """``value`` as read and merged; ``places`` says for each key path where it was written."""

    path: Path
    value: dict[str, Any]
    places: dict[Key, Place] = field(default_factory=dict)

    def place(self, key: Key) -> Place:
        """Where a key was written, or the nearest key above it."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places.get(key, Place(str(self.path), None))


def library_names() -> list[str]:
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def find(name: str, relative_to: Path | None = None) -> Path:
    """The file of a pipeline, by path or by its name in the library.

    Raises SpecError where there is neither.
    """
    path = (relative_to or Path()) / name
    if path.is_file():
        return path
    if (LIBRARY / f"{name}.yaml").is_file():
        return LIBRARY / f"{name}.yaml"
    near = [str(other) for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = did_you_mean(name, [*near, *library_names()]) or f"; the library has: {', '.join(library_names()) or 'none'}"
    raise SpecError([Problem(f"there is no pipeline file {path} and no pipeline of that name in the library{hint}")])


def parse(text: str, path: Path) -> Document:
    """Read YAML 1.2. Raises SpecError where it is not YAML, not a mapping, or a key is written twice."""
    yaml = YAML(typ="safe")
    try:
        node = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise SpecError([Problem(f"is not YAML: {what}", Place(str(path), mark and mark.line + 1))]) from None
    document = Document(path, {})
    problems: list[Problem] = []

    def build(node: Node, key: Key) -> Any:
        document.places.setdefault(key, Place(str(path), node.start_mark.line + 1))
        if isinstance(node, MappingNode):
            mapping: dict[Any, Any] = {}
            for name_node, value_node in node.value:
                name = name_node.value
                place = Place(str(path), name_node.start_mark.line + 1)
                if name in mapping:
                    problems.append(Problem("this key is written twice", place, (*key, name)))
                document.places[(*key, name)] = place
                mapping[name] = build(value_node, (*key, name))
            return mapping
        if isinstance(node, SequenceNode):
            return [build(item, (*key, number)) for number, item in enumerate(node.value)]
        value = yaml.constructor.construct_object(node)
        return value if isinstance(value, str | int | float | bool | None) else node.value

    value: Any = build(node, ()) if node is not None else None
    if not isinstance(value, dict):
        problems.append(Problem("a pipeline file is a mapping with the keys name and stages", Place(str(path), 1)))
    if problems:
        raise SpecError(problems)
    document.value = value
    return document


def merge(base: Any, over: Any) -> Any:
    """``over`` laid upon ``base``: mappings key by key, everything else replaced; null removes a key."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    merged = dict(base)
    for name, value in over.items():
        if value is None and isinstance(base.get(name), dict):
            merged.pop(name)
        else:
            merged[name] = merge(base[name], value) if name in base else value
    return merged


def read(path: Path, seen: Sequence[Path] = ()) -> Document:
    """A file and those that it extends, as one document."""
    try:
        document = parse(path.read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem(f"cannot be read: {error}", Place(str(path), None))]) from None
    extends = document.value.get("extends")
    if extends is None:
        return document
    place = document.place(("extends",))
    if not isinstance(extends, str):
        raise SpecError([Problem("is the path of a file, or a name in the library", place, ("extends",))])
    seen = [*seen, path.resolve()]
    parent_path = find(extends, path.parent)
    if parent_path.resolve() in seen:
        circle = " -> ".join(str(other) for other in [*seen, parent_path.resolve()])
        raise SpecError([Problem(f"extends itself: {circle}", place, ("extends",))])
    parent = read(parent_path, seen)
    value = merge({key: item for key, item in parent.value.items() if key != "extends"}, document.value)
    return Document(path, value, parent.places | document.places)


def with_profile(document: Document, name: str) -> Document:
    """The document under one of its profiles. Raises SpecError where there is none of that name."""
    profiles = document.value.get("profiles")
    profiles = profiles if isinstance(profiles, dict) else {}
    if name not in profiles:
        hint = did_you_mean(name, profiles) or f"; profiles: {', '.join(profiles) or 'none'}"
        raise SpecError([Problem(f"--profile {name}: there is no such profile{hint}", document.place(("profiles",)))])
    profile = profiles[name] or {}
    stages: Any = document.value.get("stages")
    for stage, entry in (profile.get("stages") or {}).items() if isinstance(stages, dict) else ():
        if stage not in stages and not {"uses", "repeat"} & set(entry or ()):
            hint = did_you_mean(str(stage), stages) or f"; stages: {', '.join(stages)}"
            key = ("profiles", name, "stages", stage)
            raise SpecError([Problem(f"there is no stage {stage!r} to overlay{hint}", document.place(key), key)])
    overlay = {key: profile[key] for key in ("seed", "execution", "stages") if profile.get(key) is not None}
    prefix = ("profiles", name)
    moved = {key[2:]: place for key, place in document.places.items() if key[:2] == prefix and len(key) > 3}
    return Document(document.path, merge(document.value, overlay), document.places | moved)


def with_settings(document: Document, settings: Iterable[str]) -> Document:
    """``stages.dpo.with.beta=0.3`` and the like, read as YAML values, laid upon the document.

    Raises SpecError where a setting is not ``path=value`` or its path leads nowhere.
    """
    value, places, problems = document.value, dict(document.places), []
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        place = Place(f"--set {setting}", None)
        if not equals or not dotted.strip():
            problems.append(Problem("is written as a.b.c=value, e.g. stages.dpo.with.beta=0.3", place))
            continue
        key = tuple(dotted.strip().split("."))
        try:
            parsed = YAML(typ="safe").load(text)
        except MarkedYAMLError as error:
            problems.append(Problem(f"the value is not YAML: {error.problem}", place))
            continue
        problem = _leads_nowhere(value, key)
        if problem:
            problems.append(Problem(problem, place))
            continue
        value = merge(value, _nested(key, parsed))
        places[key] = place
    if problems:
        raise SpecError(problems)
    return Document(document.path, value, places)


def _leads_nowhere(value: Mapping[str, Any], key: Key) -> str | None:
    """A setting may add keys below a stage, but never a stage: that would be a misspelt name."""
    here: Any = value
    for depth, name in enumerate(key):
        if depth and key[depth - 1] == "stages" and isinstance(here, dict) and name not in here:
            return f"there is no stage {name!r}" + (did_you_mean(str(name), here) or f"; stages: {', '.join(here)}")
        here = here.get(name, {}) if isinstance(here, dict) else {}
    return None


def _nested(key: Key, value: Any) -> Any:
    for name in reversed(key):
        value = {name: value}
    return value

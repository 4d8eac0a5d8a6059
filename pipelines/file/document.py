"""A pipeline file as text: YAML with the place of every key, files that extend others, profiles and ``--set``.

Everything here works on plain values; :mod:`agentrl.pipelines.file.load` gives them their meaning.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.pipelines.file import yaml_text
from agentrl.pipelines.file.problems import Origin, Problem, SpecError, did_you_mean
from agentrl.pipelines.file.yaml_text import Key, YamlError
from agentrl.schemas.pipeline import PipelineSpec

LIBRARY = Path(__file__).parents[1] / "specs"
METHODS = Path(__file__).parents[1] / "methods"


KINDS = (("type", "type"), ("init", "path"), ("path", "init"))
"""Keys that say what a mapping is, and the keys that make something else of it."""


@dataclass
class Document:
    """``value`` as read and merged; ``places`` says for each key path where it was written."""

    path: Path
    value: dict[str, Any]
    places: dict[Key, Origin] = field(default_factory=dict)

    def place(self, key: Key) -> Origin:
        """Where a key was written, or the nearest key above it."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places.get(key, Origin(str(self.path), None))


def library_files() -> dict[str, Path]:
    """The files of the library by the names that `agentrl run` takes: ``quickstart``, ``cluster/dense-8b``,
    ``methods/dagger``."""
    files = {path.relative_to(LIBRARY).with_suffix("").as_posix(): path for path in LIBRARY.rglob("*.yaml")}
    methods = {f"{METHODS.name}/{path.parent.name}": path for path in METHODS.glob("*/pipeline.yaml")}
    return dict(sorted((files | methods).items()))


def find(name: str, relative_to: Path | None = None) -> Path:
    """The file of a pipeline, by path or by its name in the library.

    Raises SpecError if there is neither.
    """
    path = (relative_to or Path()) / name
    known = library_files()
    try:
        if path.is_file() or name in known:
            return path if path.is_file() else known[name]
    except (OSError, ValueError) as error:  # too long for a path, or a character that no path has
        raise SpecError([Problem(f"{name[:80]!r} cannot be the path of a pipeline file: {error}")]) from None
    near = [str(other) for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = did_you_mean(name, [*near, *known]) or f"; the library has: {', '.join(known)}"
    raise SpecError([Problem(f"there is no pipeline file {path} and no pipeline of that name in the library{hint}")])


def _in_library(path: Path) -> bool:
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in (LIBRARY, METHODS))


def default_store(path: Path) -> str:
    """The store that belongs to a pipeline file: ``store`` in its folder, wherever the command is given. A pipeline of
    the library has that of the working directory."""
    return "store" if _in_library(path) else str(path.parent / "store")


def parse(text: str, path: Path) -> Document:
    """Read YAML 1.2. Raises SpecError if it is not YAML, not a mapping, too large, or a key is written twice."""
    document = Document(path, {})

    def place(key: Key, line: int) -> None:
        document.places[key] = Origin(str(path), line)

    try:
        value, wrong = yaml_text.parse(text, place)
    except YamlError as error:
        raise SpecError([Problem(error.message, Origin(str(path), error.line))]) from None
    problems = [Problem(error.message, Origin(str(path), error.line), error.key) for error in wrong]
    if not isinstance(value, dict):
        problems.append(Problem("a pipeline file is a mapping with the keys name and stages", Origin(str(path), 1)))
    if problems:
        raise SpecError(problems)
    document.value = value
    return document


def merge(base: Any, over: Any) -> Any:
    """``base`` changed by ``over``: mappings are merged key by key, other values replaced; null removes a key."""
    return _merged(base, over, lambda base, over, key: False, ())


def overlaid(base: Any, over: Any) -> Any:
    """:func:`merge` for what people lay over a file (``extends``, profiles, ``--set``): a mapping that becomes another
    thing, since its ``type`` changes or ``path`` stands in for ``init``, is replaced. What that drops is warned of."""
    return _merged(base, over, _is_another, ())


def _merged(base: Any, over: Any, is_another: Callable[[Any, Any, Key], bool], key: Key) -> Any:
    if not (isinstance(base, dict) and isinstance(over, dict)) or is_another(base, over, key):
        return over
    merged = dict(base)
    for name, value in over.items():
        if value is None and isinstance(base.get(name), dict):
            merged.pop(name)
        else:
            merged[name] = _merged(base[name], value, is_another, (*key, name)) if name in base else value
    return merged


def _is_another(base: Mapping[str, Any], over: Mapping[str, Any], key: Key) -> bool:
    for before, now in KINDS:
        if base.get(before) is None or over.get(now) is None or (before in over and over[before] == base[before]):
            continue
        if before != now and before in over:
            continue  # both are written: let them be checked
        if dropped := sorted(base.keys() - over.keys() - {before}):
            where = ".".join(map(str, key))
            warnings.warn(f"{where}: another {now} replaces all of it, also {', '.join(dropped)}", stacklevel=2)
        return True
    return False


def read(path: Path, seen: Sequence[Path] = ()) -> Document:
    """A file and those that it extends, as one document."""
    try:
        document = parse(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem(f"cannot be read: {error}", Origin(str(path), None))]) from None
    extends = document.value.get("extends")
    if extends is None:
        return document
    origin = document.place(("extends",))
    if not isinstance(extends, str):
        raise SpecError([Problem("is the path of a file, or a name in the library", origin, ("extends",))])
    seen = [*seen, path.resolve()]
    parent_path = find(extends, path.parent)
    if parent_path.resolve() in seen:
        circle = " -> ".join(str(other) for other in [*seen, parent_path.resolve()])
        raise SpecError([Problem(f"extends itself: {circle}", origin, ("extends",))])
    parent = _extended(parent_path, seen)
    value = overlaid({key: item for key, item in parent.value.items() if key != "extends"}, document.value)
    return Document(path, value, parent.places | document.places)


def _extended(path: Path, seen: Sequence[Path]) -> Document:
    """A file that another one extends. A stranger's file may name any file of this machine: outside the folder of the
    first file, an error names a line and the kind of mistake, and repeats nothing of what stands there."""
    if path.resolve().is_relative_to(seen[0].parent) or _in_library(path):
        return read(path, seen)
    more = f"its text is not repeated, since it is outside {seen[0].parent}; ask `agentrl validate` for it"
    try:
        document = read(path, seen)
    except SpecError as error:
        first = error.problems[0]
        if first.place and Path(first.place.source) != path:
            raise  # of a file that it extends, where this was decided already
        kind = first.message if first.message.startswith("cannot be read") else "is no pipeline file in YAML"
        raise SpecError(
            [Problem(f"{kind.partition(':')[0]}; {more}", first.place or Origin(str(path), None))]
        ) from None
    known = {*PipelineSpec.model_fields}
    if foreign := [key for key in document.value if key not in known]:
        origin = document.place((foreign[0],))
        raise SpecError([Problem(f"has {len(foreign)} keys that no pipeline file has; {more}", origin)])
    return document


def with_profile(document: Document, name: str) -> Document:
    """The document under one of its profiles. Raises SpecError if there is none of that name, or it is no overlay."""
    profiles = document.value.get("profiles")
    profiles = profiles if isinstance(profiles, dict) else {}
    if name not in profiles:
        hint = did_you_mean(name, profiles) or f"; profiles: {', '.join(profiles) or 'none'}"
        raise SpecError([Problem(f"--profile {name}: there is no such profile{hint}", document.place(("profiles",)))])
    profile = profiles[name] or {}
    prefix = ("profiles", name)
    if not isinstance(profile, dict) or not isinstance(profile.get("stages") or {}, dict):
        key: Key = (*prefix, "stages") if isinstance(profile, dict) else prefix
        raise SpecError([Problem("is a mapping of what it changes", document.place(key), key)])
    stages: Any = document.value.get("stages")
    for stage, entry in (profile.get("stages") or {}).items() if isinstance(stages, dict) else ():
        if stage not in stages and not (isinstance(entry, dict) and {"uses", "repeat"} & set(entry)):
            hint = did_you_mean(str(stage), stages) or f"; stages: {', '.join(stages)}"
            stage_key = (*prefix, "stages", stage)
            raise SpecError(
                [Problem(f"there is no stage {stage!r} to overlay{hint}", document.place(stage_key), stage_key)]
            )
    overlay = {key: profile[key] for key in ("seed", "execution", "stages") if profile.get(key) is not None}
    moved = {key[2:]: origin for key, origin in document.places.items() if key[:2] == prefix and len(key) > 3}
    return Document(document.path, overlaid(document.value, overlay), document.places | moved)


def with_settings(document: Document, settings: Iterable[str]) -> Document:
    """``stages.dpo.with.beta=0.3`` and the like, read as YAML values and merged into the document.

    Raises SpecError if a setting is not ``path=value`` or its path leads nowhere. No message repeats a value.
    """
    value, places, problems = document.value, dict(document.places), []
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        key: Key = tuple(dotted.strip().split("."))
        origin = Origin(f"--set {dotted.strip()[:200]}" if equals else "--set", None)
        if not equals or "" in key or len(key) > yaml_text.MAX_DEPTH:
            problems.append(Problem("is written as a.b.c=value, e.g. stages.dpo.with.beta=0.3", origin))
            continue
        try:
            parsed = yaml_text.plain(text)
        except YamlError as error:
            problems.append(Problem(f"the value {error.message}", origin))
            continue
        problem = _leads_nowhere(value, key)
        if problem:
            problems.append(Problem(problem, origin))
            continue
        value = overlaid(value, _nested(key, parsed))
        places |= {key[:end]: places.get(key[:end], origin) for end in range(1, len(key))} | {key: origin}
    if problems:
        raise SpecError(problems)
    return Document(document.path, value, places)


def _leads_nowhere(value: Mapping[str, Any], key: Key) -> str | None:
    """Refuse a setting that would add a stage, since its name must be misspelt. Keys below a stage may be added."""
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

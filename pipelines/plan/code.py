"""Which code a stage can reach with this config, by reading sources, not by importing them.

The unit is one top-level statement: an edit of a helper concerns the stages that reach that helper, not all that import
its module. Comments, docstrings and formatting do not count. If a string in that code names a data file or a folder of
data files (templates, prompts) beside the module or one folder up, their content counts too, unless the string is only
said (in an exception, a warning, a log).

The walk starts at the stage's function, at the class of every model in its config, and at what the config chooses by
name (:mod:`agentrl.pipelines.file.choices`). It ends at explicit boundaries: the two tables below, and type positions
(:mod:`agentrl.pipelines.plan.source`). What cannot be seen is listed in :mod:`agentrl.pipelines.plan.fingerprint`.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.pipelines.file.external import external_digest
from agentrl.pipelines.plan.source import Statement, Target
from agentrl.pipelines.plan.source_file import SourceFile, stamp_of
from agentrl.schemas.declared import OURS
from agentrl.schemas.installation import PACKAGE_ROOT

CARRIERS = frozenset(
    {
        "agentrl.pipelines.stage",  # hands data to stages
        "agentrl.pipelines.handles",
        "agentrl",  # names of the Python interface
        "agentrl.algorithms",  # tables of names; what a config chooses from them is followed separately
        "agentrl.engines",
        "agentrl.environments",
        "agentrl.placement.base",  # where processes run
        "agentrl.placement.launcher",
        "agentrl.training.trackers",  # shows metrics
        "agentrl.schemas.annotations",
        "agentrl.schemas.choice",  # looks up what a config chooses, which is followed separately
        "agentrl.schemas.declared",
        "agentrl.schemas.hints",
        "agentrl.pipelines.displays",  # shows rows
    }
)
"""Modules that hand data on, look names up or show things, and compute no result: an edit there re-runs nothing, and
what they import is not followed. A change of theirs that changes results raises
``agentrl.pipelines.plan.fingerprint.SCHEME``."""

USED_IF_SET: Mapping[str, str] = {
    "agentrl.training.launch": "deepspeed",
    "agentrl.training.job": "deepspeed",
    "agentrl.training.sequence": "deepspeed",
    "agentrl.online.ranks": "deepspeed",
    "deepspeed": "deepspeed",
    "agentrl.training.lora": "optimizer.lora",
    "peft": "optimizer.lora",
    "bitsandbytes": "optimizer.lora.quantize",
    "agentrl.online.critic": "algorithm.critic",
    "agentrl.online.off_policy": "algorithm.off_policy",
    "agentrl.pipelines.parts.retrieved": "context",
    "agentrl.online.observed": "observe",
    "agentrl.online.teacher": "algorithm.outcome",  # that of distill
}
"""Modules and packages that act only if this field of the config is set. For a stage that has the field unset, an edit
or another version of them changes nothing."""

LOADERS: Mapping[Target, str] = {Target("agentrl.environments", "load_environment"): "environment"}
"""Functions that look up a name which stands in the *data*: tasks name their environment. A stage that reaches such a
function uses what was chosen for its inputs; see ``agentrl.pipelines.file.choices``."""

WHOLE = "*"

_INSTALLED = ("site-packages", "dist-packages")


@dataclass
class Reached:
    """``code``: source file, relative to its root, -> digest of what is reached in it. ``packages``: top-level packages
    of others -> the modules of ours and the user's that use them. ``loads``: kinds of :data:`LOADERS` reached.
    ``files``: source file -> its stamp when it was read. ``modules``: names of the user's modules."""

    code: dict[str, str] = field(default_factory=dict)
    packages: dict[str, set[str]] = field(default_factory=dict)
    loads: set[str] = field(default_factory=set)
    files: dict[Path, tuple[int, int]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Start:
    """Where to start. ``fields`` of a class do not count: the config holds their values."""

    module: str
    name: str
    fields: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sources:
    """How the code of a stage was found, to find it again: see :func:`changed_code`."""

    starts: tuple[Start, ...]
    idle: frozenset[str]
    files: Mapping[Path, tuple[int, int]]
    modules: tuple[str, ...]


class CodeGraph:
    """Sources below ``folders`` (the user's) and of our own packages, each read once."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._ours = PACKAGE_ROOT
        self._folders = list(dict.fromkeys(folder.resolve() for folder in folders))
        self._roots: dict[str, Path | None] = {OURS: self._ours}
        self._sources: dict[str, SourceFile | None] = {}
        self._listed: dict[Path, set[str]] = {}
        self._folders_of_data: dict[Path, list[Path]] = {}
        self._imports: dict[str, list[Target]] = {}
        self._references: dict[tuple[str, str], list[Target]] = {}
        self._reached: dict[tuple[tuple[Start, ...], frozenset[str]], Reached] = {}

    def track(self, module: str) -> None:
        """Follow the top-level package of this imported module wherever it lies."""
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and (root := module.partition(".")[0]) not in self._roots:
            path = Path(file).resolve()
            depth = module.count(".") + (path.name == "__init__.py")
            self._roots[root] = path.parents[depth]

    def _root(self, top: str) -> Path | None:
        """The folder that holds a top-level package of ours or the user's; None for an installed one."""
        if top not in self._roots:
            near = (f for f in self._folders if (f / top).is_dir() or (f / f"{top}.py").is_file())
            self._roots[top] = next(near, None) or _elsewhere(top)
        return self._roots[top]

    def _locate(self, name: str) -> tuple[Path, Path] | None:
        """(source file, its root) of a module that is ours or the user's."""
        top = name.partition(".")[0]
        root = None if not top or top in sys.stdlib_module_names else self._root(top)
        if root is None:
            return None
        base = root / name.replace(".", "/")
        for file in (base / "__init__.py", base.with_name(base.name + ".py")):
            if file.is_file():
                return file, root
        return None

    def source(self, name: str) -> SourceFile | None:
        """The source of a module; None if it is neither ours nor the user's."""
        if name not in self._sources:
            located = self._locate(name)
            self._sources[name] = SourceFile.read(name, *located) if located else None
        return self._sources[name]

    def is_users(self, source: SourceFile) -> bool:
        return source.root != self._ours

    def reach(self, starts: Collection[Start], idle: Collection[str] = ()) -> Reached:
        """Everything that ``starts`` can reach without entering the modules in ``idle``; stages of one kind share it.
        Raises LookupError if the module of one of them has no source.
        """
        asked = tuple(starts), frozenset(idle)
        if asked not in self._reached:
            self._reached[asked] = self._walked(*asked)
        return self._reached[asked]

    def _walked(self, starts: Collection[Start], idle: frozenset[str]) -> Reached:
        walk = _Walk(self, idle | CARRIERS, {(s.module, s.name): s.fields for s in starts})
        for start in starts:
            self.track(start.module)
            if self.source(start.module) is None:
                raise LookupError(f"module {start.module!r} has no source file, so its code cannot be tracked")
            walk.todo.append((Target(start.module, start.name), start.module))
        walk.run()
        reached = Reached(packages=walk.packages, loads=walk.loads)
        for module, taken in sorted(walk.taken.items()):
            source = self.source(module)
            if source and taken:
                digests = "".join(taken[number].digest for number in sorted(taken))
                reached.code[source.label] = hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()
                reached.code |= self._data(source, taken.values())
                reached.files[source.file] = source.stamp
                if self.is_users(source):
                    reached.modules.append(module)
        return reached

    def imports(self, source: SourceFile) -> list[Target]:
        """Modules of ours and the user's that run if a module is imported, because it imports them."""
        if source.name not in self._imports:
            targets = source.content.imports.values()
            names = (name for target in targets for name in (target.module, f"{target.module}.{target.name}"))
            self._imports[source.name] = [Target(name, None) for name in names if self.is_followed(name)]
        return self._imports[source.name]

    def references(self, source: SourceFile, statement: Statement) -> list[Target]:
        """What a statement of a module refers to."""
        key = source.name, statement.digest
        if key not in self._references:
            self._references[key] = list(dict.fromkeys(self._referred(source, statement)))
        return self._references[key]

    def is_followed(self, module: str) -> bool:
        """Whether a module is ours or the user's."""
        return self.source(module) is not None

    def _referred(self, source: SourceFile, statement: Statement) -> Iterator[Target]:
        imports = source.content.imports | statement.imports
        for target in statement.imports.values():
            yield Target(target.module, None) if target.name is None else target
        for name in statement.names:
            if name in imports:
                yield self._used(imports[name])
            if name in source.content.bindings:
                yield Target(source.name, name)
        for head, *rest in statement.chains:
            if head in imports:
                yield self._follow(imports[head], rest)
            if head in source.content.bindings:
                yield Target(source.name, head)
        if self.is_users(source):
            yield from self._types(source, statement, imports)

    def _types(self, source: SourceFile, statement: Statement, imports: Mapping[str, Target]) -> Iterator[Target]:
        """What annotations of the user's code name in code of the user's: a schema of tools may be made of them."""
        for head, *rest in statement.typed:
            if head in imports:
                target = self._follow(imports[head], rest) if rest else self._used(imports[head])
                if (file := self.source(target.module)) and self.is_users(file):
                    yield target
            if head in source.content.bindings:
                yield Target(source.name, head)

    def _used(self, target: Target) -> Target:
        """A module that is handed around as a value may be used whole."""
        if target.name is not None and not self._is_module(target):
            return target
        name = target.module if target.name is None else f"{target.module}.{target.name}"
        return Target(name, WHOLE if self.is_followed(name) else None)

    def _is_module(self, target: Target) -> bool:
        return self.is_followed(f"{target.module}.{target.name}")

    def _follow(self, target: Target, attributes: list[str]) -> Target:
        """``module.part.function`` as the module and the name that it ends at."""
        if target.name is not None:
            if not self._is_module(target):
                return target
            target = Target(f"{target.module}.{target.name}", None)
        for attribute in attributes:
            if not self.is_followed(f"{target.module}.{attribute}"):
                return Target(target.module, attribute)
            target = Target(f"{target.module}.{attribute}", None)
        return self._used(target)

    def _data(self, source: SourceFile, statements: Collection[Statement]) -> dict[str, str]:
        """Digests of data files that a module's texts and paths name. A text alone names a file, or a folder of a
        package; a path also names a folder beside a module that is in no package. Beside our own package there are no
        data of it: a checkout has ``pyproject.toml`` there, and versions count by themselves."""
        texts = frozenset().union(*(statement.texts for statement in statements))
        paths = frozenset().union(*(statement.paths for statement in statements))
        digests: dict[str, str] = {}
        is_ours = source.name.partition(".")[0] == OURS
        for folder in {source.file.parent, source.file.parent.parent} - {
            source.root if is_ours else source.root.parent
        }:
            there = self._names_in(folder)
            named = {folder / text for text in texts & there if folder != source.root or (folder / text).is_file()}
            named |= {folder / path for path in paths if path.partition("/")[0] in there}
            for file in sorted({file for path in named for file in self._files(path)}):
                if source.root in file.parents:
                    label = file.relative_to(source.root).as_posix()
                    digests[label] = external_digest(str(file), "file")
        return digests

    def _files(self, path: Path) -> list[Path]:
        """A file, or all files of a folder of data: one with Python in it is code, and a store holds what runs made."""
        if path.is_file():
            return [] if path.suffix in (".py", ".pyc") else [path]
        if path not in self._folders_of_data:
            files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
            is_store = (path / "artifacts").is_dir() or (path / "trajectories" / "_delta_log").is_dir()
            is_code = any(file.suffix in (".py", ".pyc") for file in files)
            self._folders_of_data[path] = [] if is_store or is_code else files
        return self._folders_of_data[path]

    def _names_in(self, folder: Path) -> set[str]:
        if folder not in self._listed:
            self._listed[folder] = {item.name for item in folder.iterdir()}
        return self._listed[folder]


def changed_code(sources: Sources, folders: Iterable[Path], code: Mapping[str, str]) -> list[str]:
    """Source files, relative to their roots, of which a stage reaches other code now than ``code`` says. Data files are
    left out: a stage may write them.

    Raises LookupError if code is gone, or is no Python any more.
    """
    if all(stamp_of(file) == stamp for file, stamp in sources.files.items()):
        return []
    now = CodeGraph(folders).reach(sources.starts, sources.idle).code
    labels = sorted(label for label in code.keys() | now.keys() if label.endswith(".py"))
    return [label for label in labels if code.get(label) != now.get(label)]


def _elsewhere(top: str) -> Path | None:
    """The folder of a package that can be imported but was not installed, so that its version would not tell of an
    edit."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    where = [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or []) if spec else []
    if not where or not where[0].endswith(".py") or any(part in _INSTALLED for part in Path(where[0]).parts):
        return None
    file = Path(where[0]).resolve()
    return file.parents[1] if file.name == "__init__.py" else file.parent


class _Walk:
    """One search through the graph. ``todo`` holds what to visit and the module that refers to it."""

    def __init__(
        self, graph: CodeGraph, closed: frozenset[str], fields: Mapping[tuple[str, str], frozenset[str]]
    ) -> None:
        self.graph = graph
        self.closed = closed
        self.fields = fields
        self.todo: list[tuple[Target, str]] = []
        self.seen: set[Target] = set()
        self.taken: dict[str, dict[int, Statement]] = {}
        self.packages: dict[str, set[str]] = {}
        self.loads: set[str] = set()

    def run(self) -> None:
        while self.todo:
            target, origin = self.todo.pop()
            if target in self.seen:
                continue
            if target in LOADERS:
                self.loads.add(LOADERS[target])
            if target.module in self.closed:
                self._through(target, origin)
                continue
            source = self.graph.source(target.module)
            if source is None:
                self._outside(target, origin)
                continue
            self.seen.add(target)
            self._enter(source)
            if target.name == WHOLE:
                self._take(source, range(len(source.content.statements)))
            elif target.name is not None:
                self._name(source, target.name)

    def _through(self, target: Target, origin: str) -> None:
        """A package that is not followed can still hold a module that is."""
        inner = f"{target.module}.{target.name}"
        if target.name and inner not in self.closed and self.graph.source(inner):
            self.todo.append((Target(inner, None), origin))

    def _outside(self, target: Target, origin: str) -> None:
        top = target.module.partition(".")[0]
        if top and top not in self.closed and top not in sys.stdlib_module_names and not self._is_folder(target):
            self.packages.setdefault(top, set()).add(origin)

    def _is_folder(self, target: Target) -> bool:
        """For a package without ``__init__``, the module that is imported from it counts."""
        inner = f"{target.module}.{target.name}" if target.name else ""
        if inner and self.graph.source(inner):
            self.todo.append((Target(inner, None), target.module))
            return True
        return False

    def _enter(self, source: SourceFile) -> None:
        """Importing a module runs its packages and its own top-level acts, and imports what it imports."""
        if source.name in self.taken:
            return
        self.taken[source.name] = {}
        if "." in source.name:
            self.todo.append((Target(source.name.rpartition(".")[0], None), source.name))
        self._take(source, source.content.acts)
        self.todo += [(target, source.name) for target in self.graph.imports(source)]

    def _name(self, source: SourceFile, name: str) -> None:
        if name in source.content.bindings:
            self._take(source, source.content.bindings[name], self.fields.get((source.name, name), frozenset()))
        elif self.graph.is_followed(f"{source.name}.{name}"):
            self.todo.append((Target(f"{source.name}.{name}", None), source.name))
        else:
            self.todo += [(Target(star, name), source.name) for star in source.content.stars]
            if "__getattr__" in source.content.bindings:
                self._take(source, range(len(source.content.statements)))

    def _take(self, source: SourceFile, numbers: Iterable[int], without: Collection[str] = frozenset()) -> None:
        taken = self.taken[source.name]
        for number in numbers:
            if number not in taken:
                taken[number] = source.statement(number, without)
                self.todo += [(target, source.name) for target in self.graph.references(source, taken[number])]

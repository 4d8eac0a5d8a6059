"""Which code a function can reach, by reading sources, not by importing them.

The unit is one top-level statement: an edit of a helper concerns the stages that reach that helper, not all that import
its module. Comments, docstrings and formatting do not count. A text in that code that names a data file, or a folder of
data files, beside the module or one folder up brings their content in: templates, prompts. What cannot be seen is
listed in :mod:`pipelines.fingerprint`.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

OUR_PACKAGES = ("schemas", "datastore", "agentrl", "pipelines", "flows")

CARRIERS = ("pipelines.stage", "pipelines.handles")
"""Modules that hand data to stages and compute nothing: an edit there re-runs nothing. A change of theirs that changes
results raises ``pipelines.fingerprint.SCHEME``."""

WHOLE = "*"

_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{1,80}")

_CHOICE = re.compile(rf"(?:{'|'.join(OUR_PACKAGES)})(?:\.\w+)+:\w+")
"""A table of choices by name gives ``module:Class`` for each."""


@dataclass
class Reached:
    """``code``: source file, relative to its root, -> digest of what is reached in it. ``packages``: names of
    top-level packages of others that are used."""

    code: dict[str, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Target:
    """What a name stands for that an import binds. ``name`` None is the module itself."""

    module: str
    name: str | None


@dataclass
class _Statement:
    digest: str
    names: set[str]
    chains: set[tuple[str, ...]]
    imports: dict[str, Target]
    texts: set[str]


class _Docless(ast.NodeTransformer):
    """Drops bare strings, which are documentation wherever they stand, and blocks that only type checkers read."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(getattr(node, "body", None), list) and not node.body and not isinstance(node, ast.Module):  # type: ignore[attr-defined]
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt] | None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return [self.visit(child) for child in node.orelse] or None
        return self.generic_visit(node)


@dataclass
class _Module:
    """One source file, cut into top-level statements."""

    name: str
    file: Path
    root: Path
    is_package: bool
    statements: list[_Statement] = field(default_factory=list)
    bindings: dict[str, list[int]] = field(default_factory=dict)
    effects: list[int] = field(default_factory=list)
    stars: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.file.relative_to(self.root).as_posix()

    @cached_property
    def imports(self) -> dict[str, Target]:
        return {name: target for statement in self.statements for name, target in statement.imports.items()}


def _bound(node: ast.stmt) -> set[str]:
    """Names that a top-level statement binds in the module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    names: set[str] = set()
    todo: list[ast.AST] = [node]
    while todo:
        child = todo.pop()
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(child.name)
            continue
        if isinstance(child, ast.Import):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        todo.extend(ast.iter_child_nodes(child))
    return names


def _acts(node: ast.stmt) -> bool:
    """Whether running a top-level statement does more than bind names: then it counts for all who import the module."""
    if isinstance(node, ast.Assign):
        return not all(isinstance(target, ast.Name | ast.Tuple | ast.List) for target in node.targets)
    return isinstance(node, ast.Expr | ast.AugAssign | ast.For | ast.While | ast.With | ast.Delete | ast.Assert) or (
        isinstance(node, ast.If | ast.Try) and not _bound(node)
    )


def _chain(node: ast.Attribute) -> tuple[str, ...] | None:
    parts = [node.attr]
    inner: ast.expr = node.value
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return (inner.id, *reversed(parts)) if isinstance(inner, ast.Name) else None


def _one_by_one(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Imports of several names as several imports, so that one name can be reached without the others."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (ast.Import([alias]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (ast.ImportFrom(node.module, [alias], node.level) for alias in node.names)
        else:
            yield node


def _statement(node: ast.stmt, module: str, is_package: bool) -> _Statement:
    names: set[str] = set()
    chains: set[tuple[str, ...]] = set()
    imports: dict[str, Target] = {}
    inside: set[int] = set()
    texts: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            chain = _chain(child)
            if chain and id(child) not in inside:
                chains.add(chain)
            value = child.value
            while isinstance(value, ast.Attribute):
                inside.add(id(value))
                value = value.value
            inside.add(id(value))
        elif isinstance(child, ast.Name) and id(child) not in inside:
            names.add(child.id)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            if child.value.isidentifier():
                names.add(child.value)  # a forward reference, or a name looked up in globals()
            if _FILE_NAME.fullmatch(child.value):
                texts.add(child.value)
            elif _CHOICE.fullmatch(child.value):
                chosen, _, attribute = child.value.partition(":")
                imports[f"choice {child.value}"] = Target(chosen, attribute)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                bound = alias.asname or alias.name.partition(".")[0]
                imports[bound] = Target(alias.name if alias.asname else bound, None)
                imports[f"import {alias.name}"] = Target(alias.name, None)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module, is_package)
            imports.update((alias.asname or alias.name, Target(base, alias.name)) for alias in child.names)
    digest = hashlib.blake2b(ast.dump(node).encode(), digest_size=16).hexdigest()
    return _Statement(digest, names, chains, imports, texts)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


class CodeGraph:
    """Sources below ``folders`` (the user's) and of our own packages, each read once."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._ours = Path(__file__).resolve().parent.parent
        self._folders = list(dict.fromkeys(folder.resolve() for folder in folders))
        self._roots: dict[str, Path] = dict.fromkeys(OUR_PACKAGES, self._ours)
        self._modules: dict[str, _Module | None] = {}
        self._listed: dict[Path, set[str]] = {}

    def track(self, module: str) -> None:
        """Follow the top-level package of this imported module wherever it is installed."""
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and (root := module.partition(".")[0]) not in self._roots:
            path = Path(file).resolve()
            depth = module.count(".") + (path.name == "__init__.py")
            self._roots[root] = path.parents[depth]

    def _locate(self, name: str) -> tuple[Path, Path] | None:
        """(source file, its root) of a module that is ours or the user's."""
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            return None
        for root in [self._roots[top]] if top in self._roots else self._folders:
            base = root / name.replace(".", "/")
            for file in (base / "__init__.py", base.with_name(base.name + ".py")):
                if file.is_file():
                    return file, root
        return None

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            located = self._locate(name)
            self._modules[name] = self._parse(name, *located) if located else None
        return self._modules[name]

    def _parse(self, name: str, file: Path, root: Path) -> _Module:
        module = _Module(name, file, root, file.name == "__init__.py")
        for node in _one_by_one(_Docless().visit(ast.parse(file.read_bytes())).body):
            number = len(module.statements)
            module.statements.append(_statement(node, name, module.is_package))
            if _acts(node):
                module.effects.append(number)
            for bound in _bound(node):
                module.bindings.setdefault(bound, []).append(number)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                module.stars.append(_absolute(node, name, module.is_package))
        return module

    def reach(self, module: str, name: str) -> Reached:
        """Everything that ``name`` of ``module`` can reach. Raises LookupError where that module has no source."""
        self.track(module)
        if self._module(module) is None:
            raise LookupError(f"module {module!r} has no source file, so its code cannot be tracked; put it in a file")
        walk = _Walk(self)
        walk.todo.append(Target(module, name))
        walk.run()
        reached = Reached(packages=walk.packages)
        for found, numbers in sorted(walk.statements.items()):
            source = self._module(found)
            if source and numbers and found not in CARRIERS:
                digests = "".join(source.statements[number].digest for number in sorted(numbers))
                reached.code[source.label] = hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()
                texts = set().union(*(source.statements[number].texts for number in numbers))
                reached.code |= self._data(source, texts)
        return reached

    def _data(self, module: _Module, texts: set[str]) -> dict[str, str]:
        """Digests of data files that a module's texts name."""
        found: dict[str, str] = {}
        for folder in {module.file.parent, module.file.parent.parent} - {module.root, module.root.parent}:
            for text in texts & self._names_in(folder):
                path = folder / text
                files = [path] if path.is_file() else sorted(path.iterdir())
                if any(file.suffix in (".py", ".pyc") or file.is_dir() for file in files):
                    continue
                for file in files:
                    label = file.relative_to(module.root).as_posix()
                    found[label] = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        return found

    def _names_in(self, folder: Path) -> set[str]:
        if folder not in self._listed:
            self._listed[folder] = {item.name for item in folder.iterdir()}
        return self._listed[folder]


class _Walk:
    """One search through the graph."""

    def __init__(self, graph: CodeGraph) -> None:
        self.graph = graph
        self.todo: list[Target] = []
        self.seen: set[Target] = set()
        self.statements: dict[str, set[int]] = {}
        self.packages: set[str] = set()

    def run(self) -> None:
        while self.todo:
            target = self.todo.pop()
            if target in self.seen:
                continue
            self.seen.add(target)
            module = self.graph._module(target.module)
            if module is None:
                self._outside(target)
                continue
            self._enter(module)
            if target.name == WHOLE:
                self._take(module, range(len(module.statements)))
            elif target.name is not None:
                self._name(module, target.name)

    def _outside(self, target: Target) -> None:
        top = target.module.partition(".")[0]
        if top and top not in sys.stdlib_module_names and not self._is_folder(target):
            self.packages.add(top)

    def _is_folder(self, target: Target) -> bool:
        """A package without ``__init__``: the module that is imported from it is what counts."""
        inner = f"{target.module}.{target.name}" if target.name else ""
        if inner and self.graph._module(inner):
            self.todo.append(Target(inner, None))
            return True
        return False

    def _enter(self, module: _Module) -> None:
        """Importing a module runs its packages and its own top-level acts, and imports what it imports."""
        if module.name in self.statements:
            return
        self.statements[module.name] = set()
        if "." in module.name:
            self.todo.append(Target(module.name.rpartition(".")[0], None))
        if module.name in CARRIERS:
            return
        self._take(module, module.effects)
        for numbers in module.bindings.values():
            for number in numbers:
                statement = module.statements[number]
                if not statement.names and not statement.chains:  # an import statement
                    self.todo += self._imported(statement)

    def _imported(self, statement: _Statement) -> Iterator[Target]:
        """Our modules that an import statement runs, whether or not what it binds is used."""
        for target in statement.imports.values():
            for name in (target.module, f"{target.module}.{target.name}"):
                if self._is_ours(name):
                    yield Target(name, None)

    def _is_ours(self, module: str) -> bool:
        return self.graph._module(module) is not None

    def _name(self, module: _Module, name: str) -> None:
        if module.name in CARRIERS:
            return
        if name in module.bindings:
            self._take(module, module.bindings[name])
        elif self.graph._module(f"{module.name}.{name}"):
            self.todo.append(Target(f"{module.name}.{name}", None))
        else:
            self.todo += [Target(star, name) for star in module.stars]
            if "__getattr__" in module.bindings:
                self._take(module, range(len(module.statements)))

    def _take(self, module: _Module, numbers: Iterable[int]) -> None:
        taken = self.statements[module.name]
        for number in numbers:
            if number in taken:
                continue
            taken.add(number)
            statement = module.statements[number]
            self.todo += self._references(module, statement)

    def _references(self, module: _Module, statement: _Statement) -> Iterator[Target]:
        imports = module.imports | statement.imports
        for target in statement.imports.values():
            yield Target(target.module, None) if target.name is None else target
        for name in statement.names:
            if name in imports and name not in statement.imports:
                yield self._used(imports[name])
            if name in statement.imports:
                yield self._used(statement.imports[name])
            if name in module.bindings:
                yield Target(module.name, name)
        for head, *rest in statement.chains:
            if head in imports:
                yield self._follow(imports[head], rest)
            if head in module.bindings:
                yield Target(module.name, head)

    def _used(self, target: Target) -> Target:
        """A module that is handed around as a value may be used whole."""
        if target.name is not None and not self._is_module(target):
            return target
        name = target.module if target.name is None else f"{target.module}.{target.name}"
        return Target(name, WHOLE if self._is_ours(name) else None)

    def _is_module(self, target: Target) -> bool:
        return self._is_ours(f"{target.module}.{target.name}")

    def _follow(self, target: Target, attributes: list[str]) -> Target:
        """``module.part.function`` as the module and the name that it ends at."""
        if target.name is not None:
            if not self._is_module(target):
                return target
            target = Target(f"{target.module}.{target.name}", None)
        for attribute in attributes:
            if not self._is_ours(f"{target.module}.{attribute}"):
                return Target(target.module, attribute)
            target = Target(f"{target.module}.{attribute}", None)
        return self._used(target)

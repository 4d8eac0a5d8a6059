"""Resolving ``module:Name``. The name is looked up in the module's source before any code of the module runs.

A name in a pipeline file or in a row of data may come from others. So the module is imported only if its source
declares the name: an environment is a class with the methods of one, a stage is a function under ``@stage(...)``. Names
that are imported from elsewhere are followed. In code that is neither Python's own library nor installed beside it, a
name may also be assigned.
"""

import ast
import importlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl.schemas.hints import did_you_mean
from agentrl.schemas.syntax import module_tree

OURS = "agentrl"
"""The one name that an installation puts on the module path."""

HOPS = 8
"""How many imports from module to module are followed."""

_NOT_THE_USERS = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

before_import: list[Callable[[str, Path], None]] = []
"""Called with a module of the user's and its file, before its code runs in this process."""

Declares = Callable[[ast.stmt], bool]


def declared(path: str, kind: str, declares: Declares, rule: str) -> Any:
    """Import the module and return what the name stands for. ``rule`` says in an error how a ``kind`` is declared.

    Raises LookupError with a message for the user if there is no such module, if it does not declare the name as
    ``kind``, or if importing it fails.
    """
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        raise LookupError(f"{path!r} is not written as module:Name")
    _check(module, name, kind, declares, rule, HOPS)
    if module not in sys.modules and (file := own_source(module)):
        for tell in before_import:
            tell(module, file)
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # any error of the user's module is shown to the user
        raise LookupError(f"module {module!r} of {kind} {path!r} cannot be imported: {error!r}") from error
    if not hasattr(imported, name):
        raise LookupError(f"module {module!r} has no {name!r} once it is imported")
    return getattr(imported, name)


def own_source(module: str) -> Path | None:
    """The source of a module of the user's: neither Python's, nor installed, nor ours. None if it is no such module."""
    if module.partition(".")[0] == OURS or not all(part.isidentifier() for part in module.split(".")):
        return None
    file = _source(module)
    return None if file is None or any(file.is_relative_to(folder) for folder in _NOT_THE_USERS) else file


def is_environment(node: ast.stmt) -> bool:
    """Whether a statement declares a class that has, or may inherit, the methods of an environment."""
    if not isinstance(node, ast.ClassDef):
        return False
    methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
    return "tasks" in methods or bool(
        bases - {"object", "Exception", "BaseException", "str", "int", "dict", "list", ""}
    )


def is_class(node: ast.stmt) -> bool:
    """Whether a statement declares a class that is derived from another."""
    return isinstance(node, ast.ClassDef) and bool(node.bases)


def is_stage(node: ast.stmt) -> bool:
    """Whether a statement declares a function under ``@stage(...)``."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    called = [decorator.func for decorator in decorators if isinstance(decorator, ast.Call)]
    return any(getattr(decorator, "id", getattr(decorator, "attr", "")) == "stage" for decorator in called)


def _check(module: str, name: str, kind: str, declares: Declares, rule: str, hops: int) -> None:
    """Raise LookupError unless the module's source declares the name."""
    file = _source(module)
    if file is None:
        where = "there is no such module beside the pipeline file, here or installed"
        why = f"{where}, or it has no Python source"
        raise LookupError(f"module {module!r} of {kind} {module + ':' + name!r} cannot be imported: {why}")
    try:
        nodes = list(_top_level(module_tree(file.read_bytes()).body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise LookupError(f"module {module!r} cannot be imported: {file}{line} is not Python: {error}") from None
    bound = [node for node in nodes if name in _binds(node)]
    if any(declares(node) for node in bound):
        return
    own = not any(file.is_relative_to(folder) for folder in _NOT_THE_USERS)
    if own and any(isinstance(node, ast.Assign | ast.AnnAssign) for node in bound):
        return
    for node in bound:
        if isinstance(node, ast.ImportFrom) and hops:
            other = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
            _check(_absolute(module, file, node), other, kind, declares, rule, hops - 1)
            return
    there = sorted(name_bound for node in nodes if declares(node) for name_bound in _binds(node))
    hint = did_you_mean(name, there) or f"; of that kind there: {', '.join(there) or 'none'}"
    what = "is not declared as" if bound else "is not in its source: no"
    raise LookupError(f"module {module!r}: {name!r} {what} {kind} ({rule}){hint}; it was not imported")


def _source(module: str) -> Path | None:
    """The source file of a module, found without importing it or its packages."""
    search: Any = None
    parts = module.split(".")
    spec = None
    for count in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:count]), search)
        if spec is None:
            return None
        search = spec.submodule_search_locations
        if search is None and count < len(parts):
            return None
    origin = getattr(spec, "origin", None)
    return Path(origin).resolve() if origin and origin.endswith(".py") else None


def _spec(name: str, search: Any) -> Any:
    if name == OURS and name in sys.modules:  # whatever lies beside the pipeline file
        return sys.modules[name].__spec__
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, search) if find else None
        if spec is not None:
            return spec
    return None


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements outside functions and classes, those below ``if`` and ``try`` included."""
    for node in body:
        yield node
        for inside in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _top_level(getattr(node, inside, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _top_level(handler.body)


def _binds(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {name_node.id for target in targets for name_node in ast.walk(target) if isinstance(name_node, ast.Name)}
    return set()


def _absolute(module: str, file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (file.name == "__init__.py")]
    return ".".join([*parts, node.module] if node.module else parts)

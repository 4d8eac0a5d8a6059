"""A Python source as top-level statements: what each binds, which names it uses when it runs, what it imports.

A name in a type position (the annotation of a parameter or a variable, the class in ``isinstance`` or in a ``case``)
runs nothing of what it names, so it is not a use. The annotations of a class's own fields are: pydantic runs them. Code
of the user's may read its annotations, as tools do that are described by the types of their parameters: these names are
kept apart, in ``typed``. A field of a class that is declared as ``name: Annotated[..., ADDED] = None`` came after the
first version and is None unless somebody sets it, so it is no part of the class; who sets it or reads it names it. A
constant of a module that is declared as ``NAME: Annotated[int, ADDED, 4] = 5`` counts as it did at first, as 4.
"""

import ast
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from agentrl.schemas.syntax import expression_tree, module_tree

_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{1,80}")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")

_PATH_CALLS = frozenset({"Path", "PurePath", "join", "joinpath", "open", "with_name"})
_SAYING = frozenset({"warn", "debug", "info", "warning", "error", "exception", "critical"})
_SAYERS = frozenset({"warnings", "log", "logger", "logging"})
_TYPED = {"isinstance": 1, "issubclass": 1, "cast": 0}
"""Functions of two arguments, and which of them is a type."""

_IMPORT_CALLS = frozenset({"import_module", "__import__"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Target:
    """What a name stands for that an import binds. ``name`` None is the module itself."""

    module: str
    name: str | None


@dataclass(frozen=True)
class Statement:
    """One top-level statement. ``chains`` are dotted uses, as in ``module.part.function``; ``texts`` may name files,
    and ``paths`` are written where a path is built: ``HERE / "data" / "facts.json"`` gives ``data/facts.json``; what is
    only said, in an exception, a warning, a log or a print, is in neither; ``typed`` are dotted names in type
    positions, also those in quotes."""

    digest: str
    names: frozenset[str]
    chains: frozenset[tuple[str, ...]]
    imports: dict[str, Target]
    texts: frozenset[str]
    paths: frozenset[str]
    typed: frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class ModuleSource:
    """One module's source. ``bindings``: name -> numbers of the statements that bind it; ``acts``: those that do more
    than bind names, and so count for all who import the module; ``stars``: modules imported with ``*``; ``imports``:
    what is imported outside functions and classes; ``annotated``: number of a class -> names that its body annotates;
    ``bare``: number of a class -> its fields, and the class without them."""

    statements: tuple[Statement, ...]
    bindings: dict[str, list[int]]
    acts: list[int]
    stars: list[str]
    imports: dict[str, Target]
    annotated: dict[int, frozenset[str]]
    bare: dict[int, tuple[frozenset[str], Statement]]

    @classmethod
    def read(cls, code: bytes, package: str) -> "ModuleSource":
        """``package`` is where relative imports begin: the module's own name if it is a package, else its parent's.

        Raises SyntaxError or ValueError if the code is no Python.
        """
        nodes = _statements(code)
        source = cls(tuple(_described(node, package) for node in nodes), {}, [], [], {}, {}, {})
        for number, node in enumerate(nodes):
            if _acts(node):
                source.acts.append(number)
            for bound in _bound(node):
                source.bindings.setdefault(bound, []).append(number)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                source.stars.append(_absolute(node, package))
            if isinstance(node, ast.ClassDef):
                source.annotated[number], fields = _annotated(node)
                source.bare[number] = fields, _described(_without(node, fields), package)
            elif not isinstance(node, _Function):
                source.imports.update(source.statements[number].imports)
        return source


def class_without(code: bytes, package: str, number: int, fields: Collection[str]) -> Statement:
    """The class that is the module's ``number``-th statement, without some of its annotated fields."""
    node = _statements(code)[number]
    assert isinstance(node, ast.ClassDef)
    return _described(_without(node, fields), package)


def _statements(code: bytes) -> list[ast.stmt]:
    return [_at_first(node) for node in _one_by_one(_read_by_python(module_tree(code).body))]


def _read_by_python(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Statements without bare strings, which are documentation wherever they stand, and without blocks that only type
    checkers read. What a statement holds is cleaned in place."""
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue
        if isinstance(node, ast.If) and _asks_for_type_checkers(node.test):
            kept += _read_by_python(node.orelse)
            continue
        if isinstance(node, ast.ClassDef):
            node.body = [child for child in node.body if not _came_later(child)] or [ast.Pass()]
        for block in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            for name in ("body", "orelse", "finalbody"):
                if statements := getattr(block, name, None):
                    empty = [ast.Pass()] if name == "body" else []
                    setattr(block, name, _read_by_python(statements) or empty)
        kept.append(node)
    return kept


def _came_later(node: ast.stmt) -> bool:
    """Whether a statement of a class declares a field that came later and is None if nobody sets it."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Constant) or node.value.value is not None:
        return False
    return any(isinstance(child, ast.Name) and child.id == "ADDED" for child in ast.walk(node.annotation))


def _at_first(node: ast.stmt) -> ast.stmt:
    """A top-level statement; of a constant whose annotation holds its first value the assignment of that value."""
    match node:
        case ast.AnnAssign(
            target=ast.Name() as name,
            annotation=ast.Subscript(slice=ast.Tuple(elts=[_, ast.Name(id="ADDED"), ast.Constant() as first])),
        ):
            return ast.Assign([name], first)
    return node


def _asks_for_type_checkers(test: ast.expr) -> bool:
    names = (getattr(node, "id", "") or getattr(node, "attr", "") for node in ast.walk(test))
    return any("TYPE_CHECKING" in name for name in names)


def _described(node: ast.stmt, package: str) -> Statement:
    names: set[str] = set()
    chains: set[tuple[str, ...]] = set()
    imports: dict[str, Target] = {}
    texts: set[str] = set()
    paths: set[str] = set()
    in_messages = {id(part) for child in ast.walk(node) for message in _messages(child) for part in ast.walk(message)}
    for child in _uses(node):
        if isinstance(child, ast.Attribute):
            if chain := _chain(child):
                chains.add(chain)
        elif isinstance(child, ast.Name):
            names.add(child.id)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            if _FILE_NAME.fullmatch(child.value) and id(child) not in in_messages:
                texts.add(child.value)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            imports |= _imported(child, package)
        elif isinstance(child, ast.BinOp) and isinstance(child.op, ast.Div):
            paths |= _joined(_divided(child)) if id(child) not in in_messages else set()
        elif isinstance(child, ast.Call):
            called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
            if called in _PATH_CALLS:
                paths |= _joined(child.args) if id(child) not in in_messages else set()
            elif called in _IMPORT_CALLS and child.args and (module := _text(child.args[0])):
                imports[f"import {module}"] = Target(module, None)
                imports[f"import {module} *"] = Target(module, "*")
    digest = hashlib.blake2b(ast.dump(node).encode(), digest_size=16).hexdigest()
    used = (frozenset(names), frozenset(chains), imports, frozenset(texts), frozenset(paths))
    return Statement(digest, *used, _typed(node))


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, Target]:
    if isinstance(node, ast.ImportFrom):
        base = _absolute(node, package)
        return {alias.asname or alias.name: Target(base, alias.name) for alias in node.names}
    targets = {}
    for alias in node.names:
        bound = alias.asname or alias.name.partition(".")[0]
        targets[bound] = Target(alias.name if alias.asname else bound, None)
        targets[f"import {alias.name}"] = Target(alias.name, None)
    return targets


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that an import names, with the dots of a relative one resolved."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _messages(node: ast.AST) -> list[ast.expr]:
    """What a node says to people: the exception that it raises, the message of an assertion, what it warns of, logs or
    prints. A result does not depend on it, so a file that is named there is no input."""
    match node:
        case ast.Raise(exc=ast.expr() as message) | ast.Assert(msg=ast.expr() as message):
            return [message]
        case ast.Call(func=ast.Name(id="print" | "warn"), args=args):
            return args
        case ast.Call(func=ast.Attribute(value=ast.Name(id=speaker), attr=attribute), args=args):
            return args if attribute in _SAYING and speaker.strip("_").lower() in _SAYERS else []
    return []


def _text(node: ast.expr) -> str:
    """The text of a constant; of an f-string what follows its last value; otherwise nothing."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[-1]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _divided(node: ast.BinOp) -> list[ast.expr]:
    """The operands of ``a / b / c``."""
    left = node.left
    return [*(_divided(left) if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div) else [left]), node.right]


def _joined(parts: Iterable[ast.expr]) -> set[str]:
    """Runs of texts among the parts of a path, each joined by slashes."""
    runs: list[list[str]] = [[]]
    for part in parts:
        if text := _text(part).strip("/"):
            runs[-1].append(text)
        else:
            runs.append([])
    return {path for run in runs if _PATH.fullmatch(path := "/".join(run))}


def _bound(node: ast.stmt) -> set[str]:
    """Names that a top-level statement binds in the module."""
    names: set[str] = set()
    todo: list[ast.AST] = [node]
    while todo:
        child = todo.pop()
        if isinstance(child, _Function | ast.ClassDef):
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
    """Whether running a top-level statement does more than bind names."""
    if isinstance(node, ast.Assign):
        return not all(isinstance(target, ast.Name | ast.Tuple | ast.List) for target in node.targets)
    if isinstance(node, ast.If | ast.Try):
        handlers = [child for handler in getattr(node, "handlers", ()) for child in handler.body]
        return any(map(_acts, [*node.body, *handlers, *node.orelse, *getattr(node, "finalbody", ())]))
    return isinstance(node, ast.Expr | ast.AugAssign | ast.For | ast.While | ast.With | ast.Delete | ast.Assert)


def _one_by_one(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Imports of several names as several imports, so that one name can be reached without the others."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (ast.Import([alias]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (ast.ImportFrom(node.module, [alias], node.level) for alias in node.names)
        else:
            yield node


def _annotated(node: ast.ClassDef) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a class annotates in its body; and those of them that pydantic takes for fields, as far as the source
    tells."""
    named = {
        child.target.id: ast.dump(child.annotation)
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    fields = {name for name, annotation in named.items() if "ClassVar" not in annotation and not name.startswith("_")}
    return frozenset(named), frozenset(fields - {"model_config"})


def _without(node: ast.ClassDef, fields: Collection[str]) -> ast.ClassDef:
    def is_field(child: ast.stmt) -> bool:
        return isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.target.id in fields

    body = [child for child in node.body if not is_field(child)] or [ast.Pass()]
    return ast.ClassDef(**{**dict(ast.iter_fields(node)), "body": body})


def _uses(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it, but nothing in a type position, and no part of a dotted name by itself."""
    todo = [(node, False)]
    while todo:
        node, in_class = todo.pop()
        yield node
        if isinstance(node, ast.arg):
            continue
        if isinstance(node, ast.Attribute):
            value = node.value
            while isinstance(value, ast.Attribute):
                value = value.value
            if not isinstance(value, ast.Name):
                todo.append((value, False))
            continue
        typed = _type_below(node, in_class)
        is_class = isinstance(node, ast.ClassDef)
        below = [(child, is_class) for child in ast.iter_child_nodes(node) if child is not typed]
        todo += reversed(below)


def _type_below(node: ast.AST, in_class: bool) -> ast.AST | None:
    """The part of a node that is a type position. The annotations of a class's fields are none: they are configs."""
    if isinstance(node, _Function):
        return node.returns
    if isinstance(node, ast.AnnAssign):
        return None if in_class else node.annotation
    return node.cls if isinstance(node, ast.MatchClass) else _typed_argument(node)


def _typed(node: ast.stmt) -> frozenset[tuple[str, ...]]:
    """See :attr:`Statement.typed`."""
    chains: set[tuple[str, ...]] = set()
    for child in ast.walk(node):
        here: list[ast.expr | None] = []
        if isinstance(child, ast.arg | ast.AnnAssign):
            here = [child.annotation]
        elif isinstance(child, _Function):
            here = [child.returns]
        elif isinstance(child, ast.MatchClass):
            here = [child.cls]
        else:
            here = [_typed_argument(child)]
        for expression in filter(None, here):
            for part in _uses(_unquoted(expression)):
                if isinstance(part, ast.Name):
                    chains.add((part.id,))
                elif isinstance(part, ast.Attribute) and (chain := _chain(part)):
                    chains.add(chain)
    return frozenset(chains)


def _typed_argument(node: ast.AST) -> ast.expr | None:
    """The argument of ``isinstance`` and the like that is a type."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
        return node.args[_TYPED[node.func.id]] if node.func.id in _TYPED else None
    return None


def _unquoted(expression: ast.expr) -> ast.AST:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        with suppress(SyntaxError, ValueError):
            return expression_tree(expression.value)
    return expression


def _chain(node: ast.Attribute) -> tuple[str, ...] | None:
    parts = [node.attr]
    inner: ast.expr = node.value
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return (inner.id, *reversed(parts)) if isinstance(inner, ast.Name) else None

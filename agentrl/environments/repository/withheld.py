"""Test files whose right results stay outside.

In ``assert price(10, 1) == 9`` the 9 is what code under test must not know. So the sandbox gets a file that tells what
``price(10, 1)`` is, and the comparison is made outside: nothing that runs inside can read the right result, or be equal
to anything. If both sides of a comparison are calculated, both are told; code inside could then read the right one.
"""

import ast
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from agentrl.environments.repository.ended import Place, functions
from agentrl.schemas.syntax import expression_tree, module_tree

NAME = "result_is_compared_outside"
"""A function that the runner of the tests puts among Python's own. It takes the place of a comparison."""

RECORD = f"""
import builtins
told = {{}}

def plain(value):
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if value is None:
        return "None"
    for kind, text in ((list, "[{{}}]"), (tuple, "({{}})"), (set, "{{{{{{}}}}}}"), (frozenset, "{{{{{{}}}}}}")):
        if isinstance(value, kind):
            parts = [plain(one) for one in kind.__iter__(value)]
            if not parts and kind in (set, frozenset):
                return "set()"
            return text.format(", ".join(parts) + "," * (kind is tuple and len(parts) == 1))
    if isinstance(value, dict):
        return "{{" + ", ".join(plain(key) + ": " + plain(one) for key, one in dict.items(value)) + "}}"
    raise TypeError("only plain data can be compared outside, and not " + type(value).__name__)

def tell(place, *values):
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    told.setdefault(test, []).append([place, *map(plain, values)])

builtins.{NAME} = tell
"""
"""Lines of the runner: ``told`` are test -> [[place, value as Python text, other value if it is no literal]]."""

Told = Mapping[str, list[list[str]]]


def withheld(source: str, tests: Collection[Place]) -> tuple[str, dict[str, Any]]:
    """A test file in which comparisons of these tests are replaced, and literals that were compared with, by the places
    of the comparisons. A file that is no Python is returned as it is."""
    try:
        tree = module_tree(source)
    except (SyntaxError, ValueError, RecursionError):
        return source, {}
    removal = _Removal()
    for path, test in functions(tree):
        if path in tests:
            test.body = [removal.visit(statement) for statement in test.body]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", removal.literals


def right(compared: Sequence[Sequence[str]], literals: Mapping[str, Any]) -> bool:
    """Whether all that a test told is equal to what it should be."""
    try:
        for location, value, *other in compared:
            expected = literals[location] if location in literals else _literal(other[0])
            if _literal(value) != expected:
                return False
    except (ValueError, TypeError, SyntaxError, IndexError, MemoryError, RecursionError):
        return False
    return True


def _literal(text: str) -> Any:
    return ast.literal_eval(expression_tree(text))


class _Removal(ast.NodeTransformer):
    """``literals``: place of a comparison -> the literal that was there."""

    def __init__(self) -> None:
        self.literals: dict[str, Any] = {}

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[other]):
                return self._told(node, left, other)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        match node.value:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr="assertEqual"), args=[left, other, *_], keywords=[]
            ):
                return self._told(node, left, other)
        return node

    def _told(self, node: ast.stmt, left: ast.expr, other: ast.expr) -> ast.stmt:
        """The statement in place of a comparison."""
        location, values = f"{node.lineno}:{node.col_offset}", [left, other]
        for known in values:
            try:
                self.literals[location] = ast.literal_eval(known)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
            values.remove(known)
            break
        call = ast.Call(ast.Name(NAME, ast.Load()), [ast.Constant(location), *values], [])
        return ast.copy_location(ast.Expr(call), node)

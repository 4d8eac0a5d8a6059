"""Decoys: copies of tests that always fail. Code under test runs in the process that reports, so it may make a report
say that all tests passed; then the decoys passed too, and the report is worth nothing."""

import ast
from collections.abc import Collection

FAILS = """
def {name}(test):
    import functools

    @functools.wraps(test)
    def fails(*arguments, **named):
        test(*arguments, **named)
        raise AssertionError

    return fails

"""


def with_decoys(source: str, tests: Collection[str], suffix: str) -> str:
    """A test file with a decoy after each of the tests, whose name is that of the test and ``suffix``. Tests are
    functions and methods by their names; coroutines get none. A file that is no Python is returned as it is."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return source
    lines = source.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    found = [one for one in _functions(tree) if one.name in tests]
    for one in sorted(found, key=_start, reverse=True):
        head, body = lines[_start(one) - 1 : one.lineno - 1], lines[one.lineno - 1 : one.end_lineno]
        indent = " " * one.col_offset
        named = body[0].replace(f"def {one.name}", f"def {one.name}{suffix}", 1)
        lines[one.end_lineno : one.end_lineno] = ["\n", *head, f"{indent}@fails{suffix}\n", named, *body[1:]]
    if found:
        first = min(_start(node) for node in tree.body if _end(node) >= min(map(_start, found)))
        lines.insert(first - 1, FAILS.format(name=f"fails{suffix}"))
    return "".join(lines)


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    inside = [*tree.body, *(node for scope in classes for node in scope.body)]
    return [node for node in inside if isinstance(node, ast.FunctionDef)]


def _start(node: ast.stmt) -> int:
    """The line of a statement, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno

"""Test files whose tests end with a statement of ours.

Code under test runs in the process that reports, so it may make a report say that all tests passed. Each hidden test is
therefore run in two sandboxes: in one it ends with an assertion that holds, in the other with one that fails. Which of
the two comes in which sandbox is drawn for each test. Code that makes tests pass lets some pass that must fail, and
then the report is worth nothing.
"""

import ast
import secrets
from collections.abc import Mapping

from agentrl.schemas.syntax import module_tree

Place = tuple[str, ...]
"""Where a test stands in its file: the classes that it is in, and its name."""


def assertion(holds: bool) -> str:
    """A statement that holds or fails; which of the two it is, only calculating tells."""
    first, other = secrets.randbelow(9000) + 1000, secrets.randbelow(9000) + 1000
    return f"assert {first} * {other} == {first * other + (0 if holds else secrets.randbelow(900) + 1)}"


def ended_by(source: str, ends: Mapping[Place, str]) -> tuple[str, set[Place]]:
    """A test file in which each of these tests ends with a statement, however it ends; and the tests that were found. A
    file that is no Python is returned as it is."""
    try:
        tree = module_tree(source)
    except (SyntaxError, ValueError, RecursionError):
        return source, set()
    ended = set()
    for path, test in functions(tree):
        if path in ends:
            begin = 1 if ast.get_docstring(test, clean=False) is not None else 0
            body = test.body[begin:] or [ast.Pass()]
            test.body[begin:] = [ast.Try(body=body, handlers=[], orelse=[], finalbody=module_tree(ends[path]).body)]
            ended.add(path)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", ended


def place(nodeid: str) -> tuple[str, Place]:
    """The file of a test and where it stands in it, from pytest's name: ``tests/a.py::TestB::test_c[1]``."""
    home, *names = nodeid.partition("[")[0].split("::")
    return home, tuple(names)


def functions(
    scope: ast.Module | ast.ClassDef, above: Place = ()
) -> list[tuple[Place, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a module and the methods of its classes."""
    nodes = []
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.append(((*above, node.name), node))
        elif isinstance(node, ast.ClassDef):
            nodes += functions(node, (*above, node.name))
    return nodes

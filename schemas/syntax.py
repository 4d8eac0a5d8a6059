"""Python source as a syntax tree, in processes with threads."""

import ast
from collections.abc import Callable
from typing import TypeVar

Tree = TypeVar("Tree", bound=ast.mod)

TRIES = 100


def module_tree(source: str | bytes) -> ast.Module:
    """What ``ast.parse`` returns, and the errors that it raises, but for one: see :func:`_whole`."""
    return _whole(lambda: ast.parse(source))


def expression_tree(source: str) -> ast.Expression:
    """The same of one expression."""
    return _whole(lambda: ast.parse(source, mode="eval"))


def _whole(parse: Callable[[], Tree]) -> Tree:
    """CPython 3.11 counts how deep it is in a tree in one number for all threads. It raises SystemError for a tree that
    is right if the garbage collector hands over to a thread that parses too (python/cpython issue 106905), as pydantic
    does in Prefect's threads."""
    for _ in range(TRIES - 1):
        try:
            return parse()
        except SystemError:
            continue
    return parse()

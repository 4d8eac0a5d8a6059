"""Values as texts: they are read as Python's literals, so that nothing runs, and compared as Python compares them."""

import ast
from typing import Any

LONGEST = 500
"""Characters of a value that is read. What is longer could exhaust Python's parser."""


def literal(text: str) -> Any:
    """The value that a text is: numbers, strings, None, True, False, and lists, tuples, sets and dicts of them.

    Raises ValueError if it is none, or longer than :data:`LONGEST`.
    """
    if len(text) > LONGEST:
        raise ValueError(f"a value of {len(text)} characters; at most {LONGEST} are read")
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"{text!r:.80} is no literal of Python") from None


def arguments(text: str) -> list[Any]:
    """The arguments of a call that a text lists: ``[1, 2], 3``. Raises ValueError as :func:`literal`."""
    return list(literal(f"({text.strip()},)")) if text.strip() else []


def equal(text: str, other: str) -> bool:
    """Whether two texts are literals of equal values."""
    try:
        return bool(literal(text) == literal(other))
    except ValueError:
        return False


def unfenced(text: str) -> str:
    """A text without the code fence that is around it, if there is one."""
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```") and "\n" in bare:
        return bare.split("\n", 1)[1].removesuffix("```").strip("\n")
    return bare

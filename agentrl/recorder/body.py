"""Reading the body of a request fast. A coding agent sends all its tools and its whole conversation with every turn."""

import marshal
from functools import cache
from typing import Any

from pydantic_core import from_json

from agentrl.schemas.json_text import MAX_DEPTH, loads, unstorable

_VERSION = 2
"""Of ``marshal``: later ones write equal values in several ways."""
_INFINITE = (b"\0\0\0\0\0\0\xf0\x7f", b"\0\0\0\0\0\0\xf0\xff")
"""Bytes of floats that are infinite."""


def read_body(body: bytes) -> tuple[Any, tuple[str, str] | None]:
    """The value of a body, as :func:`loads` reads it, and what :func:`unstorable` finds in it. Raises ValueError if it
    is not JSON, or nested too deeply.

    The parser of pydantic-core takes a fraction of the time that counting levels takes. It has a limit of its own, so
    it reads the text within as many lists as leave it our room; it takes neither NaN nor halves of surrogate pairs.
    What it does not take is read slowly, which says why."""
    text = body.decode()
    around = _limit() - MAX_DEPTH
    try:
        value = from_json(f"{'[' * around}{text}{']' * around}", allow_inf_nan=False)
    except ValueError:
        value = loads(text)
        return value, unstorable(value)
    for _ in range(around):
        if len(value) != 1:  # such as `1], [2`
            loads(text)
        value = value[0]
    written = bytes_of_value(value)
    return value, unstorable(value) if any(part in written for part in _INFINITE) else None


@cache
def _limit() -> int:
    """How many lists within each other the parser reads, at least :data:`MAX_DEPTH`."""
    levels = MAX_DEPTH
    while levels < 10 * MAX_DEPTH:
        try:
            from_json("[" * (levels + 1) + "]" * (levels + 1))
        except ValueError:
            break
        levels += 1
    return levels


def bytes_of_value(value: Any) -> bytes:
    """Bytes that are equal for equal values of JSON, and for no others. Raises ValueError if it is nested too
    deeply."""
    return marshal.dumps(value, _VERSION)


def value_of_bytes(written: bytes) -> Any:
    """The value that :func:`bytes_of_value` wrote."""
    return marshal.loads(written)

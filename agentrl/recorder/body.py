"""Reading the body of a request fast. A coding agent sends all its tools and its whole conversation with every turn."""

import contextlib
import json
import marshal
import re
import secrets
from collections import OrderedDict
from functools import cache
from typing import Any

from pydantic_core import from_json

from agentrl.schemas.json_text import MAX_DEPTH, loads, unstorable

_VERSION = 2
"""Of ``marshal``: later ones write equal values in several ways."""
_INFINITE = (b"\0\0\0\0\0\0\xf0\x7f", b"\0\0\0\0\0\0\xf0\xff")
"""Bytes of floats that are infinite."""

_TOOLS = re.compile(rb'[{,\s]"tools"\s*:\s*(?=\[)')
"""What stands before a list of tools. Within a string, the first quotation mark would end it, and what follows is then
no JSON."""
_STAND_IN = b'"%b"' % secrets.token_hex(16).encode()
_MOST_TOOLS = 64  # lists that are kept
_LONGEST_TOOLS = 2**20  # bytes of one that is kept


class RepeatedTools(list[Any]):
    """A list of tools that requests repeat byte by byte, in ``size`` bytes. Nobody may change it. It is equal to itself
    alone."""

    def __init__(self, tools: list[Any], size: int) -> None:
        super().__init__(tools)
        self.size = size

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


_known_tools: OrderedDict[bytes, RepeatedTools] = OrderedDict()


def read_request(body: bytes) -> tuple[Any, tuple[str, str] | None]:
    """As :func:`read_body`; a list of ``tools`` that an earlier body had is the same object, and is not read again."""
    field = _TOOLS.search(body)
    start = field.end() if field else 0
    source = next((known for known in reversed(_known_tools) if body.startswith(known, start)), None) if field else None
    if source is not None:
        _known_tools.move_to_end(source)
        with contextlib.suppress(ValueError):  # which is raised below, and says where
            value, bad = read_body(body[:start] + _STAND_IN + body[start + len(source) :])
            if isinstance(value, dict) and value.get("tools") == _STAND_IN[1:-1].decode():
                value["tools"] = _known_tools[source]
                return value, bad
    value, bad = read_body(body)
    if field and not source and bad is None and isinstance(value, dict) and isinstance(value.get("tools"), list):
        _keep_tools(body[start:].decode(), value)
    return value, bad


def _keep_tools(text: str, value: dict[str, Any]) -> None:
    """Keep the list with which ``text`` begins, if it is the one that the body means by ``tools``: not one within
    another field, or one that stands there twice."""
    tools, length = json.JSONDecoder().raw_decode(text)
    source = text[:length].encode()
    if len(source) <= _LONGEST_TOOLS and bytes_of_value(tools) == bytes_of_value(value["tools"]):
        value["tools"] = _known_tools[source] = RepeatedTools(value["tools"], len(source))
        if len(_known_tools) > _MOST_TOOLS:
            _known_tools.popitem(last=False)


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

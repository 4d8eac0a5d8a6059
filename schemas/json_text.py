"""JSON that others wrote, read only up to a depth that every later reader and writer can handle."""

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

MAX_DEPTH = 100
"""Greatest depth of nested objects and lists. Python's own reader and writer fail at some hundreds."""

_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def loads(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or nested deeper than :data:`MAX_DEPTH`."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    levels = depth(text)
    if levels > MAX_DEPTH:
        raise ValueError(f"is nested {levels:,} levels deep; at most {MAX_DEPTH} are allowed")
    return json.loads(text)


def unstorable(value: Any) -> tuple[str, str] | None:
    """The dotted path of the first value, or key, within a value read from JSON that no file can hold, and why: text
    with half of a surrogate pair is no Unicode, and infinite numbers are no JSON. None if there is none."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while todo:
        path, inner = todo.pop()
        if isinstance(inner, dict):
            todo += [((*path, str(key)), element) for key, element in reversed(inner.items())]
            todo += [((*path, key), key) for key in inner if not key.isascii()]
        elif isinstance(inner, list):
            todo += [((*path, str(number)), element) for number, element in reversed(list(enumerate(inner)))]
        elif isinstance(inner, str):
            if not inner.isascii() and _HALF_A_CHARACTER.search(inner):
                return shown(".".join(path)), "has half of a surrogate pair, which is no Unicode character"
        elif isinstance(inner, float) and not math.isfinite(inner):
            return shown(".".join(path)), f"is {inner}, which JSON does not have; give a finite number"
    return None


def shown(text: str) -> str:
    """A text in which halves of surrogate pairs are written as escapes, so that it can be printed."""
    return text.encode("utf-8", "backslashreplace").decode()


def writer(ensure_ascii: bool = True, sort_keys: bool = False, default: Any = None) -> Callable[[Any], str]:
    """``json.dumps`` with these settings. For small values it takes a quarter of the time: ``json`` builds its encoder
    anew for each. Values are not checked for circles."""
    plain = json.JSONEncoder(ensure_ascii=ensure_ascii, sort_keys=sort_keys, default=default)
    build = getattr(json.encoder, "c_make_encoder", None)
    if build is None:  # not CPython
        return plain.encode
    text = json.encoder.encode_basestring_ascii if ensure_ascii else json.encoder.encode_basestring
    encode = build(None, plain.default, text, None, plain.key_separator, plain.item_separator, sort_keys, False, True)
    return lambda value: "".join(encode(value, 0))


def is_json(text: str) -> bool:
    """Whether a text is JSON that every reader takes. Rows share their tools, so the last answers on long texts are
    kept."""
    return _reads(text) if len(text) < 256 else _kept(text)


def _reads(text: str) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return len(text) <= MAX_DEPTH or depth(text) <= MAX_DEPTH


_kept = lru_cache(maxsize=128)(_reads)


def depth(text: str) -> int:
    """How deep objects and lists are nested, without reading the text."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:  # the common case, as fast as a search
        return 0
    here = deepest = 0
    for match in _STRUCTURE.finditer(text):
        character = match[0]
        if character in "[{":
            here += 1
            deepest = max(deepest, here)
        elif character in "]}":
            here -= 1
    return deepest

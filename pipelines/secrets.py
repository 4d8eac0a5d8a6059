"""Hiding secrets: values given on the command line for something that is named like a secret, and values of secrets in
what a stage prints, raises or measures."""

import io
import json
import os
import re
from collections.abc import Sequence
from urllib.parse import quote

_NAME = re.compile(r"(^|[_-])(api_?key|key|token|secret|password|passwd|credentials?|auth|authorization)($|[_-])", re.I)
_REFERENCE = re.compile(r"\$\{\w+\}")

HIDDEN = "***"


def names_a_secret(key: Sequence[str | int]) -> bool:
    """Whether any part of a key path is named like a secret: ``api_key``, ``HF_TOKEN``, ``password``."""
    return any(_NAME.search(str(part)) for part in key)


def is_reference(value: object) -> bool:
    """Whether a value is ``${NAME}``, which names an environment variable and holds no secret itself."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def shown_setting(setting: str) -> str:
    """A ``--set`` as it may be printed and recorded: the value of a secret is ``***``."""
    dotted, equals, value = setting.partition("=")
    hidden = equals and names_a_secret(dotted.split(".")) and not is_reference(value.strip("'\" "))
    return f"{dotted}={HIDDEN}" if hidden else setting


MIN_LENGTH = 6
"""Characters. Shorter values are not hidden, since they occur in any text."""

_revealed: set[str] = set()


def revealed(value: str) -> str:
    """Note that a value is a secret, for :func:`redacted`, and return it."""
    _revealed.add(value)
    return value


def redacted(text: str) -> str:
    """A text with ``***`` for each secret: what a stage of this process revealed, and the value of each environment
    variable that is named like a secret; as it is, and quoted for an URL, JSON or Python."""
    values = _revealed | {value for name, value in os.environ.items() if names_a_secret([name])}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= MIN_LENGTH:
            for form in {value, quote(value), quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]}:
                text = text.replace(form, HIDDEN)
    return text


class RedactedStream(io.TextIOWrapper):
    """Writes text to a descriptor without the values of secrets. A value that is written in two pieces is not
    recognised."""

    def __init__(self, descriptor: int) -> None:
        raw = os.fdopen(descriptor, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        super().write(redacted(text))
        return len(text)

"""Hiding secrets: values given on the command line for something that is named like a secret, and values of secrets in
what a stage prints, raises or measures."""

import functools
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from urllib.parse import quote

from agentrl.schemas.secret_names import names_a_secret

_REFERENCE = re.compile(r"\$\{\w+\}")

HIDDEN = "***"


def is_reference(value: object) -> bool:
    """Whether a value is ``${NAME}``, which names an environment variable and holds no secret itself."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def shown_setting(setting: str) -> str:
    """A ``--set`` as it may be printed and recorded: the value of a secret, and the user and password of an URL, are
    ``***``."""
    dotted, equals, value = setting.partition("=")
    hidden = equals and names_a_secret(dotted.split(".")) and not is_reference(value.strip("'\" "))
    return f"{dotted}={HIDDEN}" if hidden else redacted_urls(setting)


MIN_LENGTH = 6
"""Characters. Shorter values are not hidden, since they occur in any text."""

_USERINFO = rb"://[^/\s?#\"'<>\\]*@"
_URL_BEGUN = re.compile(rb"(?::/?|://[^/\s?#\"'<>\\]{0,4096})$")
_WHOLE_URL = re.compile(r"[a-zA-Z][\w+.-]*://\S+")

_revealed: set[str] = set()
_told: list[Callable[[str], None]] = []


def revealed(value: str) -> str:
    """Note that a value is a secret, for :func:`redacted`, and return it."""
    if value not in _revealed:
        _revealed.add(value)
        for tell in _told:
            tell(value)
    return value


def tell_of_secrets(tell: Callable[[str], None]) -> None:
    """Call ``tell`` with each value that is revealed from here on."""
    _told.append(tell)


def redacted(text: str) -> str:
    """A text with ``***`` for each secret: what a stage of this process revealed, and the value of each environment
    variable that is named like a secret; as it is, and quoted for an URL, JSON or Python; and for the user and the
    password in an URL (``http://user:password@host``)."""
    pattern, _ = _patterns(_values())
    return pattern.sub(_hidden, text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


def redacted_urls(text: str) -> str:
    """A text without the users and passwords of the URLs in it."""
    return re.sub(_USERINFO, _hidden, text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


def without_userinfo(value: str) -> str:
    """An URL without its user and password, which are secrets and change no result. Any other text as it is."""
    return redacted_urls(value) if "@" in value and _WHOLE_URL.fullmatch(value) else value


class StreamRedactor:
    """Redacts what comes in pieces as :func:`redacted` does, wherever the pieces are cut: the end of a piece that a
    secret may begin with is held until the next one."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What can be shown, now that this has come."""
        text = self._held + piece
        pattern, forms = _patterns(_values())
        cut = min(_begun(text, forms), begun.start() if (begun := _URL_BEGUN.search(text)) else len(text))
        for match in pattern.finditer(text):
            if match.start() < cut < match.end():
                cut = match.start()
        self._held = text[cut:]
        return pattern.sub(_hidden, text[:cut])

    def end(self) -> bytes:
        """What was held, once nothing follows it."""
        held, self._held = self._held, b""
        return _patterns(_values())[0].sub(_hidden, held)


def _values() -> frozenset[str]:
    values = _revealed | {value for name, value in os.environ.items() if names_a_secret([name])}
    return frozenset(value for value in values if len(value) >= MIN_LENGTH)


@functools.lru_cache(maxsize=4)
def _patterns(values: frozenset[str]) -> tuple[re.Pattern[bytes], tuple[bytes, ...]]:
    """What matches a secret, and the forms of all secrets, longest first."""
    texts = {
        form
        for value in values
        for form in (value, quote(value), quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1])
    }
    forms = sorted((text.encode("utf-8", "surrogatepass") for text in texts), key=len, reverse=True)
    return re.compile(b"|".join([*map(re.escape, forms), _USERINFO])), tuple(forms)


def _begun(text: bytes, forms: Sequence[bytes]) -> int:
    """Where the first end of the text starts that some form begins with."""
    longest = max(map(len, forms), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(len(form) > len(text) - start and form.startswith(text[start:]) for form in forms):
            return start
    return len(text)


def _hidden(match: re.Match[bytes]) -> bytes:
    secret = match[0]
    if not secret.startswith(b"://"):
        return HIDDEN.encode()
    return b"://***:***@" if b":" in secret[3:] else b"://***@"


class RedactedStream(io.TextIOWrapper):
    """Writes text to a descriptor without the values of secrets, also of those that this process put into its own
    environment. What reads the descriptor hides values that are written in two pieces, or without Python."""

    def __init__(self, descriptor: int) -> None:
        raw = os.fdopen(descriptor, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        super().write(redacted(text))
        return len(text)

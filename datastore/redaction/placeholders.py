"""What stands for secrets: ``<EMAIL_1>``. Equal values have equal placeholders within a run."""

import json
import secrets
from collections import Counter
from hashlib import blake2b
from urllib.parse import quote

_AS_WRITTEN_SMALL = frozenset({"EMAIL", "HOST"})
"""Kinds whose values are equal in capital and small letters."""


class Placeholders:
    """Numbers values by kind in the order in which they come. It holds no value, only digests with a key that is drawn
    anew, and no text of it is ever written."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._numbers: dict[bytes, int] = {}
        self.values: Counter[str] = Counter()
        """Different values of each kind."""

    def of(self, kind: str, value: str) -> str:
        """The placeholder of a value."""
        if kind in _AS_WRITTEN_SMALL:
            value = value.casefold()
        text = f"{kind}\0{value}".encode("utf-8", "surrogatepass")
        digest = blake2b(text, key=self._key, digest_size=16).digest()
        if digest not in self._numbers:
            self.values[kind] += 1
            self._numbers[digest] = self.values[kind]
        return f"<{kind}_{self._numbers[digest]}>"


def forms(value: str) -> set[str]:
    """A value as it stands in texts, in JSON, in JSON inside JSON, and in an URL."""
    written = {value, quote(value), quote(value, safe="")}
    for plain in (False, True):
        once = json.dumps(value, ensure_ascii=plain)[1:-1]
        written |= {once, json.dumps(once, ensure_ascii=plain)[1:-1]}
    return written

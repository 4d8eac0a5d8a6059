"""JSON values read from a text one at a time: elements of an array, or of a list inside an object."""

import json
from collections.abc import Iterator
from typing import IO, Any

CHUNK = 2**20
HEAD = 2**24
"""Characters of a document that are read to tell its format."""


class Chars:
    """A window on a text, for a JSON decoder that needs more text when a value is not whole."""

    _decoder = json.JSONDecoder()

    def __init__(self, text: IO[str]) -> None:
        self._text = text
        self._window = text.read(CHUNK)
        self._at = 0
        self.taken = 0

    def _more(self) -> bool:
        chunk = self._text.read(max(CHUNK, len(self._window) - self._at))
        self._window = self._window[self._at :] + chunk
        self.taken += self._at
        self._at = 0
        return bool(chunk)

    @property
    def position(self) -> int:
        return self.taken + self._at

    def peek(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            while self._at < len(self._window):
                if not (char := self._window[self._at]).isspace():
                    return char
                self._at += 1
            if not self._more():
                return ""

    def expect(self, allowed: str) -> str:
        char = self.peek()
        if not char or char not in allowed:
            raise ValueError(f"is not JSON: {char or 'the end'!r} at character {self.taken + self._at}")
        self._at += 1
        return char

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._at)
            except json.JSONDecodeError as error:
                if not self._more():
                    raise ValueError(f"is not JSON: {error}") from None
                continue
            if end == len(self._window) and self._more():  # a number may go on
                continue
            self._at = end
            return value


def elements(chars: Chars) -> Iterator[Any]:
    """Elements of the array that begins here."""
    chars.expect("[")
    if chars.peek() == "]":
        chars.expect("]")
        return
    while True:
        yield chars.value()
        if chars.expect(",]") == "]":
            return


def members(chars: Chars, key: str, beside: dict[str, Any]) -> Iterator[Any]:
    """Elements of the list ``key`` of the object that begins here; other members go to ``beside``."""
    chars.expect("{")
    if chars.peek() == "}":
        return
    while True:
        name = chars.value()
        chars.expect(":")
        if name == key and chars.peek() == "[":
            yield from elements(chars)
        else:
            beside[name] = chars.value()
        if chars.expect(",}") == "}":
            return


def outline(chars: Chars) -> dict[str, Any]:
    """Top-level members of an object; of lists the first element alone. Long documents are read in part."""
    found: dict[str, Any] = {}
    chars.expect("{")
    while chars.peek() != "}" and chars.taken < HEAD:
        name = chars.value()
        chars.expect(":")
        if chars.peek() == "[":
            found[name] = []
            for element in elements(chars):
                if not found[name]:
                    found[name].append(element)
                if chars.taken >= HEAD:
                    break
        else:
            found[name] = chars.value()
        if chars.taken >= HEAD or chars.expect(",}") == "}":
            break
    return found

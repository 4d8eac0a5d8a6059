"""JSON values read from a text one at a time: elements of an array, or of a list inside an object."""

import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.raw import MAX_RECORD, TooLongError

CHUNK = 2**20
HEAD = 2**24
"""Characters of a document that are read to tell its format."""


class Utf8Text(io.TextIOWrapper):
    """UTF-8 text whose faults are StoreErrors that name the file."""

    def __init__(self, raw: Any, name: str, errors: str) -> None:
        super().__init__(raw, encoding="utf-8-sig", errors=errors, newline="\n")
        self._name = name

    def _guarded(self, read: Callable[..., str], *arguments: Any) -> str:
        try:
            return read(*arguments)
        except UnicodeDecodeError as error:
            raise StoreError(f"{self._name} is not UTF-8 text: {error}") from None
        except (OSError, EOFError, zlib.error) as error:
            raise StoreError(f"{self._name} cannot be read: {error}") from None

    def read(self, size: int | None = -1, /) -> str:
        return self._guarded(super().read, size)

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return self._guarded(super().readline, size)

    def __next__(self) -> str:  # type: ignore[override]
        if line := self.readline():
            return line
        raise StopIteration


class Chars:
    """A window on a text, for a JSON decoder that needs more text when a value is not whole. No value may take more
    than ``limit`` characters."""

    _decoder = json.JSONDecoder()

    def __init__(self, text: IO[str], limit: int = MAX_RECORD) -> None:
        self._text = text
        self._limit = limit
        self._window = text.read(CHUNK)
        self._at = 0
        self.taken = 0

    def _more(self) -> bool:
        held = len(self._window) - self._at
        chunk = self._text.read(max(CHUNK, min(held, self._limit - held + 1)))
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

    def element(self) -> Any:
        """The next value; of one that is too long the error, and what comes after it can be read."""
        try:
            return self.value()
        except TooLongError as error:
            self._pass_over()
            return error

    def _pass_over(self) -> None:
        """Go to the end of a value without keeping it."""
        depth, inside, at = 0, False, self._at
        while True:
            match = (_IN_TEXT if inside else _BESIDE_TEXT).search(self._window, at)
            at = match.end() if match else len(self._window)
            if match is None or (match[0] == "\\" and at == len(self._window)):
                self._at = len(self._window)
                if not self._more():
                    raise ValueError("is not JSON: the value has no end")
                at = self._at
            if match is None:
                continue
            mark = match[0]
            if mark == "\\":
                at += 1
            elif mark == '"':
                inside = not inside
            elif mark in "[{":
                depth += 1
            elif depth == 0:  # a comma, or the bracket of what holds the value
                self._at = at - 1
                return
            elif mark in "]}":
                depth -= 1
            if depth == 0 and not inside and mark in ']}"':
                self._at = at
                return

    def value(self) -> Any:
        """The next value. Raises TooLongError if it is too long, and ValueError if it is no JSON."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._at)
            except json.JSONDecodeError as error:
                if len(self._window) - self._at > self._limit:
                    raise TooLongError(self._limit) from None
                if not self._more():
                    raise ValueError(f"is not JSON: {error}") from None
                continue
            if end == len(self._window) and self._more():  # a number may go on
                continue
            if end - self._at > self._limit:
                raise TooLongError(self._limit)
            self._at = end
            return value


_IN_TEXT, _BESIDE_TEXT = re.compile(r'["\\]'), re.compile(r'[\[\]{},"]')


def elements(chars: Chars) -> Iterator[Any]:
    """Elements of the array that begins here; a TooLongError in place of one that is too long."""
    chars.expect("[")
    if chars.peek() == "]":
        chars.expect("]")
        return
    while True:
        yield chars.element()
        if chars.expect(",]") == "]":
            return


def between_commas(chars: Chars) -> Iterator[Any]:
    """Values of a text that is a part of a list."""
    while True:
        yield chars.element()
        if not chars.peek():
            return
        chars.expect(",")


def members(chars: Chars, key: str, beside: dict[str, Any]) -> Iterator[Any]:
    """Elements of the list ``key`` of the object that begins here; other members go to ``beside``."""
    chars.expect("{")
    if chars.peek() != "}":
        yield from _member(chars, key, beside)
        yield from later_members(chars, key, beside)


def later_members(chars: Chars, key: str, beside: dict[str, Any]) -> Iterator[Any]:
    """The same of an object after one of its members."""
    while chars.expect(",}") == ",":
        yield from _member(chars, key, beside)


def _member(chars: Chars, key: str, beside: dict[str, Any]) -> Iterator[Any]:
    name = chars.value()
    chars.expect(":")
    if name == key and chars.peek() == "[":
        yield from elements(chars)
    else:
        beside[name] = chars.value()


def find_list(chars: Chars, key: str, beside: dict[str, Any]) -> bool:
    """Read an object up to its list ``key``, which then begins; other members go to ``beside``. False if there is
    none."""
    chars.expect("{")
    while chars.peek() != "}":
        name = chars.value()
        chars.expect(":")
        if name == key and chars.peek() == "[":
            return True
        beside[name] = chars.value()
        if chars.expect(",}") == "}":
            return False
    return False


def outline(chars: Chars) -> dict[str, Any]:
    """Top-level members of an object; of lists the first element alone. Long documents are read in part."""
    fields: dict[str, Any] = {}
    chars.expect("{")
    while chars.peek() != "}" and chars.taken < HEAD:
        name = chars.value()
        chars.expect(":")
        if chars.peek() == "[":
            fields[name] = []
            for element in elements(chars):
                if not fields[name] and not isinstance(element, TooLongError):
                    fields[name].append(element)
                if chars.taken >= HEAD:
                    break
        else:
            fields[name] = chars.value()
        if chars.taken >= HEAD or chars.expect(",}") == "}":
            break
    return fields


def utf8_fault(line: bytes) -> str | None:
    """Why a line is no text, None if it is."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text: {error}"
    return None


def not_json(error: BaseException) -> str:
    text = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    return text if text.startswith("is not ") else f"is not JSON: {text}"

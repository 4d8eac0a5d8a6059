"""Replacing secrets in texts and in JSON, with the secrets of one row known to all of its texts."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from agentrl.datastore.redaction.detect import REMEMBERED, Detection, Detectors
from agentrl.datastore.redaction.patterns import PLACEHOLDER
from agentrl.datastore.redaction.placeholders import Placeholders, forms

_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*', re.DOTALL)
_COLON = re.compile(r"\s*:")
_ALONE = ("USER", "HOST", "NAME")
"""Kinds whose values may be words. Such a word is replaced where it is detected, and elsewhere only between the same
characters."""
_WORD = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)*")
SHORT = 16
"""Characters. Shorter secrets are replaced elsewhere only if they stand alone, since a word may hold them."""
LEAD, TAIL = 8, 1
"""Characters before and after a word between which it is replaced elsewhere."""


class Known(NamedTuple):
    """A secret of the row in one of its forms, with so many characters before and after it."""

    kind: str
    value: str
    lead: int = 0
    tail: int = 0


class RowSecrets:
    """The secrets of one row, as they are found: what one text of it shows is replaced in all others too."""

    def __init__(self, detectors: Detectors, placeholders: Placeholders) -> None:
        self._detectors = detectors
        self._placeholders = placeholders
        self._known: dict[str, Known] = {}
        self._pattern: re.Pattern[str] | None = None
        self._saw = False
        self.counts: Counter[str] = Counter()
        """Places that were replaced, by kind."""
        self.words: dict[str, str] = {}
        """Kinds of values that their names in JSON gave away and that any text may hold, as ``alice`` of ``username``:
        those that were met since it was last emptied."""

    def learn(self, text: str) -> None:
        """Note the secrets of a text."""
        for hit in self._detectors(text):
            self._saw = True
            self._note_hit(hit, text)

    def learn_json(self, text: str) -> None:
        """Note the secrets of each value of a JSON text."""
        if text not in self._detectors.clean_json:
            self._saw = False
            self._json(text, self._learn_value)
            if not self._saw and len(self._detectors.clean_json) < REMEMBERED:
                self._detectors.clean_json.add(text)

    def text(self, text: str) -> str:
        """The text with placeholders for its secrets."""
        return self.replaced(text, self.hits(text))

    def hits(self, text: str, more: Iterable[Detection] = ()) -> list[Detection]:
        """The secrets of a text, where secrets of the row stand in it, and ``more``; in order, and apart."""
        hits = [*self._detectors(text), *self._elsewhere(text), *more]
        apart: list[Detection] = []
        for hit in sorted(hits, key=lambda hit: (hit.start, -hit.end)):
            start = max(hit.start, apart[-1].end if apart else 0)
            if start < hit.end:
                apart.append(Detection(start, hit.end, hit.kind))
        return apart

    def placeholder(self, hit: Detection, text: str) -> str:
        """What stands for a secret of a text; it is counted."""
        self.counts[hit.kind] += 1
        written = text[hit.start : hit.end]
        known = self._known.get(written, Known(hit.kind, written))
        return self._placeholders.of(known.kind, known.value)

    def replaced(self, text: str, hits: list[Detection]) -> str:
        """The text with placeholders at these places, and at those that show then."""
        while hits:  # each round leaves less text that is no placeholder
            parts, end = [], 0
            for hit in hits:
                self._note_hit(hit, text)
                parts += [text[end : hit.start], self.placeholder(hit, text)]
                end = hit.end
            text = "".join([*parts, text[end:]])
            hits = self.hits(text)
        return text

    def json(self, text: str) -> str:
        """A JSON text with placeholders for the secrets of its values and names; how it is written stays."""
        if text in self._detectors.clean_json and not self._elsewhere(text):
            return text
        return self._json(text, self._clean_value)

    def _json(self, text: str, clean: Callable[[str, str], str]) -> str:
        """A JSON text after ``clean`` of each literal of it, given the name that it stands under."""
        name = ""

        def changed(match: re.Match[str]) -> str:
            nonlocal name
            literal = match[0]
            value = json.loads(literal) if literal.startswith('"') else literal
            is_name = literal.startswith('"') and _COLON.match(text, match.end()) is not None
            after = clean(value, "" if is_name else name)
            if is_name:
                name = value
            return literal if after == value else _written(after, literal)

        return _LITERAL.sub(changed, text)

    def _learn_value(self, value: str, name: str) -> str:
        kind = self._detectors.value(value, name)
        if kind is not None:
            self._saw = True
            self._note_named(kind, value, name)
        self.learn(value)
        return value

    def _clean_value(self, value: str, name: str) -> str:
        kind = self._detectors.value(value, name)
        if kind is not None:
            self._note_named(kind, value, name)
            return self.placeholder(Detection(0, len(value), kind), value)
        return self.text(value)

    def _note_hit(self, hit: Detection, text: str) -> None:
        value = text[hit.start : hit.end]
        if hit.kind in _ALONE and _WORD.fullmatch(value):
            before, after = text[max(0, hit.start - LEAD) : hit.start], text[hit.end : hit.end + TAIL]
            if not PLACEHOLDER.search(before + after):
                self._note_between(hit.kind, value, before, after)
        else:
            self._note(hit.kind, value)

    def _note_named(self, kind: str, value: str, name: str) -> None:
        """Note a value that its name in JSON gave away. One that may be a word is known after that name alone."""
        if kind in _ALONE and (_WORD.fullmatch(value) or len(value) < 4):
            self.words[value] = kind
            for colon in (": ", ":"):
                self._note_between(kind, value, f'"{name}"{colon}"', '"')
        else:
            self._note(kind, value)

    def _note_between(self, kind: str, value: str, before: str, after: str) -> None:
        parts = [before, value, after]
        for _ in range(3):  # as it is, in JSON, and in JSON inside JSON
            if "".join(parts) not in self._known:
                self._known["".join(parts)] = Known(kind, value, len(parts[0]), len(parts[2]))
                self._pattern = None
            parts = [json.dumps(part, ensure_ascii=False)[1:-1] for part in parts]

    def _note(self, kind: str, value: str) -> None:
        if value in self._known or PLACEHOLDER.search(value) or len(value) < 4:
            return
        if kind in _ALONE and _WORD.fullmatch(value):
            return
        for form in forms(value):
            self._known.setdefault(form, Known(kind, value))
        self._pattern = None

    def _elsewhere(self, text: str) -> list[Detection]:
        if not self._known:
            return []
        if self._pattern is None:
            longest_first = sorted(self._known, key=lambda form: (-len(form), form))
            self._pattern = re.compile("|".join(_bounded(form, self._known[form]) for form in longest_first))
        hits = []
        for match in self._pattern.finditer(text):
            known = self._known[match[0]]
            hits.append(Detection(match.start() + known.lead, match.end() - known.tail, known.kind))
        taken = [match.span() for match in PLACEHOLDER.finditer(text)] if hits else []
        return [hit for hit in hits if not any(hit.start < end and start < hit.end for start, end in taken)]


def standing_alone(words: Mapping[str, str], text: str, start: int, end: int) -> list[Detection]:
    """Where words, each with its kind, stand between ``start`` and ``end`` (exclusive) of a text, and are no part of a
    longer one."""
    if not words:
        return []
    either = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    pattern = re.compile(rf"(?:(?<!\w)|(?<=\\[nrt]))(?:{either})(?!\w)")
    return [Detection(*match.span(), words[match[0]]) for match in pattern.finditer(text, start, end)]


def _bounded(form: str, known: Known) -> str:
    escaped = re.escape(form)
    if len(form) >= SHORT or known.lead or known.tail:
        return escaped
    return rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])){escaped}(?![A-Za-z0-9])"


def _written(value: str, before: str) -> str:
    """A JSON text of a value, in ASCII if that of it ``before`` was, or holds half a character."""
    return json.dumps(value, ensure_ascii=before.isascii() or "\\ud" in before.casefold())

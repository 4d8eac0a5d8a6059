"""Replacing secrets in token ids: the tokens that hold a part of one give way to those of the placeholder."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from agentrl.datastore.artifacts.tokenizers import TokenBytes
from agentrl.datastore.errors import StoreError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Change(NamedTuple):
    """``ids`` stand for the tokens ``start`` to ``end`` (exclusive)."""

    start: int
    end: int
    ids: list[int]


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer both ways: ids as bytes, and text as ids."""

    name: str
    json: str

    @cached_property
    def bytes_of(self) -> TokenBytes:
        return TokenBytes.of(self.json)

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.json)

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of control tokens, which no text is part of. Other tokens that were added, as for indents, are text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def text(self, ids: list[int]) -> tuple[str, np.ndarray]:
        """The text of ids, and the byte at which each begins in it, [tokens + 1]. Bytes that are no UTF-8 are lone
        surrogates, so that nothing is lost."""
        data, offsets = self.bytes_of.text(ids)
        return data.decode("utf-8", "surrogateescape"), np.asarray(offsets)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that stands in the middle of another one.

        Raises StoreError if they do not spell it: a tokenizer may lack characters.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        spelled = self.bytes_of.text(ids)[0].decode("utf-8", "replace")
        if spelled.strip() != text.strip() or self.special & set(ids):
            raise StoreError(
                f"tokenizer {self.name} cannot spell a placeholder, so the tokens of its rows cannot be redacted; set "
                "tokens: drop, which keeps their text alone"
            )
        return ids


def characters(text: str, offsets: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """Where the tokens ``start`` to ``end`` (exclusive) stand in a text of :meth:`Vocabulary.text`, in characters."""
    data = text.encode("utf-8", "surrogateescape")
    return _characters(data, offsets[start]), _characters(data, offsets[end])


def runs(vocabulary: Vocabulary, ids: list[int]) -> list[tuple[int, int]]:
    """Where text stands between control tokens: each run from a token to a token (exclusive)."""
    special = np.isin(np.asarray(ids, np.int64), list(vocabulary.special))
    edges = np.flatnonzero(np.diff(np.concatenate([[True], special, [True]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def changes(vocabulary: Vocabulary, ids: list[int], places: list[tuple[int, int, str]]) -> list[Change]:
    """What takes the place of which tokens so that the text of ``ids`` has ``places`` replaced: each from a character
    to a character (exclusive) of :meth:`Vocabulary.text`, in order and apart, with what stands there. Text of the first
    and last token of a place that is no part of it is encoded again."""
    text, offsets = vocabulary.text(ids)
    data = text.encode("utf-8", "surrogateescape")
    made: list[Change] = []
    for (first, last), group in _grouped(text, data, offsets, places):
        parts, here = [], _characters(data, offsets[first])
        for start, end, instead in group:
            parts += [text[here:start], instead]
            here = end
        parts.append(text[here : _characters(data, offsets[last])])
        whole = "".join(parts).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        made.append(Change(first, last, vocabulary.encode(whole)))
    return made


_Group = tuple[tuple[int, int], list[tuple[int, int, str]]]


def _grouped(text: str, data: bytes, offsets: np.ndarray, places: list[tuple[int, int, str]]) -> list[_Group]:
    """Places by the tokens that hold them; those that share a token belong together. Tokens are widened to whole
    characters."""
    grouped: list[_Group] = []
    for replaced in places:
        low, high = (len(text[:at].encode("utf-8", "surrogateescape")) for at in replaced[:2])
        first = int(np.searchsorted(offsets[1:], low, side="right"))
        last = int(np.searchsorted(offsets, high, side="left"))
        while first > 0 and _within(data, offsets[first]):
            first -= 1
        while last < len(offsets) - 1 and _within(data, offsets[last]):
            last += 1
        if grouped and first < grouped[-1][0][1]:
            (before, until), group = grouped[-1]
            grouped[-1] = ((before, max(last, until)), [*group, replaced])
        else:
            grouped.append(((first, last), [replaced]))
    return grouped


def _within(data: bytes, byte: int) -> bool:
    """Whether a character began before this byte and goes on."""
    return byte < len(data) and data[byte] & 0xC0 == 0x80


def _characters(data: bytes, byte: int) -> int:
    """How many characters begin before this byte."""
    return len(data[:byte].decode("utf-8", "surrogateescape"))


def positions(length: int, made: list[Change]) -> np.ndarray:
    """Where each token boundary lies after changes, [tokens + 1]. A boundary inside a change moves to its beginning."""
    moved = np.arange(length + 1)
    for change in reversed(made):
        moved[change.start + 1 : change.end] = change.start
        moved[change.end :] += len(change.ids) - (change.end - change.start)
    return moved

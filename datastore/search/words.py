"""What a full-text search asks for: words that must all be there, "a phrase", and -what must not be.

A word is found whole, in any case and without accents. One that holds signs, as ``user_id`` or ``a@b.org``, is the
phrase of its parts. In scripts without spaces each character is a word, and so a word of them is a phrase.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from agentrl.datastore.errors import StoreError
from agentrl.datastore.optional import optional

if TYPE_CHECKING:
    import tantivy

EXTRA = "text"
LONGEST = 128
"""Bytes of a word: those of so many or more, as of a picture in base64, are not found."""
MAX_CHARACTERS = 1000
ALLOWED = 'allowed are words, "a phrase", and -word or -"a phrase" for what must not be there'

_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = rf"[{_SPACELESS}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_SPACELESS}]]+"
_ASCII = "".join(chr(code).lower() if chr(code).isalnum() else " " for code in range(128))
_TERM = re.compile(r'(?P<no>-(?=[^\s-]))?(?:"(?P<phrase>[^"]*)"|(?P<word>[^\s"]+))')


@dataclass(frozen=True)
class Words:
    """What must be there and what must not, each a word or a phrase as it was written."""

    wanted: tuple[str, ...]
    unwanted: tuple[str, ...]


def parsed(text: str) -> Words:
    """What a text asks for; that needs no extra. Raises StoreError that names the text and what is allowed."""
    if len(text) > MAX_CHARACTERS:
        raise StoreError(f"a search has at most {MAX_CHARACTERS:,} characters, this has {len(text):,}; {ALLOWED}")
    if text.count('"') % 2:
        raise StoreError(f'search {text!r}: a phrase lacks its closing "; {ALLOWED}')
    sides: dict[bool, list[str]] = {True: [], False: []}
    for term in _TERM.finditer(text):
        written = term["word"] if term["phrase"] is None else term["phrase"]
        if any(map(str.isalnum, written)):
            sides[not term["no"]].append(written)
        elif term["phrase"] is not None or term["no"]:
            raise StoreError(f"search {text!r}: {term[0]} holds no letter or digit; {ALLOWED}")
    if not sides[True]:
        less = "; for rows without a word write: not matches(messages, 'word')" if sides[False] else ""
        raise StoreError(f"search {text!r} names no word that must be there; {ALLOWED}{less}")
    return Words(*(tuple(dict.fromkeys(sides[side])) for side in (True, False)))


@cache
def analyzer(longest: int = LONGEST) -> "tantivy.TextAnalyzer":
    """Text as words of at most so many bytes. Raises StoreError that names the extra if it is not installed."""
    tantivy = optional("tantivy", EXTRA)
    made = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.regex(_WORD))
    for step in (tantivy.Filter.remove_long(longest), tantivy.Filter.lowercase(), tantivy.Filter.ascii_fold()):
        made = made.filter(step)
    return made.build()


@cache
def of_plain() -> "tantivy.TextAnalyzer":
    """What :func:`plain` gives, as words. Raises StoreError as :func:`analyzer` does."""
    tantivy = optional("tantivy", EXTRA)
    made = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace())
    return made.filter(tantivy.Filter.remove_long(LONGEST)).build()


def terms(written: str) -> list[str]:
    """The words of a word or a phrase as the index has them. Raises StoreError if one is too long to be there."""
    known: list[str] = analyzer().analyze(written)
    if len(known) != len(analyzer(2**20).analyze(written)):
        raise StoreError(f"search {written[:60]!r}: a word has {LONGEST} bytes or more, and no such word is found")
    return known


def plain(text: str) -> str:
    """A text as the index has it: its words as :func:`terms` has them, with a space between two. Most texts are of
    ASCII, which Python reads faster than tantivy."""
    return text.translate(_ASCII) if text.isascii() else " ".join(analyzer(2**20).analyze(text))

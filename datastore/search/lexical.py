"""BM25 over texts, by bm25s."""

import math
from collections.abc import Sequence

import numpy as np

from agentrl.datastore.optional import optional

WORD = r"(?u)\b\w+\b"
"""Words of one letter count too, since tasks often differ only in numbers and names."""


class Lexical:
    """Scores of every text for a query. IDF depends on all texts, so it is built anew for each table version."""

    def __init__(self, texts: Sequence[str]) -> None:
        bm25s = optional("bm25s", "retrieval")
        self._bm25s = bm25s
        self._count = len(texts)
        self._index = bm25s.BM25()
        tokens = bm25s.tokenize(list(texts), token_pattern=WORD, stopwords=None, show_progress=False)
        self._empty = not tokens.vocab
        if not self._empty:
            self._index.index(tokens, show_progress=False)

    def scores(self, query: str) -> np.ndarray:
        """float32 [texts]; zero if no word is shared."""
        known = [] if self._empty else [word for word in self._words(query) if word in self._index.vocab_dict]
        if not known:
            return np.zeros(self._count, dtype=np.float32)
        return np.asarray(self._index.get_scores(known), dtype=np.float32)

    def shares(self, query: str) -> np.ndarray:
        """Which share of the query's words each text holds, float32 [texts] from 0 to 1. A word weighs its IDF, so that
        names and numbers count and "the" hardly does; words that no text holds count too, as the rarest of all."""
        held, whole = np.zeros(self._count, dtype=np.float32), 0.0
        for word in set(self._words(query)):
            number = None if self._empty else self._index.vocab_dict.get(word)
            texts = np.zeros(0, dtype=np.int64) if number is None else self._texts_of(number)
            weight = math.log(1 + (self._count - len(texts) + 0.5) / (len(texts) + 0.5))
            held[texts] += weight
            whole += weight
        return held / np.float32(whole or 1)

    def _texts_of(self, word: int) -> np.ndarray:
        """The texts that hold a word of the index: each once."""
        matrix = self._index.scores
        return np.asarray(matrix["indices"][matrix["indptr"][word] : matrix["indptr"][word + 1]])

    def _words(self, query: str) -> list[str]:
        options = {"token_pattern": WORD, "stopwords": None, "show_progress": False, "return_ids": False}
        [words] = self._bm25s.tokenize([query], **options)
        return list(words)

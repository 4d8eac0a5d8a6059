"""BM25 over texts, by bm25s."""

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
        if self._empty:
            return np.zeros(self._count, dtype=np.float32)
        options = {"token_pattern": WORD, "stopwords": None, "show_progress": False, "return_ids": False}
        [words] = self._bm25s.tokenize([query], **options)
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return np.zeros(self._count, dtype=np.float32)
        return np.asarray(self._index.get_scores(known), dtype=np.float32)

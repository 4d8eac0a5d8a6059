"""How alike two texts are, from 0 to 1."""

from typing import Any

import numpy as np

from agentrl.rewards.answers import normalized


def rouge_l(answer: str, right: str) -> float:
    """The harmonic mean of precision and recall of the longest common subsequence of normalised words (ROUGE-L: Lin
    2004, section 3.2, with beta 1)."""
    words, other = normalized(answer).split(), normalized(right).split()
    if not words or not other:
        return float(words == other)
    longest = [0] * (len(other) + 1)
    for word in words:
        before = 0
        for index, other_word in enumerate(other, 1):
            kept = longest[index]
            longest[index] = before + 1 if word == other_word else max(longest[index], longest[index - 1])
            before = kept
    return 2 * longest[-1] / (len(words) + len(other))


class Embedding:
    """Cosine similarity of the vectors of a sentence-transformers model, at least 0. The model is loaded when it is
    first used.

    Raises ValueError if the package or the model is missing.
    """

    def __init__(self, model: str) -> None:
        self.name = model
        self._model: Any = None

    def __call__(self, answer: str, right: str) -> float:
        if self._model is None:
            self._model = _loaded(self.name)
        first, other = np.asarray(self._model.encode([answer, right]), dtype=np.float64)
        length = np.linalg.norm(first) * np.linalg.norm(other)
        return max(0.0, float(first @ other / length)) if length else float(answer == right)


def _loaded(name: str) -> Any:
    from agentrl.schemas.installation import install_hint

    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ValueError(f"similarity: embedding needs sentence-transformers; {install_hint('retrieval')}") from None
    try:
        return SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"no sentence-transformers model at {name!r}: {str(error).splitlines()[0]}") from None

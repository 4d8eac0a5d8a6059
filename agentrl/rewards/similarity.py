"""How alike two texts are, from 0 to 1."""

from typing import Any

import numpy as np

from agentrl.rewards.answers import normalized


def rouge_l(said: str, right: str) -> float:
    """The harmonic mean of precision and recall of the longest common subsequence of normalised words (ROUGE-L: Lin
    2004, section 3.2, with beta 1)."""
    one, other = normalized(said).split(), normalized(right).split()
    if not one or not other:
        return float(one == other)
    longest = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, theirs in enumerate(other, 1):
            kept = longest[place]
            longest[place] = before + 1 if word == theirs else max(longest[place], longest[place - 1])
            before = kept
    return 2 * longest[-1] / (len(one) + len(other))


class Embedding:
    """Cosine similarity of the vectors of a sentence-transformers model, at least 0. The model is loaded when it is
    first used.

    Raises ValueError if the package or the model is missing.
    """

    def __init__(self, model: str) -> None:
        self.name = model
        self._model: Any = None

    def __call__(self, said: str, right: str) -> float:
        if self._model is None:
            self._model = _loaded(self.name)
        one, other = np.asarray(self._model.encode([said, right]), dtype=np.float64)
        length = np.linalg.norm(one) * np.linalg.norm(other)
        return max(0.0, float(one @ other / length)) if length else float(said == right)


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

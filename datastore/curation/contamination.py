"""What of held-out tasks stands in a conversation: their questions, and what was done to solve them."""

from collections.abc import Iterable, Sequence

import numpy as np

from agentrl.datastore.curation.text import ngrams, words


class HeldOut:
    """Held-out texts, by their word n-grams.

    ``questions`` are compared whatever their length; one of fewer than ``n`` words is one n-gram. ``solutions`` are
    (question, actions) of held-out rows. Actions of fewer than ``n`` words say nothing of one task and are left out,
    and so are n-grams that are in the actions for several questions: what an agent says in every task is no leak."""

    def __init__(self, questions: Iterable[str], solutions: Iterable[tuple[str, str]], n: int) -> None:
        self._n = n
        found = [(ngrams(text, n), -1) for text in sorted(set(questions)) if words(text)]
        self._questions = len(found)
        asked: dict[bytes, int] = {}
        seen: set[bytes] = set()
        for question, actions in solutions:
            grams = ngrams(actions, n)
            number = asked.setdefault(ngrams(question, 1).tobytes(), len(asked))
            key = grams.tobytes() + number.to_bytes(8, "little")
            if len(words(actions)) >= n and key not in seen:
                seen.add(key)
                found.append((grams, number))
        self._sizes = np.array([len(grams) for grams, _ in found], np.int64)
        keys = np.concatenate([np.empty(0, np.uint64), *(grams for grams, _ in found)])
        owners = np.repeat(np.arange(len(found)), self._sizes)
        kept = ~_of_several(keys, np.array([number for _, number in found], np.int64)[owners])
        order = np.argsort(keys[kept], kind="stable")
        self._keys, self._owners = keys[kept][order], owners[kept][order]

    def __len__(self) -> int:
        return len(self._sizes)

    def in_conversation(self, question: str, texts: Sequence[str], overlap: float) -> bool:
        """Whether a share ``overlap`` of the n-grams of one held-out text stands in the ``texts`` of a conversation, or
        that share of its own question's n-grams in one held-out question."""
        mine = ngrams(question, self._n)
        shared, counts = self._shared(np.unique(np.concatenate([mine, *(ngrams(text, self._n) for text in texts)])))
        if (counts >= overlap * self._sizes[shared]).any():
            return True
        shared, counts = self._shared(mine)
        return bool((counts[shared < self._questions] >= overlap * len(mine)).any())

    def _shared(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the held-out texts that have any of these n-grams, and how many of them each has."""
        first, last = (np.searchsorted(self._keys, grams, side) for side in ("left", "right"))
        there = np.flatnonzero(last > first)
        owners = [self._owners[start:end] for start, end in zip(first[there], last[there], strict=True)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *owners]), return_counts=True)


def _of_several(keys: np.ndarray, questions: np.ndarray) -> np.ndarray:
    """Whether each n-gram of actions is in those for several questions; ``questions`` is -1 for one of a question."""
    mask = np.zeros(len(keys), bool)
    places = np.flatnonzero(questions >= 0)
    places = places[np.lexsort([questions[places], keys[places]])]
    same = keys[places][1:] == keys[places][:-1]
    differ = same & (questions[places][1:] != questions[places][:-1])
    several = np.unique(keys[places][1:][differ])
    mask[places] = np.isin(keys[places], several)
    return mask

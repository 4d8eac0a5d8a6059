"""What of held-out tasks stands in a conversation: their questions, and what was done to solve them."""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from agentrl.datastore.curation.shingles import ngrams, words
from agentrl.datastore.shards.shard import digest_of


class HeldOut:
    """Held-out texts, by their word n-grams; the texts are not held.

    Questions are compared whatever their length; one of fewer than ``n`` words is one n-gram. Actions of fewer than
    ``n`` words say nothing of one task and are left out, and so are n-grams that are in the actions for several
    questions: what an agent says in every task is no leak."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._found: list[tuple[np.ndarray, int]] = []  # n-grams, and the number of the question of actions or -1
        self._asked: dict[bytes, int] = {}
        self._seen: set[bytes] = set()

    def add_question(self, text: str) -> None:
        """Add a question; an empty one is none."""
        self._add(ngrams(text, self._n), -1)

    def add_actions(self, question: str, actions: str) -> None:
        """Add what was done for a question."""
        if len(words(actions)) >= self._n:
            number = self._asked.setdefault(ngrams(question, 1).tobytes(), len(self._asked))
            self._add(ngrams(actions, self._n), number)

    def _add(self, grams: np.ndarray, number: int) -> None:
        key = hashlib.blake2b(grams.tobytes() + number.to_bytes(8, "little", signed=True), digest_size=16).digest()
        if len(grams) and key not in self._seen:
            self._seen.add(key)
            self._found.append((grams, number))

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.array([len(grams) for grams, _ in self._found], np.int64)

    @cached_property
    def _question(self) -> np.ndarray:
        """For each text the number of the question that its actions are for, or -1 if it is a question."""
        return np.array([number for _, number in self._found], np.int64)

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """The n-grams that count, sorted, and the number of the text that each is of."""
        keys = np.concatenate([np.empty(0, np.uint64), *(grams for grams, _ in self._found)])
        owners = np.repeat(np.arange(len(self)), self._sizes)
        kept = ~_of_several(keys, self._question[owners])
        order = np.argsort(keys[kept], kind="stable")
        return keys[kept][order], owners[kept][order]

    def __len__(self) -> int:
        return len(self._found)

    @property
    def digest(self) -> str:
        """A name for all that answers depend on, the same in each process."""
        return digest_of(self._n, *self._index, self._sizes, self._question)

    def in_conversation(self, question: str, texts: Sequence[str], overlap: float) -> bool:
        """Whether a share ``overlap`` of the n-grams of one held-out text stands in the ``texts`` of a conversation, or
        that share of its own question's n-grams in one held-out question."""
        own_ngrams = ngrams(question, self._n)
        shared, counts = self._shared(
            np.unique(np.concatenate([own_ngrams, *(ngrams(text, self._n) for text in texts)]))
        )
        if (counts >= overlap * self._sizes[shared]).any():
            return True
        shared, counts = self._shared(own_ngrams)
        return bool((counts[self._question[shared] < 0] >= overlap * len(own_ngrams)).any())

    def _shared(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the held-out texts that have any of these n-grams, and how many of them each has."""
        keys, numbers = self._index
        first, last = (np.searchsorted(keys, grams, side) for side in ("left", "right"))
        there = np.flatnonzero(last > first)
        owners = [numbers[start:end] for start, end in zip(first[there], last[there], strict=True)]
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

"""Okapi BM25 (Robertson and Zaragoza 2009) over some thousand passages, in memory."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

K1, B = 1.5, 0.75


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Index:
    """Passages by title."""

    def __init__(self, passages: Mapping[str, str]) -> None:
        counts = {title: Counter(words(text)) for title, text in passages.items()}
        mean = sum(count.total() for count in counts.values()) / len(counts)
        self.weights: dict[str, dict[str, float]] = defaultdict(dict)
        for title, count in counts.items():
            norm = K1 * (1 - B + B * count.total() / mean)
            for word, times in count.items():
                self.weights[word][title] = times * (K1 + 1) / (times + norm)
        for weights_of_titles in self.weights.values():
            rarity = math.log(1 + (len(counts) - len(weights_of_titles) + 0.5) / (len(weights_of_titles) + 0.5))
            for title in weights_of_titles:
                weights_of_titles[title] *= rarity

    def search(self, query: str) -> list[str]:
        """Titles of all passages that have a word of the query, the best first; equal ones in the order of titles."""
        scores: dict[str, float] = defaultdict(float)
        for word in dict.fromkeys(words(query)):
            for title, weight in self.weights.get(word, {}).items():
                scores[title] += weight
        return sorted(scores, key=lambda title: (-scores[title], title))

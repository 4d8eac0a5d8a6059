"""What ``prompts.py`` asks: prompts with paraphrases, and keywords drawn from the prompts of the families.

Paraphrases were written before any fusion was tried. Those of ``few common words`` favour embeddings; ``natural`` ones
keep names and nouns as people do.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PAIRS = Path(__file__).with_name("search_pairs.tsv")
WORD = re.compile(r"(?u)\b\w+\b")


@dataclass(frozen=True)
class Query:
    """What is asked, of which kind, and the prompts that answer it."""

    text: str
    kind: str
    answers: frozenset[str]


def paraphrases() -> list[Query]:
    rows = [line.split("\t") for line in PAIRS.read_text().splitlines()[1:]]
    return [Query(text, kind, frozenset({prompt})) for kind, prompt, text in rows]


def keywords(corpus: list[str], each: int, seed: int) -> list[Query]:
    """``each`` queries of each kind, drawn from the prompts; all prompts that hold what is asked for answer it."""
    draw = random.Random(seed)
    words = {prompt: [word.lower() for word in WORD.findall(prompt)] for prompt in corpus}
    frequency = Counter(word for each_ in words.values() for word in set(each_))
    asked: dict[str, set[str]] = {kind: set() for kind in ("names", "rare words", "ids", "phrases", "several words")}
    for prompt in draw.sample(corpus, len(corpus)):
        names = re.findall(r"(?<=[a-z] )[A-Z][a-z]{2,}(?: [A-Z][a-z]+)*", prompt)
        ids = re.findall(r"[\w.@/-]*(?:[a-z][-_.@]?\d|\w[_@]\w)[\w.@/-]*\w|(?<= )\d{3,}", prompt)
        rare = [word for word in words[prompt] if frequency[word] <= 3 and word.isalpha() and len(word) > 3]
        result = {"names": names, "ids": ids, "rare words": rare}
        spoken = prompt.rstrip(".?").split()
        if len(spoken) > 5:
            start = draw.randrange(len(spoken) - 3)
            result["phrases"] = [" ".join(spoken[start : start + draw.choice((3, 4))])]
        telling = sorted({word for word in words[prompt] if frequency[word] <= len(corpus) // 20})
        if len(telling) > 2:
            result["several words"] = [" ".join(draw.sample(telling, draw.choice((2, 3))))]
        for kind, texts in result.items():
            if texts and len(asked[kind]) < each:
                asked[kind].add(draw.choice(texts))
    return [
        Query(text, kind, _answers(text, words, kind != "several words"))
        for kind, texts in asked.items()
        for text in sorted(texts)
    ]


def _answers(text: str, words: dict[str, list[str]], in_order: bool) -> frozenset[str]:
    """The prompts that hold all words of a text, in order and without others between them if ``in_order``."""
    wanted = [word.lower() for word in WORD.findall(text)]
    if not in_order:
        return frozenset(prompt for prompt, held in words.items() if set(wanted) <= set(held))
    joined = f" {' '.join(wanted)} "
    return frozenset(prompt for prompt, held in words.items() if joined in f" {' '.join(held)} ")

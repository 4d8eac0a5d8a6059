"""What curation compares: the actions of a trajectory, word n-grams, and sequences of tool calls."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from datastore.optional import optional

CALL = "\x1f"
"""Stands before each tool call in an action text, so that calls can be told from prose."""


def action_texts(messages: pa.ChunkedArray) -> list[str]:
    """What the assistant wrote and called in each trajectory, one action per line; arguments in canonical order."""
    texts = []
    for row in messages.to_pylist():
        lines = []
        for message in row:
            if message["role"] != "assistant":
                continue
            if message["content"].strip():
                lines.append(" ".join(message["content"].split()))
            for call in message["tool_calls"]:
                arguments = json.dumps(json.loads(call["arguments"]), sort_keys=True, ensure_ascii=False)
                lines.append(f"{CALL}{call['name']} {arguments}")
        texts.append("\n".join(lines))
    return texts


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Word n-grams; of a shorter text the whole text."""
    tokens = words(text)
    return {tuple(tokens[i : i + n]) for i in range(max(1, len(tokens) - n + 1))} if tokens else set()


def near_duplicates(texts: Sequence[str], scopes: Sequence[str], threshold: float, seed: int) -> list[bool]:
    """True for each text that resembles an earlier one of its scope: estimated Jaccard at or above the threshold."""
    datasketch = optional("datasketch", "retrieval")

    empty = datasketch.MinHash(num_perm=128, seed=seed + 1)  # copied: drawing its permutations costs more than hashing
    tuned = datasketch.MinHashLSH(threshold=threshold, num_perm=128)  # finds bands by integration; once is enough
    bands = (tuned.b, tuned.r)
    indexes: dict[str, Any] = {}
    kept: dict[int, Any] = {}
    doubled = []
    for number, (text, scope) in enumerate(zip(texts, scopes, strict=True)):
        sketch = empty.copy()
        sketch.update_batch([" ".join(gram).encode() for gram in ngrams(text, 3)])
        index = indexes.setdefault(scope, datasketch.MinHashLSH(num_perm=128, params=bands))
        found = any(kept[key].jaccard(sketch) >= threshold for key in index.query(sketch))
        doubled.append(found)
        if not found:
            index.insert(number, sketch)
            kept[number] = sketch
    return doubled


def contaminated(texts: Sequence[str], heldout: Sequence[str], n: int, overlap: float) -> np.ndarray:
    """True for each text of whose n-grams at least a share ``overlap`` occurs in one held-out text."""
    owners: dict[tuple[str, ...], list[int]] = {}
    for number, text in enumerate(heldout):
        for gram in ngrams(text, n):
            owners.setdefault(gram, []).append(number)
    bad = np.zeros(len(texts), dtype=bool)
    for row, text in enumerate(texts):
        grams = ngrams(text, n)
        shared = Counter(owner for gram in grams for owner in owners.get(gram, ()))
        bad[row] = bool(shared) and max(shared.values()) >= overlap * len(grams)
    return bad


def tool_vectors(texts: Sequence[str]) -> np.ndarray:
    """Unit vectors of the tool-call sequences in action texts: counts of tools and of pairs of tools in a row."""
    sequences = [[line[1:].split(" ", 1)[0] for line in text.split("\n") if line.startswith(CALL)] for text in texts]
    counts = [Counter([*names, *zip(["<start>", *names], [*names, "<end>"], strict=True)]) for names in sequences]
    terms = {term: index for index, term in enumerate(sorted({str(t) for count in counts for t in count}))}
    vectors = np.zeros((len(texts), len(terms)), dtype=np.float32)
    for row, count in enumerate(counts):
        for term, number in count.items():
            vectors[row, terms[str(term)]] = number
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

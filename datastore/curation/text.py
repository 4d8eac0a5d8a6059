"""What curation compares: the actions of a trajectory, word n-grams, and sequences of tool calls."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from agentrl.datastore.optional import optional

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


PERMUTATIONS = 128


def near_duplicates(
    texts: Iterable[str], scopes: Sequence[str], order: np.ndarray, threshold: float, seed: int
) -> np.ndarray:
    """Whether each text [texts] resembles another one of its scope: estimated Jaccard at or above the threshold. The
    other one comes before it in ``order`` [texts], and resembles none itself.

    A text is held only until its sketch is made. Sketches take 512 bytes each, in a temporary file.
    """
    lsh = optional("datasketch", "retrieval").MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    doubled = np.zeros(len(scopes), dtype=bool)
    with tempfile.TemporaryFile() as file:
        sketches = np.memmap(file, np.uint32, "w+", shape=(max(1, len(scopes)), PERMUTATIONS))
        for row, sketch in enumerate(_sketches(texts, seed)):
            sketches[row] = sketch
        buckets = _buckets(sketches[: len(scopes)], scopes, lsh.b, lsh.r)
        kept: dict[int, list[int]] = {}
        for row in order[(buckets[order] >= 0).any(1)].tolist():
            shared = [bucket for bucket in buckets[row].tolist() if bucket >= 0]
            near = sorted({other for bucket in shared for other in kept.get(bucket, ())})
            doubled[row] = ((sketches[near] == sketches[row]).mean(1) >= threshold).any()
            if not doubled[row]:
                for bucket in shared:
                    kept.setdefault(bucket, []).append(row)
    return doubled


def _sketches(texts: Iterable[str], seed: int) -> Iterable[np.ndarray]:
    """The MinHash of the word 3-grams of each text, [:data:`PERMUTATIONS`]."""
    empty = optional("datasketch", "retrieval").MinHash(num_perm=PERMUTATIONS, seed=seed + 1)
    for text in texts:
        sketch = empty.copy()  # drawing the permutations costs more than hashing
        sketch.update_batch([" ".join(gram).encode() for gram in ngrams(text, 3)])
        yield sketch.hashvalues


def _buckets(sketches: np.ndarray, scopes: Sequence[str], bands: int, width: int) -> np.ndarray:
    """The bucket of each sketch in each band of ``width`` values, [sketches, bands]. Sketches of one scope that are
    equal in a band share a bucket. It is -1 if no other one is in it."""
    scope = np.unique(np.asarray(scopes, dtype=str), return_inverse=True)[1].astype(np.uint32)
    buckets = np.full((len(sketches), bands), -1)
    first = 0
    for band in range(bands):
        part = sketches[:, band * width : (band + 1) * width]
        keys = np.ascontiguousarray(np.column_stack([scope, part])).view(np.dtype((np.void, 4 * (width + 1))))[:, 0]
        _, bucket, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        buckets[:, band] = np.where(sizes[bucket] > 1, first + bucket, -1)
        first += len(sizes)
    return buckets


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


def tool_vectors(texts: Iterable[str]) -> np.ndarray:
    """Unit vectors of the tool-call sequences in action texts: counts of tools and of pairs of tools in a row."""
    kinds: dict[tuple[str, ...], int] = {}  # most rows share their sequence with others
    kind = []
    for text in texts:
        names = tuple(line[1:].split(" ", 1)[0] for line in text.split("\n") if line.startswith(CALL))
        kind.append(kinds.setdefault(names, len(kinds)))
    counts = [Counter([*names, *zip(["<start>", *names], [*names, "<end>"], strict=True)]) for names in kinds]
    terms = {term: index for index, term in enumerate(sorted({str(t) for count in counts for t in count}))}
    vectors = np.zeros((len(kinds), len(terms)), dtype=np.float32)
    for row, count in enumerate(counts):
        for term, number in count.items():
            vectors[row, terms[str(term)]] = number
    return (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))[kind]

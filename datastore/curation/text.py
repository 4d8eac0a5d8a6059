"""What curation compares: the parts of a conversation as texts, their word n-grams, and sequences of tool calls."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

Part = Literal["question", "actions", "reasoning", "observations"]
"""Parts of a conversation. ``question``: the prompt, or the first user message if the prompt is empty, and the user
messages after the first. ``actions``: what the assistant wrote and called. ``observations``: what tools answered."""

CALL = "\x1f"
"""Stands before each tool call in an action text, so that calls can be told from prose."""


def action_texts(messages: pa.ChunkedArray) -> list[str]:
    """What the assistant wrote and called in each trajectory, one action per line; arguments in canonical order."""
    return [part_text("actions", "", row) for row in messages.to_pylist()]


def part_text(part: Part, prompt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """One part of a conversation, a line for each message and for each call; white space counts as one space."""
    if part == "question":
        return "\n".join(_questions(prompt, messages))
    if part == "observations":
        return "\n".join(_line(message["content"]) for message in messages if message["role"] == "tool")
    assistant = [message for message in messages if message["role"] == "assistant"]
    if part == "reasoning":
        return "\n".join(_line(message["reasoning"] or "") for message in assistant)
    return "\n".join(line for message in assistant for line in _actions(message))


def first_question(prompt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt, or the first user message if the prompt is empty."""
    return next(iter(_questions(prompt, messages)), "")


def units(prompt: str, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """All texts of a conversation, each by itself: the prompt, what each message says and reasons, each text within the
    arguments of a call, and the actions as one."""
    texts = [prompt, part_text("actions", prompt, messages)]
    for message in messages:
        texts += [message["content"], message["reasoning"] or ""]
        texts += [text for call in message["tool_calls"] for text in _texts(json.loads(call["arguments"]))]
    return texts


def _questions(prompt: str, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    questions = [_line(message["content"]) for message in messages if message["role"] == "user"]
    return [_line(prompt), *questions[1:]] if prompt.strip() else questions


def _actions(message: Mapping[str, Any]) -> list[str]:
    lines = [_line(message["content"])] if message["content"].strip() else []
    return lines + [f"{CALL}{call['name']} {_canonical(call['arguments'])}" for call in message["tool_calls"]]


def _canonical(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)


def _line(text: str) -> str:
    return " ".join(text.split())


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for element in inner for text in _texts(element)]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams(text: str, n: int) -> np.ndarray:
    """Hashes of the word n-grams of a text, sorted and each once, uint64 [n-grams]; of a shorter text of the whole.

    A hash depends on the words alone: not on the process, the machine or the version of a library. Two different
    n-grams have one hash with probability 2^-64, about.
    """
    tokens = words(text)
    hashes = np.fromiter(map(xxh3_64_intdigest, map(str.encode, tokens)), np.uint64, len(tokens))
    if not len(hashes):
        return hashes
    size = min(n, len(hashes))
    count = len(hashes) - size + 1
    mixed = np.zeros(count, np.uint64)
    for offset in range(size):
        mixed += hashes[offset : offset + count] * _factor(offset)  # modulo 2^64
    return np.unique(mixed)


@lru_cache(maxsize=1024)
def _factor(offset: int) -> np.uint64:
    """An odd number for each place within an n-gram, so that the order of its words counts."""
    return np.uint64(xxh3_64_intdigest(f"place {offset}".encode()) | 1)


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

"""What a message says as a full-text search reads it, and where in a row the words that were found stand."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.search.words import Words, analyzer, terms

AROUND = 70
"""Characters that are shown before and after the first of the words."""
MARK = "**"


@dataclass(frozen=True)
class Excerpt:
    """``message`` is its number from 0; words that were found stand between two :data:`MARK`."""

    message: int
    role: str
    excerpt: str


def row_texts(messages: pa.Array) -> Iterator[list[str]]:
    """What is found of each row of a column ``messages``: contents, reasoning, and names and arguments of calls."""
    rows = messages.combine_chunks() if isinstance(messages, pa.ChunkedArray) else messages
    every = rows.flatten()
    contents, thoughts = (every.field(name).to_pylist() for name in ("content", "reasoning"))
    calls = every.field("tool_calls")
    flat = calls.flatten()
    names, arguments = (flat.field(name).to_pylist() for name in ("name", "arguments"))
    called = pc.fill_null(pc.list_value_length(calls), 0).to_pylist()
    message = call = 0
    for length in pc.fill_null(pc.list_value_length(rows), 0).to_pylist():
        texts: list[str] = []
        for _ in range(length):
            texts += (thoughts[message], contents[message])
            for _ in range(called[message]):
                texts += (names[call], values(arguments[call]))
                call += 1
            message += 1
        yield [text for text in texts if text]


def values(arguments: str | None) -> str:
    """The arguments of a call as text. Only if they have escapes, JSON is read, so that the words are whole."""
    if not arguments or "\\" not in arguments:
        return arguments or ""
    try:
        return "\n".join(_leaves(json.loads(arguments)))
    except (ValueError, RecursionError):
        return arguments


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def excerpt(messages: Sequence[Mapping[str, Any]], words: Words) -> Excerpt:
    """The message that holds the most of the words and phrases, the first of them if several do."""
    asked = [terms(written) for written in words.wanted]
    best, most = Excerpt(0, "", ""), 0
    for number, message in enumerate(messages):
        calls = [text for call in message["tool_calls"] or [] for text in (call["name"], values(call["arguments"]))]
        for text in [message["reasoning"], message["content"], *calls]:
            places = _places(text or "", asked)
            if (known := len({which for which, _, _ in places})) > most:
                best, most = Excerpt(number, message["role"], _marked(text, places)), known
            if most == len(asked):
                return best
    return best


def _places(text: str, asked: Sequence[list[str]]) -> list[tuple[int, int, int]]:
    """Which of the phrases stand in a text, each with where it begins and ends there."""
    tokens = analyzer().pre_tokenize(text).tokens
    words = [token.text for token in tokens]
    spans = []
    for which, phrase in enumerate(asked):
        at = -1
        while phrase[0] in words[at + 1 :]:
            at = words.index(phrase[0], at + 1)
            if words[at : at + len(phrase)] == phrase:
                last = tokens[at + len(phrase) - 1]
                spans.append((which, tokens[at].char_offset_from, last.char_offset_to))
    return sorted(spans, key=lambda span: span[1:])


def _marked(text: str, places: Sequence[tuple[int, int, int]]) -> str:
    """A piece of the text around the first place, in one line, with each place in it marked."""
    start, stop = max(0, places[0][1] - AROUND), places[0][2] + AROUND
    pieces: list[str] = []
    end = start
    for _, first, last in places:
        if first >= end and last <= stop:
            pieces += (text[end:first], MARK, text[first:last], MARK)
            end = last
    pieces.append(text[end:stop])
    line = " ".join("".join(pieces).split())
    return f"{'…' if start else ''}{line}{'…' if stop < len(text) else ''}"

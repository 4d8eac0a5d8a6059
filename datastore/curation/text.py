"""What curation compares: the parts of a conversation as texts, and sequences of tool calls."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Part = Literal["question", "actions", "reasoning", "observations"]
"""Parts of a conversation. ``question``: the prompt, or the first user message if the prompt is empty, and the user
messages after the first. ``actions``: what the assistant wrote and called. ``observations``: what tools answered."""

CALL = "\x1f"
"""Stands before each tool call in an action text, so that calls can be told from prose."""


def one_space(text: str) -> str:
    """A text in which white space counts as one space."""
    return " ".join(text.split())


def part_text(
    part: Part, prompt: str, messages: Sequence[Mapping[str, Any]], clean: Callable[[str], str] = one_space
) -> str:
    """One part of a conversation, a line for each message and for each call. ``clean`` is applied to each text: str
    leaves white space as it is, for words are the same without."""
    if part == "question":
        return "\n".join(_questions(prompt, messages, clean))
    if part == "observations":
        return "\n".join(clean(message["content"]) for message in messages if message["role"] == "tool")
    assistant = [message for message in messages if message["role"] == "assistant"]
    if part == "reasoning":
        return "\n".join(clean(message["reasoning"] or "") for message in assistant)
    return "\n".join(line for message in assistant for line in _actions(message, clean))


def part_leaves(part: Part) -> list[str]:
    """The leaves of columns that a part is made of, as Parquet names them."""
    fields = {
        "question": ["content"],
        "observations": ["content"],
        "reasoning": ["reasoning"],
        "actions": ["content", "tool_calls.list.element.name", "tool_calls.list.element.arguments"],
    }[part]
    prompt = ["prompt"] if part == "question" else []
    return prompt + [f"messages.list.element.{field}" for field in ["role", *fields]]


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


def _questions(
    prompt: str, messages: Sequence[Mapping[str, Any]], clean: Callable[[str], str] = one_space
) -> list[str]:
    questions = [clean(message["content"]) for message in messages if message["role"] == "user"]
    return [clean(prompt), *questions[1:]] if prompt.strip() else questions


def _actions(message: Mapping[str, Any], clean: Callable[[str], str]) -> list[str]:
    lines = [clean(message["content"])] if message["content"].strip() else []
    return lines + [f"{CALL}{call['name']} {_canonical(call['arguments'])}" for call in message["tool_calls"]]


def _canonical(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for element in inner for text in _texts(element)]


def tool_vectors(sequences: Sequence[tuple[str, ...]]) -> np.ndarray:
    """Unit vectors of sequences of tools' names: counts of tools and of pairs of tools in a row, float32 [sequences,
    terms]."""
    counts = [Counter([*names, *zip(["<start>", *names], [*names, "<end>"], strict=True)]) for names in sequences]
    terms = {term: index for index, term in enumerate(sorted({str(t) for count in counts for t in count}))}
    vectors = np.zeros((len(sequences), len(terms)), dtype=np.float32)
    for row, count in enumerate(counts):
        for term, number in count.items():
            vectors[row, terms[str(term)]] = number
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

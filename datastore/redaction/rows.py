"""Rows without secrets: all texts, JSON and token ids of a row, with one set of placeholders for many rows."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentrl.datastore.artifacts.tokenizers import kept
from agentrl.datastore.errors import StoreError
from agentrl.datastore.redaction.detect import Detection, Detectors
from agentrl.datastore.redaction.placeholders import Placeholders
from agentrl.datastore.redaction.settings import EVERYTHING, OnTokens, Redaction
from agentrl.datastore.redaction.texts import RowSecrets, standing_alone
from agentrl.datastore.redaction.tokens import Change, Vocabulary, changes, characters, positions, runs
from agentrl.schemas.annotation import Annotation, message_json, number_of
from agentrl.schemas.trajectory import Message, Span, Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

REDACTED = "redacted"
"""Tag of a row in which placeholders stand for secrets."""

TEXTS = ("prompt", "task_id", "episode_id", "group_id", "agent", "policy", "source_id", "source_file", "model")
JSONS = ("tools", "final_state", "sampling")
"""Columns of a row, beside its messages and tags, that what others wrote may be in."""


def unread_tokens(rows: int) -> str:
    """What to say of rows whose tokens were not searched."""
    return (
        f"the tokens of {rows} rows were not searched for secrets, since this store does not keep a tokenizer that "
        "tells what they say; agentrl buffer tokenizer FOLDER writes one"
    )


@dataclass(frozen=True)
class Cleaned:
    """A row after redaction, and how often each kind was replaced in its texts. ``row`` is the one that was given if
    there was nothing to replace. ``tokens`` counts the token ids that gave way. ``unread`` says that its tokens were
    not searched, since nobody knows what they say."""

    row: Trajectory
    counts: Counter[str]
    tokens: int = 0
    unread: bool = False

    @property
    def changed(self) -> bool:
        return bool(self.counts)


class RowRedaction:
    """Cleans rows, one after the other, with placeholders that are equal for equal values."""

    def __init__(
        self,
        storage: "LocalStorage | S3Storage",
        settings: Redaction = EVERYTHING,
        on_tokens: OnTokens = "rewrite",
    ) -> None:
        self._storage = storage
        self._detectors = Detectors(settings)
        self._on_tokens = on_tokens
        self.placeholders = Placeholders()
        self._vocabulary = lru_cache(maxsize=8)(self._read_vocabulary)

    def clean(self, row: Trajectory) -> Cleaned:
        """The row with placeholders for its secrets, in its texts and in its tokens. Tokens that were replaced were not
        sampled: their mask is false and their log-probs are NaN.

        Raises StoreError if the row has tokens of a tokenizer that the store does not keep, or that cannot spell a
        placeholder, unless tokens are dropped: then a row with secrets, in its text or in tokens that can be read,
        keeps its text alone.
        """
        secrets = RowSecrets(self._detectors, self.placeholders)
        self._learn(row, secrets)
        update: dict[str, Any] = {
            name: value for name in TEXTS if (value := _changed(secrets.text, getattr(row, name))) is not None
        }
        update |= {name: value for name in JSONS if (value := _changed(secrets.json, getattr(row, name))) is not None}
        messages, words = [], []
        for message in row.messages:
            secrets.words = {}
            messages.append(_message(message, secrets))
            words.append(secrets.words)
        tags = [secrets.text(tag) for tag in row.tags]
        counts, replaced = Counter(secrets.counts), 0
        cleaned = row.model_copy(update={**update, "messages": messages, "tags": tags})
        if row.input_ids and self._on_tokens == "rewrite":
            while made := self._changes(cleaned, secrets, words):
                cleaned = cleaned.model_copy(update=_moved(cleaned, made))
                replaced += sum(change.end - change.start for change in made)
        if row.input_ids and self._on_tokens == "drop" and not counts:
            vocabulary = self._vocabulary(row.tokenizer)
            if isinstance(vocabulary, str):
                return Cleaned(row, Counter(), unread=True)
            counts.update(hit.kind for run in _token_hits(row, vocabulary, secrets, words) for hit in run.hits)
        if not counts and not replaced:
            return Cleaned(row, Counter())
        if row.input_ids and self._on_tokens == "drop":
            cleaned = cleaned.model_copy(update=_without_tokens(messages))
        marked = [*(tag for tag in tags if tag != REDACTED), REDACTED]
        return Cleaned(cleaned.model_copy(update={"tags": marked}), counts or Counter(secrets.counts), replaced)

    def _learn(self, row: Trajectory, secrets: RowSecrets) -> None:
        """Look through the whole row first, so that a secret that one text shows is known in all of them."""
        for message in row.messages:
            _learn_message(message, secrets)
        for name in JSONS:
            secrets.learn_json(getattr(row, name))
        secrets.learn(row.prompt)

    def annotation(self, annotation: Annotation) -> Annotation:
        """An annotation with placeholders for the secrets in what it says, and in the name of its author."""
        secrets = RowSecrets(self._detectors, self.placeholders)
        correction = annotation.correction and Message.model_validate_json(annotation.correction)
        if correction:
            _learn_message(correction, secrets)
        texts = {name: getattr(annotation, name) for name in ("value", "comment", "author")}
        for text in texts.values():
            secrets.learn(text or "")
        update: dict[str, Any] = {name: text and secrets.text(text) for name, text in texts.items()}
        update["number"] = number_of(update["value"])
        if correction:
            update["correction"] = message_json(_message(correction, secrets))
        return annotation.model_copy(update=update) if secrets.counts else annotation

    def _changes(self, row: Trajectory, secrets: RowSecrets, words: list[dict[str, str]]) -> list[Change]:
        vocabulary = self._vocabulary(row.tokenizer)
        if isinstance(vocabulary, str):
            raise StoreError(vocabulary)
        made = []
        for run in _token_hits(row, vocabulary, secrets, words):
            places = [(hit.start, hit.end, secrets.placeholder(hit, run.text)) for hit in run.hits]
            for change in changes(vocabulary, run.ids, places) if places else []:
                made.append(Change(run.start + change.start, run.start + change.end, change.ids))
        return made

    def _read_vocabulary(self, tokenizer: str) -> Vocabulary | str:
        """The vocabulary of a tokenizer, or why there is none."""
        data = kept(self._storage, tokenizer) if tokenizer else None
        if data is None:
            return (
                f"rows have tokens of the tokenizer {tokenizer or '(unknown)'}, which this store does not keep, so "
                "that nobody knows what they say: write it into the store (agentrl buffer tokenizer FOLDER), or set "
                "tokens: drop, which keeps the text of rows with secrets alone"
            )
        vocabulary = Vocabulary(tokenizer, data.decode())
        try:
            _ = vocabulary.bytes_of
        except StoreError as error:
            return str(error)
        return vocabulary


class _Run(NamedTuple):
    """Token ids of a row from ``start`` on, without control tokens between them, their text, and the secrets in it."""

    start: int
    ids: list[int]
    text: str
    hits: list[Detection]


def _token_hits(
    row: Trajectory, vocabulary: Vocabulary, secrets: RowSecrets, words: list[dict[str, str]]
) -> Iterator[_Run]:
    """The secrets in the text of a row's tokens. ``words`` of each message are secrets in its tokens, or in all tokens
    of the row if nobody knows which are those of the message."""
    spans = [
        (message.token_start or 0, len(row.input_ids) if message.token_end is None else message.token_end, its_words)
        for message, its_words in zip(row.messages, words, strict=True)
        if its_words
    ]
    for start, end in runs(vocabulary, row.input_ids):
        ids = row.input_ids[start:end]
        text, offsets = vocabulary.text(ids)
        alone: list[Detection] = []
        for first, last, its_words in spans:
            if max(first, start) < min(last, end):
                shown = characters(text, offsets, max(first, start) - start, min(last, end) - start)
                alone += standing_alone(its_words, text, *shown)
        yield _Run(start, ids, text, secrets.hits(text, alone))


def holds_secrets(tasks: Iterable[Mapping[str, Any]]) -> Iterator[bool]:
    """For each task, as a mapping of the fields of :class:`agentrl.schemas.task.Task`, whether a secret of any kind is
    in its texts or JSON."""
    detectors, placeholders = Detectors(EVERYTHING), Placeholders()
    for task in tasks:
        secrets = RowSecrets(detectors, placeholders)
        for name in ("task_id", "env", "prompt"):
            secrets.text(task[name])
        for name in ("tools", "ground_truth", "metadata"):
            secrets.json(task[name])
        yield bool(secrets.counts)


def _changed(clean: Any, text: str | None) -> str | None:
    """A text after cleaning; None if that changes nothing."""
    after = clean(text) if text else text
    return after if after != text else None


_MESSAGE_TEXTS = ("content", "reasoning", "name", "tool_call_id")


def _learn_message(message: Message, secrets: RowSecrets) -> None:
    for name in _MESSAGE_TEXTS:
        secrets.learn(getattr(message, name) or "")
    for call in message.tool_calls:
        secrets.learn(call.id)
        secrets.learn_json(call.arguments)


def _message(message: Message, secrets: RowSecrets) -> Message:
    """A message after redaction. Equal ids of calls and answers stay equal."""
    calls = [
        call.model_copy(
            update={
                "id": secrets.text(call.id),
                "name": secrets.text(call.name),
                "arguments": secrets.json(call.arguments),
            }
        )
        for call in message.tool_calls
    ]
    texts = {name: secrets.text(text) for name in _MESSAGE_TEXTS if (text := getattr(message, name))}
    return message.model_copy(update={**texts, "tool_calls": calls})


def _without_tokens(messages: list[Message]) -> dict[str, Any]:
    spoken = [message.model_copy(update={"token_start": None, "token_end": None}) for message in messages]
    empty: dict[str, Any] = {"input_ids": [], "action_mask": [], "logprobs": [], "spans": []}
    return {**empty, "messages": spoken, "tokenizer": "", "n_tokens": 0, "n_action_tokens": 0, "fork_at": 0}


def _moved(row: Trajectory, made: list[Change]) -> dict[str, Any]:
    """The token columns of a row after changes, and its messages with the spans that they have then. It is no
    continuation of the row that it was made of, so ``fork_at`` is 0."""
    at = positions(len(row.input_ids), made)
    ids, mask, logprobs = (list(column) for column in (row.input_ids, row.action_mask, row.logprobs))
    for change in reversed(made):
        ids[change.start : change.end] = change.ids
        mask[change.start : change.end] = [False] * len(change.ids)
        logprobs[change.start : change.end] = [float("nan")] * len(change.ids)
    spans = [
        Span(version=span.version, start=int(at[span.start]), end=int(at[span.end]))
        for span in row.spans
        if at[span.end] > at[span.start]
    ]
    return {
        "input_ids": ids,
        "action_mask": mask,
        "logprobs": logprobs,
        "spans": spans,
        "n_tokens": len(ids),
        "n_action_tokens": int(np.sum(mask)),
        "fork_at": 0,
        "messages": [_placed(message, at) for message in row.messages],
    }


def _placed(message: Message, at: np.ndarray) -> Message:
    if message.token_start is None or message.token_end is None:
        return message
    return message.model_copy(
        update={"token_start": int(at[message.token_start]), "token_end": int(at[message.token_end])}
    )

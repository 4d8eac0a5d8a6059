"""Text of users and tools that spells a control token: it stays text."""

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from agentrl.schemas.trajectory import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLIT = "\ufdd0"
"""Divides a spelled control token. Unicode reserves this character for use inside of programs."""


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and other added tokens that its chat template writes."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str) -> None:
        added = tokenizer.added_tokens_decoder.values()
        # tokens of one character cannot be divided; spaces and line breaks are added tokens of some vocabularies
        texts = {token.content for token in added if token.special or token.content in template}
        self._texts = tuple(sorted(text for text in texts if len(text) > 1 and not text.isspace()))
        self._begins = re.compile("|".join(sorted({re.escape(text[0]) for text in self._texts})) or "(?!)")
        self._tokenizer = tokenizer
        before = [token.content for token in added if token.special and not token.rstrip]
        self._before = before[0] if before else ""

    def divided(self, text: str) -> str:
        """``text`` with :data:`SPLIT` after the first character of each control token that it spells."""
        matches = self._begins.finditer(text)
        places = [match.start() + 1 for match in matches if text.startswith(self._texts, match.start())]
        return SPLIT.join(text[start:end] for start, end in pairwise([0, *places, len(text)]))

    def heard(self, message: Message) -> Message:
        """A message to the policy, whose text spells no control token as a whole."""
        parts = {"content": message.content, "name": message.name, "tool_call_id": message.tool_call_id}
        changed = {name: self.divided(text) for name, text in parts.items() if text}
        return message.model_copy(update=changed)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; what :meth:`divided` marked becomes ordinary tokens."""
        first, *others = text.split(SPLIT)
        ids = self._encode(first)
        for part in others:  # behind a token, so that none puts a space before it
            ids += self._encode(self._before + part)[bool(self._before) :]
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

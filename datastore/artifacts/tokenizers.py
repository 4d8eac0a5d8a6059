"""Tokenizers by fingerprint, as the column ``tokenizer`` of rows names them, so that token ids become text without the
model that sampled them.

``tokenizers/<fingerprint>.json`` is the tokenizer in the form of the ``tokenizers`` library. Stages write it once. It
is never removed, because rows need it as long as they are there.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.datastore.artifacts.catalog import checked_name
from agentrl.datastore.errors import StoreError
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

FOLDER = "tokenizers"
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
"""What stands for an id that a tokenizer does not have."""


def keep(storage: LocalStorage | S3Storage, fingerprint: str, tokenizer: Callable[[], str]) -> None:
    """Write a tokenizer, unless it is there. ``tokenizer`` gives its JSON text."""
    name = f"{checked_name('tokenizer', fingerprint)}.json"
    if name not in storage.children(FOLDER)[1]:
        storage.put_if(f"{FOLDER}/{name}", tokenizer().encode(), None)


def kept(storage: LocalStorage | S3Storage, fingerprint: str) -> bytes | None:
    """The JSON text of a tokenizer; None if it is not there."""
    return storage.read(f"{FOLDER}/{checked_name('tokenizer', fingerprint)}.json")


TextOf = Callable[[Sequence[int]], tuple[bytes, Any]]
"""The bytes of tokens, and where each token begins in them, a sequence of [tokens + 1] integers."""


def text_of(storage: LocalStorage | S3Storage, fingerprint: str) -> TextOf | None:
    """What turns ids of a tokenizer of this store into text, see :meth:`TokenBytes.text`; None if it is not there, or
    of a kind that is not known."""
    try:
        data = kept(storage, fingerprint)
        return None if data is None else TokenBytes.of(data).text
    except (StoreError, ValueError, KeyError):
        return None


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of each token, one after another: those of ``id`` are ``data[starts[id]:starts[id + 1]]``. The last one
    stands for ids that there are not. ``strips`` says that a space at the beginning of a text is left out."""

    data: np.ndarray
    starts: np.ndarray
    strips: bool

    @classmethod
    def of(cls, tokenizer: str | bytes) -> "TokenBytes":
        """From the JSON text of a tokenizer whose tokens are bytes (GPT-2, Llama 3, Qwen) or text with bytes to fall
        back on (SentencePiece, as Llama 2, Mistral and Gemma have it).

        Raises StoreError that names what is not known of it.
        """
        about = json.loads(tokenizer)
        tokens = _tokens(about)
        encode, strips = _encoding(about.get("decoder"))
        pieces = [UNKNOWN] * (max(tokens, default=-1) + 2)
        for number, token in tokens.items():
            pieces[number] = encode(token)
        starts = np.cumsum([0, *map(len, pieces)])
        return cls(np.frombuffer(b"".join(pieces), np.uint8), starts, strips)

    def __len__(self) -> int:
        """The number of ids; some of them may stand for no token."""
        return len(self.starts) - 2

    def text(self, ids: Sequence[int] | np.ndarray) -> tuple[bytes, np.ndarray]:
        """The bytes of these tokens and the byte at which each begins, [tokens + 1]. A character may be spread over
        tokens: the bytes of one token alone need not be UTF-8."""
        places = self._places(ids)
        lengths = np.diff(self.starts)[places]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        index = np.arange(offsets[-1]) + np.repeat(self.starts[places] - offsets[:-1], lengths)
        text = self.data[index].tobytes()
        if self.strips and text.startswith(b" "):
            return text[1:], np.maximum(offsets - 1, 0)
        return text, offsets

    def unknown(self, ids: Sequence[int] | np.ndarray) -> int:
        """How many of these ids are no tokens, and became :data:`UNKNOWN`."""
        return int((self._places(ids) == len(self)).sum())

    def _places(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        numbers = np.asarray(ids, dtype=np.int64)
        return np.where((numbers >= 0) & (numbers < len(self)), numbers, len(self))


def _tokens(about: dict[str, Any]) -> dict[int, str]:
    """Token by id."""
    vocabulary = about.get("model", {}).get("vocab")
    if isinstance(vocabulary, dict):
        tokens = {number: token for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # of a unigram model: pairs of token and score
        tokens = {number: token for number, (token, _) in enumerate(vocabulary)}
    else:
        raise StoreError(
            f"a tokenizer of type {about.get('model', {}).get('type')!r} has no vocabulary that can be read"
        )
    return tokens | {token["id"]: token["content"] for token in about.get("added_tokens", [])}


def _encoding(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How a token becomes bytes, and whether a space at the beginning of a text is left out."""
    given = decoder or {"type": None}
    steps = given["decoders"] if given["type"] == "Sequence" else [given]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level, False
    strange = sorted({str(kind) for kind in kinds} - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
    if strange:
        raise StoreError(
            f"a tokenizer with the decoder {', '.join(strange)} is not supported; supported are ByteLevel and those of "
            "SentencePiece (Replace, ByteFallback, Fuse, Strip, Metaspace)"
        )
    swaps = [
        (step["pattern"]["String"], step["content"]) if step["type"] == "Replace" else (step["replacement"], " ")
        for step in steps
        if step["type"] in ("Replace", "Metaspace")
    ]
    falls_back = "ByteFallback" in kinds
    strips = any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"])
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )

    def encode(token: str) -> bytes:
        if falls_back and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in swaps:
            token = token.replace(old, new)
        return token.encode(errors="replace")

    return encode, strips


def _characters() -> dict[int, int]:
    """Character -> the byte that it stands for in byte-level vocabularies: printable ones stand for themselves, the
    others are numbered from 256 on. Characters that stand for no byte become one that Latin-1 has not."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    others = {256 + number: byte for number, byte in enumerate(hidden)}
    return dict.fromkeys(hidden, 0xFFFF) | {byte: byte for byte in shown} | others


_CHARACTERS = _characters()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:  # a token that was added as text
        return token.encode(errors="replace")

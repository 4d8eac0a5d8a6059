"""Texts as unit vectors, float32 ``[texts, dimensions]``.

MiniLM if the extra ``minilm`` is installed, any sentence-transformers model by name or path, or ``embedded``: latent
semantic analysis (Deerwester et al., 1990), that is TF-IDF over words and word pairs and a truncated SVD, fitted on the
buffer's own text. That needs no download and no torch, and its three arrays are kept beside the index.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Protocol

import numpy as np

from agentrl.datastore.errors import StoreError
from agentrl.datastore.optional import optional
from agentrl.datastore.search.minilm import MINILM, is_installed, minilm
from agentrl.datastore.storage.digest import digest as content_digest
from agentrl.schemas.annotations import External

EMBEDDED = "embedded"
EmbedderChoice = Annotated[str, External("model", inside=(EMBEDDED, MINILM))]
"""Type of a config field that names an embedder. A folder counts by its content; the weights of MiniLM are pinned. A
stage does not take what is installed: what it finds must not depend on the machine."""
DIMENSIONS = 128
MAX_TERMS = 50_000
FIT_TEXTS = 50_000


class Embedder(Protocol):
    identity: str
    """Names the model by its content: vectors of one identity may be compared."""
    neural: bool
    """Whether it was trained elsewhere, so that it knows what words mean."""

    def encode(self, texts: Sequence[str]) -> np.ndarray: ...

    def cut(self, texts: Sequence[str]) -> int:
        """How many texts are longer than what it looks at, which is their beginning."""


def default_embedder() -> str:
    """The one that is used if none is named: MiniLM if it is installed, else the buffer's own words."""
    return MINILM if is_installed() else EMBEDDED


def pretrained(name: str) -> Embedder:
    """The embedder of a name, other than the one that is fitted. Raises StoreError if it is not there."""
    return minilm() if name == MINILM else SentenceEmbedder(name)


class LatentEmbedder:
    """TF-IDF and SVD. ``idf`` is [terms], ``components`` [terms, dimensions]."""

    neural = False

    def __init__(self, vocabulary: dict[str, int], idf: np.ndarray, components: np.ndarray) -> None:
        self.vocabulary = vocabulary
        self.idf = idf.astype(np.float32)
        self.components = components.astype(np.float32)
        content = json.dumps(sorted(vocabulary.items())).encode() + self.idf.tobytes() + self.components.tobytes()
        self.identity = f"{EMBEDDED}-{hashlib.blake2b(content, digest_size=8).hexdigest()}"

    @classmethod
    def fit(cls, texts: Sequence[str], dimensions: int = DIMENSIONS, seed: int = 0) -> "LatentEmbedder":
        """Fit on texts, on a seeded sample if there are very many."""
        vectorizer = optional("sklearn.feature_extraction.text", "retrieval").TfidfVectorizer
        svd = optional("sklearn.decomposition", "retrieval").TruncatedSVD
        distinct = sorted(set(texts))
        if len(distinct) > FIT_TEXTS:
            picked = np.random.default_rng(seed).choice(len(distinct), FIT_TEXTS, replace=False)
            distinct = [distinct[index] for index in sorted(picked)]
        counter = vectorizer(ngram_range=(1, 2), max_features=MAX_TERMS, token_pattern=_TOKEN, sublinear_tf=True)
        try:
            counts = counter.fit_transform(distinct)
        except ValueError:
            raise StoreError("the texts hold no words, so there is nothing to build an embedder from") from None
        rank = min(dimensions, counts.shape[1] - 1, len(distinct))
        if rank < 2:
            components = np.eye(counts.shape[1], dtype=np.float32)
        else:
            components = svd(rank, n_iter=4, random_state=seed).fit(counts).components_.T
        vocabulary = {term: int(index) for term, index in counter.vocabulary_.items()}
        return cls(vocabulary, counter.idf_, components)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        if not len(texts):
            return np.zeros((0, self.components.shape[1]), np.float32)
        vectorizer = optional("sklearn.feature_extraction.text", "retrieval").TfidfVectorizer
        counter = vectorizer(ngram_range=(1, 2), token_pattern=_TOKEN, sublinear_tf=True, vocabulary=self.vocabulary)
        counter.idf_ = self.idf
        return unit(counter.transform(list(texts)) @ self.components)

    def cut(self, texts: Sequence[str]) -> int:
        return 0

    def save(self, path: Path | IO[bytes]) -> None:
        terms = sorted(self.vocabulary, key=self.vocabulary.__getitem__)
        np.savez(path, terms=np.array(json.dumps(terms)), idf=self.idf, components=self.components)

    @classmethod
    def load(cls, path: Path) -> "LatentEmbedder":
        with np.load(path) as data:
            terms = json.loads(str(data["terms"]))
            return cls({term: index for index, term in enumerate(terms)}, data["idf"], data["components"])


_TOKEN = r"(?u)\b\w+\b"


class SentenceEmbedder:
    """A sentence-transformers model, by name on the hub or by path."""

    neural = True

    def __init__(self, name: str) -> None:
        library = optional("sentence_transformers", "retrieval")
        from transformers.utils import logging

        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            self._model: Any = library.SentenceTransformer(name, device="cpu" if not _has_gpu() else None)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise StoreError(
                f"no sentence-transformers model at {name!r}: {reason}; give a folder, a model name, {MINILM!r} "
                f"or {EMBEDDED!r}"
            ) from None
        finally:
            if shown:
                logging.enable_progress_bar()
        self.identity = f"path-{content_digest(name)}" if Path(name).is_dir() else f"hub-{name}"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = self._model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False)
        return unit(np.asarray(vectors, dtype=np.float32).reshape(len(texts), -1))

    def cut(self, texts: Sequence[str]) -> int:
        limit = getattr(self._model, "max_seq_length", None)
        if limit is None or limit == float("inf"):
            return 0
        return sum(len(ids) > limit for ids in self._model.tokenizer(list(texts), truncation=False)["input_ids"])


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1, as float32; zero rows stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(norms, 1e-12)).astype(np.float32)

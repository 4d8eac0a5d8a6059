"""A policy: a causal language model with the tokenizer that it speaks through, loaded and saved as one folder."""

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.chat.codec import ChatCodec
from agentrl.chat.dialects import KEY, find_dialect
from agentrl.schemas.permissions import readable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def to_device(model: "PreTrainedModel", on_host: bool = False) -> "PreTrainedModel":
    """The model in evaluation mode, on the GPU if there is one and it is not to stay ``on_host``."""
    import torch

    there = "cuda" if torch.cuda.is_available() and not on_host else "cpu"
    model.to(there)  # type: ignore[arg-type]  # the library's own annotation
    return model.eval()


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Digest of vocabulary, special tokens and chat template: equal digests encode a conversation equally."""
    content = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        "special": sorted(tokenizer.all_special_tokens),
        "template": tokenizer.chat_template,
    }
    if dialect := tokenizer.init_kwargs.get(KEY):
        content[KEY] = dialect
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _tokenizer_class(path: str | Path) -> Any:
    """The class to load a tokenizer with. To a tokenizer that was saved as generic, AutoTokenizer would add tokens of
    the model's family, and it would no longer be the one that was used in training."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    generic = get_tokenizer_config(path).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return PreTrainedTokenizerFast if generic else AutoTokenizer


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a local folder, or of a name on the Hugging Face hub."""
    return _tokenizer_class(path).from_pretrained(path)


Precision = Literal["float32", "bfloat16"]


@cache
def processor_has_bfloat16() -> bool:
    """Whether this processor multiplies matrices in bfloat16 (AVX-512 BF16, AMX, or Arm's). Others give the same
    numbers by rounding in float32, at a fraction of the speed."""
    import torch

    return any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)


DIALECT = "dialect "
"""How warnings of dialects begin. They name no model, so that a run says each of them once for all its stages."""


def _warn(dialect: str, remark: str) -> None:
    warnings.warn(f"{DIALECT}{dialect}: {remark}", stacklevel=2)


class Speaker:
    """The side of a policy that needs no weights: how messages become tokens."""

    tokenizer: "PreTrainedTokenizerBase"
    name: str

    @cached_property
    def codec(self) -> ChatCodec:
        """How messages become tokens. What a user should know of the dialect found is given as warnings: of tools and
        of reasoning when a conversation first has them, and never if none does.

        Raises ValueError if no dialect fits the tokenizer.
        """
        codec = find_dialect(self.tokenizer)
        codec.tell = partial(_warn, codec.dialect)
        later = {remark for remarks in codec.matters_with.values() for remark in remarks}
        for remark in codec.remarks:
            if remark not in later:
                codec.tell(remark)
        return codec

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)

    def wrote(self, rows: str, tokenizer: str) -> str | None:
        """None if the tokens of ``rows`` are this tokenizer's, else what is wrong, and what to do."""
        if tokenizer == self.tokenizer_fingerprint:
            return None
        return (
            f"{rows} was tokenised by {tokenizer or 'an unknown tokenizer'}, and the model {self.name} uses "
            f"{self.tokenizer_fingerprint}; train the model that sampled it, or train on its messages with train.sft "
            "{tokens: again}"
        )


class Tokenizing(Speaker):
    """The tokenizer alone of a local folder, or of a name on the Hugging Face hub. It is loaded when it is first used,
    which takes seconds of imports.

    Raises ValueError that names the path, then, if there is no model.
    """

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":  # type: ignore[override]
        with _said_to_be_missing(self.path):
            return load_tokenizer(self.path)


@contextmanager
def _said_to_be_missing(path: str | Path) -> Iterator[None]:
    """Turns an error of loading into a ValueError that names the path and says what to give."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"model {str(path)!r} cannot be loaded: {str(error).splitlines()[0]} "
            "Give a folder with config.json, safetensors and a tokenizer, or a name on the Hugging Face hub."
        ) from error


@dataclass
class Policy(Speaker):
    """``name`` is how trajectories refer to it, ``version`` counts its updates in online training. ``precision`` is
    that of matrix products in every pass: bfloat16 through autocast; float32 is the dtype of the weights. ``plain`` is
    true if only the model's own logits give its log-probs, None until that was tried.

    ``weights`` is a folder with the weights of this version, if other processes train the policy; those of ``model``
    may then be older, or missing."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    name: str
    version: int = 0
    precision: Precision = "float32"
    plain: bool | None = None
    weights: Path | None = None

    @classmethod
    def without_weights(cls, path: Path, name: str | None = None) -> "Policy":
        """The policy of a local folder whose weights stay there: its model has shapes alone. Raises ValueError as
        :meth:`load` does."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        with _said_to_be_missing(path), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        if (path / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(path)
        return cls(model.eval(), load_tokenizer(path), name or str(path), weights=path)

    @property
    def source(self) -> Any:
        """Where the weights of this version are, for engines: the model, or a folder."""
        return self.weights or self.model

    @classmethod
    def load(cls, path: str | Path, name: str | None = None, on_host: bool = False) -> "Policy":
        """Load a local folder or a name on the Hugging Face hub, in the dtype it was saved in. ``on_host`` leaves the
        GPU to others.

        Raises ValueError that names the path if there is no model.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        with _said_to_be_missing(path):
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
            tokenizer = load_tokenizer(path)
        return cls(to_device(model, on_host), tokenizer, name or str(path))

    def prepare(self, precision: Precision) -> "Policy":
        """This policy, ready to be trained: with weights in float32, the masters that small steps do not vanish in,
        and matrix products in ``precision``; on a processor without instructions for bfloat16 in float32, which a
        warning says."""
        self.model.float()
        if precision == "bfloat16" and self.model.device.type == "cpu" and not processor_has_bfloat16():
            warnings.warn(  # from one place, so that it is said once of all models of a stage that have one name
                f"precision: bfloat16, but this processor has no instructions for it (AVX-512 BF16, AMX or Arm's) and "
                f"would be slower than in float32; {self.name} is computed in float32",
                stacklevel=1,
            )
            precision = "float32"
        self.precision = precision
        return self

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of every pass over the model: sampling, scoring and training."""
        import torch

        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def save(self, path: Path) -> None:
        """Write config, safetensors and tokenizer into ``path``. A trained model is written in float32: a checkpoint in
        bfloat16 would lose most of what small steps changed."""
        with _deepspeed_if_loaded():
            self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        readable(path)


@contextmanager
def _deepspeed_if_loaded() -> Iterator[None]:
    """To ask whether a model is wrapped by DeepSpeed, accelerate imports DeepSpeed where it is installed, which takes
    seconds. What was never imported has wrapped nothing."""
    other = sys.modules.get("accelerate.utils.other")
    if other is None or "deepspeed" in sys.modules:
        yield
        return
    available = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        other.is_deepspeed_available = available  # type: ignore[attr-defined]

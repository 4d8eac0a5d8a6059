"""Weights as folders that servers load, and the proof that they loaded them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from agentrl.engines.base import EngineError, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_TOKENS = 64


def write_folder(source: "Path | PreTrainedModel", tokenizer: Any, folder: Path, like: Path | None = None) -> Path:
    """A model folder with an output layer of its own. Servers on a CPU reload tied embeddings wrongly: they keep the
    output layer that they began with (see docs/decisions/0040-weights-of-servers.md).

    ``like`` is the folder that servers began with. Raises EngineError if its tensors have other names or shapes, which
    a server would load without a word, or if the model has an adapter.
    """
    from safetensors.torch import load_file, save_file

    if hasattr(source, "peft_config"):
        raise EngineError(
            "vLLM servers are given whole models, and this one has an adapter; merge it, or leave lora out"
        )
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if isinstance(source, Path):
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors*"))
        files = sorted(source.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    else:
        partial.mkdir(parents=True)
        source.config.save_pretrained(partial)
        if source.generation_config is not None:
            source.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        tensors = {name: tensor.detach().cpu() for name, tensor in source.state_dict().items()}
    if "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file({name: _own(tensor) for name, tensor in tensors.items()}, partial / "model.safetensors", {"format": "pt"})
    config = json.loads((partial / "config.json").read_text()) | {"tie_word_embeddings": False}
    if not config.get("architectures"):  # a server would take a model without it for one that only embeds
        config["architectures"] = [type(source).__name__]
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    if like is not None and (found := shapes(partial)) != (wanted := shapes(like)):
        odd = sorted(set(found.items()) ^ set(wanted.items()))
        raise EngineError(f"weights of {folder.name} have other tensors than those the servers began with: {odd[:3]}")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _own(tensor: Any) -> Any:
    """A tensor that shares its storage with no other."""
    return tensor.clone().contiguous()


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors in a folder, from the headers alone."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


def probe_ids(vocabulary: int, room: int) -> list[int]:
    """Fixed tokens that weights are tried with: at most 64, and at most ``room``."""
    random = Random(0)
    return [random.randrange(vocabulary) for _ in range(min(PROBE_TOKENS, room))]


def expected(weights: Weights, folder: Path, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of ``ids[1:]`` by transformers, in float32, at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM

    model = weights.source
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        tokens = torch.tensor([list(ids)], device=model.device)
        logits = model(tokens).logits[0, :-1].float()
        found = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].tolist()
    model.train(was_training)
    return found

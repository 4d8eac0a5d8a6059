"""Weights as folders that servers load, written a shard at a time, and the proof that they loaded them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from agentrl.engines.base import EngineError, Weights
from agentrl.schemas.permissions import readable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 256 << 20
"""The size of a file of weights, unless one tensor is larger."""

WRITERS = 4
"""Files that are written at once. So many, and one that is being filled, are the most that is held of a model to write
it."""

SAVED_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""What safetensors calls the dtypes of torch."""

PROBE_TOKENS = 64
TOLERANCE, ROUNDING = 1e-3, 4.0
"""Largest mean difference of the log-probs of a server from transformers' in float32, and how many times as far as
autocast to bfloat16 one in bfloat16 may be: it rounds between the layers too, which costs up to 3 times as much."""

COPY_TOLERANCE = 1e-3
"""Largest difference of a log-prob between a model and its copy on another device."""


def write_folder(
    source: "Path | PreTrainedModel",
    tokenizer: Any,
    folder: Path,
    like: Path | None = None,
    dtype: str | None = None,
    tensors: "Mapping[str, Any] | None" = None,
) -> Path:
    """A model folder with an output layer of its own. Servers on a CPU reload tied embeddings wrongly: they keep the
    output layer that they began with (see docs/decisions/0040-weights-of-servers.md). Matrices are written in
    ``dtype``, that of the servers, and as they are without it; see :func:`served_dtype`. With
    ``tensors`` these are written, and all else is that of ``source``.

    An adapter is left out, see :func:`write_adapter`. ``like`` is the folder that servers began with. Raises
    EngineError if its tensors have other names or shapes, which a server would load without a word.
    """
    partial = _begun(folder)
    if isinstance(source, Path):
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    else:
        source.config.save_pretrained(partial)
        if source.generation_config is not None:
            source.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    if tensors is None:
        tensors = stored(source) if isinstance(source, Path) else tensors_of(source)
    write_tensors(partial, tensors, dtype)
    config = json.loads((partial / "config.json").read_text()) | {"tie_word_embeddings": False}
    if dtype is not None:
        config["dtype"] = dtype
    if not config.get("architectures"):  # a server would take a model without it for one that only embeds
        config["architectures"] = [type(source).__name__]
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    if like is not None:
        check_shapes(folder.name, shapes(partial), shapes(like))
    return _whole(partial, folder)


def check_shapes(version: str, actual: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> None:
    """Raises EngineError if tensors have other names or shapes than those that servers began with."""
    if actual != wanted:
        different = sorted(name for name in actual.keys() | wanted.keys() if actual.get(name) != wanted.get(name))
        shown = ", ".join(
            f"{name} is {_shown(actual.get(name))}, not {_shown(wanted.get(name))}" for name in different[:3]
        )
        raise EngineError(f"weights of {version} have other tensors than those the servers began with: {shown}")


def _shown(shape: Sequence[int] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def write_tensors(folder: Path, tensors: "Mapping[str, Any]", dtype: str | None = None) -> None:
    """The weights of a model folder, from tensors or slices of files."""
    import torch

    planned = {
        name: torch.empty(_shape(tensor), dtype=served_dtype(tensor, dtype), device="meta")
        for name, tensor in tensors.items()
    }
    shards = WeightFiles(folder, planned)
    for name, tensor in tensors.items():
        shards.add({name: tensor[...].to("cpu", planned[name].dtype, copy=True).contiguous()})
    shards.end()


def served_dtype(tensor: Any, dtype: str | None) -> Any:
    """The dtype in which a tensor, or a slice of a file, goes to servers that compute in ``dtype``. Vectors stay as
    they are: they weigh little, and vLLM keeps some of them in float32, such as the biases of routers."""
    import torch

    own = _dtype(tensor)
    return getattr(torch, dtype) if dtype and own.is_floating_point and len(_shape(tensor)) > 1 else own


class WeightFiles:
    """The weights of a model folder, in files of at most 256 MiB with an index, or one file if the model is not larger.
    ``tensors`` have the names, shapes and dtypes of all, as tensors or as slices of files. A file is written,
    beside others, when all that it holds was added, so that tensors should come in the order of ``tensors``."""

    def __init__(self, folder: Path, tensors: "Mapping[str, Any]") -> None:
        import torch
        from huggingface_hub import split_torch_state_dict_into_shards

        empty = {
            name: torch.empty(_shape(tensor), dtype=_dtype(tensor), device="meta") for name, tensor in tensors.items()
        }
        plan = split_torch_state_dict_into_shards(empty, max_shard_size=SHARD_BYTES)
        self._folder, self._files = folder, plan.filename_to_tensors
        self._ready: dict[str, Any] = {}
        self._pool, self._written = ThreadPoolExecutor(WRITERS, "weights"), list[Future[None]]()
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def add(self, tensors: "Mapping[str, Any]") -> None:
        """Tensors on the CPU that share their storage with no other."""
        from safetensors.torch import save_file

        self._ready |= tensors
        whole = [file for file, names in self._files.items() if all(name in self._ready for name in names)]
        for file in whole:
            ready = {name: self._ready.pop(name).contiguous() for name in self._files.pop(file)}
            self._written.append(self._pool.submit(save_file, ready, self._folder / file, {"format": "pt"}))
            if len(self._written) >= WRITERS:
                self._written.pop(0).result()

    def end(self) -> None:
        """Wait until all is written. Raises EngineError if a tensor was not added, or one that nobody named."""
        for write in self._written:
            write.result()
        self._pool.shutdown()
        if self._files or self._ready:
            odd = sorted({name for names in self._files.values() for name in names} ^ self._ready.keys())
            raise EngineError(f"weights in {self._folder} are not whole: {len(odd)} tensors, such as {odd[:3]}")


def write_adapter(model: "PreTrainedModel", folder: Path) -> Path:
    """The adapter of a model, in a folder as PEFT writes it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    partial = _begun(folder)
    [config] = model.peft_config.values()
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    named = {f"base_model.model.{name}": _own(tensor.detach().cpu()) for name, tensor in tensors.items()}
    save_file(named, partial / "adapter_model.safetensors", {"format": "pt"})
    config.save_pretrained(partial)
    return _whole(partial, folder)


def adapter_rank(model: Any) -> int | None:
    """The rank of a model's adapter; None if it has none."""
    configs = getattr(model, "peft_config", None)
    return None if configs is None else max(int(config.r) for config in configs.values())


def adapter_targets(model: Any) -> list[str]:
    """The last parts of the names of the modules that a model's adapter changes."""
    return sorted(
        {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_" in name}
    )


def stored(folder: Path) -> dict[str, Any]:
    """Slices of the files of a folder, by name, none of which is read yet; with an output layer."""
    from safetensors import safe_open

    opened = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
    return _with_head({name: file.get_slice(name) for file in opened for name in file.keys()})  # noqa: SIM118


def _with_head(tensors: dict[str, Any]) -> dict[str, Any]:
    if "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def shapes_of(tensors: "Mapping[str, Any]") -> dict[str, tuple[int, ...]]:
    """Name -> shape of tensors, or of slices of files."""
    return {name: tuple(_shape(tensor)) for name, tensor in tensors.items()}


def _shape(tensor: Any) -> Sequence[int]:
    shape: Sequence[int] = tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape
    return shape


def _dtype(tensor: Any) -> Any:
    import torch

    return getattr(torch, SAVED_TYPES[tensor.get_dtype()]) if hasattr(tensor, "get_dtype") else tensor.dtype


def tensors_of(source: "Path | PreTrainedModel") -> dict[str, Any]:
    """The tensors of a model by the names that a folder of it has, without its adapter, and with an output layer."""
    from safetensors.torch import load_file

    from agentrl.engines.quantized import state_of

    if isinstance(source, Path):
        files = sorted(source.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    else:
        tensors = {name: tensor.detach() for name, tensor in state_of(source).items()}
        if adapter_rank(source) is not None:
            tensors = {
                name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if ".lora_" not in name
            }
        tensors = as_saved(source, tensors)
    return _with_head(tensors)


def has_experts(model: "PreTrainedModel") -> bool:
    """Whether a model is a mixture of experts."""
    return any(".experts." in name for name, _ in model.named_parameters())


def as_saved(model: "PreTrainedModel", tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a model under the names that its folder has, which are those that servers load: in memory, a mixture
    of experts has all experts of a layer in one tensor, and its folder has each expert by itself."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Any] = revert_weight_conversion(model, tensors)
    return saved


def _begun(folder: Path) -> Path:
    """An empty folder beside one that is to be written."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _whole(partial: Path, folder: Path) -> Path:
    """The folder, now that what was written beside it is whole."""
    readable(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _own(tensor: Any) -> Any:
    """A tensor that shares its storage with no other."""
    return tensor.clone().contiguous()


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors in a folder, from the headers alone."""
    from safetensors import safe_open

    shape_of: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            shape_of |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shape_of


def probe_ids(vocabulary: int, room: int) -> list[int]:
    """Fixed tokens that weights are tried with: at most 64, and at most ``room``."""
    random = Random(0)
    return [random.randrange(vocabulary) for _ in range(min(PROBE_TOKENS, room))]


def check_copy(model: "PreTrainedModel", source: "PreTrainedModel", version: int) -> None:
    """Raises EngineError unless a model gives the log-probs of the one whose weights it was given."""
    config = model.config.get_text_config()
    ids = probe_ids(config.vocab_size, getattr(config, "max_position_embeddings", None) or PROBE_TOKENS)
    copied, wanted = (expected(Weights(version, source_model), ids) for source_model in (model, source))
    difference = max(abs(logprob - other) for logprob, other in zip(copied, wanted, strict=True))
    if not difference <= COPY_TOLERANCE:
        raise EngineError(
            f"the embedded engine gives other log-probs with version {version} than the model that was trained "
            f"(difference {difference:.2g}): weights were not all that changed in it"
        )


def expected(weights: Weights, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of ``ids[1:]`` by transformers, in float32, at temperature 1."""
    import torch

    return _scored(module_of(weights.source, torch.float32), ids, rounded=False)


def expected_rounded(weights: Weights, ids: Sequence[int]) -> tuple[list[float], float]:
    """Log-probabilities as :func:`expected` gives them, and the mean difference that a server in bfloat16 may have:
    some times what rounding to bfloat16 costs the model here."""
    import torch

    model = module_of(weights.source, torch.float32)
    exact, rounded = (_scored(model, ids, rounded) for rounded in (False, True))
    cost = sum(abs(logprob - other) for logprob, other in zip(exact, rounded, strict=True)) / len(exact)
    return exact, ROUNDING * cost


def _scored(model: Any, ids: Sequence[int], rounded: bool) -> list[float]:
    import torch

    was_training = model.training
    model.eval()
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=rounded):
        tokens = torch.tensor([list(ids)], device=model.device)
        logits = model(tokens).logits[0, :-1].float()
        logprobs: list[float] = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].tolist()
    model.train(was_training)
    return logprobs


def module_of(source: Any, dtype: Any) -> Any:
    """A module, or the model of a folder."""
    if hasattr(source, "state_dict"):
        return source
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)

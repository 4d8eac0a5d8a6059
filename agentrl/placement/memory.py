"""How much memory a model needs where it is trained or sampled from, in bytes on one GPU.

States follow Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section
3, with float32 weights, gradients and Adam states, as they are trained here. Activations follow Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, without dropout and with attention
that keeps no scores (Dao et al. 2022), for gated MLPs and RMSNorm. Keys and values follow Kwon et al. 2023, "Efficient
Memory Management for Large Language Model Serving with PagedAttention", section 2.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.placement.limits import GatherLimits, limits_of, sizes_of

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
OVERHEAD = 1.5 * GIB
"""Of each process on a GPU: CUDA's context, kernels, NCCL's buffers, and what the allocator cannot use."""

VLLM_SHARE = 0.9
"""Of a GPU that vLLM takes, by its default ``--gpu-memory-utilization``."""

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a number in 4 bits: blocks of 64 share a scale of a byte, and 256 scales one of 4 (Dettmers et al. 2023)."""

HEAD_CHUNK = 2**24
"""Logits at a time, see :mod:`agentrl.training.logprobs`."""


@dataclass(frozen=True)
class ModelShape:
    """What of a causal language model decides its memory. ``largest`` is its largest parameter, ``matrix`` its largest
    weight of a linear layer (the output matrix counts unless it is the embedding's), ``layer`` its largest layer;
    ``linear`` are inputs and outputs of its linear layers without the head; ``heads`` are those of queries;
    ``attention`` and ``keys`` are widths of all query heads and of all key heads; ``inner`` is that of the MLP that a
    token goes through; ``item`` is the bytes of a weight in the saved model."""

    parameters: int
    largest: int
    matrix: int
    layer: int
    linear: tuple[tuple[int, int], ...]
    layers: int
    heads: int
    width: int
    attention: int
    keys: int
    inner: int
    vocabulary: int
    context: int | None
    item: int

    @property
    def kv_token(self) -> int:
        """Numbers that a token has in the cache: keys and values of all layers."""
        return 2 * self.layers * self.keys

    @property
    def weights(self) -> int:
        """Weights of all linear layers."""
        return sum(inputs * outputs for inputs, outputs in self.linear)

    def splits(self, ranks: int) -> bool:
        """Whether so many ranks can share its heads."""
        key_heads = self.keys * self.heads // self.attention
        return self.heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)

    def adapters(self, rank: int) -> int:
        """Parameters of adapters of this rank on all linear layers: two matrices for each (Hu et al. 2021)."""
        return sum(rank * (inputs + other) for inputs, other in self.linear)


def config_of(path: str | Path) -> Any:
    """The config of a model folder, or of a name in the Hugging Face cache; its weights need not be there. Raises
    ValueError if there is none, or none of a causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
    else:
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return config
        reason = f"{config.model_type} is no causal language model"
    raise ValueError(f"the memory of model {str(path)!r} cannot be estimated: {reason}")


def shape_of_config(config: Any) -> ModelShape:
    """The shape of a model with this config of transformers. The model is built without memory (on torch's meta
    device), so the counts are those of its own code."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    heads = text.num_attention_heads
    each = getattr(text, "head_dim", None) or text.hidden_size // heads
    experts = getattr(text, "moe_intermediate_size", None)
    inner = experts * text.num_experts_per_tok if experts else text.intermediate_size
    dtype = getattr(config, "dtype", None) or torch.float32
    largest, layer = sizes_of(model)
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    matrices = linear if tied or not isinstance(head, torch.nn.Linear) else [*linear, head]
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        largest=largest,
        matrix=max((module.weight.numel() for module in matrices), default=0),
        layer=layer,
        linear=tuple((module.in_features, module.out_features) for module in linear),
        layers=text.num_hidden_layers,
        heads=heads,
        width=text.hidden_size,
        attention=heads * each,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * each,
        inner=inner,
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
        item=(getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize,
    )


@dataclass(frozen=True)
class TrainingPlan:
    """How a model is trained. ``tokens`` are those of the largest micro batch that one rank computes; ``ranks`` share
    the states by ``zero``; 0 ranks is one process without DeepSpeed. ``bfloat16`` is the precision of products, and
    ``in_bfloat16`` says that ranks exchange weights of linear layers in it."""

    tokens: int
    bfloat16: bool = False
    checkpointing: bool = False
    lora_rank: int | None = None
    quantized: bool = False
    zero: int = 0
    ranks: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    in_bfloat16: bool = False


@dataclass
class Need:
    """Bytes on one GPU, by what they are for, and on the machine for each process (``host``)."""

    parts: dict[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def training(shape: ModelShape, plan: TrainingPlan) -> Need:
    """What one process needs to train. Weights, gradients and Adam's two moments are float32, 4 bytes each; ZeRO splits
    moments from stage 1, gradients from 2, weights from 3. In stages 1 and 2 DeepSpeed also keeps a copy of its part of
    the weights. Adapters alone have gradients and moments; linear layers below them may be in 4 bits."""
    ranks = max(1, plan.ranks)
    trained = shape.adapters(plan.lora_rank) if plan.lora_rank else shape.parameters
    whole = shape.parameters + (trained if plan.lora_rank else 0)
    split = {stage: ranks if plan.ranks and plan.zero >= stage else 1 for stage in (1, 2, 3)}
    frozen = shape.weights if plan.quantized else 0
    weights = FLOAT32 * (whole - frozen) / split[3] + NF4 * frozen
    gradients = FLOAT32 * trained / split[2]
    moments = 2 * FLOAT32 * trained / split[1]
    need = Need()
    if plan.ranks and plan.zero in (1, 2):
        moments += FLOAT32 * trained / ranks
    if plan.offload_optimizer:
        need.host += moments + gradients + FLOAT32 * trained / split[1]
        moments = gradients = 0.0
    if plan.offload_parameters:
        need.host += weights
        weights = 0.0
    need.parts = {"weights": weights, "gradients": gradients, "optimizer": moments}
    if plan.ranks > 1:
        need.parts["communication"] = moved(shape, plan, whole)
    need.parts["activations"] = activations(shape, plan) + head(shape, plan)
    need.parts["overhead"] = OVERHEAD
    return need


def moved(shape: ModelShape, plan: TrainingPlan, whole: int) -> float:
    """Bytes that DeepSpeed holds to move a model of ``whole`` parameters: a bucket of gradients, or the gradient of a
    parameter that is larger; under ZeRO 3 also the weights that are gathered, see :mod:`agentrl.placement.limits`."""
    limits = limits_of(shape.largest, shape.layer)
    gradients = limits.reduced if plan.lora_rank else max(shape.largest, limits.reduced)
    gathered = min(whole, limits.live) if plan.zero == 3 else 0
    return FLOAT32 * (gradients + gathered) + (cast(shape, plan, whole, limits) if plan.in_bfloat16 else 0)


def cast(shape: ModelShape, plan: TrainingPlan, whole: int, limits: GatherLimits) -> float:
    """Bytes that ``communication: bfloat16`` adds. Weights that are gathered ahead arrive in a buffer of their own and
    are cast to float32 from it, and gradients have a bucket of their own. Where adapters alone are trained, the bucket
    replaces that of float32, and the rank's part of the largest weight is cast before it is gathered (``stage3.py`` and
    ``partition_parameters.py`` of DeepSpeed 0.19, and two real ranks)."""
    ahead = min(whole, limits.prefetched)
    if plan.lora_rank:
        return BFLOAT16 * (ahead + shape.matrix / plan.ranks - limits.reduced)
    return BFLOAT16 * (ahead + limits.reduced)


def layer_numbers(shape: ModelShape, bfloat16: bool) -> float:
    """Numbers that a layer keeps of each token for its backward pass: twice the input of two norms and the inputs of
    the linear layers after them (6 widths); queries, the output of attention and the input of its projection (3), keys
    and values; the gate, its activation, the other branch and their product (4 inner widths). In float32, keys and
    values that several heads share are repeated, see :mod:`agentrl.training.packing`."""
    keys = shape.keys if bfloat16 else shape.attention
    return 6 * shape.width + 3 * shape.attention + 2 * keys + 4 * shape.inner


def activations(shape: ModelShape, plan: TrainingPlan) -> float:
    """Bytes that the layers keep for the backward pass. With checkpointing that is each layer's input, and one layer at
    a time in full. Under autocast the norms keep float32 and the rest bfloat16, and bfloat16 copies of weights are
    held during a pass: by autocast of those that are trained, by the backward pass of all that are not computed
    again. ZeRO 3 holds no such copies: its linear layers cast a weight that is gathered, autocast keeps casts of leaves
    alone, and the backward pass gathers the weight again."""
    numbers = layer_numbers(shape, plan.bfloat16)
    full = FLOAT32 * numbers
    if plan.bfloat16:
        full = FLOAT32 * 4 * shape.width + BFLOAT16 * (numbers - 4 * shape.width)
    kept = FLOAT32 * shape.width * shape.layers + full if plan.checkpointing else full * shape.layers
    sharded = plan.ranks > 0 and plan.zero == 3
    keeps_copies = plan.bfloat16 and not sharded and not (plan.lora_rank and plan.checkpointing)
    copies = BFLOAT16 * (shape.parameters - (shape.weights if plan.quantized else 0)) if keeps_copies else 0
    if plan.quantized:  # one weight at a time is cast back, and then to the precision of products
        copies += (FLOAT32 + BFLOAT16 * plan.bfloat16) * max(inputs * outputs for inputs, outputs in shape.linear)
    return plan.tokens * kept + copies


def head(shape: ModelShape, plan: TrainingPlan) -> float:
    """Bytes of logits, a chunk at a time, with their softmax and gradient, and of the hidden states before them. Under
    ZeRO 3 and autocast also a cast of the output matrix, and its gradient before that is cast back."""
    logits = min(HEAD_CHUNK, plan.tokens * shape.vocabulary)
    casts = 0
    if plan.bfloat16 and plan.ranks > 0 and plan.zero == 3:
        casts = BFLOAT16 * shape.vocabulary * shape.width * (1 if plan.lora_rank else 2)
    return 3 * FLOAT32 * logits + FLOAT32 * plan.tokens * shape.width + casts


def scoring(shape: ModelShape, tokens: int, item: int) -> Need:
    """What one process needs for passes without gradients: a reference, a probe."""
    one_layer = item * tokens * (2 * shape.width + 2 * shape.attention + 2 * shape.keys + 3 * shape.inner)
    logits = 3 * FLOAT32 * min(HEAD_CHUNK, tokens * shape.vocabulary)
    return Need({"weights": item * shape.parameters, "activations": one_layer + logits, "overhead": OVERHEAD})


def sampled(shape: ModelShape, rows: int, length: int, item: int, bfloat16: bool) -> dict[str, float]:
    """What the embedded engine keeps beside a model whose weights have ``item`` bytes: keys and values of ``rows`` of
    ``length`` tokens, and in precision ``bfloat16`` copies of the weights of linear layers."""
    cache = (BFLOAT16 if bfloat16 else item) * shape.kv_token * rows * length
    copies = {"weights in bfloat16": float(BFLOAT16 * shape.weights)} if bfloat16 else {}
    return {"KV cache": float(cache), **copies}


def serving(shape: ModelShape, tensor_parallel: int, length: int, item: int, gpu: float | None) -> Need:
    """What a vLLM server takes of each of its GPUs. Its cache is what is left of its share; without a known size of the
    GPU, the cache of one row. Keys of at least one head lie on each GPU."""
    weights = item * shape.parameters / tensor_parallel
    run = item * 8192 * (4 * shape.width + 2 * shape.inner / tensor_parallel) + 2 * FLOAT32 * 256 * shape.vocabulary
    need = Need({"weights": weights, "activations": run, "overhead": OVERHEAD})
    cache = kv_bytes(shape, tensor_parallel, length, item)
    need.parts["KV cache"] = cache if gpu is None else max(cache, VLLM_SHARE * gpu - need.total)
    return need


def kv_bytes(shape: ModelShape, tensor_parallel: int, length: int, item: int) -> float:
    """Keys and values of a row of ``length`` tokens on one GPU."""
    return item * shape.kv_token * length / tensor_parallel


def rounded(number: float) -> float:
    """GiB with one decimal, rounded up."""
    return math.ceil(10 * number / GIB) / 10

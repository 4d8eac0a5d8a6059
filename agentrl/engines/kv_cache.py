"""The key-value cache of the embedded engine: rows of their own lengths in its slots."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from agentrl.engines.routes import RouteShape, recording

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

_FIRST_CAPACITY = 64
ATTENTION = "agentrl_one_token"


def one_token_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one token of each row, as an attention function of transformers: what ``sdpa`` computes, whose
    kernel for bfloat16 on a processor takes many times as long for one token.

    ``query`` [rows, heads, 1, size], ``key`` and ``value`` [rows, key heads, width, size]; ``attention_mask``
    [rows, 1, 1, width] is True where a token sees a place. Returns [rows, 1, heads, size].
    """
    rows, heads, _, size = query.shape
    key_heads, width = key.shape[1:3]
    queries = query.to(key.dtype).reshape(rows * key_heads, heads // key_heads, size)
    scores = torch.bmm(queries, key.reshape(rows * key_heads, width, size).transpose(1, 2))
    scores = scores.view(rows, heads, 1, width).float() * (size**-0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~attention_mask, float("-inf")).softmax(-1).to(value.dtype)
    values = value.reshape(rows * key_heads, width, -1)
    return torch.bmm(weights.view(rows * key_heads, -1, width), values).view(rows, 1, heads, -1), None


@contextmanager
def one_token(model: "PreTrainedModel") -> Iterator[None]:
    """Within it, forward passes of ``model`` over one token of each row compute attention by
    :func:`one_token_attention`."""
    AttentionInterface.register(ATTENTION, one_token_attention)
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes products in on a device; None without it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def rounded_weights(model: "PreTrainedModel", dtype: torch.dtype) -> dict[str, Tensor]:
    """The float32 weights of linear layers in ``dtype``, by their names: what autocast would make at each pass."""
    return {
        f"{name}.weight": module.weight.detach().to(dtype)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module.weight.dtype == torch.float32
    }


class _Place:
    """Where the tokens of a forward pass lie: ``slots`` [rows] and ``positions`` [rows, tokens]; ``width`` is what
    attention reads of each slot. ``leading`` says that the slots are the first ones, in order."""

    def __init__(self) -> None:
        self.slots = self.positions = torch.empty(0, dtype=torch.long)
        self.width = self.capacity = self.size = 0
        self.leading = True
        self._flat: dict[int, Tensor] = {}

    def set(self, slots: Tensor, positions: Tensor, width: int, leading: bool) -> None:
        self.slots, self.positions, self.width, self.leading = slots, positions, width, leading
        self._flat = {}

    def flat(self, heads: int) -> Tensor:
        """Rows of a cache, seen as [slots x heads x capacity, width], that new keys and values go to."""
        if heads not in self._flat:
            head = torch.arange(heads, device=self.slots.device)
            rows = self.slots[:, None] * heads + head  # [rows, heads]
            self._flat[heads] = (rows[:, :, None] * self.capacity + self.positions[:, None, :]).reshape(-1)
        return self._flat[heads]


class _CacheLayer(DynamicLayer):
    """Keys and values [slots, heads, capacity, width] of one layer. Writing a token copies one token; the library's
    layer copies the whole cache."""

    def __init__(self, layout: _Place, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.place = layout
        self.storages: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        layout = self.place
        views = []
        if lower := autocast_dtype(key_states.device):  # attention would round them at each step, all of them
            key_states, value_states = key_states.to(lower), value_states.to(lower)
        if not self.storages:
            self.storages = [self._empty(new, layout.size, layout.capacity) for new in (key_states, value_states)]
        for storage, new in zip(self.storages, (key_states, value_states), strict=True):
            _, heads, _, size = new.shape
            storage.view(-1, size).index_copy_(0, layout.flat(heads), new.reshape(-1, size))
            read = storage[:, :, : layout.width]
            views.append(read[: len(layout.slots)] if layout.leading else read.index_select(0, layout.slots))
        self.keys, self.values = views
        return self.keys, self.values

    def resize(self, size: int, capacity: int) -> None:
        grown = []
        for storage in self.storages:
            new = self._empty(storage, size, capacity)
            new[: storage.shape[0], :, : storage.shape[2]] = storage
            grown.append(new)
        self.storages = grown

    @staticmethod
    def _empty(like: Tensor, size: int, capacity: int) -> Tensor:
        """Zeros: attention multiplies what lies beyond a row's end by 0, which must not be NaN."""
        return like.new_zeros(size, like.shape[1], capacity, like.shape[3])


class KVCache:
    """Slots for rows of one model. Slot ``s`` holds what the model computed for the first tokens of a row; a row's
    length is kept by the caller. With the ``shape`` of its routes, it holds these beside the keys and values."""

    def __init__(self, model: "PreTrainedModel", shape: RouteShape | None = None) -> None:
        self.model, self._shape = model, shape
        self._routes = torch.empty(0)
        self._place = _Place()
        self._cache = DynamicCache()
        self._cache.layers = []
        self._cache.layer_class_to_replicate = partial(_CacheLayer, self._place)  # type: ignore[assignment]
        self._rounded: dict[str, Tensor] = {}
        self._masks = _Masks(model.config.get_text_config(), model.dtype)

    def forward(self, slots: Tensor, ids: Tensor, positions: Tensor, width: int, leading: bool = False) -> Tensor:
        """Logits [rows, vocabulary] after the last of ``ids`` [rows, tokens], at ``positions`` of the same shape, which
        are all below ``width``."""
        self._reserve(int(len(slots) if leading else slots.max().item() + 1), width)
        lower = autocast_dtype(self.model.device)
        if lower and not self._rounded:
            self._rounded = rounded_weights(self.model, lower)
        by_one = ids.shape[1] == 1 and torch.bfloat16 in (lower, self.model.dtype) and self._masks.added is None
        by_one = by_one and self.model.device.type == "cpu"
        if by_one and leading and self._place.capacity <= 2 * width:
            width = self._place.capacity  # a view without gaps between slots, which need not be copied
        self._place.set(slots, positions, width, leading)
        with (
            one_token(self.model) if by_one else nullcontext(),
            recording(self.model) if self._shape else nullcontext() as recorded,
        ):
            given = {
                "input_ids": ids,
                "attention_mask": self._masks(positions, width),
                "position_ids": positions,
                "past_key_values": self._cache,
                "use_cache": True,
                "logits_to_keep": 1,
            }
            if lower:
                out = functional_call(self.model, self._rounded, kwargs=given, tie_weights=False)
            else:
                out = self.model(**given)
        if recorded:
            chosen = torch.stack(recorded, 1).to(self._routes.dtype)
            self._routes[slots[:, None], positions] = chosen.unflatten(0, ids.shape)
        return out.logits[:, -1]

    def routes(self, slot: int, start: int, end: int) -> "np.ndarray | None":
        """Routes [tokens, layers, k] of a slot's tokens from ``start`` to ``end``; None if they are not kept, or there
        are no such tokens."""
        if self._shape is None or start >= end:
            return None
        return self._routes[slot, start:end].cpu().numpy().astype(self._shape.dtype)

    def copy(self, sources: list[int], targets: list[int], width: int) -> None:
        """Copy the first ``width`` positions of slots to other slots."""
        self._reserve(max(targets) + 1, width)
        device = self.model.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for storage in self._storages():
            storage[target, :, :width] = storage[source, :, :width]
        if self._shape:
            self._routes[target, :width] = self._routes[source, :width]

    def renew(self) -> None:
        """The weights of the model have changed."""
        self._rounded = {}

    def keep(self, slots: list[int]) -> None:
        """Keep these slots alone, numbered in this order."""
        self._reserve(max(slots) + 1, 0)
        order = torch.tensor(slots, device=self.model.device)
        for layer in self._layers():
            layer.storages = [storage.index_select(0, order) for storage in layer.storages]
        if self._shape:
            self._routes = self._routes.index_select(0, order)
        self._place.size = len(slots)

    def clear(self) -> None:
        """Free all memory."""
        self._cache.layers = []
        self._routes = torch.empty(0)
        self._place.size = self._place.capacity = 0

    def _reserve(self, size: int, width: int) -> None:
        layout = self._place
        if size <= layout.size and width <= layout.capacity:
            return
        if width > layout.capacity:
            layout.capacity = max(_FIRST_CAPACITY, width + width // 2)
        layout.size = max(layout.size, size)
        for layer in self._layers():
            layer.resize(layout.size, layout.capacity)
        if self._shape:
            self._routes = self._resized(self._shape)

    def _resized(self, shape: RouteShape) -> Tensor:
        """Room for the routes of all slots, with those that are known."""
        room = (self._place.size, self._place.capacity, len(shape.layers), shape.k)
        dtype = torch.uint8 if shape.bytewise else torch.int32
        grown = torch.zeros(room, dtype=dtype, device=self.model.device)
        if self._routes.numel():
            grown[: self._routes.shape[0], : self._routes.shape[1]] = self._routes
        return grown

    def _layers(self) -> list[_CacheLayer]:
        return [layer for layer in self._cache.layers if isinstance(layer, _CacheLayer)]

    def _storages(self) -> list[Tensor]:
        return [storage for layer in self._layers() for storage in layer.storages]


class _Masks:
    """Attention masks of rows with positions of their own, for each kind of layer that a config names."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.added = None if config._attn_implementation == "sdpa" else torch.finfo(dtype).min
        self.dtype = dtype
        self.kinds = set(getattr(config, "layer_types", None) or [])
        self.window = getattr(config, "sliding_window", None)
        self.chunk = getattr(config, "attention_chunk_size", None)

    def __call__(self, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """True where a token at ``positions`` [rows, tokens] sees a place: [rows, 1, tokens, width]. Attention other
        than the library's ``sdpa`` adds a mask to its scores: 0 there, the lowest number elsewhere."""
        masks = self._seen(positions, width)
        if self.added is None:
            return masks if len(masks) > 1 else next(iter(masks.values()))
        none = torch.zeros((), dtype=self.dtype, device=positions.device)
        numbers = {kind: torch.where(mask, none, self.added) for kind, mask in masks.items()}
        return numbers if len(numbers) > 1 else next(iter(numbers.values()))

    def _seen(self, positions: Tensor, width: int) -> dict[str, Tensor]:
        places = torch.arange(width, device=positions.device)
        query = positions[:, None, :, None]
        causal = places <= query
        if len(self.kinds) <= 1 and not self.kinds & {"sliding_attention", "chunked_attention"}:
            return {"": causal & (places > query - self.window) if self.window and not self.kinds else causal}
        masks = {"full_attention": causal}
        if self.window:
            masks["sliding_attention"] = causal & (places > query - self.window)
        if self.chunk:
            masks["chunked_attention"] = causal & (places // self.chunk == query // self.chunk)
        return masks

"""The embedded engine: a Hugging Face model in this process, with one key-value cache kept across turns.

All rows advance together, one token per step. If the turn of a row has ended, the row is fed its observation as forced
tokens while the other rows go on sampling. So no token is computed twice; calling ``generate()`` for each turn would
compute the whole conversation again at each turn. Rows that are done leave the batch.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from agentrl.engines.base import Generation, Respond, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHRINK_BELOW = 0.7  # below this share of live rows, copying the cache is worth its time


class _SlabLayer(DynamicLayer):
    """Keys and values [rows, heads, tokens, width] in a slab with room to grow: appending one token copies one token.
    The library's layer copies the whole cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._length = 0
            self._slabs: list[torch.Tensor] = [key_states[:, :, :0], value_states[:, :, :0]]
        end = self._length + key_states.shape[2]
        for index, new in enumerate((key_states, value_states)):
            slab = self._slabs[index]
            if slab.shape[2] < end:
                rows, heads, _, width = new.shape
                grown = new.new_empty(rows, heads, max(64, 2 * end), width)
                grown[:, :, : self._length] = slab[:, :, : self._length]
                slab = self._slabs[index] = grown
            slab[:, :, self._length : end] = new
        self._length = end
        self.keys, self.values = (slab[:, :, :end] for slab in self._slabs)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._slabs = [slab[indices] for slab in self._slabs]
        self.keys, self.values = (slab[:, :, : self._length] for slab in self._slabs)


def _filter(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [rows, vocabulary] after temperature, top-k and top-p; excluded tokens are -inf."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return logits


def _draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[list[int], list[float]]:
    """One token for each row of ``logits`` [rows, vocabulary], with its log-probability."""
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist(), [0.0] * logits.shape[0]
    logprobs = _filter(logits, sampling).log_softmax(-1)
    # Divide by exponential noise and take the largest: the same draw as torch.multinomial, much faster on a CPU.
    clocks = torch.empty_like(logprobs).exponential_(generator=generator)
    tokens = (logprobs.exp() / clocks).argmax(-1, keepdim=True)
    return tokens[:, 0].tolist(), logprobs.gather(-1, tokens)[:, 0].tolist()


class TransformersEngine:
    """Generates with ``model`` on the device it is on. ``max_rows`` bounds the batch, and with it the memory."""

    def __init__(self, model: "PreTrainedModel", max_rows: int = 256) -> None:
        self.model = model
        self.max_rows = max_rows

    def generate(
        self, prompts: Sequence[list[int]], respond: Respond, sampling: Sampling, stop_id: int, seed: int
    ) -> list[Generation]:
        """See :class:`agentrl.engines.base.Engine`."""
        generator = torch.Generator(self.model.device).manual_seed(seed)
        was_training = self.model.training
        self.model.eval()
        rows = [Generation(list(prompt)) for prompt in prompts]
        # Rows of similar length share a batch, so that little is padded.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row].ids))
        with torch.inference_mode():
            for start in range(0, len(order), self.max_rows):
                self._run(rows, order[start : start + self.max_rows], respond, sampling, stop_id, generator)
        self.model.train(was_training)
        return rows

    def _run(
        self,
        rows: list[Generation],
        live: list[int],
        respond: Respond,
        sampling: Sampling,
        stop_id: int,
        generator: torch.Generator,
    ) -> None:
        """Advance the rows numbered in ``live`` to their ends. ``None`` in ``live`` marks a row that is done."""
        device = self.model.device
        width = max(len(rows[row].ids) for row in live)
        # Left padding: the last tokens of all rows are at the same position.
        ids = torch.tensor([[0] * (width - len(rows[row].ids)) + rows[row].ids for row in live], device=device)
        mask = torch.tensor(
            [[0] * (width - len(rows[row].ids)) + [1] * len(rows[row].ids) for row in live], device=device
        )
        cache = DynamicCache()
        cache.layer_class_to_replicate = _SlabLayer
        cache.layers = []
        places: list[int | None] = list(live)
        forced: dict[int, deque[int]] = {}
        turn_start = {row: len(rows[row].ids) for row in live}
        position = mask.cumsum(-1).sub(1).clamp(min=0)
        while True:
            logits = self.model(
                input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, logits_to_keep=1
            ).logits[:, -1]
            tokens, logprobs = _draw(logits, sampling, generator)
            for place, row in enumerate(places):
                if row is None:
                    continue
                if forced.get(row):
                    tokens[place] = forced[row].popleft()
                    continue
                rows[row].act(tokens[place], logprobs[place])
                if not self._advance(rows[row], row, turn_start, forced, respond, sampling, stop_id):
                    places[place] = None
            alive = [place for place, row in enumerate(places) if row is not None]
            if not alive:
                return
            next_ids = torch.tensor(tokens, device=device)[:, None]
            last = position[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(places), 1)], dim=1)
            if len(alive) < _SHRINK_BELOW * len(places):
                keep = torch.tensor(alive, device=device)
                cache.batch_select_indices(keep)
                next_ids, last, mask = next_ids[keep], last[keep], mask[keep]
                places = [places[place] for place in alive]
            ids, position = next_ids, last

    @staticmethod
    def _advance(
        generation: Generation,
        row: int,
        turn_start: dict[int, int],
        forced: dict[int, deque[int]],
        respond: Respond,
        sampling: Sampling,
        stop_id: int,
    ) -> bool:
        """Account for a token just sampled; False when the row is done. A finished turn queues its observation."""
        turn = generation.ids[turn_start[row] :]
        if turn[-1] == stop_id:
            observation = respond(row, turn)
            if observation is None:
                return False
            if len(generation.ids) + len(observation) >= sampling.max_tokens:
                generation.truncated = True
                return False
            generation.observe(observation)
            forced[row] = deque(observation)
            turn_start[row] = len(generation.ids)
            return True
        if len(turn) >= sampling.max_turn_tokens or len(generation.ids) >= sampling.max_tokens:
            generation.truncated = True
            return False
        return True

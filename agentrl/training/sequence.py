"""Sequence parallelism: several ranks compute each micro batch together, so that a row may be longer than what one GPU
holds (Ulysses: Jacobs et al. 2023, "DeepSpeed Ulysses").

The tokens of a packed micro batch are split over the ranks. All layers but attention run over a rank's own tokens. In
attention, DeepSpeed exchanges them for all tokens of the rank's own heads, and back. So rows and prefix trees are what
they are in one process. Each rank then computes the whole loss, from everybody's log-probs, and the gradients of its
own tokens.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from agentrl.training.batch import TrainingError

if TYPE_CHECKING:
    from agentrl.training.packing import Packing


class SequenceGroup:
    """The ``size`` neighbouring ranks that compute each micro batch of a model together; this one is number ``rank`` of
    them. ``config`` is the model's.

    Raises TrainingError if the model's heads cannot be split over so many ranks.
    """

    def __init__(self, size: int, config: Any) -> None:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        from agentrl.training.packing import attention_within_rows

        self._group = _group(size)
        self.size, self.rank = size, dist.get_rank(self._group)
        text = config.get_text_config()
        heads = text.num_attention_heads
        try:
            self._exchanged = UlyssesSPAttentionHF(
                attn=attention_within_rows,
                batch_size=1,
                attn_head_count=heads,
                attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
                kv_head_count=getattr(text, "num_key_value_heads", None) or heads,
                num_hidden_layers=text.num_hidden_layers,
                process_group=self._group,
                seq_length_is_variable=True,
            )
        except ValueError as error:
            raise TrainingError(f"deepspeed.sequence_parallel: {size} cannot be: {error}") from None

    def own(self, packing: "Packing") -> slice:
        """The nodes that this rank computes."""
        number = packing.input_ids.shape[1] // self.size
        return slice(self.rank * number, (self.rank + 1) * number)

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, packing: "Packing", **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of this rank's own nodes to those of all ranks; see
        :func:`agentrl.training.packing.packed_attention`."""
        kwargs["position_ids"] = packing.positions[:, self.own(packing)]
        out, _ = self._exchanged(module, query, key, value, None, packing=packing, **kwargs)
        return out.unflatten(-1, (query.shape[1], query.shape[3])), None

    def summed(self, own: Tensor) -> Tensor:
        """The sum over the ranks of tensors in which each has its own part and zeros elsewhere. Gradients go to this
        rank's part alone: each rank computes the same loss of the sum, and backward passes exchange the rest."""
        whole = own.detach().clone()
        dist.all_reduce(whole, group=self._group)
        return own + (whole - own.detach())


@cache
def _group(size: int) -> Any:
    """One for all models of this process: the policy, its reference and its critic."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp.get_sequence_parallel_group()

"""Packed forward passes: the rows of a batch as one sequence without padding, in which a token is computed once if
several rows have it after the same prefix.

Rows form a prefix tree: both sides of a preference pair, the rollouts of one task, or all rows behind one long system
prompt share its trunk. Linear layers, norms and embeddings run over the nodes of the tree; attention gathers the
nodes of each row, so a token sees exactly the tokens of its own row before it, at their own positions. Values and
gradients equal those of separate rows, as long as there is no dropout, which rows would share.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.training.sequence import SequenceGroup

ATTENTION = "agentrl_packed"
PADDED_SCORES = 2**20
"""Scores of a head, over padding alone, from which on rows are computed in another call of attention."""


@dataclass(frozen=True)
class Packing:
    """The tree's nodes in one sequence. ``input_ids`` and ``positions`` are [1, nodes].

    ``places`` [rows, width] gives the node of each row's token; padding has node 0. ``owner`` [nodes] gives for each
    node one token that it stands for, as a position in flattened [rows x width].

    Attention is computed for rows of about the same length at once, so that little of it is padding. ``blocks`` has
    [rows, width] of each such block, and ``attended`` [their sum] the nodes of all blocks, one after the other. The
    attention output at position ``outputs`` [nodes] of these becomes the output of the node.

    If the ranks of a ``sequence`` group compute it together, each has as many nodes of its own; the last ones may be
    padding, which no row has.
    """

    input_ids: Tensor
    positions: Tensor
    places: Tensor
    owner: Tensor
    blocks: tuple[tuple[int, int], ...]
    attended: Tensor
    outputs: Tensor
    sequence: "SequenceGroup | None" = None

    def to(self, device: torch.device) -> "Packing":
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def hidden(self, backbone: Any) -> Tensor:
        """The last hidden states under ``backbone`` of the nodes that this process computes, [own nodes, width]."""
        own = self.sequence.own(self) if self.sequence else slice(None)
        ids, positions = self.input_ids[:, own], self.positions[:, own]
        hidden: Tensor = backbone(
            input_ids=ids, position_ids=positions, packing=self, use_cache=False
        ).last_hidden_state
        return hidden[0]


def pack(
    sequences: Sequence[Sequence[int]],
    group: "SequenceGroup | None" = None,
    marks: Sequence[Sequence[Hashable]] | None = None,
) -> Packing:
    """Token lists as one packed sequence over their prefix tree. With ``marks`` [rows][tokens], rows share a node only
    where these are equal too."""
    width = max(len(sequence) for sequence in sequences)
    nodes: dict[tuple[int, int, Hashable], int] = {}
    tokens: list[int] = []
    positions: list[int] = []
    owner: list[int] = []
    places = []
    for row, sequence in enumerate(sequences):
        parent, path = -1, []
        for position, token in enumerate(sequence):
            mark = marks[row][position] if marks else None
            node = nodes.setdefault((parent, token, mark), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                positions.append(position)
                owner.append(row * width + position)
            path.append(node)
            parent = node
        places.append(path + [0] * (width - len(path)))
    padding = [0] * (-len(tokens) % group.size if group else 0)
    owners, of_rows = torch.tensor(owner + padding), torch.tensor(places)
    blocks = _blocks([len(sequence) for sequence in sequences])
    attended: list[Tensor] = []
    firsts = torch.zeros(len(sequences), dtype=torch.long)
    widths = [max(len(sequences[row]) for row in rows) for rows in blocks]
    for rows, longest in zip(blocks, widths, strict=True):
        firsts[rows] = sum(part.numel() for part in attended) + longest * torch.arange(len(rows))
        attended.append(of_rows[rows, :longest].flatten())
    return Packing(
        torch.tensor([tokens + padding]),
        torch.tensor([positions + padding]),
        of_rows,
        owners,
        tuple(zip(map(len, blocks), widths, strict=True)),
        torch.cat(attended),
        firsts[owners // width] + owners % width,
        group,
    )


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """The rows in blocks of about the same length; within a block they keep their order, in which sums are rounded."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    blocks = [[order[0]]]
    for number, row in enumerate(order[1:], 1):
        longest = lengths[blocks[-1][0]]
        if (len(order) - number) * (longest**2 - lengths[row] ** 2) >= PADDED_SCORES:
            blocks.append([])
        blocks[-1].append(row)
    return [sorted(rows) for rows in blocks]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of ``packing``, as an attention function of transformers.

    ``query`` [1, heads, nodes, width], ``key`` and ``value`` [1, key heads, nodes, width]; returns
    [1, nodes, heads, width]. The nodes are those that this process computes.
    """
    if packing.sequence:
        return packing.sequence.attention(module, query, key, value, packing, **kwargs)
    return attention_within_rows(module, query, key, value, attention_mask, packing, **kwargs)


def attention_within_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same over all nodes, for the heads that are given."""
    each = query.shape[1] // key.shape[1]
    repeated = each > 1 and _keeps_scores_of_groups(query)
    sizes = [rows * width for rows, width in packing.blocks]

    def gathered(states: Tensor) -> Iterator[Tensor]:
        """[1, heads, nodes, width] as [rows, heads, width of rows, width] of each block."""
        table = states[0].transpose(0, 1).flatten(1).index_select(0, packing.attended)
        parts = zip(table.split(sizes), packing.blocks, strict=True)
        return (part.view(*shape, states.shape[1], -1).transpose(1, 2) for part, shape in parts)

    outputs = []
    for queries, keys, values in zip(gathered(query), gathered(key), gathered(value), strict=True):
        if repeated:
            keys, values = keys.repeat_interleave(each, dim=1), values.repeat_interleave(each, dim=1)
        out = scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.outputs)[None], None


def _keeps_scores_of_groups(query: Tensor) -> bool:
    """Whether PyTorch would keep all scores, width x width for each head, where several heads of queries share keys: on
    CUDA, its kernels without scores take either float32 or such heads."""
    lower = torch.is_autocast_enabled(query.device.type)
    return query.device.type == "cuda" and query.dtype == torch.float32 and not lower


def can_pack(model: "PreTrainedModel") -> bool:
    """Whether the model computes attention through the library's interface, over all earlier tokens, without soft
    caps or sinks; other models are trained on padded rows."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and kinds == {"full_attention"}
        and not (getattr(config, "sliding_window", None) and "layer_types" not in config.to_dict())
        and not getattr(config, "attn_logit_softcapping", None)
        and getattr(config, "position_embedding_type", "rotary") != "alibi"
        and not any("sink" in name for name, _ in model.named_parameters())
    )


@contextmanager
def packed(model: "PreTrainedModel", enabled: bool = True) -> Iterator[None]:
    """Within it, forward and backward passes of ``model`` compute attention over the ``packing`` they are given."""
    if not enabled:
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = ATTENTION  # the mask is then left to the attention function
    try:
        yield
    finally:
        config._attn_implementation = before

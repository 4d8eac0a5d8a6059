"""Rollouts of one group that keep apart: diverse beam search with one beam for each of its groups, and a softer form of
it that draws (Vijayakumar et al. 2016, arXiv 1610.02424, equation 5 with Hamming diversity, section 5.1)."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from agentrl.engines.decoding import Row

_REMEMBERED = 1024  # groups; those that sampled last are remembered


@dataclass
class DrawnTokens:
    """Which tokens the rows of a group have drawn, by offset: the number of tokens that a row sampled before."""

    groups: "OrderedDict[str, dict[int, Counter[int]]]" = field(default_factory=OrderedDict)

    def at(self, row: "Row", offset: int) -> Counter[int]:
        places = self.groups.setdefault(row.session.root, {})
        self.groups.move_to_end(row.session.root)
        while len(self.groups) > _REMEMBERED:
            self.groups.popitem(last=False)
        return places.setdefault(offset, Counter())

    def lowered(self, logits: Tensor, row: "Row", offset: int) -> Tensor:
        """The ``logits`` [vocabulary] of a row, each lowered by ``diversity`` for every row of its group that drew that
        token at this offset."""
        taken = self.at(row, offset)
        if not taken:
            return logits
        tokens = torch.tensor(list(taken), device=logits.device)
        counts = torch.tensor(list(taken.values()), device=logits.device, dtype=logits.dtype)
        return logits.index_add(0, tokens, counts, alpha=-row.sampling.diversity)


def rounds(rows: Sequence["Row"]) -> Iterator[list[int]]:
    """Positions of rows, so that no round has two of one group that keep apart, those with lower keys first."""
    order = sorted(range(len(rows)), key=lambda position: rows[position].session.key)
    ranks, number = Counter[str](), dict[int, int]()
    for position in order:
        row = rows[position]
        number[position] = ranks[row.session.root] if row.sampling.diversity else 0
        ranks[row.session.root] += row.sampling.diversity > 0
    for rank in range(max(number.values(), default=-1) + 1):
        yield [position for position in range(len(rows)) if number[position] == rank]

"""Which calls of rows help, by the probabilities of a policy."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.advantages.turns import acting
from agentrl.pipelines.methods.toolformer.calls import (
    AnsweredTurn,
    CallLocation,
    UnclearError,
    Variants,
    call_at,
    gain,
    locations,
    weighted_loss,
)
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

NO_HELP = "no_help"
"""Why a call is cut."""

Losses = tuple[float, float, float]
"""Of the row as it is, without the call, and with an empty answer."""


@dataclass
class FilteredRow:
    """A row by its ``name``, and what is decided of its calls. ``now`` is the row as the cuts so far leave it, until no
    call is ``left`` to be looked at, of which the last one is at the end; then ``changed`` has cuts, or is None."""

    name: str
    now: Trajectory | None = None
    left: list[CallLocation] = field(default_factory=list)
    changed: Trajectory | None = None
    _calls: dict[CallLocation, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Trajectory, tools: Sequence[str]) -> "FilteredRow":
        """A row with tokens, of which the calls of ``tools`` are to be looked at."""
        made = cls(row.trajectory_id, row)
        own = {id(turn) for turn in acting(row.messages)}
        turns = [number for number, message in enumerate(row.messages) if id(message) in own]
        for location in locations(row):
            name = call_at(row, location).name
            turn = turns.index(location.message)
            made._calls[location] = {
                "trajectory_id": row.trajectory_id,
                "turn": turn,
                "call": location.call,
                "tool": name,
            }
            if name in tools:
                made.left.append(location)
            else:
                made.note(location, "other_tool")
        return made

    @property
    def n_cut(self) -> int:
        return sum(call["reason"] == NO_HELP for call in self._calls.values())

    def note(self, location: CallLocation, reason: str, losses: Losses | None = None) -> None:
        """Say why a call is kept or cut."""
        loss, without, unanswered = losses or (None, None, None)
        line = self._calls[location]
        line |= {"loss": loss, "loss_without": without, "loss_unanswered": unanswered}
        line |= {"gain": gain(*losses) if losses else None, "kept": reason != NO_HELP, "reason": reason}

    def restore(self, reason: str) -> None:
        """Keep the calls that were cut, for this reason."""
        self.changed = None
        for call in self._calls.values():
            if call["reason"] == NO_HELP:
                call |= {"kept": True, "reason": reason}

    def lines(self) -> list[dict[str, Any]]:
        """The table's rows, in the order of the calls."""
        return [self._calls[location] for location in sorted(self._calls)]


def decide(rows: Sequence[FilteredRow], policy: "Policy", tau: float, decay: float) -> None:
    """Look at the calls of each row from the last to the first, of all rows side by side. A call that does not help is
    cut before the one before it is looked at: of two equal calls one stays, and calls that only led to one that is cut
    do not help any more."""
    context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    while waiting := [row for row in rows if row.left]:
        asked: list[tuple[FilteredRow, CallLocation, AnsweredTurn]] = []
        variants: list[Variants] = []
        for row in waiting:
            assert row.now
            location = row.left.pop()
            try:
                answered = AnsweredTurn.of(row.now, location, policy.codec)
                three = answered.variants(policy.codec, decay) if answered else None
            except UnclearError:
                row.note(location, "unclear")
                continue
            if answered is None or three is None:
                row.note(location, "nothing_follows")
                continue
            if max(len(variant.input_ids) for variant in three) > context:
                row.note(location, "beyond_context")
                continue
            asked.append((row, location, answered))
            variants.append(three)
        for (row, location, answered), losses in zip(asked, _losses(variants, policy, decay), strict=True):
            helps = gain(*losses) >= tau
            row.note(location, "helps" if helps else NO_HELP, losses)
            if not helps:
                row.now = answered.cut(policy.codec)
    for row in rows:
        row.changed, row.now = row.now if row.n_cut else None, None


def _losses(variants: Sequence[Variants], policy: "Policy", decay: float) -> list[Losses]:
    """The loss of what follows the call in each of the three, for each call."""
    from agentrl.training.rows import TrainingRows
    from agentrl.training.scoring import batch_logprobs

    if not variants:
        return []
    every = [variant for three in variants for variant in three]
    rows = [
        TrainingRow(row_id=str(number), unit=number, input_ids=ids, mask=mask, weights=[1.0] * len(ids))
        for number, (ids, mask) in enumerate(every)
    ]
    logprobs = batch_logprobs(policy, TrainingRows.of(rows))
    losses = [
        weighted_loss(values[variant.mask].tolist(), decay) for values, variant in zip(logprobs, every, strict=True)
    ]
    return list(zip(losses[::3], losses[1::3], losses[2::3], strict=True))

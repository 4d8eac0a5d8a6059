"""Whether our passes over a model give the model's own log-probs. Our passes take hidden states and the output
matrix, and pack rows over prefixes; some families scale, cap or route in ways that these do not know. Sampling is
checked by :mod:`agentrl.engines.check`."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.engines.check import gap, own_logprobs, probe_rows, tolerance
from agentrl.models.policy import Policy
from agentrl.training.backend import Backend
from agentrl.training.batch import TrainingError, collate
from agentrl.training.logprobs import token_logprobs
from agentrl.training.packing import can_pack, packed
from agentrl.training.rows import TrainingRows

if TYPE_CHECKING:
    from agentrl.training.sequence import SequenceGroup


def needs_plain_pass(policy: Policy, sequence: "SequenceGroup | None" = None) -> bool:
    """Whether log-probs for scoring and training come from the model's own logits, row by row, because our faster
    passes differ from them. Found once for each policy, and announced by a warning that says what differed. With a
    ``sequence`` group, its ranks also try a pass that they compute together."""
    if policy.plain is None:
        was = policy.model.training
        policy.model.eval()
        problem = _problem(policy, sequence)
        policy.model.train(was)
        policy.plain = bool(problem)
        if problem:
            warnings.warn(
                f"{policy.name} ({policy.model.config.model_type}) is scored and trained by its own logits, row by "
                f"row, which is slower: {problem}",
                stacklevel=2,
            )
    return policy.plain


def plain_pass(policy: Policy, backend: Backend) -> bool:
    """The same on a backend. Raises TrainingError if it is one on which ranks could not take turns row by row."""
    group = backend.sequence
    [plain] = backend.run(lambda: [needs_plain_pass(policy, group)])  # DeepSpeed looks for tensors in what it returns
    if plain and backend.sharded and backend.world > 1:
        raise TrainingError(
            f"{policy.name} ({policy.model.config.model_type}) is computed row by row, and with zero: 3 all ranks must "
            "compute equally often; use zero: 2"
        )
    return plain


def packs(model: Any, backend: Backend, plain: bool = False) -> bool:
    """Whether passes over a model are packed, if they are not ``plain``. Raises TrainingError if ranks are to compute
    rows together, which they can only do with packed ones."""
    packed_passes = can_pack(model) and not plain
    if backend.sequence and not packed_passes:
        kind = type(model).__name__
        raise TrainingError(
            f"deepspeed.sequence_parallel: {backend.sequence.size} splits packed rows, and passes of {kind} are not "
            "packed (another kind of attention than over all earlier tokens, or logits of its own); leave it out"
        )
    return packed_passes


@torch.no_grad()
def _problem(policy: Policy, sequence: "SequenceGroup | None") -> str:
    """What our passes get wrong, or nothing."""
    model = policy.model
    rows = probe_rows(model)
    with torch.autocast(model.device.type, enabled=False):
        expected = [own_logprobs(model, row.input_ids) for row in rows]
        ways: list[tuple[str, bool, list[Any], SequenceGroup | None]] = [
            ("a pass over one row", False, [[row] for row in rows], None),
            ("a pass over padded rows", False, [rows], None),
            ("a packed pass", True, [rows], None),
        ]
        if sequence:
            ways.append(("a packed pass of several ranks", True, [rows], sequence))
        for name, packing, parts, group in ways:
            if packing and not can_pack(model):
                continue
            try:
                logprobs: list[Tensor] = []
                for part in parts:
                    batch = collate(TrainingRows.of(part), packing, group).to(model.device)
                    with packed(model, packing):
                        logprobs += token_logprobs(model, batch.input_ids, batch.mask, batch.packing)[0].cpu()
            except Exception as error:  # whatever a model that we do not know raises
                return f"{name} fails with {type(error).__name__}: {str(error)[:120]}"
            worst = max(gap(wanted, ours[: len(wanted)]) for wanted, ours in zip(expected, logprobs, strict=True))
            if worst > tolerance(expected, model.dtype):
                return f"{name} differs from its logits by {worst:.2g} nats"
    return ""

"""Log-probabilities of given tokens under a model, computed without holding the logits of all positions at once."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from agentrl.engines.routes import Routes, replaying
from agentrl.training.packing import Packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_VALUES = 1 << 24  # logits held at a time: 64 MiB in float32


class _HeadLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies [tokens] of ``targets`` [tokens] from ``hidden`` [tokens, width] and the output
    matrix [vocabulary, width], by products in ``dtype``.

    The matrix is cast in both passes, and kept as it is: under ZeRO 3 it is gone between them. Logits are computed in
    chunks. The backward pass computes them again, unless they fit one chunk, and writes gradients in closed form:
    ``d logp / d logit = onehot - p`` and ``d H / d logit = -p (log p + H)``.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        matrix, weight = weight, weight.to(dtype)
        logprobs = torch.empty(len(targets), device=hidden.device)
        entropies = torch.empty_like(logprobs)
        single, kept = len(targets) <= size, None
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logp = linear(hidden[part], weight).float().log_softmax(-1)
            logprobs[part] = logp.gather(-1, targets[part, None])[:, 0]
            probabilities = logp.exp()
            entropies[part] = -torch.linalg.vecdot(probabilities, logp)
            kept = probabilities if single else None
        ctx.save_for_backward(hidden, matrix, targets, entropies, kept)
        ctx.size, ctx.dtype = size, dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, matrix, targets, entropies, kept = ctx.saved_tensors
        weight = matrix.to(ctx.dtype)
        for_logprob, for_entropy = gradients
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), ctx.size):
            part = slice(start, start + ctx.size)
            p = linear(hidden[part], weight).float().softmax(-1) if kept is None else kept
            scale = torch.zeros(p.shape[0], device=p.device) if for_logprob is None else for_logprob[part]
            if for_entropy is None:
                grad = p * -scale[:, None]
            else:
                surprise = p.clamp(min=1e-30).log_().add_(entropies[part, None]).mul_(for_entropy[part, None])
                grad = surprise.add_(scale[:, None]).mul_(p).neg_()
            grad.scatter_add_(-1, targets[part, None], scale[:, None])
            grad = grad.to(weight.dtype)
            torch.matmul(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(matrix.dtype), None, None, None


def _through_module(
    hidden: Tensor, targets: Tensor, head: torch.nn.Module, softcap: float | None
) -> tuple[Tensor, ...]:
    """The same, for a chunk, by calling the output module itself."""
    logits = head(hidden).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def _called(module: torch.nn.Module, forward: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """``forward(hidden)`` as a pass of ``module``: under ZeRO 3 its hooks gather its weights before both passes."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        return module(hidden)
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _head_logprobs(model: "PreTrainedModel", hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    size = max(1, _CHUNK_VALUES // config.vocab_size)
    # a bias is looked for without naming it: within a pass, DeepSpeed gathers whatever is read from a module
    if type(head) is torch.nn.Linear and not softcap and len([*head.parameters()]) == 1:
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        return _called(
            head, lambda given: _HeadLogprobs.apply(given, head.weight, targets, size, dtype), hidden.to(dtype)
        )  # fmt: skip
    if any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
        # Sharded by ZeRO 3: every rank must call the module equally often, even if its batches differ.
        chosen, entropy = _through_module(hidden, targets, head, softcap)
        return chosen, entropy
    parts = [
        checkpoint(
            _through_module,
            hidden[start : start + size],
            targets[start : start + size],
            head,
            softcap,
            use_reentrant=False,
        )
        for start in range(0, max(1, len(targets)), size)
    ]
    chosen, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    return chosen, entropy


def _own_logprobs(
    model: "PreTrainedModel", input_ids: Tensor, mask: Tensor, routes: Routes | None
) -> tuple[Tensor, Tensor]:
    """The same from the model's own logits, of each row by itself and up to its last masked token."""
    chosen, entropies = [], []
    for row, (ids, inside) in enumerate(zip(input_ids, mask, strict=True)):
        end = int(inside.nonzero().max()) + 1 if inside.any() else 2
        own = routes.part(slice(row * len(ids), row * len(ids) + end)) if routes else None
        with replaying(model, own):
            logp = model(input_ids=ids[None, :end], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        pad = (1, len(ids) - end)
        of_ids = logp.gather(-1, ids[1:end, None])[:, 0]
        chosen.append(torch.nn.functional.pad(of_ids, pad))
        entropies.append(torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), pad))
    use = mask.clone()
    use[:, 0] = False
    return torch.stack(chosen).where(use, 0.0), torch.stack(entropies).where(use, 0.0)


def token_logprobs(
    model: "PreTrainedModel",
    input_ids: Tensor,
    mask: Tensor,
    packing: Packing | None = None,
    plain: bool = False,
    routes: Routes | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [rows, tokens] of ``input_ids``, in float32; 0 if a token's ``mask`` is
    false.

    Element ``[:, t]`` belongs to ``input_ids[:, t]`` given the tokens before it. Rows are right-padded, so causal
    attention ignores padding; with ``packing`` (inside :func:`agentrl.training.packing.packed`) there is none. Each
    of the ranks that compute a packing together gives all of them, and has the gradients of its own tokens.
    Logits exist for masked positions only, a chunk at a time. ``plain`` takes the model's own logits, row by row, for
    models whose logits are more than hidden states times a matrix. ``routes`` are replayed: of the nodes of
    ``packing``, or of all padded tokens.

    Raises ValueError for models that scale their logits in a way that is not known here.
    """
    if plain:
        return _own_logprobs(model, input_ids, mask, routes)
    config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"models with {name} ({config.model_type}) are not supported; use one without")
    rows, places = mask[:, 1:].nonzero(as_tuple=True)
    group = packing.sequence if packing else None
    if packing is None:
        with replaying(model, routes):
            hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        flat = hidden[rows, places]
    else:
        nodes = packing.places[rows, places]
        if group:
            own = group.own(packing)
            routes = routes and routes.part(own)
            inside = (nodes >= own.start) & (nodes < own.stop)
            rows, places, nodes = rows[inside], places[inside], nodes[inside] - own.start
        with replaying(model, routes):
            flat = packing.hidden(model.base_model).index_select(0, nodes)
    chosen, entropy = _head_logprobs(model, flat, input_ids[rows, places + 1])
    empty = torch.zeros(input_ids.shape, device=input_ids.device)
    index = (rows, places + 1)
    logprobs_and_entropy = empty.index_put(index, chosen), empty.index_put(index, entropy)
    return (
        (group.summed(logprobs_and_entropy[0]), group.summed(logprobs_and_entropy[1]))
        if group
        else logprobs_and_entropy
    )

"""Routes of mixtures of experts: which experts each token goes to, in each layer with a router.

They are recorded in one pass, and replayed in another one (rollout routing replay, R3: Ma et al. 2025, arXiv
2510.11370). While a router runs, the ``topk`` over all its experts answers with given indices, and with the router's
own scores of them, so that its gradient stays. Nothing else of a pass changes, so this is the same for all families.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Answer = Callable[[int, Tensor], Tensor]
"""Gives the experts of each token, [tokens, k], from the number of a layer and those that its router chose itself."""

_BYTE = 256  # as many experts have numbers of one byte


@dataclass(frozen=True)
class RouteShape:
    """A token goes to ``k`` of ``experts`` in each of the ``layers`` that have a router, which are those of these
    numbers among all layers."""

    layers: tuple[int, ...]
    k: int
    experts: int

    @property
    def bytewise(self) -> bool:
        """Whether the number of an expert fits into a byte."""
        return self.experts <= _BYTE

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an expert's number where routes are kept."""
        return np.dtype(np.uint8 if self.bytewise else np.uint16)

    @property
    def token_bytes(self) -> int:
        """What the routes of one token take."""
        return len(self.layers) * self.k * self.dtype.itemsize

    def read(self, data: bytes) -> np.ndarray:
        """Routes [tokens, layers, k] from their bytes, token by token. Raises ValueError if they are none of this
        shape."""
        if len(data) % self.token_bytes:
            raise ValueError(
                f"{len(data)} bytes of routes are no whole tokens of {self.token_bytes}: they are of another model"
            )
        routes = np.frombuffer(data, self.dtype).reshape(-1, len(self.layers), self.k)
        self.check(routes)
        return routes

    def check(self, routes: np.ndarray) -> None:
        """Raise ValueError if routes [tokens, layers, k] name experts that there are not."""
        if routes.shape[1:] != (len(self.layers), self.k) or (routes.size and routes.max() >= self.experts):
            raise ValueError(
                f"routes of shape {routes.shape} up to expert {routes.max(initial=0)} are of another model: this one "
                f"takes {self.k} of {self.experts} experts in {len(self.layers)} layers"
            )


@dataclass(frozen=True)
class Routes:
    """Given routes of the tokens of a pass, in their order: ``indices`` [tokens, layers, k], and whether they are
    ``known`` [tokens]. Tokens without take their router's own."""

    indices: Tensor
    known: Tensor

    def to(self, device: torch.device) -> "Routes":
        return Routes(self.indices.to(device), self.known.to(device))

    def part(self, tokens: Tensor | slice) -> "Routes":
        """Those of some tokens, by position."""
        return Routes(self.indices[tokens], self.known[tokens])


def route_shape(model: "PreTrainedModel") -> RouteShape | None:
    """What routes of a model look like; None if it has no router, or routers of several kinds."""
    routers = _routers(model)
    kinds = {(router.top_k, router.num_experts) for router in routers.values()}
    if len(kinds) != 1:
        return None
    [(k, experts)] = kinds
    numbers = [re.findall(r"\d+", name) for name in routers]
    return RouteShape(tuple(int(number[0]) for number in numbers), k, experts) if all(numbers) else None


def _routers(model: torch.nn.Module) -> dict[str, Any]:
    """The modules that choose experts, by name, in the order of their layers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "top_k", None), int)
        and isinstance(getattr(module, "num_experts", None), int)
        and "weight" in module._parameters
    }


class _Answering(TorchFunctionMode):
    """Within it, the ``topk`` over all experts of a router gives the indices of ``answer``."""

    def __init__(self, router: Any, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shape, self.answer, self.asked = (router.num_experts, router.top_k), answer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0]
        if scores.ndim != 2 or (scores.shape[-1], result[1].shape[-1]) != self.shape:  # it chooses among groups
            return result
        self.asked += 1
        chosen = self.answer(result[1])
        if chosen is result[1]:
            return result
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _routed(router: Any, forward: Callable[..., Any], answer: Callable[[Tensor], Tensor], *given: Any) -> Any:
    """A pass of one router. Raises ValueError if it does not choose by one ``topk``."""
    with _Answering(router, answer) as mode:
        result = forward(*given)
    if mode.asked != 1:
        raise ValueError(
            f"{type(router).__name__} chooses experts by {mode.asked} calls of topk over all of them, and one is known "
            "here; leave routes out for this model"
        )
    return result


@contextmanager
def _asking(model: torch.nn.Module, answer: Answer) -> Iterator[None]:
    """Within it, the routers of a model take the experts that ``answer`` gives."""
    routers = [*_routers(model).values()]
    before = [vars(router).get("forward") for router in routers]
    for layer, router in enumerate(routers):
        router.forward = partial(_routed, router, router.forward, partial(answer, layer))
    try:
        yield
    finally:
        for router, own in zip(routers, before, strict=True):
            del router.forward
            if own is not None:
                router.forward = own


_REPLAYED: ContextVar[Routes | None] = ContextVar("replayed", default=None)


@contextmanager
def replaying(model: torch.nn.Module, routes: Routes | None) -> Iterator[None]:
    """Within it, a pass of ``model`` takes given routes; without any, its own. Raises ValueError if the pass has
    another number of tokens."""
    if routes is None:
        yield
        return

    def answer(layer: int, own: Tensor) -> Tensor:
        given = routes.indices[:, layer].to(own.dtype)
        if given.shape != own.shape:
            raise ValueError(f"routes of {len(given)} tokens are given to a pass of {len(own)}")
        return given.where(routes.known[:, None], own)

    token = _REPLAYED.set(routes)
    try:
        with _asking(model, answer):
            yield
    finally:
        _REPLAYED.reset(token)


def checkpoint_contexts(model: torch.nn.Module) -> Callable[[], tuple[AbstractContextManager[Any], ...]]:
    """The ``context_fn`` of gradient checkpointing: what is computed again in a backward pass takes the routes that its
    forward pass took."""

    def contexts() -> tuple[AbstractContextManager[Any], ...]:
        return nullcontext(), replaying(model, _REPLAYED.get())

    return contexts


@contextmanager
def recording(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Within it, a pass of ``model`` adds the experts that each of its routers chose, [tokens, k], layer by layer."""
    recorded: list[Tensor] = []

    def answer(layer: int, own: Tensor) -> Tensor:
        recorded.append(own.detach())
        return own

    with _asking(model, answer):
        yield recorded

"""Batched decoding of the embedded engine: which slot of its cache belongs to which session, and one token per step for
each slot that samples, drawn with one given number per token."""

import asyncio
import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agentrl.engines.base import EngineError, Sampling, Session, Turn
from agentrl.engines.diversity import DrawnTokens, rounds
from agentrl.schemas.trajectory import Span

if TYPE_CHECKING:
    from agentrl.engines.kv_cache import KVCache

_SHARED_TOKENS = 4  # a shorter common prefix is not worth copying
_BEGINNING = 64  # tokens; sessions of other roots that begin alike for longer, such as by a system prompt, share that
_DONORS = 8  # sessions of other roots that are looked at
_LEAD_ABOVE = 0.5  # above this share of sampling slots, computing all slots is faster than gathering some


def uniforms(seed: int, number: int) -> np.ndarray:
    """``number`` float32 numbers in [0, 1), a function of ``seed``; the first ones do not depend on ``number``."""
    digest = hashlib.shake_128(seed.to_bytes(8, "little")).digest(4 * number)
    return ((np.frombuffer(digest, dtype="<u4") >> 8) * np.float32(2.0**-24)).astype(np.float32)


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [rows, vocabulary] after temperature, top-k and top-p; excluded tokens are -inf."""
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return logits


def draw(logits: Tensor, sampling: Sampling, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row of ``logits`` [rows, vocabulary] and its log-probability, both [rows]: the first token at
    which the cumulative probability exceeds the row's number, in [0, 1)."""
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=torch.float32)
    logits = filtered(logits, sampling)
    largest = logits.amax(-1, keepdim=True)
    masses = (logits - largest).exp()
    cumulative = masses.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    tokens = torch.searchsorted(cumulative, numbers[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # rounding never reaches a token of no probability
    tokens = torch.minimum(tokens, last)
    logprobs = logits.gather(-1, tokens) - largest - masses.sum(-1, keepdim=True).log()
    return tokens[:, 0], logprobs[:, 0]


@dataclass(eq=False)
class Row:
    """A turn that was asked for. ``ids``, ``logprobs`` and ``spans`` are what was sampled before it was suspended."""

    session: Session
    sampling: Sampling
    stop: tuple[int, ...]
    limit: int
    seed: int
    deadline: int
    expires: float
    done: "asyncio.Future[Turn]"
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    before: int = 0
    """Tokens that the session sampled before the turn; counted if its rows keep apart."""


class DecodingBatch:
    """``rows`` are the turns that are sampled now, by slot. By slot too: ``length`` counts the tokens in the cache,
    ``last`` is the token that comes after them, or after those of ``ahead``, which the next step computes too. Drawn
    tokens wait in arrays until their turn ends."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.ahead: dict[int, list[int]] = {}
        self.length = np.zeros(0, dtype=np.int64)
        self.last = np.zeros(0, dtype=np.int64)
        self._made = np.zeros(0, dtype=np.int64)
        self._limit = np.zeros(0, dtype=np.int64)
        self._numbers = np.zeros((0, 0), dtype=np.float32)
        self._ids = np.zeros((0, 0), dtype=np.int64)
        self._logprobs = np.zeros((0, 0), dtype=np.float32)
        self._stops = np.zeros(0, dtype=bool)
        self._taken = DrawnTokens()
        self._keeps_apart = False

    def reserve(self, slots: int) -> None:
        """Make room for this many slots."""
        missing = slots - len(self.length)
        if missing > 0:
            for name in ("length", "last", "_made", "_limit", "_numbers", "_ids", "_logprobs"):
                array = getattr(self, name)
                more = np.zeros((missing + slots // 2, *array.shape[1:]), dtype=array.dtype)
                setattr(self, name, np.concatenate([array, more]))

    def begin(self, slot: int, row: Row, ahead: list[int]) -> None:
        """Sample a row from the next step on, which computes the tokens ``ahead`` too."""
        if row.sampling.diversity:
            self._keeps_apart, row.before = True, sum(row.session.mask)
        room = row.limit - len(row.ids)
        if self._ids.shape[1] < room:
            for name in ("_numbers", "_ids", "_logprobs"):
                array = getattr(self, name)
                more = np.zeros((len(array), room - array.shape[1]), dtype=array.dtype)
                setattr(self, name, np.concatenate([array, more], axis=1))
        highest = max((token for token in row.stop if token >= 0), default=-1)
        if highest >= len(self._stops):
            self._stops = np.concatenate([self._stops, np.zeros(highest + 1 - len(self._stops), dtype=bool)])
        self._stops[[token for token in row.stop if token >= 0]] = True
        self._numbers[slot, :room] = uniforms(row.seed, row.limit)[len(row.ids) :]
        self._made[slot], self._limit[slot] = 0, room
        self.rows[slot] = row
        if ahead:
            self.ahead[slot] = ahead

    def suspend(self, slot: int, version: int) -> Row:
        """Sample a row no further; what was drawn goes into it."""
        row, made = self.rows.pop(slot), int(self._made[slot])
        if made:
            row.spans.append(Span(version=version, start=len(row.ids), end=len(row.ids) + made))
            row.ids += self._ids[slot, :made].tolist()
            row.logprobs += self._logprobs[slot, :made].tolist()
        return row

    def keep(self, slots: list[int]) -> None:
        """Keep these slots alone, numbered in this order."""
        for name in ("length", "last", "_made", "_limit", "_numbers", "_ids", "_logprobs"):
            setattr(self, name, getattr(self, name)[slots])
        numbers = {old: new for new, old in enumerate(slots)}
        self.rows = {numbers[slot]: row for slot, row in self.rows.items()}

    def step(self, cache: "KVCache", slots: int) -> list[int]:
        """Draw one token for each row; returns the slots whose turns are over."""
        here = np.array(sorted(self.rows))
        logits = self._logits_with_chunks(cache, here) if self.ahead else self._logits(cache, here, slots)
        tokens, logprobs = self._draw(logits, here)
        made = self._made[here]
        self._ids[here, made] = tokens
        self._logprobs[here, made] = logprobs
        self._made[here] = made + 1
        self.length[here] += 1
        self.last[here] = tokens
        over = made + 1 >= self._limit[here]
        if len(self._stops):
            known = np.minimum(tokens, len(self._stops) - 1)
            over |= self._stops[known] & (known == tokens)
        ended = []
        for index in over.nonzero()[0].tolist():
            slot = int(here[index])
            row = self.rows[slot]
            if made[index] + 1 >= self._limit[slot] or int(tokens[index]) in row.stop:
                ended.append(slot)
        return ended

    def _logits(self, cache: "KVCache", here: np.ndarray, slots: int) -> torch.Tensor:
        device = cache.model.device
        width = int(self.length[here].max()) + 1
        leading = len(here) >= _LEAD_ABOVE * slots
        if leading:  # slots that do not sample write behind their end, which is overwritten before it is read
            count = int(here[-1]) + 1
            width = max(width, int(self.length[:count].max()) + 1)
        chosen = np.arange(count) if leading else here
        ids = torch.from_numpy(self.last[chosen, None]).to(device)
        positions = torch.from_numpy(self.length[chosen, None]).to(device)
        logits = cache.forward(torch.from_numpy(chosen).to(device), ids, positions, width, leading)
        return logits[torch.from_numpy(here).to(device)] if len(here) < len(chosen) else logits

    def _logits_with_chunks(self, cache: "KVCache", here: np.ndarray) -> torch.Tensor:
        """Each token is a row of the pass. All keys and values of a layer are written before any is read, so tokens of
        one slot see each other."""
        device = cache.model.device
        behind: list[int] = []
        tokens: list[int] = []
        places: list[int] = []
        lasts: list[int] = []
        for slot in here.tolist():
            ahead = self.ahead.get(slot, [])
            start = int(self.length[slot])
            behind += [slot] * (len(ahead) + 1)
            tokens += [*ahead, int(self.last[slot])]
            places += range(start, start + len(ahead) + 1)
            self.length[slot] += len(ahead)
            lasts.append(len(tokens) - 1)
        self.ahead = {}
        ids, positions = (torch.tensor(column, device=device)[:, None] for column in (tokens, places))
        logits = cache.forward(torch.tensor(behind, device=device), ids, positions, max(places) + 1)
        return logits[torch.tensor(lasts, device=device)]

    def _draw(self, logits: torch.Tensor, here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = torch.from_numpy(self._numbers[here, self._made[here]]).to(logits.device)
        if not self._keeps_apart:
            return self._drawn(logits, here, numbers)
        rows = [self.rows[slot] for slot in here.tolist()]
        tokens_of = np.zeros(len(here), dtype=np.int64)
        logprobs_of = np.zeros(len(here), dtype=np.float32)
        for positions in rounds(rows):
            # what a row sampled before its turn, in the parts of the turn before this one, and in this one
            at = {n: rows[n].before + len(rows[n].ids) + int(self._made[here[n]]) for n in positions}
            lower = [
                self._taken.lowered(logits[n], rows[n], at[n]) if rows[n].sampling.diversity else logits[n]
                for n in positions
            ]
            parts = self._drawn(torch.stack(lower), here[positions], numbers[positions])
            tokens_of[positions], logprobs_of[positions] = parts
            for n in positions:
                if rows[n].sampling.diversity:
                    self._taken.at(rows[n], at[n])[int(tokens_of[n])] += 1
        return tokens_of, logprobs_of

    def _drawn(self, logits: torch.Tensor, here: np.ndarray, numbers: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """A token and its log-prob for each of these slots, from their logits and numbers."""
        kinds: dict[int, tuple[Sampling, list[int]]] = {}
        for index, slot in enumerate(here.tolist()):
            sampling = self.rows[slot].sampling
            kinds.setdefault(id(sampling), (sampling, []))[1].append(index)
        if len(kinds) == 1:
            tokens, logprobs = draw(logits, sampling, numbers)
            return tokens.cpu().numpy(), logprobs.cpu().numpy()
        tokens_of = np.zeros(len(here), dtype=np.int64)
        logprobs_of = np.zeros(len(here), dtype=np.float32)
        for sampling, places in kinds.values():
            which = torch.tensor(places, device=logits.device)
            tokens, logprobs = draw(logits[which], sampling, numbers[which])
            tokens_of[places], logprobs_of[places] = tokens.cpu().numpy(), logprobs.cpu().numpy()
        return tokens_of, logprobs_of


Beginning = tuple[int, ...]
"""The first tokens of a session, by which those of other roots that share them are known."""


@dataclass(eq=False)
class CacheSlot:
    """A session and the slot that holds its cache. ``row`` is its turn under way, ``used`` when it last had one."""

    session: Session
    slot: int
    row: Row | None = None
    used: int = 0
    beginning: Beginning = ()


@dataclass(eq=False)
class CacheSlots:
    """Which slot belongs to which session. A cache_slot without a turn under way may be taken by another session."""

    limit: int
    by_session: dict[Session, CacheSlot] = field(default_factory=dict)
    by_root: dict[str, list[CacheSlot]] = field(default_factory=dict)
    by_beginning: dict[Beginning, list[CacheSlot]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    slots: int = 0

    def take(self, session: Session) -> CacheSlot | None:
        """A cache_slot for a session that has none; None if all have turns under way."""
        if self.free:
            slot = min(self.free)
            self.free.remove(slot)
        elif self.slots < self.limit:
            slot, self.slots = self.slots, self.slots + 1
        else:
            idle = [cache_slot for cache_slot in self.by_session.values() if cache_slot.row is None]
            if not idle:
                return None
            oldest = min(idle, key=lambda cache_slot: cache_slot.used)
            self.leave(oldest.session)
            return self.take(session)
        cache_slot = CacheSlot(session, slot, beginning=beginning_of(session.ids))
        self.by_session[session] = cache_slot
        self.by_root.setdefault(session.root, []).append(cache_slot)
        self.by_beginning.setdefault(cache_slot.beginning, []).append(cache_slot)
        return cache_slot

    def donor(self, session: Session, length: np.ndarray) -> tuple[CacheSlot | None, int]:
        """The cache_slot whose cache has the longest common prefix with a session, and its length: one of the same
        root, else one of the first that begin alike. ``length`` [slots] counts the tokens in each cache."""
        beginning = beginning_of(session.ids)
        alike = self.by_beginning.get(beginning, [])[:_DONORS] if beginning else []
        for donors in (self.by_root.get(session.root, []), alike):
            widths = [common_prefix(session.ids, donor.session.ids, int(length[donor.slot])) for donor in donors]
            if max(widths, default=0) >= _SHARED_TOKENS:
                best = widths.index(max(widths))
                return donors[best], min(widths[best], len(session.ids) - 1)
        return None, 0

    def leave(self, session: Session) -> None:
        cache_slot = self.by_session.pop(session, None)
        if cache_slot is not None:
            self.free.append(cache_slot.slot)
            _leave(self.by_root, session.root, cache_slot)
            _leave(self.by_beginning, cache_slot.beginning, cache_slot)
        if not self.by_session:  # what comes next is computed as by a new engine: the number of slots changes shapes
            self.free, self.slots = [], 0

    def gather(self) -> list[int]:
        """Renumber the used slots from 0 on; returns their old numbers in the new order."""
        cache_slots = sorted(self.by_session.values(), key=lambda cache_slot: cache_slot.slot)
        order = [cache_slot.slot for cache_slot in cache_slots]
        for slot, cache_slot in enumerate(cache_slots):
            cache_slot.slot = slot
        self.free, self.slots = [], len(cache_slots)
        return order


def check_tokens(ids: Sequence[int], vocabulary: int) -> None:
    """Refuse ids that a model with ``vocabulary`` embeddings has not. A GPU that reads past them fails, and can then
    not be used by this process any more.

    Raises EngineError that names the first.
    """
    if max(ids, default=0) < vocabulary and min(ids, default=0) >= 0:
        return
    wrong = next(token for token in ids if not 0 <= token < vocabulary)
    raise EngineError(
        f"token {wrong} is none of the model's {vocabulary:,}, so it comes from another tokenizer; use the one that "
        "was saved with the model"
    )


def _leave(index: dict[Any, list[CacheSlot]], key: Hashable, cache_slot: CacheSlot) -> None:
    index[key].remove(cache_slot)
    if not index[key]:
        del index[key]


def beginning_of(ids: list[int]) -> Beginning:
    """The beginning of a session with the tokens ``ids``; empty if these are too few to share with other roots."""
    return tuple(ids[:_BEGINNING]) if len(ids) > _BEGINNING else ()


def common_prefix(ids: list[int], others: list[int], limit: int) -> int:
    """Length of the common prefix, at most ``limit``."""
    low, high = 0, min(len(ids), len(others), limit)
    if ids[:high] == others[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ids[:middle] == others[:middle] else (low, middle - 1)
    return low

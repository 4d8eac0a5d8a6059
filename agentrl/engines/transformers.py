"""The embedded engine: a Hugging Face model in this process, with continuous batching.

Rows have lengths of their own. Each step samples one token for every row whose turn is under way. What comes between
two turns is computed in one chunk, and the cache of a row stays in its slot while its tool runs, so no token is
computed twice. Tokens that sessions of one root share, such as the prompt of a group, are computed once and copied.

Steps run on the thread of the event loop, one after the other, and other tasks run between them.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from agentrl.engines.base import EngineError, Sampling, Session, Turn, Weights
from agentrl.engines.decoding import CacheSlot, CacheSlots, DecodingBatch, Row, beginning_of, check_tokens
from agentrl.engines.kv_cache import KVCache
from agentrl.engines.quantized import restore, without_quantized
from agentrl.engines.routes import RouteShape
from agentrl.engines.weights import check_copy, module_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOVE_BELOW = 0.7  # below this share of used slots, moving the rows together is worth its time
_WAIT_SHARE = 8  # one chunk pass for this share of the sampling rows: many small passes cost more
_WAIT_STEPS = 8  # and no row waits for more steps than this
_ONE_THREAD = 2_000_000
"""Parameters up to which passes of a step take one thread: a second one saves no time (measured at .07 to 1.1 M, with
256 rows; at 3.4 M it saves a quarter), and costs as much of a processor as the first."""
_CHUNK_TOKENS = 8192  # tokens of one pass over chunks
_ALONG_TOKENS = 128  # so few tokens need no pass of their own, but go along with the next step
_ALONG_CELLS = 32_768  # places of the cache that are read in such a step: each of its tokens reads a copy
_NO_MEMORY = "; set engine.rows lower, or run fewer stages beside each other on this GPU (execution.gpus, --jobs)"

Schedule = Literal["exact", "free"]


@dataclass
class EngineCounts:
    """What an engine has done. ``computed`` counts tokens that went through the model, ``sampled`` those drawn."""

    sampled: int = 0
    computed: int = 0
    copied: int = 0
    steps: int = 0


class TransformersEngine:
    """Samples with ``model`` on the device it is on. ``max_rows`` bounds the slots, and with them the memory.

    ``schedule`` exact waits before each step until every open session has asked for its next turn or ended: the same
    seeds give the same tokens, to the bit. ``free`` does not wait; float32 sums may then differ in their last bit,
    since which rows share a step depends on time. ``autocast`` gives the context of forward passes. Turns have routes
    if their ``shape`` is given.
    """

    exact = True

    def __init__(
        self,
        model: "PreTrainedModel",
        max_rows: int = 256,
        schedule: Schedule = "exact",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        shape: RouteShape | None = None,
    ) -> None:
        self.model = model
        self.reproducible = schedule == "exact"
        self.version = 0
        self.work = EngineCounts()
        self._autocast = autocast
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary = int(embeddings.weight.shape[0])
        self._one_thread = model.num_parameters() <= _ONE_THREAD
        self._cache = KVCache(model, shape)
        self._decoding = DecodingBatch()
        self._cache_slots = CacheSlots(max_rows)
        self._waiting: list[Row] = []
        self._outside: set[Session] = set()
        self._names = itertools.count()
        self._pump: asyncio.Task[None] | None = None
        self._all_back = asyncio.Event()
        self._held = 0

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        """See :class:`agentrl.engines.base.Engine`."""
        session = Session(key=key, root=root or f"#{next(self._names)}", on_end=self._end, on_fork=self._forked)
        self._outside.add(session)
        return session

    async def turn(
        self,
        session: Session,
        sampling: Sampling,
        *,
        stop: Sequence[int],
        seed: int,
        deadline: int = 0,
        time_limit: float | None = None,
    ) -> Turn:
        """See :class:`agentrl.engines.base.Engine`. Raises EngineError if the model fails, or has not all tokens."""
        check_tokens(session.ids, self._vocabulary)
        limit = min(sampling.max_turn_tokens, sampling.max_tokens - len(session.ids))
        if limit < 1:
            return Turn([], [], [], "length")
        expires = math.inf if time_limit is None else time.monotonic() + time_limit
        done: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        row = Row(session, sampling, tuple(stop), limit, seed, deadline, expires, done)
        self._waiting.append(row)
        cache_slot = self._cache_slots.by_session.get(session)
        if cache_slot is not None:
            cache_slot.row = row
        self._returned(session)
        if self._pump is None or self._pump.done():
            self._all_back = asyncio.Event()
            self._pump = asyncio.create_task(self._run())
        try:
            return await done
        except asyncio.CancelledError:
            self._withdraw(row)
            raise

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        """See :class:`agentrl.engines.base.Engine`. Raises EngineError if the model has not all tokens."""
        check_tokens(ids, self._vocabulary)
        tokens = torch.tensor([list(ids)], device=self.model.device)
        with self._passes():
            logits = self.model(input_ids=tokens, use_cache=False, logits_to_keep=len(ids) - start + 1).logits[0, :-1]
            chosen = logits.float().log_softmax(-1).gather(-1, tokens[0, start:, None])
        return [float(value) for value in chosen[:, 0].tolist()]

    async def load(self, weights: Weights) -> None:
        """See :class:`agentrl.engines.base.Engine`. All caches are computed again with the new weights, so that later
        tokens see these alone. The source may be this engine's own model, if it was changed in place. Raises
        EngineError if the model gives other log-probs with them than the source does."""
        if weights.source is not self.model:
            source = module_of(weights.source, self.model.dtype)
            restore(self.model, without_quantized(source, source.state_dict()))
            check_copy(self.model, source, weights.version)
        for cache_slot in list(self._cache_slots.by_session.values()):
            if cache_slot.row is not None and cache_slot.row not in self._waiting:
                self._decoding.suspend(cache_slot.slot, self.version)
                self._waiting.append(cache_slot.row)
            self._cache_slots.leave(cache_slot.session)  # so that what rows share is computed once again
        self._cache.renew()
        self.version = weights.version

    async def close(self) -> None:
        """See :class:`agentrl.engines.base.Engine`."""
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self._fail(EngineError("the engine was closed"))
        self._outside.clear()
        self._cache.clear()

    # -- which sessions are outside: in a tool, or about to begin

    def _returned(self, session: Session) -> None:
        self._outside.discard(session)
        if not self._outside:
            self._all_back.set()

    def _end(self, session: Session) -> None:
        cache_slot = self._cache_slots.by_session.get(session)
        if cache_slot is not None:
            self._decoding.length[cache_slot.slot] = 0
            self._cache_slots.leave(session)
        self._returned(session)

    def _forked(self, parent: Session, child: Session) -> None:
        self._outside.add(child)

    def _withdraw(self, row: Row) -> None:
        """Forget a turn that nobody waits for any more."""
        cache_slot = self._cache_slots.by_session.get(row.session)
        if cache_slot is not None and cache_slot.row is row:
            if row not in self._waiting:
                self._decoding.suspend(cache_slot.slot, self.version)
                known = min(int(self._decoding.length[cache_slot.slot]), len(row.session.ids))
                self._decoding.length[cache_slot.slot] = known
            cache_slot.row = None
        if row in self._waiting:
            self._waiting.remove(row)
        self._outside.add(row.session)

    # -- the loop

    async def _run(self) -> None:
        """Step until no turn is under way."""
        was_training, threads = self.model.training, torch.get_num_threads()
        self.model.eval()
        if self._one_thread:
            torch.set_num_threads(1)  # of this thread of the process, and of new ones; slow, so not at each step
        try:
            while self._waiting or self._decoding.rows:
                while self.reproducible and self._outside:
                    self._all_back.clear()
                    await self._all_back.wait()
                with self._passes():
                    self._step()
                await asyncio.sleep(0)
        except Exception as error:
            advice = _NO_MEMORY if isinstance(error, torch.OutOfMemoryError) else ""
            self._fail(EngineError(f"the embedded engine failed: {type(error).__name__}: {error}{advice}"), error)
        finally:
            self.model.train(was_training)
            if self._one_thread:
                torch.set_num_threads(threads)

    @contextmanager
    def _passes(self) -> Iterator[None]:
        with torch.inference_mode(), self._autocast():
            yield

    def _step(self) -> None:
        now = time.monotonic()
        self._cut(row for row in (*self._waiting, *self._decoding.rows.values()) if row.expires <= now)
        self._gather()
        self._held += 1
        enough = max(1, len(self._decoding.rows) // _WAIT_SHARE)
        if self._waiting and (self._small() or len(self._waiting) >= enough or self._held >= _WAIT_STEPS):
            self._held = 0
            while self._admit():
                pass
        if self._decoding.rows:
            self.work.steps += 1
            self.work.computed += len(self._decoding.rows) + sum(map(len, self._decoding.ahead.values()))
            self.work.sampled += len(self._decoding.rows)
            for slot in self._decoding.step(self._cache, self._cache_slots.slots):
                self._finish(slot)

    def _finish(self, slot: int, cut: bool = False) -> None:
        """Resolve the turn that a slot samples."""
        row = self._decoding.suspend(slot, self.version)
        self._resolve(row, "cut" if cut else "stop" if row.ids and row.ids[-1] in row.stop else "length")

    def _resolve(self, row: Row, stop: Literal["stop", "length", "cut"]) -> None:
        cache_slot, routes = self._cache_slots.by_session.get(row.session), None
        if cache_slot is not None:
            cache_slot.row, cache_slot.used = None, self.work.steps
            computed = min(int(self._decoding.length[cache_slot.slot]), len(row.session.ids) + len(row.ids) - 1)
            routes = self._cache.routes(cache_slot.slot, row.session.routed, computed)
        self._outside.add(row.session)
        if not row.done.done():
            row.done.set_result(Turn(row.ids, row.logprobs, row.spans, stop, routes=routes))

    def _cut(self, rows: Iterable[Row]) -> None:
        for row in list(rows):
            if row in self._waiting:
                self._waiting.remove(row)
                self._resolve(row, "cut")
            else:
                self._finish(self._cache_slots.by_session[row.session].slot, cut=True)

    def _fail(self, error: EngineError, cause: BaseException | None = None) -> None:
        """Give an error to all who wait, and start from nothing."""
        error.__cause__ = cause
        under_way = [
            cache_slot.row for cache_slot in self._cache_slots.by_session.values() if cache_slot.row is not None
        ]
        for row in (*self._waiting, *under_way):
            if not row.done.done():
                row.done.set_exception(error)
        self._waiting, self._decoding, self._cache_slots = [], DecodingBatch(), CacheSlots(self._cache_slots.limit)
        self._cache.clear()

    def _gather(self) -> None:
        """Move rows together if many slots are unused."""
        cache_slots = self._cache_slots
        if cache_slots.slots > 8 and len(cache_slots.by_session) < _MOVE_BELOW * cache_slots.slots:
            order = cache_slots.gather()
            self._decoding.keep(order)
            self._cache.keep(order) if order else self._cache.clear()

    # -- chunks

    def _admit(self) -> bool:
        """Compute what waiting rows have that the cache has not, except for the last token of each, and begin to
        sample. Returns whether rows were left that can share what was computed now."""
        self._waiting.sort(key=lambda row: row.session.key if self.reproducible else (row.deadline,))
        begun: list[CacheSlot] = []
        left: list[Row] = []
        leading: set[Hashable] = set()  # roots and beginnings that a row of this round computes for those of the next
        copies: list[tuple[int, int, int]] = []
        shared = full = False
        for row in self._waiting:
            session = row.session
            cache_slot = self._cache_slots.by_session.get(session)
            if cache_slot is None:
                donor, width = self._cache_slots.donor(session, self._decoding.length)
                of_root = donor is not None and donor.session.root == session.root
                beginning = beginning_of(session.ids)
                led = (session.root in leading and not of_root) or (donor is None and beginning in leading)
                cache_slot = None if full or led else self._cache_slots.take(session)
                shared |= led
                if cache_slot is None:
                    full |= not led
                    left.append(row)
                    continue
                self._decoding.reserve(self._cache_slots.slots)
                self._decoding.length[cache_slot.slot] = 0
                if not of_root:
                    leading.add(session.root)
                if donor is not None:
                    copies.append((donor.slot, cache_slot.slot, width))
                elif beginning:
                    leading.add(beginning)
            cache_slot.row = row
            begun.append(cache_slot)
        self._waiting = left
        if copies:
            self._copy(copies)
        return self._begin(begun) and shared

    def _small(self) -> bool:
        """Whether what waits can go along with the next step."""
        if len(self._waiting) > _ALONG_TOKENS:
            return False
        sizes = [len(row.session.ids) + len(row.ids) for row in self._waiting]
        known = [self._cached(row.session) for row in self._waiting]
        return self._along(sum(sizes) - sum(known), max(sizes))

    def _cached(self, session: Session) -> int:
        cache_slot = self._cache_slots.by_session.get(session)
        return int(self._decoding.length[cache_slot.slot]) if cache_slot else 0

    def _along(self, tokens: int, width: int) -> bool:
        """Whether so many tokens of rows that are at most so long can go along with a step."""
        sampled = list(self._decoding.rows)
        width = max(width, int(self._decoding.length[sampled].max(initial=0)))
        return tokens <= _ALONG_TOKENS and (tokens + len(sampled)) * width <= _ALONG_CELLS

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        sources, targets, widths = map(list, zip(*copies, strict=True))
        self._cache.copy(sources, targets, max(widths))
        self._decoding.length[targets] = widths
        self.work.copied += sum(widths)

    def _begin(self, cache_slots: list[CacheSlot]) -> bool:
        """Begin to sample. Chunks go along with the next step if they are short together; returns whether they did
        not, so that they are computed now."""
        chunks: list[tuple[int, int, int, list[int]]] = []
        for cache_slot in cache_slots:
            assert cache_slot.row is not None
            tokens = [*cache_slot.session.ids, *cache_slot.row.ids]
            start = min(int(self._decoding.length[cache_slot.slot]), len(tokens) - 1)
            self._decoding.length[cache_slot.slot], self._decoding.last[cache_slot.slot] = start, tokens[-1]
            chunks.append((len(tokens) - 1 - start, start, cache_slot.slot, tokens[start:-1]))
        total = sum(size + 1 for size, _, _, _ in chunks)
        along = self._along(total, max((start + size + 1 for size, start, _, _ in chunks), default=0))
        if not along:
            self._compute([chunk for chunk in chunks if chunk[0]])
        for cache_slot, (_, _, _, tokens) in zip(cache_slots, chunks, strict=True):
            assert cache_slot.row is not None
            self._decoding.begin(cache_slot.slot, cache_slot.row, tokens if along else [])
        return not along

    def _compute(self, chunks: list[tuple[int, int, int, list[int]]]) -> None:
        """Chunks of similar length share a pass."""
        chunks.sort(key=lambda chunk: (chunk[0], chunk[2]))
        while chunks:
            rows = max(1, _CHUNK_TOKENS // chunks[-1][0])
            part, chunks = chunks[-rows:], chunks[:-rows]
            self._pass(part)
            for size, start, slot, _ in part:
                self._decoding.length[slot] = start + size

    def _pass(self, part: list[tuple[int, int, int, list[int]]]) -> None:
        longest, device = part[-1][0], self.model.device
        # Padding comes after a chunk, at the place of the row's next token, which overwrites it before it is seen.
        ids = torch.tensor([tokens + [0] * (longest - size) for size, _, _, tokens in part], device=device)
        starts = torch.tensor([start for _, start, _, _ in part], device=device)
        sizes = torch.tensor([size for size, _, _, _ in part], device=device)
        places = torch.minimum(torch.arange(longest, device=device), sizes[:, None])
        slots = torch.tensor([slot for _, _, slot, _ in part], device=device)
        width = max(start + size for size, start, _, _ in part) + 1
        self._cache.forward(slots, ids, starts[:, None] + places, width)
        self.work.computed += sum(size for size, _, _, _ in part)

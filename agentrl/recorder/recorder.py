"""Answers requests for turns out of an engine: which conversation a request goes on with, and its next turn."""

import asyncio
import contextlib
import hmac
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from agentrl.engines.base import EngineError, Sampling, SchemaError, Session, TurnClock
from agentrl.engines.seeds import stream
from agentrl.recorder.episode import About, PostedReward, RecordedEpisode
from agentrl.recorder.episodes import KEY, REMEMBERED, Episodes
from agentrl.recorder.reminders import takes_system_inside, with_reminders
from agentrl.recorder.sampler import Sampler
from agentrl.recorder.tree import SampledTurn, beginning, digests, heard_ids, match, with_own_ids
from agentrl.recorder.turns import Following, Turning, answered, differences, sampled_turn, sampling_json
from agentrl.recorder.wire import Answered, ApiError, OverflowingError, Reply, TurnRequest, check_model
from agentrl.schemas.trajectory import Message

History = Literal["keep", "template"]
"""What the policy reads of its earlier turns: their sampled tokens, or what its chat template makes of them."""

HISTORIES: tuple[str, ...] = get_args(History)

GRACE_S = 15.0
"""How long a turn goes on that no client waits for: one whose request timed out comes back within this time."""

TOLD_S = 2.0
"""How long a reward waits for an answer of its episode that is being sent."""

REFUSED_S = 2.0
"""How long the stream of an answer by a JSON schema begins later, so that a schema that the engine refuses is an
error of status 400."""

_TEND_S = 1.0
_LONG = 1000  # tokens of a turn that is written in a thread: a millisecond


@dataclass
class RecorderSettings:
    """``history``: see :data:`History`. ``fixed_temperature`` takes the place of those that requests ask for;
    ``fixed_sampling`` says that they choose nothing but fewer tokens.
    ``any_model`` answers requests for models of other names too. Episodes without a request for ``idle_s`` seconds are
    closed unscored. Without ``api_key`` everybody who reaches the server may ask. Answers are kept to the JSON schemas
    of requests if ``constrain``."""

    history: History = "keep"
    fixed_temperature: float | None = None
    any_model: bool = False
    idle_s: float = 3600.0
    api_key: str | None = None
    fixed_sampling: bool = False
    constrain: bool = True


@dataclass
class Recorder:
    """Answers requests by ``sampler``, as the model of that name, and records them in ``episodes``. Use :meth:`start`
    and :meth:`stop` on the event loop that serves."""

    sampler: Sampler
    model: str
    episodes: Episodes
    settings: RecorderSettings = field(default_factory=RecorderSettings)

    def __post_init__(self) -> None:
        self._replies: OrderedDict[tuple[str, str], Turning] = OrderedDict()
        self._under_way: set[Turning] = set()
        self._awaited: set[Turning] = set()
        """Turns that a client waits for, or is being told."""
        self._background: set[asyncio.Task[None]] = set()
        codec = self.sampler.codec
        self._takes_system_inside = codec is None or takes_system_inside(codec)

    async def start(self) -> list[str]:
        """Begin. Returns what is to be said about episodes that go on."""
        notes = await self.episodes.start()
        self._spawn(self._tend())
        return notes

    async def stop(self) -> int:
        """End what is under way, and store what is finished. Returns the number of episodes that stay in their
        files."""
        await self.cancel()
        return await self.episodes.stop()

    async def cancel(self) -> None:
        """End what is under way."""
        tasks = [turning.task for turning in self._under_way if turning.task] + list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(_TEND_S)
            try:
                self.episodes.close_idle(self.settings.idle_s, {turning.episode for turning in self._under_way})
                await self.episodes.flush()
            except Exception as error:  # it goes on: no row would be stored any more
                warnings.warn(f"idle or closed episodes cannot be stored yet: {error}", stacklevel=1)
            for scope in [scope for scope, reply in self._replies.items() if reply.episode.closed]:
                del self._replies[scope]

    async def reward(self, episode: RecordedEpisode, outcome: PostedReward) -> list[str]:
        """Close an episode. Turns under way end, and one that is being told gets the time for it. Returns the ids of
        its rows. Raises ApiError if it was closed meanwhile."""
        ends = time.monotonic() + TOLD_S
        while time.monotonic() < ends and any(
            turning.episode is episode and turning.turn and not turning.turn.delivered for turning in self._awaited
        ):
            await asyncio.sleep(0.01)
        _check_open(episode)
        ids = self.episodes.close(episode, outcome, "rewarded")
        for turning in [turning for turning in self._under_way if turning.episode is episode]:
            if turning.task:
                turning.task.cancel()
        return ids

    # -- requests

    def place_of(self, key: str | None, episode: str | None) -> RecordedEpisode | None:
        """See :class:`agentrl.recorder.wire.Answerer`; None is a conversation of an episode that nobody has opened."""
        own = self.episodes.by_key.get(key or "")
        if self.settings.api_key is None:
            any_key = own is None and not (key or "").startswith(KEY)
        else:
            any_key = hmac.compare_digest((key or "").encode(), self.settings.api_key.encode())
        named = self.episodes.opened.get(episode) or self.episodes.closed.get(episode) if episode else own
        if not any_key and (own is None or own is not named):
            raise ApiError(401, "the api key is neither the server's nor that of this episode", "invalid_api_key")
        if named is None and episode is not None:
            raise ApiError(404, f"there is no episode {episode!r}", "episode_not_found")
        if named is not None:
            _check_open(named)
        return named

    async def ask(self, addressed: RecordedEpisode | None, asked: TurnRequest, digest: str, again: bool) -> Turning:
        """See :class:`agentrl.recorder.wire.Answerer`."""
        if not self.settings.any_model:
            check_model(asked.model, self.model)
        if addressed is not None:
            _check_open(addressed)  # it may have been closed while the body arrived
        scope = (addressed.name if addressed else asked.caller.session, digest)
        known = self._replies.get(scope)
        if known is not None and self._is_again(known, scope, asked, again):
            known.waiting += 1
            self._awaited.add(known)
            return known
        episode, following = self._next(addressed, self._readable(asked))
        reply = Turning(episode, episode.turns)
        episode.turns += 1
        episode.last = time.time()
        reply.waiting = 1
        reply.begin(asyncio.create_task(self._turn(reply, asked, following)))
        self._under_way.add(reply)
        self._awaited.add(reply)
        assert reply.task is not None
        reply.task.add_done_callback(lambda _: self._done(reply))
        self._replies[scope] = reply
        if len(self._replies) > REMEMBERED:
            self._replies.popitem(last=False)
        return reply

    def _is_again(self, known: Turning, scope: tuple[str, str], asked: TurnRequest, again: bool) -> bool:
        """Whether an equal request is the same one, sent again, and not another sample of the same turn. Clients that
        count their retries say so. Others get the answer that they have not received: one that they have left, or, of
        programs that say whose session it is, one that is still under way."""
        if known.task is None or _failed(known.task) or known.episode.closed:
            return False
        if again:
            return True
        undelivered = known.turn is None or not known.turn.delivered
        return bool(scope[0]) and undelivered and (not known.waiting or bool(asked.caller.session))

    def _readable(self, asked: TurnRequest) -> TurnRequest:
        """A request whose messages the chat template takes."""
        if self._takes_system_inside:
            return asked
        return replace(asked, messages=with_reminders(asked.messages, first=not asked.instructions))

    async def count(self, addressed: RecordedEpisode | None, asked: TurnRequest) -> int:
        """See :class:`agentrl.recorder.wire.Answerer`. What was sampled counts as sampled, as in the turn itself."""
        asked = self._readable(asked)
        following = self._following(addressed, asked)
        before, _, new = await self._heard(Counter(), asked, following)
        return len(before.ids if before else ()) + len(new)

    def _done(self, reply: Turning) -> None:
        self._under_way.discard(reply)
        if reply.task is not None and _failed(reply.task):  # which also marks its error as seen
            reply.episode.counts["failed_turns"] += 1

    def _next(self, addressed: RecordedEpisode | None, asked: TurnRequest) -> tuple[RecordedEpisode, Following]:
        """The episode of a request, a new one if it goes on with none, and what its turn follows."""
        following = self._following(addressed, asked)
        before = following.before
        episode = addressed or (self.episodes.of_turn[before] if before else self.episodes.open(About()))
        return episode, following

    def _following(self, addressed: RecordedEpisode | None, asked: TurnRequest) -> Following:
        named = self._named(addressed, asked.previous) if asked.previous else None
        conversation = asked.conversation(named.messages(instructions=False) if named else ())
        if asked.named:
            with contextlib.suppress(ApiError):  # another server's, or of another conversation: it names nothing here
                named = self._named(addressed, asked.named)
        reached = digests(conversation, beginning(asked.tools))
        turns = addressed.tree.by_digest if addressed else self.episodes.unnamed
        before, size = match(conversation, reached, turns, named)
        return Following(before, conversation[size:], conversation, reached[-1])

    def _named(self, addressed: RecordedEpisode | None, response: str) -> SampledTurn:
        name, _, number = response.removeprefix("resp_").rpartition("-")
        episode = self.episodes.opened.get(name)
        turns = (
            episode.tree.turns if episode and (addressed is episode or (addressed is None and not episode.key)) else []
        )
        for turn in turns:
            if str(turn.number) == number:
                return turn
        raise ApiError(404, f"there is no response {response!r}", "previous_response_not_found", "previous_response_id")

    def received(self, reply: Reply) -> None:
        """See :class:`agentrl.recorder.wire.Answerer`. A turn is part of a row only if this was recorded of it, or if
        another follows it: a server that is killed between a turn's line and its answer leaves it out."""
        assert isinstance(reply, Turning)
        turn = reply.turn
        if turn is None or turn.delivered or reply.episode.closed:
            return
        try:
            reply.episode.write({"delivered": turn.number, "is": True})
        except OSError as error:
            warnings.warn(f"the recorder cannot record that {reply.name} was received: {error}", stacklevel=1)
            return
        turn.delivered = True

    async def left(self, reply: Reply) -> None:
        """See :class:`agentrl.recorder.wire.Answerer`. A turn that nobody waits for is cancelled after a while, since
        the client may come back for it."""
        assert isinstance(reply, Turning)
        assert reply.task is not None
        reply.waiting -= 1
        if not reply.waiting:
            self._awaited.discard(reply)
            if not reply.task.done():
                self._spawn(self._cancelled_later(reply))

    async def _cancelled_later(self, reply: Turning) -> None:
        await asyncio.sleep(GRACE_S)
        if not reply.waiting and reply.task and not reply.task.done():
            reply.episode.counts["abandoned"] += 1
            reply.task.cancel()

    # -- a turn

    async def _turn(self, reply: Turning, asked: TurnRequest, following: Following) -> Answered:
        episode, before = reply.episode, following.before
        before, rest, new = await self._heard(episode.counts, asked, following)
        ids = before.ids if before else []
        start = len(ids) + len(new)
        sampling = self._sampling(asked, start)
        schema = self._schema(asked, ids, new)
        if schema is None:
            reply.encoded(start)
        else:
            asyncio.get_running_loop().call_later(REFUSED_S, reply.encoded, start)
        session = self._session(reply, before, ids)
        clock = TurnClock(session)
        try:
            session.observe(new)
            if self.sampler.policy is None:
                session.messages, session.tools = with_own_ids(following.conversation, before), asked.tools
            seed = stream(self.sampler.seed, "recorded", episode.number, reply.number, asked.seed or 0)
            tell = reply.add if asked.stream else None
            turn, parsed = await self.sampler.turn(session, sampling, seed, asked.tools, asked.stop, tell, schema)
            told = sampling_json(sampling, self.sampler.sampling.max_turn_tokens)
            made = sampled_turn(reply, asked, following.reached, before, (rest, new), (turn, parsed.message), told)
            made.constrained, made.seconds = schema is not None, clock.seconds()
            episode.counts.update(differences(asked, made.message, parsed.error, self.model))
            await self._written(episode, made)
        except EngineError as error:
            session.end()
            raise _failure(asked, error) from error
        except OSError as error:
            session.end()
            raise ApiError(500, f"the turn cannot be recorded: {error}", "not_recorded") from error
        except BaseException:
            session.end()
            raise
        stopped_by = None
        if len(session.ids) == start + len(turn.ids):
            made.session = session
        else:  # the turn ends before a stop string, which the session has
            assert self.sampler.policy is not None
            text = self.sampler.policy.tokenizer.decode(session.ids[start:])
            stopped_by = next((word for word in asked.stop if word in text), None)
            session.end()
        episode.tree.add(made)
        self.episodes.add(episode, made)
        episode.last = time.time()
        reply.turn = made
        return answered(reply, asked, made, start, stopped_by)

    async def _written(self, episode: RecordedEpisode, made: SampledTurn) -> None:
        """Write a turn. Others would wait for a long one, and a thread costs more than a short one."""
        if len(made.heard_ids) + len(made.turn.ids) > _LONG:
            await asyncio.to_thread(episode.sampled, made)
        else:
            episode.sampled(made)

    def _session(self, reply: Turning, before: SampledTurn | None, ids: list[int]) -> Session:
        """A session with these tokens: the one that ended with the turn before, unless another turn has taken it."""
        if before is not None and before.session is not None:
            session, before.session = before.session, None
            return session
        session = self.sampler.engine.open(
            (reply.episode.number, reply.number), root=reply.episode.about.group_id or reply.episode.name
        )
        session.observe(ids)
        return session

    async def _heard(
        self, counts: Counter[str], asked: TurnRequest, following: Following
    ) -> tuple[SampledTurn | None, list[Message], list[int]]:
        """The sampled turn that the next one goes on from, the new messages, and their tokens. If the dialect cannot go
        on from it, or the chat template shows earlier turns differently and is asked to, there is none."""
        codec, tools, conversation = self.sampler.codec, asked.tools, following.conversation
        before, rest = following.before, with_own_ids(following.rest, following.before)
        if codec is None:
            return before, rest, []
        if before is not None and self.settings.history == "keep":
            try:
                return before, rest, await self.sampler.encoded(rest, lambda: heard_ids(codec, before, rest, tools))
            except ValueError:
                counts["segments_by_dialect"] += 1
        whole = with_own_ids(conversation, before)
        try:
            ids = await self.sampler.encoded(whole, lambda: codec.opening(whole, tools))
        except ValueError as error:
            raise ApiError(400, str(error), "conversation_refused", "messages") from error
        if before is not None and ids[: len(before.ids)] == before.ids:
            return before, rest, ids[len(before.ids) :]
        return None, whole, ids

    def _schema(self, asked: TurnRequest, ids: list[int], new: list[int]) -> str | None:
        """The JSON schema that a turn after ``ids`` and ``new`` is kept to. There is none where tools may be called: it
        would be in their way."""
        calls = asked.tools != "[]" and asked.tool_choice != "none"
        if asked.schema is None or calls or not self.settings.constrain:
            return None
        return asked.schema.text if self.sampler.keeps_schemas([*ids, *new]) else None

    def _sampling(self, asked: TurnRequest, prompt: int) -> Sampling:
        """How this turn is sampled. Raises ApiError if there is no room for it."""
        own = self.sampler.sampling
        if prompt >= own.max_tokens:
            raise OverflowingError(self.model, prompt, own.max_tokens)
        fixed = self.settings.fixed_temperature
        given = {
            "temperature": fixed if fixed is not None else asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "max_turn_tokens": min(asked.max_tokens, own.max_turn_tokens) if asked.max_tokens else None,
        }
        if self.settings.fixed_sampling:
            given = {"max_turn_tokens": given["max_turn_tokens"]}
        changes = {name: value for name, value in given.items() if value is not None}
        return own.model_copy(update=changes) if changes else own


def _check_open(episode: RecordedEpisode) -> None:
    """Raises ApiError if an episode is closed."""
    if episode.closed:
        raise ApiError(409, f"episode {episode.name} is closed: {episode.why}", "episode_closed")


def _failure(asked: TurnRequest, error: EngineError) -> ApiError:
    """What a client is told of an engine's error."""
    if isinstance(error, SchemaError) and asked.schema is not None:
        field = asked.schema.field
        return ApiError(400, f"{field}: {error}", "unsupported_or_invalid", field)
    return ApiError(503, f"the engine failed: {error}", "engine_failed")


def _failed(task: "asyncio.Task[Answered]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)

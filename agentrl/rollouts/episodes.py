"""One episode: a coroutine in which a policy and an environment take turns, until one of them or a limit ends it."""

import asyncio
import math
import time
import traceback
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

from agentrl.chat.codec import ChatCodec, spanned
from agentrl.engines.base import Engine, EngineError, Session, Turn, TurnClock, TurnError
from agentrl.engines.seeds import stream
from agentrl.environments.adapted import AdaptedEpisode
from agentrl.environments.base import FORMAT_ERROR, MAX_STEPS, Environment, Episode, Score, Step, is_cut, tool_message
from agentrl.environments.forks import DivergedError, rebuild
from agentrl.environments.scripted import adviser
from agentrl.rollouts.acting import Act
from agentrl.rollouts.attempts import Attempt
from agentrl.rollouts.compression import window
from agentrl.rollouts.exploring import RESAMPLED, uncertainty
from agentrl.rollouts.outcomes import REPLAY_DIFFERS, tags_of
from agentrl.rollouts.rationalize import with_hint
from agentrl.rollouts.segments import SUMMARY, Segment
from agentrl.schemas.trajectory import InfrastructureError, Message, Role, Termination

DIVERGED = "diverged"
"""Tag of an episode that could not be continued: its environment answered otherwise than before."""

_TRACEBACK_CHARS = 2000
Answer = TypeVar("Answer")


class _EnvironmentError(Exception):
    """The environment failed; the cause says how."""


@dataclass
class EpisodeRun:
    """An episode under way, and what came of it. ``steps`` counts turns, those of a prefix too, and ``tool_calls`` the
    calls after it. ``error`` is the traceback of an environment that failed, or what the engine said of a request that
    did. ``earlier`` are the segments before the one that ``session`` is of."""

    act: Act
    environment: Environment
    attempt: Attempt
    session: Session
    seed: int
    deadline: int = 0
    steps: int = 0
    tool_calls: int = 0
    info: Counter[str] = field(default_factory=Counter)
    termination: Termination = Termination.MAX_STEPS
    score: Score | None = None
    error: str = ""
    lasting: bool = False  # whether another attempt would fail in the same way
    diverged: bool = False
    ends: float = 0.0  # when the episode has taken its time, by the monotonic clock
    advised: list[tuple[int, int]] = field(default_factory=list)  # the tokens of turns that the episode advised
    replaced: tuple[int, int] | None = None  # the tokens of the turn that stands in the place of the policy's
    differed: str = ""  # what a replay was answered otherwise at first
    unreadable: str = ""  # why the calls of the last turn could not be read
    uncertain: float | None = None  # how uncertain the policy was in its last turn
    earlier: list[Segment] = field(default_factory=list)
    opening: list[Message] = field(default_factory=list)
    left_out: list[list[Message]] = field(default_factory=list)
    """Steps that do not stand in the context any more."""

    @property
    def messages(self) -> list[Message]:
        return self.session.messages

    @property
    def segments(self) -> list[Segment]:
        """All segments; there is one unless the context was compressed."""
        counts = (self._turns(), self.tool_calls, self.info["tool_errors"])
        before = [(segment.steps, segment.tool_calls, segment.tool_errors) for segment in self.earlier]
        return [*self.earlier, Segment(self.session, *(now - sum(past) for now, *past in zip(counts, *before)))]  # noqa: B905

    async def run(self) -> None:
        """Play the episode to its end and score it. Raises EngineError if the engine fails for others too. Nothing of
        the environment is raised."""
        episode: Episode | None = None
        self.ends = time.monotonic() + self.act.limits.episode_s
        try:
            episode = await self._begun()
            self.session.tools = episode.tools
            await self._play(episode)
            if self.termination is not Termination.CANCELLED:
                self.score = await self._of_environment(episode.score())
        except _EnvironmentError as failure:
            self._fail(failure.__cause__)
        except TurnError as failure:
            self.termination, self.error, self.lasting = Termination.INFRA_ERROR, str(failure), failure.lasting
        finally:
            if episode is not None:
                await self._close(episode)

    async def _begun(self) -> Episode:
        """The episode, at its beginning or in the state after the prefix."""
        task, prefix = self.attempt.task, self.attempt.prefix
        if prefix is None:
            return await self._of_environment(self.environment.reset(task))
        self.session.observe(prefix.ids)
        self.messages.extend(prefix.messages)
        self.steps = prefix.turns
        messages = prefix.plain(task, self.attempt.hint)
        differs = self._differs if self.attempt.goes_on else None
        again = rebuild(self.environment, task, messages, differs=differs)
        try:
            return await self._of_environment(again, 1 + prefix.turns)
        except _EnvironmentError as failure:
            self.diverged = self.lasting = isinstance(failure.__cause__, DivergedError)
            raise

    def _differs(self, what: str) -> None:
        self.info[REPLAY_DIFFERS] += 1
        self.differed = self.differed or what

    def _open(self, episode: Episode) -> None:
        """Put the opening into the session."""
        opening = list(episode.opening)
        if self.attempt.hint:
            opening = with_hint(opening, self.attempt.task, self.attempt.hint)
        self.opening = opening
        self._heard(opening, self.act.opening(opening, episode.tools))

    async def _play(self, episode: Episode) -> None:
        codec = self.act.codec
        if self.attempt.prefix is None:
            self._open(episode)
        allowed: int = self.act.limits.max_steps or getattr(self.environment, "max_steps", None) or MAX_STEPS
        while True:
            message = await self._next(episode)
            if message is None:
                return
            if self.steps >= allowed and (message.tool_calls or self.unreadable):
                self.termination = Termination.MAX_STEPS
                return
            step = self._refused() if self.unreadable else await self._step(episode, message)
            self.session.seconds |= step.known(len(self.messages))
            if step.reward is not None:
                self.messages[-1] = message.model_copy(update={"reward": step.reward})
            ended = step.done or not step.messages
            if ended or self.steps >= allowed:
                self.termination = Termination.ANSWERED if ended else Termination.MAX_STEPS
                self.messages.extend(step.messages)
                return
            start = self.messages[-1].token_start or 0
            before, turn_ids = self.session.ids[:start], self.session.ids[start:]
            ids = codec.observations(step.messages, before, turn_ids, self.session.tools) if codec else []
            compress = self.act.sampling.compress
            if compress and len(self.session.ids) + len(ids) > compress.limit:
                if not await self._compressed(step.messages, ids):
                    return
                continue
            if codec and len(self.session.ids) + len(ids) >= self.act.sampling.max_tokens:
                self.termination = Termination.MAX_TOKENS
                self.messages.extend(step.messages)
                return
            self._heard(step.messages, ids)
            if self._turns() == self.attempt.turns:
                self.termination = Termination.CANCELLED
                return

    def _turns(self) -> int:
        """Turns of the attempt's own."""
        return self.steps - (self.attempt.prefix.turns if self.attempt.prefix else 0)

    async def _compressed(self, answers: list[Message], ids: list[int]) -> bool:
        """Go on in a new segment after these ``answers``, whose tokens are ``ids``; false if the episode ends."""
        compress, old = self.act.sampling.compress, self.session
        assert compress is not None
        known = old.ids + ids
        shown = [*old.messages, *spanned(answers, len(old.ids), len(known))][len(self.opening) :]
        summary = ""
        if compress.by == "summary" and len(self.earlier) + 1 < compress.segments:
            text = await self._summary(answers, compress.ask)
            if text is None:
                return False
            summary = text
        else:
            old.messages.extend(answers)
        go_on = window(
            self.opening, self.left_out, shown, known, compress, summary,
            lambda opening: self.act.opening(opening, old.tools),
        )  # fmt: skip
        if go_on is None or len(self.earlier) + 1 >= compress.segments:
            self.termination = Termination.MAX_CONTEXT
            return False
        self.earlier = self.segments
        self.session = self.act.engine.open((*old.key, len(self.earlier)), root=old.root)
        old.end()
        self.session.tools = old.tools
        self.session.observe(go_on.ids)
        self.messages.extend(go_on.messages)
        self.left_out = go_on.left_out
        return True

    async def _summary(self, answers: list[Message], ask: str) -> str | None:
        """What the policy says it knows after these answers; None if the episode ends with that."""
        codec, session = self.act.codec, self.session
        assert codec is not None
        asked = [*answers, Message(role=Role.USER, name=SUMMARY, content=ask)]
        start = session.messages[-1].token_start or 0
        ids = codec.observations(asked, session.ids[:start], session.ids[start:], session.tools)
        if len(session.ids) + len(ids) >= self.act.sampling.max_tokens:
            self.termination = Termination.MAX_CONTEXT
            self.messages.extend(answers)
            return None
        self._heard(asked, ids)
        message = await self._turn(summing_up=True)
        if message is not None and not message.content.strip():
            self.info["empty_summaries"] += 1
        return message.content.strip() if message else None

    async def _next(self, episode: Episode) -> Message | None:
        """The next message: the policy's, an adviser's if it is drawn to speak, or a call at random; None if the
        episode ends with this turn."""
        share, codec, start = self.attempt.advised, self.act.codec, len(self.session.ids)
        if self.attempt.replaced and codec and not self._turns():
            nothing = Message(role=Role.ASSISTANT)
            skipped = self.attempt.replaced == "none"
            message = self._given(codec, nothing) if skipped else await self._turn(self.act.teacher)
            self.replaced = (start, len(self.session.ids))
            return message
        if share and codec and Random(stream(self.seed, "advised", self.steps)).random() < share:
            taken: Message | None
            if self.act.teacher is not None:
                taken = await self._turn(self.act.teacher)
            else:
                taken = self._given(codec, adviser(self.environment, episode).advise())
            if taken is not None:
                self.advised.append((start, len(self.session.ids)))
            return taken
        random = Random(stream(self.seed, "explore", self.steps)) if self.act.explore.tool else None
        if codec and random and (call := self.act.explore.call(episode, self.messages, random)):
            self.info["random_calls"] += 1
            return self._given(codec, call)
        return await self._turn()

    def _given(self, codec: ChatCodec, message: Message) -> Message:
        """Put a message that nobody sampled into the session."""
        start = len(self.session.ids)
        self.session.observe(codec.assistant(message))
        self.messages.extend(spanned([message], start, len(self.session.ids)))
        self.steps += 1
        self.unreadable = ""
        return self.messages[-1]

    async def _turn(self, teacher: Engine | None = None, summing_up: bool = False) -> Message | None:
        """The policy's next message, or the teacher's; None if the episode ends with this turn. A summary is no step,
        and is not read for calls. What an engine that is reproducible gives must not depend on the speed of the
        machine, so its turns have no limit of time, and do not count in the episode's."""
        codec, session, began = self.act.codec, self.session, time.monotonic()
        left = min(self.act.limits.turn_s, self.ends - began)
        if left <= 0:
            self.termination = Termination.TIME_LIMIT
            return None
        timeless = (teacher or self.act.engine).reproducible
        left = math.inf if timeless else left
        start, clock = len(session.ids), TurnClock(session)
        if summing_up:
            turn = await self._sampled(self.act.engine, session, start, left, "summary")
        else:
            turn = await (self._explored(start, left) if teacher is None else self._taught(teacher, start, left))
        if turn.stop == "cut" and turn.message is None and len(session.ids) == start and left == self.act.limits.turn_s:
            raise TurnError(f"the engine gave nothing within limits.turn_s, {left:g} s")
        self.ends += time.monotonic() - began if timeless else 0.0
        message, self.unreadable = self.act.said(session, turn, start)
        if message is not None:
            span = {"token_start": start, "token_end": len(session.ids)} if codec else {}
            session.seconds[len(self.messages)] = clock.seconds()
            self.messages.append(message.model_copy(update=span))
            self.steps += not summing_up
        if turn.stop != "stop":
            self.termination = Termination.TIME_LIMIT if turn.stop == "cut" else Termination.MAX_TOKENS
            return None
        if summing_up:
            return self.messages[-1]
        retries = self.act.limits.format_retries
        if retries is None:
            retries = getattr(self.environment, "format_retries", 0)
        before = self.attempt.prefix.format_errors if self.attempt.prefix else 0
        if self.unreadable and before + self.info["format_errors"] >= retries:
            self.termination = Termination.FORMAT_ERROR
            return None
        return self.messages[-1]

    def _refused(self) -> Step:
        """What answers a turn whose calls cannot be read. The environment does not see it."""
        self.info.update(format_errors=1, tool_errors=1)
        text = f"Your calls could not be read: {self.unreadable}. Write them again."
        return Step([Message(role=Role.USER, name=FORMAT_ERROR, content=text)])

    async def _explored(self, start: int, time_limit: float) -> Turn:
        """The policy's turn. One that is as uncertain as the one before is sampled again, if rollouts explore so."""
        again, ends = self.act.explore.resample, time.monotonic() + time_limit
        turn = await self._sampled(self.act.engine, self.session, start, time_limit, "turn")
        for number in range(again.tries if again else 0):
            doubt = uncertainty(self.session.logprobs[start:])
            if again is None or turn.stop == "cut" or not again.wants(doubt, self.uncertain):
                break
            self.info.update({RESAMPLED: 1, "resampled_tokens": len(self.session.ids) - start})
            self.session.forget(start)
            left = max(0.0, ends - time.monotonic())
            turn = await self._sampled(self.act.engine, self.session, start, left, f"again {number}")
        self.uncertain = uncertainty(self.session.logprobs[start:]) if again else None
        return turn

    async def _taught(self, teacher: Engine, start: int, time_limit: float) -> Turn:
        """A teacher's turn, who reads what the policy read and said."""
        with teacher.open(self.session.key, self.session.root) as session:
            session.observe(self.session.ids)
            session.messages, session.tools = list(self.messages), self.session.tools
            turn = await self._sampled(teacher, session, start, time_limit, "taught")
            given = replace(turn, ids=session.ids[start:], logprobs=session.logprobs[start:], spans=[], routes=None)
            self.session.act(given)
        return turn

    async def _sampled(self, engine: Engine, session: Session, start: int, time_limit: float, purpose: str) -> Turn:
        """An engine's turn, with its tokens in the session from ``start`` on."""

        def seed(part: int) -> int:
            return stream(self.seed, purpose, self.steps, *([part] if part else []))

        return await self.act.sampled(engine, session, start, time_limit, seed, self.deadline, self.info)

    async def _step(self, episode: Episode, message: Message) -> Step:
        """The environment's answer. One that takes too long to answer tool calls is an observation."""
        calls = message.tool_calls
        self.tool_calls += len(calls)
        limit = self.act.limits.tool_s * max(1, len(calls))
        # What is adapted limits each call by itself. Beyond that it may have to start a process again.
        adapted, began = isinstance(episode, AdaptedEpisode), time.monotonic()
        try:
            async with asyncio.timeout(limit + self.act.limits.environment_s * adapted) as clock:
                step = await episode.step(message)
        except TimeoutError as error:
            if adapted or not calls or not clock.expired():
                raise _EnvironmentError from error
            answers = [tool_message(call, f"{call.name} took longer than {limit:g} s", True) for call in calls]
            step = Step(answers, info={"tool_timeouts": len(calls), "tool_errors": len(calls)})
        except EngineError:  # of a model that plays a user
            raise
        except Exception as error:
            raise _EnvironmentError from error
        self.info.update({name: value for name, value in step.info.items() if isinstance(value, int)})
        if self.act.limits.retry.tool_timeouts and step.info.get("tool_timeouts"):
            raise _EnvironmentError from InfrastructureError(f"{calls[0].name} or a later call exceeded limits.tool_s")
        return self._cut(step.timed(time.monotonic() - began))

    def _cut(self, step: Step) -> Step:
        """The step with messages of bounded length. What is adapted has cut its own, and counted it."""
        shortened = [(message, self.act.shortened(message.content)) for message in step.messages]
        changed = [message.content for message, text in shortened if text is not message.content]
        if not changed:
            return step
        self.info["observations_cut"] += sum(not is_cut(text) for text in changed)
        return replace(step, messages=[message.model_copy(update={"content": text}) for message, text in shortened])

    def _heard(self, messages: list[Message], ids: list[int]) -> None:
        """Append what the policy reads next. If several messages were encoded together, the first has the span of all,
        the others an empty one at its end."""
        start = len(self.session.ids)
        self.session.observe(ids)
        self.messages.extend(spanned(messages, start, start + len(ids)) if self.act.codec else messages)

    async def _of_environment(self, work: Awaitable[Answer], times: int = 1) -> Answer:
        """What a method of the environment returns, in ``times`` the time that it has."""
        try:
            async with asyncio.timeout(times * self.act.limits.environment_s):
                return await work
        except Exception as error:
            raise _EnvironmentError from error

    async def _close(self, episode: Episode) -> None:
        try:
            await self._of_environment(episode.close())
        except _EnvironmentError as failure:
            self._fail(failure.__cause__)

    def _fail(self, error: BaseException | None) -> None:
        assert error is not None
        outside = isinstance(error, InfrastructureError) or getattr(error, "infrastructure", False)
        self.termination = Termination.INFRA_ERROR if outside else Termination.ENV_ERROR
        self.score = None
        self.error = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]

    @property
    def tags(self) -> list[str]:
        counted = [*tags_of(self.info), *[DIVERGED] * self.diverged]
        counted += [f"{REPLAY_DIFFERS}: {self.differed}"] if self.differed else []
        return counted + ([f"{self.termination}: {self.error}"] if self.error else [])

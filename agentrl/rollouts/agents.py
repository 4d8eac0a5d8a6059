"""An episode in which an agent program asks for turns, as :class:`agentrl.rollouts.episodes.EpisodeRun` is one in which
the policy and an environment take turns. Each conversation of the program is a row."""

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, cast

from agentrl.engines.base import EngineError, Session, Turn, TurnError, Usage
from agentrl.environments.agent import AgentEnd, AgentEnvironment, Endpoint
from agentrl.environments.base import MAX_STEPS, Score
from agentrl.recorder.desk import Attended
from agentrl.recorder.lines import Line
from agentrl.recorder.sampler import Sampler
from agentrl.rollouts.episodes import EpisodeRun
from agentrl.rollouts.outcomes import REPLAY_DIFFERS
from agentrl.rollouts.replaying import ReplayDivergedError, ReplayingSampler
from agentrl.rollouts.segments import Segment
from agentrl.schemas.trajectory import RewardComponent, Termination

TROUBLE = {
    "refused": Termination.MAX_STEPS,
    "full": Termination.MAX_TOKENS,
    "cut": Termination.TIME_LIMIT,
    "engine": Termination.INFRA_ERROR,
}
"""What :attr:`agentrl.recorder.desk.Attended.trouble` makes of the end of an episode."""

_ENDS_S = 20.0  # what a program may take to end after it was cancelled


@dataclass
class AgentRun(EpisodeRun):
    """``session`` is none of the episode's: it says in which order the engine serves its turns."""

    lines: list[Line] = field(default_factory=list)
    more_tags: tuple[str, ...] = ()
    replayed: list[Turn] = field(default_factory=list)
    """Turns of the row that is continued, which the program was given."""

    @property
    def segments(self) -> list[Segment]:
        """One for each conversation; one without anything if nothing was asked."""
        segments = [self._segment(number, line) for number, line in enumerate(self.lines)]
        return segments or [Segment(Session(), 0, 0, 0)]

    def _segment(self, number: int, line: Line) -> Segment:
        replayed = sum(any(turn.turn is stored for stored in self.replayed) for turn in line.turns)
        continues = line.parent is None and (replayed > 0 or (number == 0 and not self.replayed))
        if continues:
            line = replace(line, shared=max(line.shared, replayed))
        session, fork_at = line.session()
        if continues and self.attempt.prefix:
            pairs = zip(session.ids, self.attempt.prefix.ids, strict=False)
            fork_at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        session.usage = _usage(line)
        own = line.turns[line.shared :]
        return Segment(
            continues=continues,
            session=session,
            steps=len(own) if self.attempt.prefix and continues else len(line.turns),
            tool_calls=sum(len(turn.message.tool_calls) for turn in own),
            tool_errors=sum(message.error is True for turn in own for message in turn.heard),
            agent=line.agent,
            parent=line.parent,
            fork_at=fork_at,
            trained=line.trained,
            tags=() if line.kind == "turn" else (f"kind:{line.kind}",),
        )

    @property
    def tags(self) -> list[str]:
        return [*self.more_tags, *super().tags]

    async def run(self) -> None:
        """See :meth:`agentrl.rollouts.episodes.EpisodeRun.run`."""
        self._check()
        environment = cast(AgentEnvironment, self.environment)
        limits, loop = self.act.limits, asyncio.get_running_loop()
        failed: asyncio.Future[EngineError] = loop.create_future()
        sampler = self._sampler()
        allowed = limits.max_steps or getattr(environment, "max_steps", None) or MAX_STEPS

        def fails(error: EngineError) -> None:
            if not isinstance(error, TurnError) and not failed.done():
                failed.set_result(error)

        attended = Attended(sampler, self.session.key[0], self.session.root, allowed, fails)
        desk = await environment.desk()
        desk.admit(attended)
        endpoint = Endpoint(f"{desk.url}/v1", attended.key, desk.model, limits.episode_s, desk.door)
        program = environment.begin(self.attempt.task, endpoint)
        try:
            in_time = await self._waited(program, failed, attended)
            self._finish(program, attended, in_time)
            self._check_replay(sampler)
        except ReplayDivergedError as error:
            self._diverge(str(error))
        finally:
            desk.dismiss(attended)
            program.cancel()
            await attended.end()
            await asyncio.wait({program}, timeout=_ENDS_S)
            if program.done() and not program.cancelled():
                program.exception()  # it was told, or does not matter any more

    def _sampler(self) -> Sampler:
        act, prefix = self.act, self.attempt.prefix
        how = (act.engine, act.speaker, act.sampling, act.limits.turn_s, self.seed, self.deadline)
        return ReplayingSampler(*how, prefix, self.attempt.goes_on) if prefix else Sampler(*how)

    def _check_replay(self, sampler: Sampler) -> None:
        """Take in what became of the turns that were to be replayed."""
        if not isinstance(sampler, ReplayingSampler):
            return
        self.replayed = sampler.replayed
        self.info[REPLAY_DIFFERS] += len(sampler.differences)
        self.differed = next(iter(sampler.differences), "")
        if not sampler.arrived and not self.error:
            self._diverge(f"the program did not ask for turn {len(sampler.replayed)} of {sampler.prefix.parent}")

    def _diverge(self, what: str) -> None:
        self.lines, self.diverged, self.lasting = [], True, True
        self._fail(RuntimeError(what))

    def _check(self) -> None:
        attempt = self.attempt
        textual = attempt.prefix is not None and not (attempt.prefix.ids and self.act.speaker)
        unfit = {
            "to go on from a row without token ids": textual,
            "to go on for some turns alone": attempt.turns is not None,
            "a hint": bool(attempt.hint),
            "turns of an adviser or a teacher": attempt.advised is not None or bool(attempt.replaced),
            "sampling.compress": self.act.sampling.compress is not None,
            "explore": bool(self.act.explore.tool or self.act.explore.resample),
        }
        if wrong := [what for what, asked in unfit.items() if asked]:
            raise ValueError(
                f"env {self.environment.name!r} is an agent program, which writes its own prompts and compresses its "
                f"own context; leave out what asks for {wrong[0]}"
            )

    async def _waited(
        self, program: "asyncio.Future[object]", failed: "asyncio.Future[EngineError]", attended: Attended
    ) -> bool:
        """Wait for the program to end. One that a limit ended may take the time of scoring. Returns whether it ended in
        time. Raises EngineError if the engine fails for others too."""
        limits = self.act.limits
        ends = time.monotonic() + limits.episode_s
        while not (program.done() or failed.done()):
            left = ends - time.monotonic()
            if left <= 0 and attended.over:
                break
            if left <= 0:
                attended.over, ends = True, ends + limits.environment_s
                continue
            both: set[asyncio.Future[Any]] = {program, failed}
            await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        return not attended.over

    def _finish(self, program: "asyncio.Future[object]", attended: Attended, in_time: bool) -> None:
        """What became of the episode, now that its program has ended, or should have."""
        self.lines = attended.lines
        self.info.update(attended.episode.counts)
        self.steps = len(attended.episode.tree.turns)
        error: BaseException | None = TimeoutError("it did not end") if not program.done() else None
        if program.done():
            error = asyncio.CancelledError() if program.cancelled() else program.exception()
        end = AgentEnd(failure="error") if error is not None else _ended(program.result())
        self.more_tags = (*end.tags, *_counts(attended))
        stopped = Termination.TIME_LIMIT if not in_time else TROUBLE.get(attended.trouble) or end.stopped
        if not self.lines and stopped is not Termination.INFRA_ERROR:
            reason = f"no turn was sampled: {attended.error}" if attended.error else end.failure
            self.lasting = stopped is Termination.MAX_TOKENS
            self._fail(error or RuntimeError(f"the agent ended without an answered request; {reason}".strip("; ")))
        elif stopped is Termination.INFRA_ERROR and (end.failure or error):
            self.termination, self.error = Termination.INFRA_ERROR, str(attended.error)
            self.lasting = getattr(attended.error, "lasting", False)
        elif (end.failure or error) and stopped in (None, Termination.INFRA_ERROR):
            self._fail(error or RuntimeError(end.failure))
        else:
            recovered = stopped is Termination.INFRA_ERROR  # it asked once more, and made do without
            self.termination = Termination.ANSWERED if recovered or stopped is None else stopped
            unfinished = Score(False, (RewardComponent(name="unfinished", value=0.0),))
            self.score = unfinished if error is not None else _score(end.score)


def _ended(returned: object) -> AgentEnd:
    return returned if isinstance(returned, AgentEnd) else AgentEnd(cast("Score | float | None", returned))


def _score(given: Score | float | None) -> Score | None:
    if given is None or isinstance(given, Score):
        return given
    value = float(given)
    if not math.isfinite(value):
        raise ValueError(f"run() returned {value} as the reward; give a finite number")
    return Score(value > 0, (RewardComponent(name="score", value=value),))


def _counts(attended: Attended) -> list[str]:
    """Tags of what the recorder counted, beside those that rollouts count too."""
    counts = attended.episode.counts
    return [f"{name}:{number}" for name, number in sorted(counts.items()) if number and name != "format_errors"]


def _usage(line: Line) -> Usage | None:
    """What the turns of a conversation took at an endpoint."""
    with suppress(StopIteration):
        return next(turn.session.usage for turn in reversed(line.turns) if turn.session is not None)
    return None

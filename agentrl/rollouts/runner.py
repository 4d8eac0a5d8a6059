"""Rollouts: a policy acts in environments, many episodes at once, and what happened becomes trajectories."""

import asyncio
import copy
import gc
import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agentrl.chat.probes import check_asking
from agentrl.engines.base import Engine, EngineError, Sampling, Session, Weights
from agentrl.engines.blocking import Background, blocking
from agentrl.engines.seeds import stream
from agentrl.environments.adapted import Adapted, protocol
from agentrl.environments.agent import AgentEnvironment
from agentrl.environments.base import Environment
from agentrl.environments.forks import rebuild
from agentrl.environments.hosts import Host, Processes, Threads
from agentrl.models.policy import Policy
from agentrl.rewards.component import Reward
from agentrl.rollouts.acting import Act
from agentrl.rollouts.agents import AgentRun
from agentrl.rollouts.attempts import Attempt, tickets
from agentrl.rollouts.continuations import held_back
from agentrl.rollouts.corrections import advised_alone
from agentrl.rollouts.episodes import DIVERGED, EpisodeRun
from agentrl.rollouts.exploring import NO_EXPLORATION, Explore
from agentrl.rollouts.in_flight import Flow, NumberedAttempt, OnRows
from agentrl.rollouts.limits import DEFAULT_LIMITS, Limits
from agentrl.rollouts.openings import closable, openings
from agentrl.rollouts.outcomes import COUNTED, latency_tags, spent
from agentrl.rollouts.progress import EpisodeReport, OnProgress
from agentrl.rollouts.segments import Segment, by_attempt, firsts, name_of
from agentrl.rollouts.team import SOURCE, Playing, TeamRun
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Termination, Trajectory, seconds_of_messages

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Attempt", "Limits", "RolloutRunner", "tickets"]

Result = TypeVar("Result")


_ALLOCATIONS, _GENERATIONS = 50_000, 20  # between collections of garbage, see `rare_collections`


class RolloutRunner:
    """Makes trajectories of one policy with one engine, in one environment or in those that tasks name by ``env``.

    ``rewards`` are added to the environments'. ``counts`` says what went wrong so far: environments that failed, tools
    that took too long or raised, observations that were cut, rows that a reward could not grade (``ungraded``);
    ``first`` is an episode for each of what went wrong in episodes, with the last line of its error if it has one.
    ``tries`` counts ``attempts``. An engine without token ids needs no ``policy``. ``explore`` says how rollouts
    explore; ``teacher`` is the engine of whom attempts have ``advised`` turns, in place of the environment.
    ``on_failed`` is told, in a thread, of the rows of an attempt that failed by no doing of the policy and is made
    again, as ``limits.retry`` says. ``team`` says which agents act in an episode, if there are several. ``on_routes``,
    if it is set, is told of the routes of each row's turns.

    As a context manager it does all its work on one event loop, in a thread of its own, so that connections stay open
    between calls, and closes the engine and the environments at the end, also after an error or Ctrl-C. Otherwise the
    caller closes them.
    """

    def __init__(
        self,
        policy: Policy | None,
        engine: Engine,
        environment: Environment | Mapping[str, Environment],
        sampling: Sampling,
        rewards: Sequence[Reward] = (),
        limits: Limits = DEFAULT_LIMITS,
        on_progress: OnProgress | None = None,
        explore: Explore = NO_EXPLORATION,
        teacher: Engine | None = None,
        on_failed: OnRows | None = None,
        team: Playing | None = None,
    ) -> None:
        if team:
            team.check(environment.values() if isinstance(environment, Mapping) else [environment])
        if policy is None and engine.exact:
            raise ValueError("an engine with token ids needs the policy's tokenizer; give the policy")
        if policy and sampling.compress and sampling.compress.by == "summary":
            check_asking(policy.codec)
        self.policy = policy
        self.engine = engine
        self.environment = environment
        self.sampling = sampling
        self.rewards = rewards
        self.limits = limits
        self.on_progress = on_progress
        self.report: EpisodeReport | None = None  # counts the episodes of several calls; None: one for each call
        self.explore = explore
        self.teacher = teacher
        self.on_failed = on_failed
        self.team = team
        self.on_routes: Callable[[str, list[np.ndarray]], None] | None = None
        self.counts: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self._replayed: set[str] = set()
        self._loop: Background | None = None

    def __enter__(self) -> Self:
        self._loop = Background()
        return self

    def __exit__(self, *_: object) -> None:
        loop, self._loop = self._loop, None
        assert loop is not None
        try:
            given = self.environment if isinstance(self.environment, Mapping) else {"": self.environment}
            other = self.team.other.engine if self.team and self.team.other else None
            engines = [engine for engine in (self.engine, self.teacher, other) if engine is not None]
            loop.wait(_ended([*engines, *closable(given)]))
        finally:
            loop.close()

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What a coroutine returns that uses this runner."""
        return self._loop.wait(work) if self._loop else blocking(work)

    def sampling_as(self, sampling: Sampling) -> "RolloutRunner":
        """The same runner with other sampling; both add to the same ``counts``."""
        other = copy.copy(self)
        other.sampling = sampling
        return other

    def run(
        self, attempts: Sequence[Attempt], seed: int, ids: Sequence[str], source: str = "model"
    ) -> list[Trajectory]:
        """One trajectory for each attempt, in their order, named by ``ids``; if contexts are compressed, those of the
        segments of each. ``source`` says what kind of run it is. With an engine that is reproducible, the same seed and
        attempts give the same trajectories."""

        async def collect() -> list[Trajectory]:
            by_name: dict[str, list[Trajectory]] = {}
            async with aclosing(self.groups(attempts, seed, ids, source)) as groups:
                async for group in groups:
                    by_name.update((rows[0].episode_id, rows) for rows in by_attempt(group))
            return [row for name in ids for row in by_name[name]]

        return self.wait(collect())

    def environments(self, tasks: Sequence[Task]) -> Mapping[str, Environment]:
        """The environments of tasks, by the names that these give them."""
        if isinstance(self.environment, Mapping):
            return {task.env: self.environment[task.env] for task in tasks}
        return {task.env: self.environment for task in tasks}

    def openings(self, tasks: Sequence[Task]) -> list[tuple[list[Message], str]]:
        """What the policy sees first of each task, see :func:`agentrl.rollouts.openings.openings`."""
        return self.wait(openings(self.environments(tasks), tasks, self.limits))

    async def groups(
        self, attempts: Sequence[Attempt], seed: int, ids: Sequence[str], source: str = "model"
    ) -> AsyncGenerator[list[Trajectory], None]:
        """The trajectories of each group when all of them are done, groups in the order in which they finish. Closing
        the iterator cancels what is under way. Raises EngineError if the engine fails with more than single requests.
        """
        await self.renew()
        report = self.report or EpisodeReport(len(attempts), self.on_progress)
        flow = self._flow(source, on_told=report)
        refused: list[Trajectory] = []
        try:
            with rare_collections():
                numbers = [index if each.number is None else each.number for index, each in enumerate(attempts)]
                await flow.add(
                    [
                        NumberedAttempt(attempt, name, number, stream(seed, "row", number))
                        for attempt, name, number in zip(attempts, ids, numbers, strict=True)
                    ]
                )
                while groups := await flow.groups():
                    for group in groups:
                        refused += [row for row in firsts(group) if row.termination is Termination.INFRA_ERROR]
                        if len(refused) == len(attempts):
                            raise nothing_sampled(refused)
                        yield group
        finally:
            await flow.close()

    async def renew(self) -> None:
        """Give the engine the weights of the policy, if it has those of another version."""
        if self.policy is not None and self.engine.version != self.policy.version:
            await self.engine.load(Weights(self.policy.version, self.policy.source))

    @contextmanager
    def flow(self, made: OnRows | None = None) -> Iterator[Flow]:
        """Episodes under way on the runner's event loop, which go on while nobody waits for them: give the coroutines
        of the flow to :meth:`wait`. At the end all of them are cancelled."""
        flow = self._flow("model", made)
        try:
            with rare_collections():
                yield flow
        finally:
            self.wait(flow.close())

    def _flow(self, source: str, made: OnRows | None = None, on_told: OnRows | None = None) -> Flow:
        if self.sampling.compress and not self.engine.exact:
            raise ValueError(
                "sampling.compress counts tokens, which this engine does not give; leave it out, or use an engine with "
                "token ids (transformers, vllm)"
            )
        host: Host = Processes(self.limits.processes) if self.limits.processes else Threads()
        places: dict[str, Environment] = {}
        codec = self.policy.codec if self.policy and self.engine.exact else None
        speaker = self.policy if codec else None
        act = Act(self.engine, codec, self.sampling, self.limits, self.explore, self.teacher, speaker)
        others: dict[Sampling, Act] = {}

        async def play(job: NumberedAttempt) -> list[Trajectory]:
            own = act
            if job.sampling is not None:
                own = others.setdefault(job.sampling, replace(act, sampling=job.sampling))
            return await self._episode(own, job, self._place(job.attempt, places, host), source)

        given = self.environment.values() if isinstance(self.environment, Mapping) else [self.environment]
        in_flight = min([self.limits.in_flight, *(getattr(environment, "at_once", math.inf) for environment in given)])
        return Flow(play, int(in_flight), self.rewards, self.counts, host, made, on_told)

    def _place(self, attempt: Attempt, places: dict[str, Environment], host: Host) -> Environment:
        name = attempt.task.env
        if name not in places:
            given = self.environment if isinstance(self.environment, Mapping) else {name: self.environment}
            if name not in given:
                raise ValueError(f"task {attempt.task.task_id} is of env {name!r}; given are {sorted(given)}")
            places[name] = protocol(given[name], host, self.limits.tool_s, self.limits.observation_chars)
        return places[name]

    async def _episode(self, act: Act, job: NumberedAttempt, environment: Environment, source: str) -> list[Trajectory]:
        """The rows of an episode; one that fails by no doing of the policy is begun again."""
        attempt, retry = job.attempt, act.limits.retry
        if act.sampling.compress and (attempt.prefix or attempt.advised is not None):
            raise ValueError("sampling.compress is for episodes from their beginning; continue rows without it")
        for number in count(1):
            self.tries["attempts"] += 1
            session = self.engine.open((job.number,), root=f"{attempt.group_id}{attempt.hint}")
            run = self._run(act, environment, job, session)
            try:
                await run.run()
            finally:
                run.session.end()
            if not run.error or run.lasting or number >= retry.attempts:
                break
            self._count(job.name, run, {"retried": 1})
            if self.on_failed:
                await asyncio.to_thread(self.on_failed, self._rows(job.name, run, source))
            await asyncio.sleep(retry.pause(number))
        wrong = {name: run.info[name] for name in COUNTED if run.info[name]}
        if run.diverged or run.error:
            wrong[DIVERGED if run.diverged else f"{run.termination}s"] = 1
        self._count(job.name, run, wrong)
        await self._check_replay(run)
        rows = self._rows(job.name, run, source)
        for row, segment in zip(rows, run.segments, strict=True):
            if self.on_routes:
                self.on_routes(row.trajectory_id, segment.session.routes)
        return rows

    def _run(self, act: Act, environment: Environment, job: NumberedAttempt, session: Session) -> EpisodeRun:
        """A run of a job's episode. What a team's actor does after given words is an episode of its own."""
        given = (act, environment, job.attempt, session, job.seed, job.deadline)
        if isinstance(environment, AgentEnvironment):
            return AgentRun(*given)
        return TeamRun(*given, playing=self.team) if self.team and not job.attempt.hint else EpisodeRun(*given)

    def _count(self, name: str, run: EpisodeRun, wrong: Mapping[str, int]) -> None:
        """Count what went ``wrong`` in an episode, and keep the first reason of each."""
        self.counts.update(wrong)
        reason = ": ".join([name, *run.error.strip().splitlines()[-1:]])
        for what in wrong:
            self.first.setdefault(what, reason)

    def _rows(self, name: str, run: EpisodeRun, source: str) -> list[Trajectory]:
        rows = [self._trajectory(name, run, index, segment, source) for index, segment in enumerate(run.segments)]
        rows = rows if run.replaced is None else [held_back(row, *run.replaced) for row in rows]
        return rows if run.attempt.advised is None else [advised_alone(row, run.advised) for row in rows]

    async def _check_replay(self, run: EpisodeRun) -> None:
        """Make one episode of each environment again, if an episode whose process is killed would be. Raises
        DivergedError if it is answered otherwise."""
        environment, name = run.environment, run.attempt.task.env
        relied_on = isinstance(environment, Adapted) and environment.replayable and self.limits.processes
        whole = run.termination is Termination.ANSWERED and run.steps > 1 and not run.info["tool_timeouts"]
        if not relied_on or not whole or run.attempt.hint or run.attempt.prefix or run.earlier:
            return
        if name in self._replayed:
            return
        self._replayed.add(name)
        last = max(number for number, message in enumerate(run.messages) if message.role is Role.ASSISTANT)
        again = await rebuild(environment, run.attempt.task, run.messages[:last])
        await again.close()

    def _trajectory(self, name: str, run: EpisodeRun, index: int, segment: Segment, source: str) -> Trajectory:
        """The row of the episode's segment number ``index``."""
        task, session, prefix = run.attempt.task, segment.session, run.attempt.prefix if segment.continues else None
        score, policy = run.score if segment.trained else None, segment.speaker or self.policy
        parent = name_of(name, segment.parent) if segment.parent is not None else prefix.parent if prefix else None
        return Trajectory(
            trajectory_id=name_of(name, index),
            episode_id=name,
            segment=index,
            agent=segment.agent,
            task_id=task.task_id,
            group_id=run.attempt.group_id,
            sample_index=run.attempt.index,
            parent_id=parent,
            fork_at=segment.fork_at or (len(prefix.ids) if prefix else 0),
            source=SOURCE if self.team else source,
            env=task.env,
            env_version=run.environment.version,
            split=task.split,
            level=task.level,
            prompt=task.prompt,
            policy=policy.name if policy else getattr(self.engine, "name", ""),
            policy_version=session.spans[0].version if session.spans else self.engine.version,
            sampling=run.act.sampling.model_dump_json(),
            reward=score.reward if score else None,
            success=score.success if score else None,
            termination=run.termination,
            reward_components=list(score.components) if score else [],
            tags=[*run.tags, *latency_tags(session.usage), *segment.tags, *[NOT_TRAINED] * (not segment.trained)],
            n_steps=segment.steps,
            n_tokens=len(session.ids),
            n_action_tokens=sum(session.mask),
            n_tool_calls=segment.tool_calls,
            n_tool_errors=segment.tool_errors,
            messages=session.messages,
            message_seconds=seconds_of_messages(session.seconds, len(session.messages)),
            tools=session.tools,
            final_state=json.dumps(score.state if score else None),
            **spent(session.usage),
            tokenizer=policy.tokenizer_fingerprint if policy and session.ids else "",
            input_ids=session.ids,
            action_mask=session.mask,
            logprobs=session.logprobs,
            spans=session.spans,
        )


async def _ended(opened: Sequence[Any]) -> None:
    """Close an engine and environments. What is still under way on this event loop, because a signal ended the wait for
    it, is cancelled first."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for each in opened:
        await each.close()


def nothing_sampled(refused: Sequence[Trajectory]) -> EngineError:
    return EngineError(f"no episode could be sampled; the last ended by {refused[-1].tags[-1]}")


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for circular garbage rarely, and not at what was there before. Rows and libraries are millions of
    objects without circles, and looking at them again and again takes a third of the time of rollouts."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    if not frozen:
        gc.freeze()
    gc.set_threshold(_ALLOCATIONS, _GENERATIONS, _GENERATIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:  # there is only one way back: for all that anybody has frozen
            gc.unfreeze()

"""Demonstrations: trajectories of an environment's scripted expert. They have text and no tokens, because the
tokenizer depends on the model that will be trained on them."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from inspect import iscoroutinefunction
from random import Random
from typing import Any

from agentrl.engines.base import EngineError, Sampling, Session, Turn, Weights
from agentrl.engines.blocking import blocking
from agentrl.environments.adapted import protocol
from agentrl.environments.agent import AgentEnvironment
from agentrl.environments.base import MAX_STEPS, Environment, Score
from agentrl.environments.hosts import Threads
from agentrl.environments.scripted import NoExpertError, Turns, expert, play
from agentrl.rollouts.acting import Act
from agentrl.rollouts.agents import AgentRun
from agentrl.rollouts.attempts import Attempt
from agentrl.rollouts.limits import Limits, Retry
from agentrl.rollouts.outcomes import tags_of
from agentrl.rollouts.rationalize import with_hint
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory, seconds_of_messages


def demonstrate(
    environment: Environment, task: Task, noise: float, seed: int, trajectory_id: str, hint: str = ""
) -> Trajectory:
    """One attempt of the expert at ``task``. ``noise`` is its probability of an error at each turn; ``hint`` is a
    template for :func:`agentrl.rollouts.rationalize.with_hint`.

    The expert is the environment's ``demonstrate``, or if it has none, what its episodes ``advise``. That one errs by
    a turn at random (``stray``), and goes on from where this has led.

    Raises NoExpertError if the environment has no scripted expert.
    """
    return blocking(_demonstrated(environment, task, Random(f"{seed}-{task.task_id}"), noise, trajectory_id, hint))


class Demonstrations:
    """Demonstrations that are begun again as ``retry`` says if something fails that is no doing of the expert: what the
    environment or the expert raises. ``counts`` says how often (``retried``, ``env_errors``), ``error`` is the last."""

    def __init__(self, retry: Retry, seed: int, noise: float) -> None:
        self.retry, self.seed, self.noise = retry, seed, noise
        self.counts: Counter[str] = Counter()
        self.error: Exception | None = None

    def of(self, environment: Environment, task: Task, trajectory_id: str, hint: str = "") -> Trajectory | None:
        """As :func:`demonstrate`; None if the last attempt fails too."""
        for number in range(1, self.retry.attempts + 1):
            try:
                return demonstrate(environment, task, self.noise, self.seed, trajectory_id, hint)
            except NoExpertError:
                raise
            except Exception as error:
                self.error = error
            if number < self.retry.attempts:
                self.counts["retried"] += 1
                time.sleep(self.retry.pause(number))
        self.counts["env_errors"] += 1
        return None


def optimal_steps(environment: Environment, task: Task) -> int | None:
    """Assistant messages that a task takes: what its metadata says in ``optimal_steps``, or else what the scripted
    expert takes without an error; None if the expert fails. Raises NoExpertError if there is neither."""
    given = json.loads(task.metadata)
    steps = given.get("optimal_steps") if isinstance(given, dict) else None
    if isinstance(steps, int) and steps > 0:
        return steps
    if isinstance(environment, AgentEnvironment):  # to start its program for that would take too long
        raise NoExpertError(f"tasks of env {environment.name!r} do not say their optimal_steps")
    row = demonstrate(environment, task, 0.0, 0, "expert")
    return row.n_steps if row.success else None


async def _demonstrated(
    environment: Environment,
    task: Task,
    random: Random,
    noise: float,
    trajectory_id: str,
    hint: str,
) -> Trajectory:
    if isinstance(environment, AgentEnvironment):
        return await _program(environment, task, random, noise, trajectory_id, hint)
    host = Threads(1)
    episode = await protocol(environment, host).reset(task)
    try:
        turns = expert(environment, episode, task, noise, random)
        played = await play(episode, turns, getattr(environment, "max_steps", MAX_STEPS))
        score = await episode.score()
    finally:
        await episode.close()
        await host.close()
        if iscoroutinefunction(close := getattr(environment, "close", None)):
            await close()
    messages = played.messages
    opening = with_hint(list(episode.opening), task, hint) if hint else list(episode.opening)
    tags = [*["hinted"] * bool(hint), *tags_of(played.info)]
    row = _row(environment, task, noise, trajectory_id, opening, messages, episode.tools, played.termination, score)
    calls = {len(opening) + number: seconds for number, seconds in played.seconds.items()}
    seconds = seconds_of_messages(calls, len(row.messages))
    return row.model_copy(
        update={"tags": tags, "n_tool_errors": played.info["tool_errors"], "message_seconds": seconds}
    )


async def _program(
    environment: AgentEnvironment, task: Task, random: Random, noise: float, trajectory_id: str, hint: str
) -> Trajectory:
    """An attempt of an agent program to which the expert says what a policy would: its first conversation."""
    engine = _Expert(environment.demonstrate(task, noise, random))
    act = Act(engine, None, Sampling(), Limits())
    run = AgentRun(act, environment, Attempt(task, hint=hint), engine.open((0,)), 0)
    try:
        await run.run()
    finally:
        await environment.close()
    if run.error:
        raise RuntimeError(run.error.strip().splitlines()[-1])
    session, bare = run.segments[0].session, {"token_start": None, "token_end": None}
    spoken = [message.model_copy(update=bare) for message in session.messages]
    first = next((number for number, message in enumerate(spoken) if message.role is Role.ASSISTANT), len(spoken))
    opening, turns = spoken[:first], spoken[first:]
    row = _row(environment, task, noise, trajectory_id, opening, turns, session.tools, run.termination, run.score)
    return row.model_copy(update={"tags": run.tags, "n_tool_errors": run.segments[0].tool_errors})


class _Expert:
    """Says the turns of an expert, whoever asks."""

    exact, reproducible, version = False, True, 0

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._begun = False

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        return Session(key=key, root=root)

    async def turn(self, session: Session, sampling: Sampling, **_: Any) -> Turn:
        spoken = [number for number, message in enumerate(session.messages) if message.role is Role.ASSISTANT]
        try:
            if not self._begun:
                self._begun, message = True, next(self.turns)
            else:
                message = self.turns.send(session.messages[max(spoken, default=-1) + 1 :])
        except StopIteration:
            message = Message(role=Role.ASSISTANT, content="Done.")
        return Turn([], [], [], "stop", message)

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        raise EngineError("a scripted expert has no probabilities")

    async def load(self, weights: Weights) -> None:
        """It has no weights."""

    async def close(self) -> None:
        """It holds nothing."""


def _row(
    environment: Environment,
    task: Task,
    noise: float,
    trajectory_id: str,
    opening: list[Message],
    messages: list[Message],
    tools: str,
    termination: Termination,
    score: Score | None,
) -> Trajectory:
    return Trajectory(
        trajectory_id=trajectory_id,
        episode_id=trajectory_id,
        task_id=task.task_id,
        group_id=task.task_id,
        source="expert",
        env=task.env,
        env_version=environment.version,
        split=task.split,
        level=task.level,
        prompt=task.prompt,
        policy="expert",
        sampling=json.dumps({"noise": noise}),
        reward=score.reward if score else None,
        success=score.success if score else None,
        termination=termination,
        reward_components=list(score.components) if score else [],
        n_steps=sum(message.role is Role.ASSISTANT for message in messages),
        n_tool_calls=sum(len(message.tool_calls) for message in messages),
        messages=opening + messages,
        tools=tools,
        final_state=json.dumps(score.state if score else None),
    )

"""Rollouts: a policy acts in an environment, and what happened becomes trajectories."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.chat.codec import ChatCodec, align
from agentrl.engines.base import Engine, Generation, Sampling
from agentrl.environments.base import Environment, Episode, Score, answer_calls
from agentrl.models.policy import Policy
from agentrl.rewards.component import Reward, with_rewards
from agentrl.rollouts.rationalize import with_hint
from schemas.task import Task
from schemas.trajectory import Message, Termination, Trajectory, one_span


@dataclass(frozen=True)
class Attempt:
    """One rollout to make: of ``task``, as sample ``index`` of ``group``, which is the task itself if it is empty.
    ``hint`` is a template for :func:`agentrl.rollouts.rationalize.with_hint`."""

    task: Task
    index: int = 0
    hint: str = ""
    group: str = ""


def tickets(
    tasks: Sequence[Task], samples: int, name: Callable[[int], str], first: int = 0, extra: int = 0, hint: str = ""
) -> dict[str, Attempt]:
    """``samples`` attempts at each task, by the ids that ``name`` gives to their numbers, which begin at ``first`` and
    leave room for ``extra`` more of each task. A task's group has the id of its first attempt."""
    found = {}
    for place, task in enumerate(tasks):
        start = first + place * (samples + extra)
        for index in range(samples):
            found[name(start + index)] = Attempt(task, index, hint, name(start))
    return found


@dataclass
class _Run:
    """An attempt that is not finished."""

    episode: Episode
    messages: list[Message]
    steps: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    answer: str | None = None
    termination: Termination = Termination.MAX_STEPS

    def observe(self, message: Message) -> list[Message]:
        """Tool messages that answer the calls of an assistant message."""
        answers, observations = answer_calls(self.episode, message)
        self.tool_calls += len(observations)
        self.tool_errors += sum(observation.error for observation in observations)
        return answers


class RolloutRunner:
    """Makes trajectories of one policy in one environment with one engine. ``rewards`` are added to the
    environment's."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        environment: Environment,
        sampling: Sampling,
        rewards: Sequence[Reward] = (),
    ) -> None:
        self.policy = policy
        self.engine = engine
        self.environment = environment
        self.sampling = sampling
        self.rewards = rewards

    def run(
        self, attempts: Sequence[Attempt], seed: int, ids: Sequence[str], source: str = "model"
    ) -> list[Trajectory]:
        """One trajectory for each attempt, in their order, named by ``ids``; ``source`` says what kind of run it is.
        The same seed and attempts give the same trajectories."""
        codec = self.policy.codec
        runs = [self._start(attempt) for attempt in attempts]
        prompts = [codec.opening(run.messages, attempt.task.tools) for run, attempt in zip(runs, attempts, strict=True)]

        def respond(row: int, turn: list[int]) -> list[int] | None:
            return self._respond(runs[row], turn, codec)

        with self.policy.autocast():
            generations = self.engine.generate(prompts, respond, self.sampling, codec.stop_id, seed)
        return [
            with_rewards(self._trajectory(trajectory_id, attempt, run, generation, source), attempt.task, self.rewards)
            for trajectory_id, attempt, run, generation in zip(ids, attempts, runs, generations, strict=True)
        ]

    def _start(self, attempt: Attempt) -> _Run:
        episode = self.environment.episode(attempt.task)
        opening = episode.opening()
        if attempt.hint:
            opening = with_hint(opening, attempt.task, attempt.hint)
        return _Run(episode, opening)

    def _respond(self, run: _Run, turn: list[int], codec: ChatCodec) -> list[int] | None:
        parsed = codec.parse(turn)
        run.steps += 1
        run.messages.append(parsed.message)
        if parsed.error:
            run.termination = Termination.FORMAT_ERROR
            return None
        if not parsed.message.tool_calls:
            run.answer, run.termination = parsed.message.content, Termination.ANSWERED
            return None
        if run.steps == self.environment.max_steps:
            return None
        results = run.observe(parsed.message)
        run.messages += results
        return codec.observations(results)

    def _trajectory(
        self, trajectory_id: str, attempt: Attempt, run: _Run, generation: Generation, source: str
    ) -> Trajectory:
        task = attempt.task
        if generation.truncated:
            run.termination = Termination.MAX_TOKENS
            # cut off in the middle of a turn, which is kept as text; a turn that ended was answered already
            if generation.mask[-1] and generation.ids[-1] != self.policy.codec.stop_id:
                tail = generation.ids[_last_turn(generation.mask) :]
                run.messages.append(self.policy.codec.parse(tail).message)
                run.steps += 1
        score: Score = run.episode.score(run.answer)
        return Trajectory(
            trajectory_id=trajectory_id,
            episode_id=trajectory_id,
            task_id=task.task_id,
            group_id=attempt.group or task.task_id,
            sample_index=attempt.index,
            source=source,
            env=task.env,
            env_version=self.environment.version,
            split=task.split,
            level=task.level,
            prompt=task.prompt,
            policy=self.policy.name,
            policy_version=self.policy.version,
            sampling=self.sampling.model_dump_json(),
            reward=score.reward,
            success=score.success,
            termination=run.termination,
            reward_components=list(score.components),
            n_steps=run.steps,
            n_tokens=len(generation.ids),
            n_action_tokens=sum(generation.mask),
            n_tool_calls=run.tool_calls,
            n_tool_errors=run.tool_errors,
            messages=align(run.messages, generation.mask),
            tools=task.tools,
            final_state=json.dumps(run.episode.state()),
            tokenizer=self.policy.tokenizer_fingerprint,
            input_ids=generation.ids,
            action_mask=generation.mask,
            logprobs=generation.logprobs,
            spans=one_span(self.policy.version, generation.mask),
        )


def _last_turn(mask: list[bool]) -> int:
    """Where the last run of action tokens begins."""
    start = len(mask)
    while start and mask[start - 1]:
        start -= 1
    return start

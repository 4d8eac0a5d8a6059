"""Rollouts: the embedded engine, tools that take time, and how many episodes the loop carries.

- The embedded engine with one cache across turns, against ``generate()`` over the whole conversation at each turn. Same
  model, tasks, prompts, limits and sampling, groups of 8. Both sides run in turn; the ratio is of medians of the CPU
  seconds that the engines take: templates, parsing and tools cost both the same.
- Tools whose time is log-normal (median 100 ms, sigma 1), 64 episodes in flight. The schedule ``free`` against the
  lockstep batch, which awaits all tools before each step (``exact``); and against the bound, the longer of two times:
  computing all turns if tools take none, and waiting for all tools if computing takes none.
- 1,024 episodes in flight against an engine that answers at once.
- The embedded engine against vLLM's CPU build with the same model in float32, by the clock, in turn. It needs
  VLLM_PYTHON, the interpreter of an environment that has vLLM (`make test-vllm` makes one).
- SmolLM2-135M against ``generate()`` of transformers, if `make smollm` was run.

The model is trained for some steps first, so that conversations have the turns and lengths of real ones. It computes in
one thread; vLLM keeps one of two cores for its own scheduler and computes in one thread too.

    python benchmarks/rollouts.py
    SCALE=small python benchmarks/rollouts.py
    CHECK=1 ...                              # exit code 1 if a target is missed
"""

import asyncio
import heapq
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import smollm_speed
import torch
from exactness import judged, train
from transformers import GenerationConfig
from transformers.utils import logging

from agentrl.chat.codec import ChatCodec
from agentrl.engines.base import Sampling, Session, Turn
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import EmbeddedConfig, VLLMConfig
from agentrl.engines.transformers import TransformersEngine
from agentrl.environments import load_environment
from agentrl.environments.base import Episode, Score, Step
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.runner import Attempt, Limits, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Span, ToolCall, Trajectory

SMALL = os.environ.get("SCALE") == "small"
IN_FLIGHT = 64
GROUP = 8


class GeneratePerTurn(TransformersEngine):
    """The usual way: ``generate()`` over the whole conversation at every turn, all unfinished rows in one batch."""

    def _step(self) -> None:
        rows, self._waiting = self._waiting, []
        sampling = rows[0].sampling
        width = max(len(row.session.ids) for row in rows)
        ids = torch.tensor([[0] * (width - len(row.session.ids)) + row.session.ids for row in rows])
        mask = torch.tensor([[0] * (width - len(row.session.ids)) + [1] * len(row.session.ids) for row in rows])
        config = GenerationConfig(
            do_sample=True, temperature=sampling.temperature, top_k=0, max_new_tokens=sampling.max_turn_tokens,
            eos_token_id=rows[0].stop[0], pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        out = self.model.generate(ids, attention_mask=mask, generation_config=config)
        new = out.sequences[:, width:]
        chosen = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, new[..., None])[..., 0].tolist()
        for row, turn, logprobs in zip(rows, new.tolist(), chosen, strict=True):
            stopped = row.stop[0] in turn
            row.ids = turn[: turn.index(row.stop[0]) + 1] if stopped else turn[: row.limit]
            row.logprobs = logprobs[: len(row.ids)]
            self._resolve(row, "stop" if stopped else "length")


class SlowTools:
    """Lookup, whose n-th step of a task takes as long as a log-normal number that is a function of both."""

    name, version, max_steps = "lookup", "1", 5

    def __init__(self, takes: Callable[[str, int], float]) -> None:
        self.inner, self.takes = load_environment("lookup"), takes

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return self.inner.tasks(sizes, seed)

    async def reset(self, task: Task) -> "SlowVisit":
        return SlowVisit(await self.inner.reset(task), lambda number: self.takes(task.task_id, number))


class SlowVisit:
    def __init__(self, inner: Episode, takes: Callable[[int], float]) -> None:
        self.inner, self.takes, self.calls = inner, takes, 0
        self.opening, self.tools = inner.opening, inner.tools

    async def step(self, message: Message) -> Step:
        if message.tool_calls:
            self.calls += 1
            await asyncio.sleep(self.takes(self.calls))
        return await self.inner.step(message)

    async def score(self) -> Score:
        return await self.inner.score()

    async def close(self) -> None:
        await self.inner.close()


class AtOnce:
    """An engine that calls the tool until the last step, and answers at once."""

    exact = reproducible = True
    version = 0

    def __init__(self, codec: ChatCodec) -> None:
        call = ToolCall(id="call_0", name="find", arguments=json.dumps({"who": "Ann", "rel": "boss"}))
        self.ids = codec.assistant(Message(role=Role.ASSISTANT, tool_calls=[call]))
        self.turns = self.now = self.most = 0

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        self.now += 1
        self.most = max(self.most, self.now)
        return Session(key=key, root=root, on_end=self._end)

    def _end(self, session: Session) -> None:
        self.now -= 1

    async def turn(self, session: Session, sampling: Sampling, **_: Any) -> Turn:
        await asyncio.sleep(0)
        self.turns += 1
        span = Span(version=0, start=0, end=len(self.ids))
        return Turn(list(self.ids), [-1.0] * len(self.ids), [span], "stop")


def trained_policy(tasks: list[Task], steps: int) -> Policy:
    environment = load_environment("lookup")
    shown = [demonstrate(environment, task, 0.1, 0, f"expert-{n}") for n, task in enumerate(tasks)]
    policy = tiny_policy([row.messages for row in shown], seed=0)
    train(policy, shown, steps)
    return policy


def timed(runner: RolloutRunner, tasks: list[Task], seed: int) -> tuple[float, list[Trajectory]]:
    started = time.perf_counter()
    made = runner.run([Attempt(task) for task in tasks], seed, [str(number) for number in range(len(tasks))])
    return time.perf_counter() - started, made


def cache_across_turns(policy: Policy, tasks: list[Task], repeats: int) -> bool:
    """Groups of 8, as training samples them. The ratio is of CPU seconds in the engines' steps."""
    spent = {"one cache across turns": [], "generate() per turn": []}  # type: dict[str, list[float]]
    attempts = [Attempt(task, index, group=task.task_id) for task in tasks for index in range(GROUP)]
    for repeat in range(repeats + 1):
        for name, kind in zip(spent, (TransformersEngine, GeneratePerTurn), strict=True):
            engine = clocked(kind)(policy.model)
            runner = RolloutRunner(policy, engine, load_environment("lookup"), Sampling())
            made = runner.run(attempts, repeat, [str(number) for number in range(len(attempts))])
            if repeat:  # the first round warms up
                spent[name].append(engine.seconds)
    turns = statistics.mean(row.n_steps for row in made)
    for name, times in spent.items():
        print(f"{name}: {len(attempts) / statistics.median(times):.1f} rollouts per CPU second, {turns:.2f} turns each")
    ours, theirs = (statistics.median(times) for times in spent.values())
    return judged("embedded engine against generate() per turn", theirs / ours, 3.0, "x")


def clocked(kind: Any) -> Any:
    """An engine that counts the CPU seconds of its steps."""

    class Clocked(kind):  # type: ignore[misc,valid-type]
        seconds = 0.0

        def _step(self) -> None:
            started = time.process_time()
            super()._step()
            self.seconds += time.process_time() - started

    return Clocked


def slow_tools(policy: Policy, tasks: list[Task]) -> bool:
    def takes(task: str, number: int) -> float:
        return 0.1 * random.Random(f"{task}-{number}").lognormvariate(0.0, 1.0)

    def run(schedule: Any, seconds: Callable[[str, int], float]) -> tuple[float, list[Trajectory]]:
        engine = TransformersEngine(policy.model, IN_FLIGHT, schedule)
        limits = Limits(in_flight=IN_FLIGHT)
        return timed(RolloutRunner(policy, engine, SlowTools(seconds), Sampling(), limits=limits), tasks, 0)

    run("free", lambda *_: 0.0)  # warms up
    computing, _ = run("free", lambda *_: 0.0)
    free, made = run("free", takes)
    lockstep, _ = run("exact", takes)
    ends = [0.0] * IN_FLIGHT
    for row in made:
        waits = sum(takes(row.task_id, number) for number in range(1, row.n_tool_calls + 1))
        heapq.heapreplace(ends, ends[0] + waits)
    bound = max(computing, *ends)
    print(
        f"{len(tasks)} episodes: {free:.2f} s; lockstep {lockstep:.2f} s; computing alone {computing:.2f} s, tools "
        f"alone {max(ends):.2f} s"
    )
    fast = judged("tools of 100 ms: free against the lockstep batch", lockstep / free, 4.0, "x")
    return judged("tools of 100 ms: share of the bound", 100 * bound / free, 75, " %") and fast


def many_episodes(policy: Policy, tasks: list[Task], episodes: int) -> bool:
    engine = AtOnce(policy.codec)
    runner = RolloutRunner(
        policy, engine, load_environment("lookup"), Sampling(max_tokens=4096), limits=Limits(in_flight=1024)
    )
    chosen = [tasks[number % len(tasks)] for number in range(episodes)]
    before = time.process_time()
    took, _ = timed(runner, chosen, 0)
    spent = time.process_time() - before
    memory = psutil.Process().memory_info().rss / 2**20
    per_cpu = engine.turns / spent
    print(f"{episodes} episodes, {engine.most} in flight: {engine.turns} turns in {took:.2f} s, {per_cpu:,.0f}/CPU s")
    fast = judged("1,024 episodes in flight: turns per second, by the clock", engine.turns / took, 2000, "")
    return judged("1,024 episodes in flight: memory of the process", memory, 1024, " MB", above=False) and fast


def against_vllm(policy: Policy, tasks: list[Task], repeats: int) -> bool:
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        print("embedded engine against vLLM: left out, VLLM_PYTHON names no environment that has vLLM")
        return True
    attempts = [Attempt(task, index, group=task.task_id) for task in tasks for index in range(GROUP)]
    ids = [str(number) for number in range(len(attempts))]
    spent: dict[str, list[float]] = {"embedded": [], "vLLM": []}
    served = VLLMConfig(dtype="float32", python=python).build(policy)
    try:
        for repeat in range(repeats + 1):
            for name, engine in zip(spent, (EmbeddedConfig().build(policy), served), strict=True):
                started = time.perf_counter()
                rows = RolloutRunner(policy, engine, load_environment("lookup"), Sampling()).run(attempts, repeat, ids)
                if repeat:  # the first round warms up
                    spent[name].append(time.perf_counter() - started)
                    tokens = sum(row.n_action_tokens for row in rows)
                    print(f"{name}: {tokens / spent[name][-1]:,.0f} sampled tokens per second")
    finally:
        blocking(served.close())
    ours, theirs = (statistics.median(times) for times in spent.values())
    return judged("embedded engine against vLLM's CPU build", theirs / ours, 1.0, "x")


def real_model() -> bool:
    """SmolLM2 against ``generate()`` of transformers, if it is there."""
    met = True
    for what, measure in smollm_speed.SAMPLING.items():
        if (ratio := smollm_speed.ratio(what, measure)) is not None:
            met &= judged(f"SmolLM2, {what}: ours against generate()", ratio, smollm_speed.TARGET, "x")
    return met


def main() -> int:
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # as our pipelines do: a second thread costs a small model more than it brings
    shown, n_tasks, repeats, steps, slow, episodes = (
        (128, 32, 3, 100, 192, 2048) if SMALL else (512, 128, 5, 150, 512, 8192)
    )
    tasks = load_environment("lookup").tasks({"train": max(shown, slow)}, 0)["train"]
    policy = trained_policy(tasks[:shown], steps)
    met = [
        many_episodes(policy, tasks, episodes),
        cache_across_turns(policy, tasks[:n_tasks], repeats),
        slow_tools(policy, tasks[:slow]),
        against_vllm(policy, tasks[:n_tasks], 3),
        real_model(),
    ]
    return int(os.environ.get("CHECK") == "1" and not all(met))


if __name__ == "__main__":
    sys.exit(main())

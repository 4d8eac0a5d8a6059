"""Task families: steps per second, distinct tasks per second, and what a scripted expert and a random policy solve.

All times are CPU seconds of one core, but those of code that runs in a sandbox: these are seconds by the clock, of one
program after the other.

- Steps: tool calls per second, over whole episodes with reset and score. The expert plays.
- Tasks: 100,000 of a family in two splits. Ids and contents are compared, within and between the splits.
- The expert without noise, and a random policy, on held-out tasks.

- Sandbox: runs per second of a Python program that prints a line.

    python benchmarks/environments.py [FAMILY ... sandbox]
    SCALE=small python benchmarks/environments.py
    CHECK=1 ...                              # exit code 1 if a target is missed
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.environments import load_environment
from agentrl.environments.scripted import at_random, expert, play
from agentrl.sandbox import Bubblewrap
from agentrl.sandbox.bubblewrap import check
from agentrl.schemas.task import Task

SMALL = os.environ.get("SCALE") == "small"
TASKS = 5_000 if SMALL else 100_000
SECONDS = 60 * TASKS / 100_000
PLAYED = 200 if SMALL else 500
RANDOM_AT_MOST = 0.05
SANDBOXED = 20
"""Runs, and steps of episodes that run code, per second."""


@dataclass(frozen=True)
class Family:
    """``drawn`` is the variant of which many tasks are drawn, the family itself unless it says otherwise.
    ``steps`` is the target of steps per second, ``played`` the number of episodes, ``clock`` the time that counts."""

    name: str
    drawn: str | None = None
    steps: int = 5_000
    played: int = PLAYED
    clock: Callable[[], float] = time.process_time


FAMILIES = [
    Family("lookup", drawn='lookup{"names": 2000}'),  # 155 questions start with each name
    Family("rooms", drawn='rooms{"size": 400}'),  # its 48 rooms have 2,256 tasks
    Family("search_qa", drawn='search_qa{"size": 2500}'),  # facts for enough questions of one hop
    Family("math"),
    Family("code", steps=SANDBOXED, played=PLAYED // 10, clock=time.perf_counter),
    Family("shop", drawn='shop{"size": 5000}'),  # a larger catalogue has more cheapest products
    Family("service"),
    Family("office"),
    Family("research", drawn='research{"size": 5000}'),  # more datasets have more questions
]


def main() -> int:
    names = sys.argv[1:] or [*(family.name for family in FAMILIES), "sandbox"]
    missed = sum(sum(judge(family)) for family in FAMILIES if family.name in names)
    missed += asyncio.run(sandboxed()) if "sandbox" in names else 0
    return int(bool(missed) and os.environ.get("CHECK") == "1")


def judge(family: Family) -> list[bool]:
    """Print the lines of a family; which of its targets are missed."""
    name, drawn = family.name, family.name if family.drawn is None else family.drawn
    environment: Any = load_environment(name)
    tasks = environment.tasks({"train": 1, "heldout": family.played}, 1)["heldout"]
    solved, calls, seconds = asyncio.run(played(environment, tasks, family.clock, senseless=False))
    chance = asyncio.run(played(environment, tasks, family.clock, senseless=True))[0]
    rate = calls / seconds
    return [
        line(f"{name}: {rate:,.0f} steps/s on one core", rate >= family.steps, f"{family.steps:,}"),
        line(f"{name}: the expert solves {solved:.1%} of {family.played}", solved == 1, "100 %"),
        line(f"{name}: a random policy solves {chance:.1%}", chance < RANDOM_AT_MOST, f"below {RANDOM_AT_MOST:.0%}"),
        distinct(name, drawn),
    ]


async def played(
    environment: Any, tasks: Sequence[Task], clock: Callable[[], float], senseless: bool
) -> tuple[float, int, float]:
    """The share of tasks that a scripted policy solves, its tool calls, and the seconds that it took."""
    solved = calls = 0
    started = clock()
    for number, task in enumerate(tasks):
        random = Random(f"played-{number}")
        episode = await environment.reset(task)
        turns = at_random(episode, random) if senseless else expert(environment, episode, task, 0.0, random)
        seen = await play(episode, turns, environment.max_steps)
        solved += (await episode.score()).success
        calls += sum(len(message.tool_calls) for message in seen.messages)
        await episode.close()
    return solved / len(tasks), calls, clock() - started


async def sandboxed() -> bool:
    """Run a program many times, each in a sandbox of its own."""
    sandbox, program = Bubblewrap(), {"main.py": b"print(sum(range(100)))"}
    command = [sandbox.python, "-I", "-S", "main.py"]
    started = time.perf_counter()
    runs = [await sandbox.run(command, program) for _ in range(PLAYED // 2)]
    rate = len(runs) / (time.perf_counter() - started)
    right = all(ran.ok and ran.stdout == b"4950\n" for ran in runs)
    return line(f"sandbox: {rate:.0f} runs/s, limits by {check()}", right and rate >= SANDBOXED, f"{SANDBOXED}")


def distinct(name: str, variant: str) -> bool:
    """Draw many tasks in two splits, and count those that are there twice."""
    environment = load_environment(variant)
    started = time.process_time()
    splits = environment.tasks({"train": TASKS * 9 // 10, "heldout": TASKS // 10}, 2)
    seconds = time.process_time() - started
    rows = [task for tasks in splits.values() for task in tasks]
    ids, contents = ({task.task_id for task in rows}, {(task.prompt, task.metadata) for task in rows})
    twice = max(len(rows) - len(ids), len(rows) - len(contents))
    what = f"{name}: {len(rows):,} tasks in {seconds:.1f} s, {twice} of them twice"
    return line(what, seconds <= SECONDS and not twice and len(rows) == TASKS, f"{SECONDS:g} s, none twice")


def line(figure: str, met: bool, target: str) -> bool:
    print(f"{figure} (target {target}): {'met' if met else 'MISSED'}", flush=True)
    return not met


if __name__ == "__main__":
    sys.exit(main())

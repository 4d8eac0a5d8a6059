"""``program_io``: tasks about a program, an input and an output (Absolute Zero: Zhao et al. 2025, arXiv 2505.03335).

Two of them are shown and one is asked for, in one message:

- deduction: the output of a program for an input.
- abduction: an input for which a program gives an output. Each that does is right.
- induction: a program that gives the outputs of some inputs. It is judged on inputs that are held back.

Right is what is equal as a value, whatever its text. Programs run in a sandbox, which is never told what is right. A
program belongs to one split, whatever the seed, the kind and the names in it.
"""

import json
from collections.abc import Generator, Iterator
from functools import partial
from random import Random
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.environments.base import Score, Step
from agentrl.environments.code.programs import run
from agentrl.environments.program_io.programs import EXAMPLES, LEVELS, draw_program, known, source
from agentrl.environments.program_io.proposed import (
    FORM,
    LONGEST_PROGRAM,
    Executed,
    Proposal,
    execute,
    read,
    run_program,
)
from agentrl.environments.program_io.values import equal, literal, unfenced
from agentrl.environments.task_splits import Draft, digest, draw
from agentrl.sandbox import Bubblewrap, ResourceLimits, Sandbox
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role

LIMITS = ResourceLimits(cpu_s=2, wall_s=10, memory_mb=128, processes=16, file_mb=4, disk_mb=16, output_kb=64)
Kind = Literal["deduction", "abduction", "induction"]
EIGHTHS = {"train": range(5), "dev": range(5, 6), "heldout": range(6, 8)}
"""Of all programs, those of each split."""


class ProgramIOConfig(BaseModel):
    """The settings of the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kinds: list[Kind] = Field(
        ["deduction", "abduction", "induction"], min_length=1, description="what is asked for, each as often: an "
        "output, an input, or a program"
    )  # fmt: skip
    levels: list[int] | None = Field(None, min_length=1, description="levels of the tasks that are drawn; None: all")
    sandbox: Sandbox = Field(Bubblewrap(limits=LIMITS), description="where programs run: bubblewrap, docker, or unsafe")


class ProgramIOEpisode:
    """One answer to one task."""

    def __init__(self, environment: "ProgramIO", task: Task) -> None:
        self.sandbox, self.of = environment.config.sandbox, json.loads(task.metadata)
        self.opening = [Message(role=Role.USER, content=task.prompt)]
        self.tools = "[]"
        self.answer: str | None = None

    async def step(self, message: Message) -> Step:
        self.answer = message.content
        return Step(done=True)

    async def score(self) -> Score:
        """``execution`` in the state is right, wrong, unreadable if the answer is no literal of Python or no program
        that can be run, raised, or stopped by a limit of the sandbox."""
        execution = await self._executed(unfenced(self.answer or ""))
        kind, success = self.of["kind"], execution == "right"
        state = {"answer": self.answer, "kind": kind, "execution": execution}
        return Score(success, (RewardComponent(name=kind, value=float(success)),), state)

    async def _executed(self, answer: str) -> str:
        kind, inputs, outputs = (self.of[name] for name in ("kind", "inputs", "outputs"))
        try:
            if kind == "deduction":
                return "right" if literal(answer) == literal(outputs[0]) else "wrong"
            if kind == "abduction":
                return await self._compared(self.of["program"], [answer], outputs)
        except ValueError:
            return "unreadable"
        if not 0 < len(answer) <= LONGEST_PROGRAM:
            return "unreadable"
        half = len(inputs) // 2
        return await self._compared(answer, inputs[half:], outputs[half:])

    async def _compared(self, program: str, inputs: list[str], outputs: list[str]) -> str:
        """How the results of a program compare with the right ones. Raises ValueError if an input is none."""
        results, ran = await run_program(self.sandbox, program, inputs)
        if "uncompiled" in results:
            return "unreadable"
        if "" in results or "raised" in results:
            return "stopped" if ran.stopped else "raised"
        return "right" if all(map(equal, results, outputs)) else "wrong"

    async def close(self) -> None:
        pass


class ProgramIO:
    """The environment; see the module's docstring."""

    name = "program_io"
    version = "1"
    max_steps = 1
    replayable = True
    proposal = FORM

    def __init__(self, config: ProgramIOConfig = ProgramIOConfig()) -> None:  # noqa: B008  (frozen)
        if unknown := set(config.levels or ()) - set(LEVELS):
            raise ValueError(f"levels: program_io has no level {min(unknown)}; it has 1 to {max(LEVELS)}")
        self.config = config

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Tasks for each split, none of them twice, and none with a program of another split. Raises ValueError if
        ``sizes`` ask for another split, or for more than exist."""
        if unknown := set(sizes) - set(EIGHTHS):
            raise ValueError(f"program_io has no split {min(unknown)!r}; it has {', '.join(EIGHTHS)}")
        settings = self.config.model_dump(mode="json", include={"kinds", "levels"})
        name = self.name + json.dumps({"version": self.version, "sizes": sizes, **settings}, sort_keys=True)
        shares = dict.fromkeys(self.config.levels or LEVELS, 1.0)

        def of_split(split: str, size: int) -> list[Task]:
            drafts = partial(self._drafts, split)
            return draw(name, {split: size}, seed, shares, drafts, self._task)[split]

        return {split: of_split(split, size) for split, size in sizes.items()}

    async def reset(self, task: Task) -> ProgramIOEpisode:
        return ProgramIOEpisode(self, task)

    def goal(self, task: Task) -> str:
        """What the program does: no two splits share it."""
        return str(json.loads(task.metadata)["known_by"])

    async def proposed(self, text: str, like: Task, random: Random) -> Task:
        """The task of a program with its input, or for induction its inputs, in the form :attr:`proposal`. It is of the
        kind and the level of ``like``.

        Raises NoTaskError that says why it is none; see :mod:`agentrl.environments.program_io.proposed`.
        """
        kind = json.loads(like.metadata)["kind"]
        proposal = read(text, several=kind == "induction")
        draft = _draft(kind, proposal, await execute(self.config.sandbox, proposal))
        name = f"{like.task_id}+{digest(draft.prompt, draft.truth, draft.metadata)}"
        return self._task(draft, name, like.split, like.level).model_copy(update={"env": like.env})

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """The answer, or with probability ``noise`` that of someone who takes the program for one that does nothing."""
        metadata, answer = json.loads(task.metadata), json.loads(task.ground_truth)
        if random.random() < noise:
            nothing = {"deduction": metadata["inputs"][0], "abduction": metadata["outputs"][0]}
            answer = nothing.get(metadata["kind"], "def f(values):\n    return values")
        yield Message(role=Role.ASSISTANT, content=answer)

    def demonstrate_proposal(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """Another program of the task's level and split; with probability ``noise`` the task's own, which is nothing
        new."""
        metadata = json.loads(task.metadata)
        proposal = Proposal(metadata["program"], metadata["inputs"], metadata["message"])
        if random.random() >= noise:
            proposal, _ = next(_programs(task.split, task.level, len(proposal.inputs), random))
        yield Message(role=Role.ASSISTANT, content=proposal.text)

    def _drafts(self, split: str, level: int, random: Random) -> Iterator[Draft]:
        while True:
            kind = random.choice(self.config.kinds)
            yield _draft(kind, *next(_programs(split, level, EXAMPLES if kind == "induction" else 1, random)))

    def _task(self, draft: Draft, task_id: str, split: str, level: int) -> Task:
        return draft.task(task_id, self.name, split, level, "[]", "program")


def _programs(split: str, level: int, inputs: int, random: Random) -> Iterator[tuple[Proposal, Executed]]:
    """Programs of a split with so many inputs, without end."""
    while True:
        drawn = draw_program(level, inputs, random)
        if drawn is None:
            continue
        steps, values = drawn
        name = known(steps)
        if int(name, 16) % 8 in EIGHTHS[split]:
            outputs = [repr(run(steps, given)) for given in values]
            yield Proposal(source(steps), [repr(given) for given in values]), Executed(outputs, name)


def _draft(kind: Kind, proposal: Proposal, outcome: Executed) -> Draft:
    """The task of a kind about a program."""
    program, inputs, outputs = proposal.program, proposal.inputs, outcome.outputs
    if kind == "deduction":
        prompt = f"{program}\nf({inputs[0]}) == ?\nReply with the value of ? alone."
    elif kind == "abduction":
        prompt = f"{program}\nf(?) == {outputs[0]}\nReply with a value of ? alone, any that makes this true."
    else:
        half = len(inputs) // 2
        shown = [f"f({given}) == {output}" for given, output in zip(inputs[:half], outputs[:half], strict=True)]
        message = [f"# {proposal.message}"] if proposal.message else []
        asked = "Reply with a Python function f alone that does this to other inputs too."
        prompt = "\n".join([*shown, *message, asked])
    truth = {"deduction": outputs[0], "abduction": inputs[0], "induction": program}[kind]
    about = {
        "kind": kind,
        "program": program,
        "inputs": inputs,
        "outputs": outputs,
        "message": proposal.message,
        "known_by": outcome.known_by,
    }
    return Draft(prompt, truth, about, key=(kind, outcome.known_by, *inputs))

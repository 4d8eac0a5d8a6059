"""Which calls successes have in common: runs of calls that differ in their arguments alone become skills.

Skills are induced as in ASI (Wang et al. 2025, arXiv 2504.06821): from successes, not from what a model writes.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.environments.skilled import Argument, Skill, SkillCall
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

Shape = tuple[tuple[str, tuple[tuple[str, int | None], ...]], ...]
"""Calls without what they are about: of each the tool, and of each argument the earlier call whose answer it is, or
None."""


@dataclass(frozen=True)
class CallTurn:
    """A turn with one call that was answered without an error. ``number`` is that of its message."""

    number: int
    call: ToolCall
    arguments: Mapping[str, Any]
    answer: str


@dataclass(frozen=True)
class CallRun:
    """Some turns of a row one after the other, and the values of their arguments that no earlier call returned, in the
    order of the calls and of the arguments' names."""

    row: Trajectory
    turns: Sequence[CallTurn]
    values: tuple[Any, ...]


def runs(row: Trajectory, longest: int) -> Iterator[tuple[Shape, CallRun]]:
    """All runs of two to ``longest`` calls of a row, with their shapes."""
    for turns in unbroken(row):
        for length in range(2, longest + 1):
            for start in range(len(turns) - length + 1):
                part = turns[start : start + length]
                yield shape(row, part)


def shape(row: Trajectory, turns: Sequence[CallTurn]) -> tuple[Shape, CallRun]:
    """What some turns have in common with others. An argument that is the answer of several calls comes from the newest
    of them."""
    calls, values = [], list[Any]()
    for number, turn in enumerate(turns):
        sources: list[tuple[str, int | None]] = []
        for name, value in sorted(turn.arguments.items()):
            earlier = [index for index in range(number) if turns[index].answer == value]
            sources.append((name, earlier[-1] if earlier else None))
            values += [] if earlier else [value]
        calls.append((turn.call.name, tuple(sources)))
    return tuple(calls), CallRun(row, turns, tuple(json.dumps(value, sort_keys=True) for value in values))


def unbroken(row: Trajectory) -> Iterator[list[CallTurn]]:
    """Turns one after the other that each make one call and have an answer that is no error."""
    turns: list[CallTurn] = []
    for number, message in enumerate(row.messages):
        if message.role is not Role.ASSISTANT:
            continue
        answers = row.messages[number + 1 : number + 1 + len(message.tool_calls)]
        turn = _turn(number, message, answers)
        if turn is None:
            yield turns
            turns = []
        else:
            turns.append(turn)
    yield turns


def _turn(number: int, message: Message, answers: Sequence[Message]) -> CallTurn | None:
    if len(message.tool_calls) != 1 or len(answers) != 1 or answers[0].role is not Role.TOOL or answers[0].error:
        return None
    call = message.tool_calls[0]
    arguments = call.parsed()
    return CallTurn(number, call, arguments, answers[0].content) if isinstance(arguments, dict) else None


@dataclass(frozen=True)
class Induced:
    """A skill, the shape of what it does, and which of the values of a run are its parameters: by each value the name
    of a parameter, or None for a constant."""

    skill: Skill
    shape: Shape
    names: tuple[str | None, ...]
    constants: tuple[str, ...]
    runs: Sequence[CallRun]

    @property
    def tasks(self) -> set[str]:
        return {run.row.task_id for run in self.runs}

    @property
    def saved(self) -> int:
        """Calls that it saves in the rows that it was found in, one run for each task."""
        return (len(self.shape) - 1) * len(self.tasks)

    def call(self, run: CallRun) -> ToolCall | None:
        """The call of the skill that does what a run of its shape did; None if it differs in a constant, or in two
        values that the skill takes from one parameter."""
        given: dict[str, str] = {}
        for name, constant, value in zip(self.names, self.constants, run.values, strict=True):
            if (value if name is None else given.setdefault(name, value)) != (constant if name is None else value):
                return None
        arguments = {name: json.loads(given[name]) for name in self.skill.parameters}
        first = run.turns[0].call
        return ToolCall(id=first.id, name=self.skill.name, arguments=json.dumps(arguments, ensure_ascii=False))


def induced(rows: Sequence[Trajectory], longest: int, support: int, taken: Sequence[str] = ()) -> list[Induced]:
    """Skills of at least so many tasks each, those first that save most calls. ``taken`` are names of other skills."""
    by_shape: dict[Shape, list[CallRun]] = defaultdict(list)
    for row in rows:
        for key, run in runs(row, longest):
            by_shape[key].append(run)
    usual = {key: each for key, each in by_shape.items() if len({run.row.task_id for run in each}) >= support}
    names = {*taken, *(entry["function"]["name"] for row in rows for entry in json.loads(row.tools))}
    skills: list[Induced] = []
    for key, each in sorted(usual.items(), key=lambda item: (-(len(item[0]) - 1) * len(item[1]), repr(item[0]))):
        skills.append(_generalised(key, each, names))
        names.add(skills[-1].skill.name)
    return sorted(skills, key=lambda skill: (-skill.saved, skill.skill.name))


def _generalised(key: Shape, matches: Sequence[CallRun], taken: set[str]) -> Induced:
    """The skill of runs of one shape: values that are the same in all of them are constants, and two that are always
    equal are one parameter."""
    columns = list(zip(*(run.values for run in matches), strict=True))
    places = [name for _, sources in key for name, earlier in sources if earlier is None]
    names, known = list[str | None](), dict[tuple[str, ...], str]()
    for name, column in zip(places, columns, strict=True):
        if len(set(column)) == 1:
            names.append(None)
            continue
        if column not in known:
            number = sum(other == name or other.startswith(f"{name}_") for other in known.values())
            known[column] = f"{name}_{number + 1}" if number else name
        names.append(known[column])
    schemas = _schemas(matches[0].row)
    sources = iter(zip(names, [column[0] for column in columns], strict=True))
    calls, parameters = list[SkillCall](), dict[str, dict[str, Any]]()
    for tool, arguments in key:
        made: dict[str, Argument] = {}
        for name, earlier in arguments:
            if earlier is not None:
                made[name] = Argument(call=earlier)
                continue
            parameter, constant = next(sources)
            made[name] = Argument(value=json.loads(constant)) if parameter is None else Argument(parameter=parameter)
            if parameter is not None:
                parameters.setdefault(parameter, schemas.get((tool, name), {"type": "string"}))
        calls.append(SkillCall(tool=tool, arguments=made))
    skill = Skill(name=_name(key, taken), description=_description(key), parameters=parameters, calls=calls)
    return Induced(skill, key, tuple(names), tuple(column[0] for column in columns), matches)


def _schemas(row: Trajectory) -> dict[tuple[str, str], dict[str, Any]]:
    """JSON schemas of the arguments of the tools that a row was offered."""
    return {
        (entry["function"]["name"], name): schema
        for entry in json.loads(row.tools)
        for name, schema in entry["function"].get("parameters", {}).get("properties", {}).items()
    }


def _name(key: Shape, taken: set[str]) -> str:
    """A name that is not taken: the tools in their order, a tool that is called again and again with how often."""
    parts: list[list[Any]] = []
    for tool, _ in key:
        if parts and parts[-1][0] == tool:
            parts[-1][1] += 1
        else:
            parts.append([tool, 1])
    name = "_".join(tool if times == 1 else f"{tool}_{times}" for tool, times in parts)[:56]
    number, made = 1, name
    while made in taken:
        number += 1
        made = f"{name}_v{number}"
    return made


def _description(key: Shape) -> str:
    """What the calls do, in words."""
    parts = []
    for tool, arguments in key:
        taken = [f"{name} from call {earlier + 1}" for name, earlier in arguments if earlier is not None]
        parts.append(f"{tool} ({', '.join(taken)})" if taken else tool)
    return f"Calls {', then '.join(parts)}. Returns what the last call does."

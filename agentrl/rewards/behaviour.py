"""How a rollout went about its task: the form of its turns, its tool calls, and what it must not do."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentrl.rewards.answers import Declared, final_answer
from agentrl.rewards.component import Grade, Reward
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory


def calls_of(rollout: Trajectory) -> list[ToolCall]:
    """All tool calls of a rollout, in order."""
    return [call for message in rollout.messages for call in message.tool_calls]


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object."""
    try:
        arguments = call.parsed()
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


def valid_calls(rollout: Trajectory) -> int:
    """How many calls name a tool that is on offer, with an object of arguments that has what is required, nothing that
    is unknown, and values of the types that its schema names."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in json.loads(rollout.tools)}
    return sum(call.name in schemas and _fits_schema(call, schemas[call.name]) for call in calls_of(rollout))


def _fits_schema(call: ToolCall, schema: dict[str, Any]) -> bool:
    arguments, properties = arguments_of(call), schema.get("properties", {})
    if arguments is None or not set(schema.get("required", [])) <= set(arguments):
        return False
    if properties and schema.get("additionalProperties") is not True and not set(arguments) <= set(properties):
        return False
    return all(_is_of(value, properties.get(name, {}).get("type")) for name, value in arguments.items())


def _is_of(value: Any, named: str | list[str] | None) -> bool:
    if named is None:
        return True
    allowed = [named] if isinstance(named, str) else named
    if isinstance(value, bool):
        return "boolean" in allowed
    return any(isinstance(value, _TYPES.get(name, (object,))) for name in allowed)


class Form(Reward):
    """1 if reasoning, tool calls and answer are all well-formed, else 0 (ToolRL's format reward: Qian et al. 2025;
    DeepSeek-R1: Guo et al. 2025, section 2.2.2). Details say which of the three were."""

    type: Literal["format"] = "format"
    reasoning: Literal["any", "required", "forbidden"] = Field(
        "any", description="of each turn; tags of reasoning that are not closed are never well-formed"
    )
    declared: Declared | None = Field("message", description="where the answer must stand; null: none is asked for")
    unrewarded: Annotated[bool, ADDED] = Field(
        False, description="0 for a rollout that the environment rewarded: the form of a wrong answer is worth "
        "something, that of a right one nothing more (ReFT: Trung et al. 2024; ReSearch: Chen et al. 2025)",
    )  # fmt: skip

    def value(self, rollout: Trajectory, task: Task) -> Grade:
        turns = [message for message in rollout.messages if message.role is Role.ASSISTANT]
        parts = {
            "reasoning": all(map(self._reasons_well, turns)),
            "calls": rollout.termination is not Termination.FORMAT_ERROR
            and all(arguments_of(call) is not None for call in calls_of(rollout)),
            "answer": self.declared is None or bool((final_answer(rollout, self.declared) or "").strip()),
        }
        counts = not (self.unrewarded and (rollout.reward or 0.0) > 0)
        return Grade(float(counts and all(parts.values())), {name: float(well) for name, well in parts.items()})

    def _reasons_well(self, turn: Message) -> bool:
        if "<think>" in turn.content or "</think>" in turn.content:
            return False  # a parser moves what is closed to ``reasoning``
        return self.reasoning == "any" or bool((turn.reasoning or "").strip()) == (self.reasoning == "required")


class ToolUse(Reward):
    """The share of the needed tools that were called, less ``duplicate`` for each call that repeats the one before it,
    and ``unknown`` for each call of a tool that is not on offer; at least -1. Needed tools are ``needed``, or what the
    task's ``metadata`` names in ``needed_tools``; without any, the share is 1. (After the tool rewards of ToolRL: Qian
    et al. 2025, which :class:`ToolMatch` has as published.)"""

    type: Literal["tool_use"] = "tool_use"
    needed: list[str] = Field([], description="tools; without any, those that the task names")
    duplicate: float = Field(0.25, ge=0, le=1, description="taken off for a call that repeats the one before it")
    unknown: float = Field(0.25, ge=0, le=1, description="taken off for a call of a tool that is not on offer")

    def value(self, rollout: Trajectory, task: Task) -> Grade:
        calls = calls_of(rollout)
        used = {call.name for call in calls}
        needed = set(self.needed or json.loads(task.metadata).get("needed_tools", []))
        share = len(needed & used) / len(needed) if needed else 1.0
        same = [(call.name, arguments_of(call) or call.arguments) for call in calls]
        repeated = sum(call == before for call, before in zip(same[1:], same, strict=False))
        offered = {tool["function"]["name"] for tool in json.loads(rollout.tools)}
        unknown = sum(call.name not in offered for call in calls)
        value = share - self.duplicate * repeated - self.unknown * unknown
        return Grade(max(-1.0, value), {"needed": share, "repeated": float(repeated), "unknown": float(unknown)})


class ToolMatch(Reward):
    """How well the calls match those of the task's ``metadata``, ``calls: [{name, arguments}]``: ToolRL's correctness
    reward (Qian et al. 2025, section 3.3), divided by 3 so that it lies in [-1, 1].

    With reference calls G and made calls P, r_name = |names of G and P| / |names of G or P|, r_param sums over G the
    same ratio of argument names, r_value counts equal arguments, and the value is 2 (r_name + r_param + r_value) /
    (1 + |G| + number of arguments in G) - 1. Each reference call is compared with the call of P that fits it best.
    """

    type: Literal["tool_match"] = "tool_match"
    outcome: Annotated[bool, ADDED] = Field(
        False, description="count the match as the outcome, for tasks that are to make these calls, as ToolRL's"
    )

    @property
    def is_outcome(self) -> bool:
        return self.outcome

    def value(self, rollout: Trajectory, task: Task) -> float:
        wanted = [(call["name"], dict(call["arguments"])) for call in json.loads(task.metadata).get("calls", [])]
        if not wanted:
            raise ValueError(f"task {task.task_id} names no calls in its metadata; tool_match compares with them")
        made = [(call.name, arguments_of(call) or {}) for call in calls_of(rollout)]
        left, total = list(made), jaccard({name for name, _ in wanted}, {name for name, _ in made})
        for name, arguments in wanted:
            fits = [(_fit(arguments, given), index) for index, (other, given) in enumerate(left) if other == name]
            if fits:
                fit, index = max(fits, key=lambda fit_and_index: (fit_and_index[0], -fit_and_index[1]))
                total += fit
                del left[index]
        return 2 * total / (1 + len(wanted) + sum(len(arguments) for _, arguments in wanted)) - 1


def jaccard(words: Iterable[str], other: Iterable[str]) -> float:
    """The share of what two sets hold together that both hold; 1 if both are empty."""
    first, second = set(words), set(other)
    return len(first & second) / len(first | second) if first | second else 1.0


def _fit(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> float:
    """r_param and r_value of two calls of one tool."""
    return jaccard(wanted, given) + sum(name in given and given[name] == value for name, value in wanted.items())


class Forbidden(BaseModel):
    """Calls that violate safety: both patterns are searched for, ``arguments`` in the JSON text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str = Field(description="regular expression that the tool's whole name matches")
    arguments: str = Field("", description="regular expression that is found in the arguments")

    @field_validator("tool", "arguments")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return pattern

    def hits(self, call: ToolCall) -> bool:
        return bool(re.fullmatch(self.tool, call.name) and re.search(self.arguments, call.arguments))


class Safety(Reward):
    """0 without a violation, and ``-each`` for every one, down to -1. Violations are those that the environment
    recorded (:func:`violations`), and calls that are ``forbidden``."""

    type: Literal["safety"] = "safety"
    forbidden: list[Forbidden] = Field([], description="calls that count as violations")
    each: float = Field(1.0, gt=0, le=1, description="what a violation costs")

    def value(self, rollout: Trajectory, task: Task) -> Grade:
        number = violations(rollout.final_state)
        number += sum(any(pattern.hits(call) for pattern in self.forbidden) for call in calls_of(rollout))
        return Grade(-min(1.0, number * self.each) if number else 0.0, {"violations": float(number)})


def violations(final_state: str) -> int:
    """How many violations of safety an environment recorded in its final state: ``violations`` is a number, a list of
    them, or a mapping from each kind to its number."""
    state = json.loads(final_state)
    count_or_list = state.get("violations", 0) if isinstance(state, dict) else 0
    if isinstance(count_or_list, Mapping):
        return int(Counter(count_or_list).total())
    return len(count_or_list) if isinstance(count_or_list, list) else int(count_or_list)

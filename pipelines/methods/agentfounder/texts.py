"""What texts say of stored rows: a plan, a conclusion, or each decision with its alternatives."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from agentrl.advantages.turns import acting, own_turns
from agentrl.datastore.search.experience import render
from agentrl.rewards.answers import final_answer
from agentrl.schemas.trajectory import Message, Role, Trajectory

VERDICTS = {True: "right", False: "wrong"}


def plan(row: Trajectory) -> str | None:
    """First-order: the task, and the calls that solve it, before any of them is made. None for a row without calls."""
    opening = row.messages[: _numbers(row)[0]]
    calls = [Message(role=Role.ASSISTANT, tool_calls=message.tool_calls) for message in acting(row.messages)]
    if not any(message.tool_calls for message in calls):
        return None
    return f"{_said(row, opening)}\nPlan:\n{_said(row, calls)}"


def reason(row: Trajectory) -> str | None:
    """First-order: the task, what tools answered, and the answer that follows. None for a row without either."""
    opening = row.messages[: _numbers(row)[0]]
    known = [message.content for message in row.messages if message.role is Role.TOOL]
    answer = final_answer(row)
    if not known or not answer:
        return None
    lines = [f"Known: {fact}" for fact in known]
    return "\n".join([_said(row, opening), *lines, f"Answer: {answer}"])


State = tuple[str, str, str]
"""The environment, the task, and the conversation so far."""


@dataclass
class TurnOutcomes:
    """How many rows took a turn in a state, and how many of these succeeded."""

    tried: int = 0
    solved: int = 0


@dataclass
class Decisions:
    """Every turn that was taken in a state, by any row, with what became of it."""

    options: defaultdict[State, dict[str, TurnOutcomes]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, row: Trajectory) -> None:
        """Count the turns of a scored row, those that it shares with its parent aside."""
        own = set(own_turns(row))
        for turn, (state, option) in enumerate(_steps(row)):
            if turn in own:
                outcomes = self.options[state].setdefault(option, TurnOutcomes())
                outcomes.tried += 1
                outcomes.solved += row.scored_success()

    def text(self, row: Trajectory, most: int, random: Random) -> str | None:
        """Higher-order: the row with what else was tried in its states, at most so many turns in all, in an order at
        random; which of them the row took; what became of each; and whether the row succeeded. None if nothing else
        was tried in any of its states."""
        numbers, steps = _numbers(row), list(_steps(row))
        lines, forks = [_said(row, row.messages[: numbers[0]])], 0
        for number, after, (state, option) in zip(numbers, [*numbers[1:], len(row.messages)], steps, strict=True):
            outcomes = self.options[state]
            others = [other for other in outcomes if other != option]
            shown = [option, *random.sample(others, min(most - 1, len(others)))]
            random.shuffle(shown)
            if others:
                forks += 1
                lines += [f"Option {number}: {text}" for number, text in enumerate(shown, 1)]
                lines.append(f"Choice: {shown.index(option) + 1}")
            lines.append(_said(row, row.messages[number:after]))
            if others:
                lines.append(f"Outcome: {_told(shown, outcomes)}")
        return "\n".join([*filter(None, lines), f"Verdict: {VERDICTS[row.scored_success()]}"]) if forks else None


def _told(shown: Sequence[str], outcomes: Mapping[str, TurnOutcomes]) -> str:
    return ", ".join(
        f"{number} {outcomes[option].solved} of {outcomes[option].tried}" for number, option in enumerate(shown, 1)
    )


def _steps(row: Trajectory) -> Iterator[tuple[State, str]]:
    """The state before each turn, and the turn."""
    for number in _numbers(row):
        yield (row.env, row.task_id, _said(row, row.messages[:number])), _said(row, row.messages[number : number + 1])


def _numbers(row: Trajectory) -> list[int]:
    """Those of the messages that are turns."""
    turns = {id(message) for message in acting(row.messages)}
    return [number for number, message in enumerate(row.messages) if id(message) in turns]


def _said(row: Trajectory, messages: Sequence[Message]) -> str:
    return render(row.model_copy(update={"messages": list(messages)}))

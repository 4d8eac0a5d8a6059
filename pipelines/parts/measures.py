"""What an evaluation measures of its rollouts."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from agentrl.environments.scripted import NoExpertError
from agentrl.rewards.behaviour import calls_of, valid_calls, violations
from agentrl.rewards.component import Reward, graded
from agentrl.rollouts.demonstrations import optimal_steps
from agentrl.rollouts.outcomes import latency_of
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Termination, Trajectory
from agentrl.statistics.intervals import wilson_of_tasks
from agentrl.statistics.passes import pass_intervals

if TYPE_CHECKING:
    from agentrl.environments.base import Environment

EVERY = ""
"""The environment, and -1 the level, of a row of results over all of them."""


@dataclass(frozen=True)
class Attempted:
    """What an evaluation uses of one rollout. ``chosen`` is its chance to be the one that a scorer picks of its task's
    attempts. ``calls`` counts those too that a limit kept from being made."""

    task: str
    env: str
    level: int
    success: bool
    steps: int
    tokens: int
    calls: int
    valid_calls: int
    tool_errors: int
    format_error: bool
    violations: int
    optimum: int | None = None
    chosen: float | None = None
    failure: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    latency_s: float | None = None
    first_action_s: float | None = None


FAILURES = {
    "out_of_turns": (Termination.MAX_STEPS,),
    "out_of_tokens": (Termination.MAX_TOKENS, Termination.MAX_CONTEXT),
    "out_of_time": (Termination.TIME_LIMIT,),
    "invalid_call": (Termination.FORMAT_ERROR,),
    "tool_error": (),
    "wrong_answer": (),
}
"""Why a scored rollout failed -> how it ended. A rollout that ended in another way, mostly by an answer, failed
by ``invalid_call`` if none of its calls fits a tool's schema, by ``tool_error`` if all of its calls gave an error, and
else by a ``wrong_answer``. Each failure counts once."""

SPENT = ("prompt_tokens", "completion_tokens", "cost_usd", "latency_s")
"""What a rollout took at an endpoint."""


def failure(row: Trajectory) -> str:
    """One of :data:`FAILURES`; the empty text of a success."""
    if row.success:
        return ""
    by_end = next((name for name, ends in FAILURES.items() if row.termination in ends), "")
    if by_end:
        return by_end
    calls = calls_of(row)
    if calls and valid_calls(row) == 0:
        return "invalid_call"
    return "tool_error" if calls and row.n_tool_errors == row.n_tool_calls else "wrong_answer"


def attempted(row: Trajectory, optimum: int | None = None, chosen: float | None = None) -> Attempted:
    return Attempted(
        task=f"{row.env} {row.task_id}",
        env=row.env,
        level=row.level,
        success=row.scored_success(),
        steps=row.n_steps,
        tokens=row.n_tokens or (row.prompt_tokens or 0) + (row.completion_tokens or 0),
        calls=len(calls_of(row)),
        valid_calls=valid_calls(row),
        tool_errors=row.n_tool_errors,
        format_error=row.termination is Termination.FORMAT_ERROR,
        violations=violations(row.final_state),
        optimum=optimum,
        chosen=chosen,
        failure=failure(row),
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        cost_usd=row.cost_usd,
        latency_s=latency_of(row.tags),
        first_action_s=first_action_s(row),
    )


def first_action_s(row: Trajectory) -> float | None:
    """Seconds that a rollout took to its first message; None if its row does not say."""
    first = next((number for number, message in enumerate(row.messages) if message.role == Role.ASSISTANT), None)
    return row.message_seconds[first] if row.message_seconds and first is not None else None


async def choices(group: Sequence[Trajectory], task: Task, scorer: Sequence[Reward]) -> list[float]:
    """The chance of each attempt to be the best of its group, if ``scorer`` chooses and ties are broken by lot. An
    attempt that it cannot grade is never chosen, unless it can grade none."""
    rewards = [score.reward for score in await graded(group, task, scorer)]
    known = [reward for reward in rewards if reward is not None]
    best = [reward == max(known) if known else True for reward in rewards]
    return [float(is_best) / sum(best) for is_best in best]


class Optimum:
    """Steps that a task takes, by what its task says or its environment's expert does; looked up once for each."""

    def __init__(self, tasks: Iterable[Task], environments: "Mapping[str, Environment]") -> None:
        self._tasks = {(task.env, task.task_id): task for task in tasks}
        self._environments = environments
        self._known: dict[tuple[str, str], int | None] = {}
        self._without: set[str] = set()

    def of(self, row: Trajectory) -> int | None:
        """None if the rollout failed, or if nothing says how many steps its task takes."""
        key = (row.env, row.task_id)
        if not row.success or row.env in self._without:
            return None
        if key not in self._known:
            try:
                self._known[key] = optimal_steps(self._environments[row.env], self._tasks[key])
            except NoExpertError:
                self._without.add(row.env)  # looking for one may start a server
                return None
        return self._known[key]


def parts(rows: Sequence[Attempted]) -> dict[tuple[str, int], list[Attempted]]:
    """Rows by (environment, level): all of them, those of each level, and if there are several environments, those of
    each and of each of its levels."""
    by_part: dict[tuple[str, int], list[Attempted]] = defaultdict(list)
    families = len({row.env for row in rows}) > 1
    for row in rows:
        for env in (EVERY, row.env) if families else (EVERY,):
            for level in (-1, row.level):
                by_part[env, level].append(row)
    return {key: by_part[key] for key in sorted(by_part)}


def summary(rows: Sequence[Attempted]) -> dict[str, float | None]:
    """Measures of some rows; None if there is nothing to measure them on.

    ``success`` is the mean over tasks, with :func:`agentrl.statistics.intervals.wilson_of_tasks`.
    """
    by_task: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        by_task[row.task].append(row.success)
    successes = sum(row.success for row in rows)
    once = len(by_task) == len(rows)
    low, high = wilson_of_tasks(list(by_task.values()))
    erred = [row.success for row in rows if row.tool_errors]
    calls = sum(row.calls for row in rows)
    ratios = [row.steps / row.optimum for row in rows if row.optimum]
    picked = [row for row in rows if row.chosen is not None]
    return {
        "tasks": len(by_task),
        "attempts": len(rows),
        "successes": successes,
        "success": fmean(map(fmean, by_task.values())),
        "low": low,
        "high": high,
        **(pass_intervals([(len(each), sum(each)) for each in by_task.values()]) if not once else {}),
        "best_of_n": sum(row.success * (row.chosen or 0) for row in picked) / len(by_task) if picked else None,
        "steps": fmean(row.steps for row in rows),
        "steps_over_optimum": fmean(ratios) if ratios else None,
        "tokens": fmean(row.tokens for row in rows),
        "tool_errors": fmean(row.tool_errors for row in rows),
        "recovered": fmean(erred) if erred else None,
        "valid_calls": sum(row.valid_calls for row in rows) / calls if calls else None,
        "format_errors": fmean(row.format_error for row in rows),
        "violations_per_1000": 1000 * sum(row.violations for row in rows) / len(rows),
        **{name: fmean(row.failure == name for row in rows) for name in FAILURES},
        **_spent(rows),
    }


def _spent(rows: Sequence[Attempted]) -> dict[str, float]:
    """Means of one rollout of what an endpoint took; nothing of what no row says."""
    values = {name: [value for row in rows if (value := getattr(row, name)) is not None] for name in SPENT}
    return {name: fmean(each) for name, each in values.items() if each}

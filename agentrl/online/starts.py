"""Online rollouts that begin in states of stored successes, from the end backwards: first one turn before it, and when
that is learned, earlier (reverse curriculum: Florensa et al. 2017, arXiv 1707.05300; from demonstrations: Salimans and
Chen 2018, arXiv 1812.03381). States are made again by replaying the turns before them, which are not trained on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from agentrl.advantages.turns import acting
from agentrl.rollouts.attempts import Prefix
from agentrl.rollouts.continuations import node
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class StartsConfig(BaseModel):
    """From which states of the successes of ``inputs.starts`` rollouts begin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    turns: int = Field(3, ge=1, description="furthest state: so many turns before the end; then come whole tasks")


@dataclass(frozen=True)
class StoredState:
    """A state to begin from: ``left`` turns before the end of a success at ``task``."""

    task: Task
    prefix: Prefix
    left: int


def starts_of(rows: Iterable[tuple[Trajectory, Task]], turns: int) -> list[StoredState]:
    """The states of the rows that succeeded, up to ``turns`` before their ends, but for those before the first turn. A
    state that several rows share comes once, with the fewest turns left.

    Raises ValueError as :func:`agentrl.rollouts.continuations.node` does.
    """
    starts: dict[str, StoredState] = {}
    for row, task in rows:
        own = len(acting(row.messages)) if row.success else 0
        for left in range(1, min(turns, own - 1) + 1):
            point = node(row, own - left, task)
            known = starts.get(point.name)
            if known is None or left < known.left:
                starts[point.name] = StoredState(task, point.prefix, left)
    return list(starts.values())


def levels_of(starts: Sequence[StoredState], tasks: Sequence[Task], turns: int) -> list[int]:
    """Levels for a curriculum over starts and then whole tasks, [starts + tasks]: the turns that are left, and above
    ``turns`` the levels of tasks, of which the lowest is ``turns + 1``."""
    lowest = min((task.level for task in tasks), default=0)
    return [start.left for start in starts] + [turns + 1 + task.level - lowest for task in tasks]

"""What a policy sees first of tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction

from agentrl.engines.base import Sampling
from agentrl.engines.blocking import blocking
from agentrl.environments.adapted import protocol
from agentrl.environments.agent import AgentEnvironment
from agentrl.environments.base import Environment
from agentrl.environments.hosts import Threads
from agentrl.rollouts.limits import Limits
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message


async def openings(
    environments: Mapping[str, Environment], tasks: Sequence[Task], limits: Limits
) -> list[tuple[list[Message], str]]:
    """What the policy sees first of each task, of the environment that it names: messages, and JSON of the tools. There
    are no messages if its environment fails to begin, or is an agent program."""
    host = Threads()
    seen: list[tuple[list[Message], str]] = []
    for task in tasks:
        given = environments[task.env]
        if isinstance(given, AgentEnvironment):  # its program says them
            seen.append(([], "[]"))
            continue
        try:
            episode = await protocol(given, host, limits.tool_s, limits.observation_chars).reset(task)
        except Exception:  # its own episode will say so, as env_error
            seen.append(([], "[]"))
            continue
        seen.append((list(episode.opening), episode.tools))
        await episode.close()
    await host.close()
    return seen


def closable(environments: Mapping[str, Environment]) -> list[Environment]:
    """Those that are closed at the end."""
    return [each for each in environments.values() if iscoroutinefunction(getattr(each, "close", None))]


@dataclass(frozen=True)
class Opener:
    """Looks at openings where nothing is sampled. Environments are closed after each look."""

    environments: Mapping[str, Environment]
    sampling: Sampling
    limits: Limits

    def openings(self, tasks: Sequence[Task]) -> list[tuple[list[Message], str]]:
        """See :func:`openings`."""

        async def look() -> list[tuple[list[Message], str]]:
            try:
                return await openings(self.environments, tasks, self.limits)
            finally:
                for each in closable(self.environments):
                    await each.close()  # type: ignore[attr-defined]

        return blocking(look())

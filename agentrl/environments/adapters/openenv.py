"""``openenv``: an environment behind an OpenEnv server.

The policy acts by the tool ``act``, whose parameters are the fields of the environment's actions. The client of
``openenv-core`` runs in an interpreter of its own, which ``python`` names, since its requirements do not agree with
ours.
"""

from typing import Annotated

from pydantic import Field

from agentrl.environments.adapters.foreign import Program, begin
from agentrl.environments.adapters.seeds import seeded
from agentrl.environments.base import Episode
from agentrl.schemas.task import Task


class OpenEnvironment:
    """``url`` is that of a running server, which holds a session for each episode under way. A task is a seed, which
    the server's ``reset`` gets. Rewards of steps sum up; a task is solved by ``solved_from`` or more."""

    name = "openenv"

    def __init__(
        self,
        url: Annotated[str, Field(description="of the server", pattern="^https?://")],
        prompt: Annotated[str, Field(description="what the policy is told before the first observation")] = (
            "Act until the episode ends."
        ),
        text: Annotated[str, Field(description="field of observations that is shown; empty: all, as JSON")] = "",
        python: Annotated[str, Field(description="interpreter that has openenv-core")] = "python",
        solved_from: Annotated[float, Field(description="sum of rewards from which on a task is solved")] = 1.0,
        environment_version: Annotated[str, Field(description="in every row, as env_version")] = "1",
        max_steps: Annotated[int, Field(ge=1, description="assistant messages of an episode")] = 64,
    ) -> None:
        self.prompt, self.version, self.max_steps = prompt, environment_version, max_steps
        self.program = Program(python, "openenv_holder", {"url": url, "text": text, "solved_from": solved_from})

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Seeds for each split, from a block that belongs to ``seed``. Raises ValueError if the block is too small."""
        return seeded(self.name, self.name, self.prompt, "[]", sizes, seed)

    async def reset(self, task: Task) -> Episode:
        return await begin(self.program, task)

"""``verifiers``: an environment of the ``verifiers`` package, as the Environments Hub has them.

The package's requirements do not agree with ours (its OpenAI and MCP clients are older), so it runs in an interpreter
of its own: ``python`` names one that has ``verifiers`` (0.1 to 0.3, whose environments have a rubric) and the
environment.
"""

import json
from typing import Annotated, Any

from pydantic import Field

from agentrl.environments.adapters.foreign import Program, begin
from agentrl.environments.base import Episode
from agentrl.schemas.task import Task


class VerifiersEnvironment:
    """``id`` and ``args`` are those of ``verifiers.load_environment``. Each function of its rubric is a component of
    the reward, by its own weight. What the other interpreter has installed is not in the fingerprint: raise
    ``environment_version`` if it changes."""

    name = "verifiers"

    def __init__(
        self,
        id: Annotated[str, Field(description="of the environment", min_length=1)],
        args: Annotated[dict[str, Any], Field(description="its arguments")] = {},  # noqa: B006  (a setting's default)
        python: Annotated[str, Field(description="interpreter that has verifiers and the environment")] = "python",
        solved_from: Annotated[float, Field(description="reward from which on a task is solved")] = 1.0,
        environment_version: Annotated[str, Field(description="in every row, as env_version")] = "1",
        max_steps: Annotated[int, Field(ge=1, description="assistant messages of an episode")] = 32,
    ) -> None:
        self.version, self.max_steps = environment_version, max_steps
        self.program = Program(python, "verifiers_holder", {"id": id, "args": args, "solved_from": solved_from})

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Rows of the environment's data, each in one split, and each question once. Raises ValueError if there are too
        few, and ForeignError if the environment cannot be loaded."""
        tasks = {task["prompt"]: task for task in self.program.ask("tasks", seed=seed).result()}
        rows = iter(tasks.values())
        if sum(sizes.values()) > len(tasks):
            raise ValueError(f"{sum(sizes.values())} tasks are asked for, and the environment has {len(tasks)}")
        return {
            split: [self._task(split, number, next(rows)) for number in range(size)] for split, size in sizes.items()
        }

    def _task(self, split: str, number: int, row: dict[str, Any]) -> Task:
        return Task(
            task_id=f"verifiers-{row['metadata'].get('example_id', f'{split}-{number}')}",
            env=self.name,
            split=split,
            prompt=row["prompt"],
            verifier="rubric",
            ground_truth=json.dumps(row["metadata"].get("answer")),
            metadata=json.dumps(row["metadata"], default=str),
        )

    async def reset(self, task: Task) -> Episode:
        return await begin(self.program, task)

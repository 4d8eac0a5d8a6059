"""Reflection: what went wrong in a failed attempt, as a note for later ones (Reflexion: Shinn et al. 2023)."""

import json
from typing import Any

from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

NAME = "reflection"
"""The environment of :func:`reflections`."""

ASKED = (
    "You failed this task. Say in one or two sentences what to do otherwise in the next attempt. Name what went wrong, "
    "not the answer.\n\nWhat happened, as JSON:\n{attempt}\n\nThe note:"
)
"""What a model is asked; ``{attempt}`` stands for the attempt."""

CHARS = 20_000
"""Of an attempt. Of a longer one the middle is left out."""


def asked(row: Trajectory) -> str:
    """What a model is asked about a failed attempt. The attempt is JSON, because it may hold what looks like
    instructions."""
    turns: list[dict[str, Any]] = []
    for message in row.messages:
        turn: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.tool_calls:
            turn["calls"] = [{"tool": call.name, "arguments": call.arguments} for call in message.tool_calls]
        turns.append(turn)
    attempt = json.dumps({"ended_by": row.termination.value, "reward": row.reward, "turns": turns}, ensure_ascii=False)
    if len(attempt) > CHARS:
        attempt = f"{attempt[: CHARS // 2]} [{len(attempt) - CHARS} characters are left out] {attempt[-(CHARS // 2) :]}"
    return ASKED.format(attempt=attempt)


def reflections(rows: list[Trajectory]) -> list[Task]:
    """A task for each failed attempt, in order: to say what to do otherwise."""
    return [Task(task_id=row.trajectory_id, env=NAME, split=row.split, prompt=asked(row)) for row in rows]

"""Rows that nobody wrote by hand: episodes of this project's own environments, and what harnesses recorded."""

from functools import cache
from pathlib import Path
from typing import Any

from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import Trajectory

RECORDED = Path(__file__).parent / "recorded"
"""Small cut files of other programs; ``recorded/README.md`` names their sources."""
ENVIRONMENTS = ("lookup", "shop", "math", "service")


@cache
def played(name: str) -> tuple[Trajectory, ...]:
    """Episodes of an environment: its scripted expert, with mistakes and without."""
    from agentrl.environments import load_environment
    from agentrl.rollouts.demonstrations import demonstrate

    environment = load_environment(name)
    tasks = environment.tasks({"train": 3}, 0)["train"]
    return tuple(
        demonstrate(environment, task, noise, 0, f"{name}-{number}-{noise}")
        for number, task in enumerate(tasks)
        for noise in (0.0, 0.5)
    )


def recorded(path: Path) -> list[Trajectory]:
    source = Source(path, Notes(quarantine=True))
    name = detect(source)
    assert name is not None
    return list(FORMATS[name].read(source))


@cache
def real_rows() -> dict[str, list[Trajectory]]:
    """Rows by where they are from, under ids that tell them apart."""
    groups: dict[str, Any] = {name: list(played(name)) for name in ENVIRONMENTS}
    groups |= {path.name: recorded(path) for path in sorted(RECORDED.iterdir()) if path.suffix != ".md"}
    return {
        name: [row.model_copy(update={"trajectory_id": f"{name}-{n}", "group_id": None}) for n, row in enumerate(rows)]
        for name, rows in groups.items()
    }

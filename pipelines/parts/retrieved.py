"""Runs of other tasks that succeeded, retrieved for rollouts to see: an item of the setting ``context``."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from agentrl.datastore.search.embedding import EmbedderChoice
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.stage import StageConfig

if TYPE_CHECKING:
    from agentrl.datastore.search.experience import Demonstration
    from agentrl.datastore.search.pinned import PinnedIndex
    from agentrl.schemas.task import Task

SOLVED_BEFORE = "Solved before:"


class ExperienceShown(StageConfig):
    """The successful runs of the tasks that are most like this one."""

    k: int = Field(3, ge=1, description="at most so many")
    max_tokens: int = Field(1024, ge=1, description="of all of them together; one that does not fit is left out")
    embedder: EmbedderChoice = Field(
        "embedded", description="embedded (the buffer's own words), minilm, or a sentence-transformers model or path"
    )


class ExperienceItem(StageConfig):
    experience: ExperienceShown = Field(description="successful runs of similar tasks, of the input experience")


class Retrieved:
    """Finds runs among the wired rows alone, so that their content, which is in the fingerprint, decides what is found:
    never a run of the task itself, nor of another split than train. ``count`` gives the tokens of a text, and
    ``counts`` says how many rows there are, and how many of them are of other splits."""

    def __init__(self, rows: Sequence[Trajectories], count: Callable[[str], int]) -> None:
        self.count = count
        self.counts: Counter[str] = Counter()
        self._buffer = rows[0].buffer
        self._ids = pc.unique(
            pa.concat_arrays([selection.selection()["trajectory_id"].combine_chunks() for selection in rows])
        )
        self._indexes: dict[str, PinnedIndex] = {}
        splits = self._buffer.read(self._ids, ["split"])["split"].to_pylist()
        self.counts.update(
            experience_rows=len(splits), experience_other_splits=sum(split != "train" for split in splits)
        )

    def of(self, task: "Task", item: ExperienceShown) -> "list[Demonstration]":
        """The runs that a task is shown, best match first."""
        from agentrl.datastore.search.experience import experience
        from agentrl.datastore.search.pinned import PinnedIndex

        if item.embedder not in self._indexes:
            self._indexes[item.embedder] = PinnedIndex(self._buffer, self._ids, item.embedder)
        return experience(
            self._indexes[item.embedder],
            task.prompt,
            k=item.k,
            max_tokens=item.max_tokens,
            task_id=task.task_id,
            count=self.count,
        )


def as_experience(runs: "Sequence[Demonstration]") -> str:
    """Runs as they are shown."""
    return "\n\n".join([SOLVED_BEFORE, *(run.text for run in runs)])

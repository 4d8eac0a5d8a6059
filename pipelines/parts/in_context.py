"""The setting ``context``: what rollouts are shown after the opening of their task. It is a list of items with one key
each, their kind, such as ``{notes: {k: 3}}``."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from agentrl.pipelines.handles import NoteTable, Trajectories
from agentrl.pipelines.parts.retrieved import ExperienceItem, Retrieved, as_experience
from agentrl.pipelines.stage import StageConfig
from agentrl.rollouts.rationalize import literal
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.note import Note, NoteScope
from agentrl.schemas.task import Task

if TYPE_CHECKING:
    from agentrl.datastore.search.experience import Demonstration


class NotesShown(StageConfig):
    """The newest notes of the task, and of its environment."""

    k: int = Field(3, ge=1, description="at most so many (Reflexion's Omega)")
    max_tokens: int = Field(256, ge=1, description="of all notes together; older ones are left out")


class NotesItem(StageConfig):
    notes: NotesShown = Field(description="notes that notes.reflect made, of the input notes")


InContext = Annotated[
    list[NotesItem | ExperienceItem],
    ADDED,
    Field(description="what rollouts see besides their task, as in [{notes: {k: 3}}, {experience: {k: 3}}]"),
]


NOTE, EXPERIENCE = "note:", "experience:"
"""How tags begin that name what was shown."""


@dataclass(frozen=True)
class Shown:
    """A text after the opening of a task, none if it is empty, and tags that say what is in it."""

    text: str = ""
    tags: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        """The text as the hint of an attempt."""
        return literal(self.text)


class Showing:
    """What each task is shown. ``count`` gives the tokens of a text. ``counts`` says how many notes were shown, and how
    many had no room.

    Raises ValueError if an item lacks its input or an input its item, and for notes from tasks that policies are
    measured on.
    """

    def __init__(
        self,
        items: Sequence[NotesItem | ExperienceItem],
        notes: NoteTable | None,
        count: Callable[[str], int],
        experience: Sequence[Trajectories] = (),
    ) -> None:
        self.experience = [item for item in items if isinstance(item, ExperienceItem)]
        self.items = [item for item in items if isinstance(item, NotesItem)]
        if bool(self.experience) != bool(experience):
            raise ValueError(
                "context shows experience, and none is wired; wire inputs.experience, such as earlier successes"
                if self.experience
                else "inputs.experience is wired, and context shows none; set context: [{experience: {}}]"
            )
        if self.items and notes is None:
            raise ValueError("context shows notes, and none are wired; wire inputs.notes to a stage notes.reflect")
        if notes is not None and not self.items:
            raise ValueError(
                "inputs.notes is wired, and context shows none; set context: [{notes: {}}], or leave it out"
            )
        self.count = count
        self.counts: Counter[str] = Counter()
        self._known: dict[str, Shown] = {}
        self._notes = notes.read() if notes else []
        self._retrieved = Retrieved(experience, count) if experience else None
        check_training(self._notes)

    def __call__(self, task: Task) -> Shown:
        """What one attempt at a task is shown; it is counted."""
        shown = self.of(task)
        for kind in (NOTE, EXPERIENCE):
            if number := sum(tag.startswith(kind) for tag in shown.tags):
                self.counts["notes_shown" if kind == NOTE else "experience_shown"] += number
        return shown

    def of(self, task: Task) -> Shown:
        if task.task_id not in self._known:
            chosen = [note for item in self.items for note in self._chosen(task, item.notes)]
            parts = [as_text(chosen)] if chosen else []
            tags = [f"{NOTE}{note.note_id}" for note in chosen]
            for runs in self._runs(task):
                parts.append(as_experience(runs))
                tags += [f"{EXPERIENCE}{run.trajectory_id}" for run in runs]
            self._known[task.task_id] = Shown("\n\n".join(parts), tuple(dict.fromkeys(tags)))
        return self._known[task.task_id]

    def _runs(self, task: Task) -> "list[list[Demonstration]]":
        """The runs that each item of experience finds for a task, if it finds some."""
        if self._retrieved is None:
            return []
        runs_found = [self._retrieved.of(task, item.experience) for item in self.experience]
        self.counts.update(experience_none=int(not any(runs_found)))
        self.counts.update(self._retrieved.counts)
        self._retrieved.counts.clear()
        return [runs for runs in runs_found if runs]

    def _chosen(self, task: Task, item: NotesShown) -> list[Note]:
        """The newest notes for a task that fit, the oldest of them first."""
        newest = [note for note in self._notes if _is_about(note, task)][-item.k :][::-1]
        kept = 0
        while kept < len(newest) and self.count(as_text(newest[: kept + 1])) <= item.max_tokens:
            kept += 1
        if kept < len(newest):
            self.counts["notes_without_room"] += len(newest) - kept
        return newest[:kept][::-1]


def _is_about(note: Note, task: Task) -> bool:
    if note.scope is NoteScope.TASK:
        return note.task_id == task.task_id
    return note.scope is NoteScope.ENV and note.env == task.env


def as_text(notes: Sequence[Note]) -> str:
    """Notes as they are shown."""
    return notes_as_text([note.text for note in notes])


def notes_as_text(texts: Sequence[str]) -> str:
    """Texts of notes as they are shown."""
    return f"Notes: {'; '.join(texts)}"


def check_training(notes: Sequence[Note]) -> None:
    """Raise ValueError that names a note that was made from a task that policies are measured on."""
    if wrong := [note for note in notes if note.split != "train"]:
        raise ValueError(
            f"{len(wrong)} of {len(notes)} notes are of tasks that are not trained on: {wrong[0].note_id} was made "
            f"from {wrong[0].made_from}, of split {wrong[0].split}; what is measured there would be known. Make notes "
            "from rows of the train split (trajectories.select, where: split = 'train')"
        )

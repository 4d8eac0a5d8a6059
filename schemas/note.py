"""A note: what is to be remembered of an attempt, for later ones."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from agentrl.schemas.arrow import Int32, arrow_schema

NOTE_VERSION = 1


class NoteScope(StrEnum):
    """Who reads a note."""

    TASK = "task"  # later attempts at the same task
    ENV = "env"  # all tasks of the same environment
    SKILL = "skill"  # whoever looks for ``code`` that does something


class Note(BaseModel):
    """``made_from`` is the row that it is about, and ``by`` who wrote it. ``env`` and ``split`` are those of the row's
    task, ``task_id`` is None for a note that is about more than one task. ``trials`` counts the attempts that were
    shown the note, ``wins`` those of them that succeeded."""

    model_config = ConfigDict(extra="forbid")

    note_id: str
    scope: NoteScope
    task_id: str | None
    env: str
    split: str
    text: str
    code: str = ""
    made_from: str
    by: str
    trials: Int32 = 0
    wins: Int32 = 0


NOTE_SCHEMA = arrow_schema(Note, NOTE_VERSION)

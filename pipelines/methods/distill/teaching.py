"""The teacher of a training stage: its settings, and the policy that says how likely it finds what was sampled."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from agentrl.algorithms.policy_gradient import PolicyGradient
from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE, EmbeddedConfig
from agentrl.pipelines.handles import Model, NoteTable
from agentrl.pipelines.parts.common import load_policy
from agentrl.pipelines.parts.in_context import NotesItem, NotesShown, Showing
from agentrl.pipelines.stage import StageConfig
from agentrl.rollouts.rationalize import HINT
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Speaker
    from agentrl.online.teacher import Sees, Teacher


class Teaching(NamedTuple):
    """The inputs of a stage that are about its teacher."""

    teacher: Model | None = None
    notes: NoteTable | None = None


class TeacherConfig(StageConfig):
    """Settings of stages whose algorithm may ask for a teacher."""

    teacher_context: Annotated[Literal["answer", "notes"] | None, ADDED] = Field(
        None,
        description="what the teacher sees and the student does not: the task's answer, or its notes, of the input "
        "notes. None: nothing",
    )
    teacher_engine: Annotated[TokenEngineChoice, ADDED] = Field(
        DEFAULT_ENGINE, description="what scores for the teacher; transformers: packed passes in the stage's process"
    )

    def check_teacher(self, algorithm: PolicyGradient) -> None:
        """Raise ValueError if there are settings of a teacher, and the algorithm asks for none."""
        given = [name for name, info in TeacherConfig.model_fields.items() if getattr(self, name) != info.default]
        if given and not algorithm.needs_teacher:
            raise ValueError(
                f"{given[0]} is set, and algorithm {algorithm.type} asks for no teacher, so it would do nothing; leave "
                "it out, or use algorithm: {type: distill}"
            )


@contextmanager
def teaching(
    config: TeacherConfig,
    algorithm: PolicyGradient,
    model: Model,
    inputs: Teaching,
    student: "Speaker",
    task_of: Callable[[Trajectory], Task],
    micro_tokens: int,
) -> "Iterator[Teacher | None]":
    """The teacher of an algorithm that asks for one: the input ``teacher``, or the ``model`` that training starts from,
    if that sees more than the student. ``task_of`` gives the task of a rollout. At the end its engine is closed.

    Raises ValueError if there is a teacher without need or need without a teacher, or if it has another tokenizer.
    """
    teacher, notes = inputs
    if (config.teacher_context == "notes") != (notes is not None):
        raise ValueError(
            "inputs.notes is wired, and no teacher sees them; set teacher_context: notes, or leave the input out"
            if notes
            else "teacher_context: notes needs notes; wire inputs.notes to a stage notes.reflect"
        )
    if not algorithm.needs_teacher:
        if teacher is not None:
            raise ValueError(
                f"inputs.teacher is wired, and algorithm {algorithm.type} asks for none; use algorithm: "
                "{type: distill}, or leave the input out"
            )
        yield None
        return
    if teacher is None and config.teacher_context is None:
        raise ValueError(
            f"algorithm {algorithm.type} needs a teacher: wire inputs.teacher to a model, or set teacher_context, so "
            "that the model that training starts from sees more than the student"
        )
    from agentrl.engines.blocking import blocking
    from agentrl.online.teacher import Teacher, check_vocabulary

    policy = load_policy(teacher or model, config.teacher_engine)
    policy.model.requires_grad_(False)
    check_vocabulary(policy, student)  # before servers start
    embedded = isinstance(config.teacher_engine, EmbeddedConfig)
    engine = None if embedded else config.teacher_engine.build(policy)
    try:
        yield Teacher(policy, student, engine, _sees(config, notes, student, task_of), micro_tokens)
    finally:
        if engine is not None:
            blocking(engine.close())


def _sees(
    config: TeacherConfig, notes: NoteTable | None, student: "Speaker", task_of: Callable[[Trajectory], Task]
) -> "Sees | None":
    """What the teacher sees of the task of a rollout, if that is more than the student saw."""
    if config.teacher_context is None:
        return None
    if notes is None:
        return lambda row: HINT.format(answer=json.loads(task_of(row).ground_truth))
    showing = Showing([NotesItem(notes=NotesShown())], notes, student.codec.count)
    return lambda row: showing.of(task_of(row)).text
